"""The plan object, for users of CUTLASS's older Python interface.

    plan = epifuse.Gemm(element=torch.float16, layout=LayoutType.RowMajor)
    plan.activation = relu                  # or (leaky_relu, 0.1)
    D = plan.run(A, B, C, alpha=2.0, beta=1.0)

A plan has the dtypes and layouts; each run has the tensors. `plan.epilogue_visitor` may be any epilogue instead.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epifuse.api import explain, get_kernels
from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import fail
from epifuse.base.results import Results
from epifuse.forms.dense_gemm import whole_pair
from epifuse.forms.thread import LinearCombinationGeneric, ScaleType
from epifuse.frontend import Parsed
from epifuse.frontend import parsed as parse_cached
from epifuse.frontend.names import is_number
from epifuse.fusion import VOCABULARY
from epifuse.fusion.activation import identity
from epifuse.ir import Graph
from epifuse.kernel import Kernel
from epifuse.pytorch.kept_calls import run
from epifuse.request.checks import check_tensor
from epifuse.request.options import Options
from epifuse.request.problem import Constraints
from epifuse.request.signature import Request
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments


class LayoutType(enum.Enum):
    """Which dim of a matrix is contiguous."""

    RowMajor = -1
    ColumnMajor = -2


@dataclass(frozen=True)
class TileDescription:
    """A tile of some kernel. Assign it to `plan.tile_description` to pin it."""

    threadblock_shape: tuple[int, int]
    cluster_shape: tuple[int, int] | None = None
    kernel_schedule: str | None = None

    def __post_init__(self) -> None:
        for name, optional in (("threadblock_shape", False), ("cluster_shape", True)):
            object.__setattr__(self, name, whole_pair(name, getattr(self, name), optional=optional))


# --- visitors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trace:
    """An epilogue that was checked with examples. `print` shows its typed graph. It can be passed as an epilogue."""

    epilogue: Any
    graph: Graph

    def __epifuse__(self) -> Parsed:
        return parse_cached(self.epilogue)

    def __str__(self) -> str:
        return str(self.graph)


@outside_graph
def trace(epilogue: Any, example_tensors: Mapping[str, Any]) -> Trace:
    """Parse and type an epilogue (function, source text, tree or functor) for examples of `accum` and its operands.

    `example_tensors` are by name, and may include outputs, which are checked too. No data is read. Raises what
    `GemmArguments` raises.
    """
    if not isinstance(example_tensors, Mapping):
        raise fail("wrong_arguments", None, function="trace", want="a mapping", type=type(example_tensors).__name__)
    examples = {name: _without_data(value) for name, value in example_tensors.items()}
    accum = examples.pop("accum", None)
    want = "a tensor of two or three dims, of floats or int32"
    if not isinstance(accum, torch.Tensor) or accum.dim() not in (2, 3) or not _is_accumulated(accum.dtype):
        raise fail("option", None, name="example_tensors['accum']", want=want, value=accum)
    held = (
        torch.int8 if accum.dtype == torch.int32 else torch.float64 if accum.dtype == torch.float64 else torch.float32
    )
    a = torch.empty(*accum.shape[:-1], 1, dtype=held, device="meta")
    b = torch.empty(1, accum.shape[-1], dtype=held, device="meta")
    return Trace(epilogue, GemmArguments(a, b, epilogue=EpilogueArguments.partial(epilogue, examples)).graph)


def _is_accumulated(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype == torch.int32


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# --- the plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    """The dtype and layout that the plan requires of A, B, C or D. None allows any."""

    name: str
    element: torch.dtype | None
    layout: LayoutType | None

    def check(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            check_tensor(self.name, tensor, None)
        if self.element is not None and tensor.dtype != self.element:
            raise fail("plan_tensor", None, name=self.name, have=tensor.dtype, want=self.element)
        if self.layout is not None and tensor.dim() > 1 and not _has_layout(tensor, self.layout):
            raise fail("plan_tensor", None, name=self.name, have=f"of strides {tensor.stride()}", want=self.layout.name)


def _has_layout(tensor: torch.Tensor, layout: LayoutType) -> bool:
    return tensor.stride(layout.value) == 1 or tensor.shape[layout.value] == 1


class Gemm:
    """`D = activation(alpha * A @ B + beta * C)`, or any epilogue as `epilogue_visitor`.

    Each matrix X has a dtype and a layout: those of the tensor given here, else `element_X` and `layout_X`, else
    `element` and `layout`, else any. `alpha` and `beta` are defaults for `run`: without them 1 and 0, or those of the
    `epilogue_visitor`. C is not read if beta is a Python zero. `cc` is the compute capability, times ten, for which
    `tile_descriptions` lists tiles. Raises `ArgumentError`, also for an attribute that a plan does not have.
    """

    def __init__(
        self,
        A: torch.Tensor | None = None,
        B: torch.Tensor | None = None,
        C: torch.Tensor | None = None,
        D: torch.Tensor | None = None,
        alpha: Any = None,
        beta: Any = None,
        element_accumulator: torch.dtype | None = None,
        element: torch.dtype | None = None,
        layout: LayoutType | None = None,
        *,
        cc: int | None = None,
        **per_matrix: Any,
    ) -> None:
        tensors = {"A": A, "B": B, "C": C, "D": D}
        allowed = {f"{kind}_{name}" for kind in ("element", "layout") for name in tensors}
        for key in per_matrix:
            if key not in allowed:
                raise fail("unknown_parameter", None, function="Gemm", name=key, parameters=", ".join(sorted(allowed)))
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._matrices = {
            name: _matrix(
                name, tensor, per_matrix.get(f"element_{name}", element), per_matrix.get(f"layout_{name}", layout)
            )
            for name, tensor in tensors.items()
        }
        self.alpha, self.beta, self.cc, self._element_accumulator = alpha, beta, cc, element_accumulator
        self.tile_description = None
        self._visitor: Any = None
        self.activation = identity

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ATTRIBUTES and not name.startswith("_"):
            raise fail("unknown_parameter", None, function="Gemm", name=name, parameters=", ".join(_ATTRIBUTES))
        object.__setattr__(self, name, value)

    # --- the epilogue --------------------------------------------------------------------------------------------

    @property
    def activation(self) -> Any:
        """A function, its name, or a tuple of a function and up to two numbers: `relu`, "relu", `(leaky_relu, 0.1)`."""
        return self._activation

    @activation.setter
    def activation(self, value: Any) -> None:
        function, *numbers = value if isinstance(value, tuple) and value else (value,)
        if isinstance(function, str) and function in VOCABULARY:
            function = VOCABULARY[function].function
        if not callable(function) or len(numbers) > 2 or not all(map(is_number, numbers)):
            want = "a function, the name of one of ours, or a tuple of a function and up to two numbers"
            raise fail("option", None, name="activation", want=want, value=value)
        named = {"activation": function, "activation_args": tuple(numbers)}
        self._with_source = LinearCombinationGeneric(beta=1.0, **named)
        self._without = LinearCombinationGeneric(scale=ScaleType.OnlyAlphaScaling, **named)
        self._activation, self._visitor = value, None

    @property
    def epilogue_visitor(self) -> Any:
        """The epilogue that replaces the activation: a `trace`, function, visitor tree or functor. None if unused."""
        return self._visitor

    @epilogue_visitor.setter
    def epilogue_visitor(self, value: Any) -> None:
        if value is not None:
            parse_cached(value)  # raises at the assignment, where the mistake is
        self._visitor = value

    # --- tiles ---------------------------------------------------------------------------------------------------

    @property
    def tile_description(self) -> TileDescription | None:
        """The pinned tile: only kernels with it are used. Assign one of `tile_descriptions`, or a dict of its fields.
        None leaves the choice to the planner."""
        return self._tile

    @tile_description.setter
    def tile_description(self, value: TileDescription | Mapping[str, Any] | None) -> None:
        if isinstance(value, Mapping):
            unknown = [str(name) for name in value if name not in TileDescription.__dataclass_fields__]
            if unknown or "threadblock_shape" not in value:
                want = f"a TileDescription or a dict of {', '.join(TileDescription.__dataclass_fields__)}"
                raise fail("option", None, name="tile_description", want=want, value=dict(value))
            value = TileDescription(**value)
        if not isinstance(value, (TileDescription, type(None))):
            raise fail("option", None, name="tile_description", want="a TileDescription, a dict or None", value=value)
        self._tile = value
        pinned, hint, element = _constraints(value), _HINT, self._matrices["D"].element
        self._without_d = Options(self._element_accumulator, pinned=pinned, hint=hint)
        self._only_d = self._without_d._replace(out_dtypes=element)
        self._with_d = self._without_d._replace(out_dtypes=element and {"D": element})

    def tile_descriptions(self) -> list[TileDescription]:
        """The tiles of all kernels for this plan's dtypes and layouts, the best one for a large product first.

        Tiles that only some sizes can use are left out.
        """
        cc = self.cc
        if cc is None and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            cc = major * 10 + minor

        def kernels(tile: TileDescription | None, extent: int = _LARGE) -> list[Kernel]:
            a, b = (_stand_in(self._matrices[name], extent) for name in ("A", "B"))
            pinned = _constraints(tile)
            args = GemmArguments(a, b, accumulator_type=self._element_accumulator, constraints=pinned)
            return get_kernels(args, cc=cc)

        # A kernel may report a tile that cannot be pinned, because it has no other, or one that is only for some sizes.
        found = dict.fromkeys(map(_description, kernels(None)))
        return [tile for tile in found if kernels(tile) and kernels(tile, _SMALL)]

    # --- running -------------------------------------------------------------------------------------------------

    @outside_graph
    def run(
        self,
        A: torch.Tensor | None = None,
        B: torch.Tensor | None = None,
        C: torch.Tensor | None = None,
        D: torch.Tensor | None = None,
        alpha: Any = None,
        beta: Any = None,
        sync: bool = True,
        print_module: bool = False,
        visitor_args: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run once, on tensors given here or to the constructor. If neither gives D, it is allocated row by row.

        `visitor_args` are the operands and outputs of the `epilogue_visitor` by name. `print_module` prints the graph
        and the plan. `sync` waits for the GPU. Returns the output, or all of them by name if there are several. Raises
        `ArgumentError` for tensors that do not fit the plan, and `UnsupportedError` if no kernel has the pinned tile.
        """
        tensors, scalars = {"A": A, "B": B, "C": C, "D": D}, {"alpha": alpha, "beta": beta}
        if print_module:
            sys.stdout.write(f"{explain(self.arguments(tensors, scalars, visitor_args))}\n")
        a, b, parsed, given = self._described(tensors, scalars, visitor_args)
        outputs = run(Request(a, b, parsed, given, self._options(parsed)))
        if sync and a.is_cuda:
            torch.cuda.current_stream(a.device).synchronize()
        return next(iter(outputs.values())) if len(outputs) == 1 else Results(outputs)

    def arguments(
        self, tensors: Mapping[str, Any], scalars: Mapping[str, Any], visitor_args: Mapping[str, Any] | None = None
    ) -> GemmArguments:
        """The arguments of a `run`, for `explain` and `get_kernels`. Matrices and scalars are by name; None stands for
        the plan's own."""
        a, b, parsed, given = self._described(tensors, scalars, visitor_args)
        options = self._options(parsed)
        return GemmArguments(
            a,
            b,
            accumulator_type=options.accumulator_type,
            epilogue=EpilogueArguments.partial(parsed, given),
            out_dtypes=options.out_dtypes,
            constraints=options.pinned,
        )

    def _options(self, parsed: Parsed) -> Options:
        outputs = parsed.output_names
        return self._only_d if outputs == ("D",) else self._with_d if "D" in outputs else self._without_d

    def _described(
        self, tensors: Mapping[str, Any], scalars: Mapping[str, Any], visitor_args: Mapping[str, Any] | None
    ) -> tuple[torch.Tensor, torch.Tensor, Parsed, dict[str, Any]]:
        """A, B, the parsed epilogue, and its operands and outputs by name."""
        given = dict(self._tensors)
        for name, tensor in tensors.items():
            if name not in self._matrices:
                raise fail("unknown_parameter", None, function="Gemm", name=name, parameters="A, B, C, D")
            if tensor is not None:
                self._matrices[name].check(tensor)
                given[name] = tensor
        for name in ("A", "B"):
            if name not in given:
                raise fail("missing_parameter", None, function="Gemm.run", name=name)
        a, b = given.pop("A"), given.pop("B")
        if visitor_args is not None and not isinstance(visitor_args, Mapping):
            raise fail("option", None, name="visitor_args", want="a mapping of names", value=visitor_args)
        numbers = {"alpha": self.alpha, "beta": self.beta}
        numbers |= {name: value for name, value in scalars.items() if value is not None}
        if self._visitor is not None:
            written = {name: value for name, value in {**tensors, **scalars}.items() if value is not None}
            return a, b, *self._visited({**given, **numbers}, written, visitor_args or {})
        if visitor_args:
            raise fail("unknown_parameter", None, function="Gemm.run", name="visitor_args", parameters="no visitor")
        return a, b, *self._activated(given | numbers)

    def _activated(self, given: dict[str, Any]) -> tuple[Parsed, dict[str, Any]]:
        """The parsed epilogue with the plan's activation, and its operands and outputs by name."""
        for name, value in _UNLESS_GIVEN.items():
            if given[name] is None:
                given[name] = value
        if is_number(beta := given["beta"]) and beta == 0:
            return parse_cached(self._without), {k: v for k, v in given.items() if k not in ("beta", "C")}
        return parse_cached(self._with_source), given

    def _visited(
        self, known: Mapping[str, Any], written: Mapping[str, Any], visitor_args: Mapping[str, Any]
    ) -> tuple[Parsed, dict[str, Any]]:
        """The parsed `epilogue_visitor`, and its operands and outputs by name, those in `known` and in `visitor_args`.

        A name that is `written` at the run must be among them, or be C, which precedes D and may be passed unread.
        """
        parsed = parse_cached(self._visitor)
        names = {*parsed.parameters, *parsed.output_names}
        for name, value in written.items():
            if name not in {*names, "A", "B", "C"}:
                have = ", ".join((*parsed.parameters, *parsed.output_names))
                raise fail("unknown_parameter", None, function="the epilogue_visitor", name=name, parameters=have)
            if name in names and name in visitor_args and not _is_same(value, visitor_args[name]):
                raise fail("parameter_twice", None, function="Gemm.run", name=name)
        unless = {name: value for name, value in _UNLESS_GIVEN.items() if name not in parsed.defaults}
        given = unless | {name: value for name, value in known.items() if value is not None}
        return parsed, parsed.named({k: v for k, v in given.items() if k in names} | dict(visitor_args))


_ATTRIBUTES = ("activation", "epilogue_visitor", "tile_description", "alpha", "beta", "cc")
_UNLESS_GIVEN = {"alpha": 1.0, "beta": 0.0}


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (is_number(one) and is_number(other) and one == other)


def _matrix(name: str, tensor: Any, element: Any, layout: Any) -> _Matrix:
    if tensor is not None:
        check_tensor(name, tensor, None)
        found = [layout for layout in LayoutType if tensor.dim() > 1 and _has_layout(tensor, layout)]
        return _Matrix(name, tensor.dtype, found[0] if len(found) == 1 else None)
    if element is None and name in ("A", "B"):
        raise fail("missing_parameter", None, function="Gemm", name=f"element_{name}")
    if not isinstance(element, (torch.dtype, type(None))):
        raise fail("option", None, name=f"element_{name}", want="a torch dtype", value=element)
    if not isinstance(layout, (LayoutType, type(None))):
        raise fail("option", None, name=f"layout_{name}", want="a LayoutType", value=layout)
    return _Matrix(name, element, layout)


_HINT = "plan.tile_descriptions() lists the tiles there are"
_LARGE, _SMALL = 4096, 64


def _stand_in(matrix: _Matrix, extent: int) -> torch.Tensor:
    made = torch.empty(extent, extent, dtype=matrix.element, device="meta")
    return made.mT if matrix.layout is LayoutType.ColumnMajor else made


def _constraints(tile: TileDescription | None) -> Constraints:
    if tile is None:
        return Constraints()
    return Constraints(tile=tile.threadblock_shape, cluster=tile.cluster_shape, schedule=tile.kernel_schedule)


def _description(kernel: Kernel) -> TileDescription:
    design = kernel.spec.design
    tile = kernel.metadata.tile_shape
    return TileDescription(tile, getattr(design, "cluster", None), getattr(design, "schedule", None))
