"""What is to be computed, as a value: shapes, strides and dtypes of A, B, operands and destinations, and constraints.

Nothing here holds a tensor, so a `Problem` can be a cache key. FakeTensors and meta tensors give the same problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from epifuse.base.config import CONFIG
from epifuse.base.dtypes import Kind, short
from epifuse.base.errors import fail
from epifuse.base.lazy import cached_property
from epifuse.base.target import Target
from epifuse.ir.types import Dims, Factor


class TensorInfo(NamedTuple):
    """A tensor without its data; strides are in elements. `aligned`: whether it starts at a multiple of 16 bytes.

    For a tensor without an address: whether it starts at a multiple of 16 bytes from the start of its storage.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    aligned: bool = True

    def __str__(self) -> str:
        return f"{short(self.dtype)}[{', '.join(map(str, self.shape))}]"


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent or 1
    return tuple(strides[::-1])


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has an address: FakeTensors and meta tensors have none."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def info(tensor: torch.Tensor) -> TensorInfo:
    """Shape, strides (in elements), dtype and device of `tensor`."""
    # A storage that another library allocated may itself start at any address.
    start = tensor.data_ptr() if has_memory(tensor) else tensor.storage_offset() * tensor.dtype.itemsize
    aligned = start % 16 == 0
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))  # also of sizes that are symbols
    return TensorInfo(shape, strides, tensor.dtype, str(tensor.device), aligned)


class HostNumber(NamedTuple):
    """A run-time number. Only its kind is known in planning."""

    kind: Kind

    def __str__(self) -> str:
        return f"host {self.kind}"


def old_content(output: str) -> str:
    """The name of the operand that is the old content of an output's destination. It is not an identifier, so that no
    other operand can have it."""
    return f"old {output}"


OperandInfo = TensorInfo | HostNumber
Operands = tuple[tuple[str, OperandInfo], ...]


@dataclass(frozen=True)
class Constraints:
    """What the caller requires of the kernel. `select` honours or refuses every field.

    `tile` and `cluster` are (M, N), `schedule` is a name that a kernel defines, `precision` is "ieee" or "tf32".
    `split` is the number of parts into which K is cut; it decides the last bits of a sum. None leaves the choice to the
    library. With `fast_accum` the tensor cores alone add up products of 8-bit floats; their sums have 14 bits. With
    `batch_invariant` a row of the result has the same bits for any M and at any position. With `tune` the kernel is the
    one that was measured to be the fastest of those that meet the other constraints, if there is a measurement. Raises
    `ArgumentError` for values of any other type.
    """

    tile: tuple[int, int] | None = None
    cluster: tuple[int, int] | None = None
    schedule: str | None = None
    fast_math: bool = False
    precision: str | None = None
    allow_recompute: bool = False
    batch_invariant: bool = CONFIG.batch_invariant
    tune: bool = False
    split: int | None = None
    fast_accum: bool = False

    def __post_init__(self) -> None:
        for name, value in ("tile", self.tile), ("cluster", self.cluster):
            if value is not None and not _is_pair(value):
                raise fail("option", None, name=name, want="two whole numbers (M, N), or None", value=value)
        for name in ("fast_math", "allow_recompute", "batch_invariant", "tune", "fast_accum"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise fail("option", None, name=name, want="True or False", value=flag)
        if self.split is not None and (type(self.split) is not int or self.split < 1):
            raise fail("option", None, name="split", want="a whole number from 1 on, or None", value=self.split)
        if not isinstance(self.schedule, (str, type(None))):
            raise fail("option", None, name="schedule", want="a name or None", value=self.schedule)
        if not isinstance(self.precision, (str, type(None))) or self.precision not in _PRECISIONS:
            raise fail("option", None, name="precision", want="None, 'ieee' or 'tf32'", value=self.precision)


_PRECISIONS = (None, "ieee", "tf32")


def tf32_allowed() -> bool:
    """Whether PyTorch's own switch allows TF32 for products of float32 on a GPU."""
    backend = torch.backends.cuda.matmul
    # Reading the old switch after the new one was set raises; torch 2.8 has only the old one.
    precision = getattr(backend, "fp32_precision", None)
    return bool(backend.allow_tf32) if precision is None else precision == "tf32"


UNCONSTRAINED = Constraints()


def settled(constraints: Constraints, dtype: torch.dtype) -> Constraints:
    """The constraints. If A is float32 and no precision was asked for, PyTorch's own switch decides it."""
    if dtype != torch.float32 or constraints.precision is not None or not tf32_allowed():
        return constraints
    return replace(constraints, precision="tf32")


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(item) is int for item in value)


class _Fields(NamedTuple):
    a: TensorInfo
    b: TensorInfo
    accumulator: torch.dtype
    target: Target
    operands: Operands = ()
    outputs: tuple[tuple[str, TensorInfo | None], ...] = ()
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    by_tma: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    accumulated: tuple[tuple[str, torch.dtype], ...] = ()
    constraints: Constraints = UNCONSTRAINED
    scales: tuple[tuple[str, TensorInfo], ...] = ()


class Problem(_Fields):
    """One fused GEMM. `operands` and `outputs` are in the order of the epilogue's signature and return statement.

    An output's info is None if the library is to allocate it; `dtypes` gives its dtype. `accumulated` are the outputs
    that are added onto the content of their destinations, with the dtypes of these; that content is an operand too.
    `scales` are the block scales of A and B, by the names of `scaled.SCALES`.
    A named tuple, because each unseen extent makes two of them, and a dataclass takes four times as long to make.
    """

    @property
    def batched(self) -> bool:
        """True if accum has three dims."""
        return len(self.a.shape) == 3 or len(self.b.shape) == 3

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """Extents of the axes l, m, n and of k."""
        a, b, l = self.a.shape, self.b.shape, 1
        for shape in a, b:
            if l == 1 and len(shape) == 3:
                l = shape[0]
        return {"l": l, "m": a[-2], "n": b[-1], "k": a[-1]}

    @property
    def is_empty(self) -> bool:
        """Whether the result has no elements."""
        extents = self.extents
        return 0 in (extents["l"], extents["m"], extents["n"])

    def with_outputs(
        self,
        outputs: tuple[tuple[str, TensorInfo | None], ...],
        dtypes: tuple[tuple[str, torch.dtype], ...],
        operands: Operands,
        aliases: tuple[tuple[str, str], ...],
    ) -> Problem:
        """The same product with these destinations."""
        a, b, accumulator, target, _, _, _, by_tma, _, accumulated, constraints, scales = self
        made = Problem(
            a, b, accumulator, target, operands, outputs, dtypes, by_tma, aliases, accumulated, constraints, scales
        )  # fmt: skip
        vars(made)["extents"] = self.extents  # they stay the same, and are not computed again
        return made

    def with_rows(self, rows: int) -> Problem:
        """The same product with `rows` rows. The product has two dims, and its outputs are to be allocated."""
        extents = self.extents
        made = self.with_others({extents["m"]: rows})
        vars(made)["extents"] = {**extents, "m": rows}
        return made

    def with_others(self, others: Mapping[int, int]) -> Problem:
        """The same product with other numbers of rows and batches; `others` maps present numbers to new ones.

        Each extent of operands, scales, A and B that equals a present number is replaced, except for N and K of A and
        B. Outputs stay as they are."""
        known, get = frozenset(others), others.get

        def changed(info: Any, kept: int = 0) -> Any:
            shape = getattr(info, "shape", ())
            if known.isdisjoint(shape):
                return info
            own = len(shape) - kept
            return info._replace(shape=(*[get(extent, extent) for extent in shape[:own]], *shape[own:]))

        operands, scales = (
            tuple([(name, changed(info)) for name, info in one]) for one in (self.operands, self.scales)
        )
        return self._replace(a=changed(self.a, 1), b=changed(self.b, 2), operands=operands, scales=scales)

    @property
    def accum_dims(self) -> Dims:
        """The dims of accum as the user sees it: (l, m, n), or (m, n) without a batch."""
        return tuple((Factor(axis),) for axis in ("lmn" if self.batched else "mn"))

    @property
    def accum_shape(self) -> tuple[int, ...]:
        """Shape of accum."""
        return tuple(self.extents[axis] for axis in ("lmn" if self.batched else "mn"))

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype of the epilogue's floats: float64 iff the accumulator is."""
        return torch.float64 if self.accumulator == torch.float64 else torch.float32

    @cached_property
    def by_name(self) -> Mapping[str, OperandInfo]:
        """Operands by name."""
        return dict(self.operands)

    def describe(self) -> str:
        """The problem in one line, for messages."""
        e: Any = self.extents
        batch = f"L={e['l']} " if self.batched else ""
        blocks = f"{' and '.join(name for name, _ in self.scales)} by blocks, " if self.scales else ""
        return (
            f"{batch}M={e['m']} N={e['n']} K={e['k']}, A {short(self.a.dtype)}, B {short(self.b.dtype)}, {blocks}"
            f"accumulator {short(self.accumulator)}, on {self.target.name}"
        )
