"""Emulate launches of Hopper's kernel: PyTorch computes what the kernel's text says, on the tensors it is given."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from gpu.harness import Machine
from hopper import RANKED

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.base.target import TARGETS
from epifuse.fusion.reduction import REDUCTIONS
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Node
from epifuse.ir.types import dim_size
from epifuse.kernel import Kernel
from epifuse.plan import settle
from epifuse.providers.cpu.store import store
from epifuse.providers.cutedsl import launch, segments, weave
from epifuse.providers.cutedsl.kernel_text import read
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.ways import Access
from epifuse.request.scaled import SCALES, dequantised
from epifuse.runtime import background
from epifuse.runtime.launch import Prepared

_KINDS = {"float": torch.float32, "int32": torch.int32, "int64": torch.int64, "mask": torch.bool}


def function(text: str, _name: str) -> Any:
    """Stand in for the compiled function of a kernel's text. It takes the same arguments."""
    source = read(text)
    design = source.design

    def compute(a: Any, b: Any, tensors: Any, numbers: Any, outputs: Any, *_: Any) -> None:
        given = list(tensors), list(numbers), list(outputs)
        names = [name for name, own in zip(SCALES, design.scaled, strict=True) if own]
        if names:  # behind the operands
            scales = [given[0].pop() for _ in names][::-1]
            a, b = dequantised(a, b, {name: _of_batches(x, a) for name, x in zip(names, scales, strict=True)})
        for program in source.programs:
            start, stop = program.columns or (0, None)
            assert not program.columns or start % design.columns == 0, "a tile of two regions"
            counts = len(program.tensors), len(program.numbers), len(program.stores)
            own = [[every.pop(0) for _ in range(count)] for every, count in zip(given, counts, strict=True)]
            compute_region(program, a, b[:, start:stop] if program.columns else b, *own)

    def compute_region(program: Program, a: Any, b: Any, tensors: Any, numbers: Any, outputs: Any) -> None:
        graph = program.graph
        if design.swapped:
            a, b, tensors, outputs = transposed(program, a, b, tensors, outputs)
        parts = _products(a, b, program.order)
        m, n, l = parts[0].shape
        extents = {"m": m, "n": n, "l": l}
        pairs = zip(tensors, program.tensors, strict=True)
        loaded = {load[0]: _whole(tensor, load, n) for tensor, load in pairs}
        given = dict(zip(program.numbers, map(torch.as_tensor, numbers), strict=True))

        def leaf(node: Node) -> torch.Tensor:
            if node.op == "accum":
                return parts[node.attr or 0]
            if node.op == "index":
                return _counted(node, extents)
            if node.op == "const":
                return torch.tensor(node.attr, dtype=torch.float32 if isinstance(node.attr, float) else None)
            found = loaded[node] if node in loaded else given[node]
            if node.op == "load" and found.dim() == 3:  # the stride is 0 along axes that the operand does not have
                found = found[tuple(slice(0, None if axis in graph.types[node].axes else 1) for axis in "mnl")]
            return found.to(_KINDS[graph.types[node].kind])

        values: dict[Node, torch.Tensor] = {}
        for node in graph.nodes:
            value = _value(node, [values[arg] for arg in node.args]) if node.args else leaf(node)
            values[node] = value.to(_KINDS[graph.types[node].kind])
        for output, access, tensor in zip(graph.outputs, program.stores, outputs, strict=True):
            if not access.travels.merged:  # a merged output is written at the extents of its value
                to = _pieces(tensor, access)
                value = values[output.node].expand(_extents(to, access)).reshape(to.shape)
                # A dim with stride 0 has one value for a segment of columns; its first column is compared for all.
                first = tuple(slice(0, None if step else 1) for step in to.stride())
                to, value = to[first], value[first]
            else:
                to, value = tensor[tuple(slice(0, s) for s in values[output.node].shape)], values[output.node]
            if access.dtype == torch.float8_e8m0fnu:  # handed over as bytes
                to = to.view(access.dtype)
            store(value.to(torch.uint8) if value.dtype == torch.bool and to.dtype == torch.uint8 else value, to)

    return compute


def transposed(program: Any, a: Any, b: Any, tensors: Any, outputs: Any) -> tuple[Any, ...]:
    """The arguments as a kernel that exchanges A and B uses them: A and B exchanged, and M and N of all tensors that no
    reshape cuts."""
    pairs = (tensors, [access for _, access in program.tensors]), (outputs, program.stores)
    each = [[x if any(access.pieces) else x.transpose(0, 1) for x, access in zip(*one, strict=True)] for one in pairs]
    return b.transpose(0, 1), a.transpose(0, 1), *each


def _products(a: torch.Tensor, b: torch.Tensor, order: weave.Order) -> list[torch.Tensor]:
    """The product of each part of a row, of shape (M, N, L), for A (M, K[, L]) and B (K, N[, L]). Sums of integers are
    exact."""
    wide = torch.float32 if a.is_floating_point() or b.is_floating_point() else torch.float64
    a, b = (x if x.dim() == 3 else x[..., None] for x in (a.to(wide), b))
    if not order:
        return [torch.einsum("mkl,knl->mnl", a, b.to(wide))]
    extents, strides = weave.rows(order, b.shape[1] // weave.PARTS, b.stride(1))
    shape, steps = (b.shape[0], *extents, b.shape[2]), (b.stride(0), *strides, b.stride(2))
    rows = b.as_strided(shape, steps, b.storage_offset()).to(wide)
    found = torch.einsum("mkl,kiptl->ptiml", a, rows)
    return [part.flatten(0, 1).permute(1, 0, 2) for part in found]


def _of_batches(scales: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Block scales as they stand beside A or B, which have a last dim for batches where there are any."""
    return scales[..., None] if matrix.dim() == 3 else scales


def _pieces(tensor: torch.Tensor, access: Access) -> torch.Tensor:
    """The tensor with a dim for each piece of M, N and L. The slowest piece of each comes first."""
    tensor = tensor if tensor.dim() > 2 else tensor[..., None]
    counts = [len(own) + 1 for own in access.pieces]
    ends = list(itertools.accumulate(counts))
    order = [i for end, count in zip(ends, counts, strict=True) for i in reversed(range(end - count, end))]
    return tensor.permute(order)


def _extents(pieces: torch.Tensor, access: Access) -> list[int]:
    """The extents of M, N and L, each the product of its pieces."""
    ends = [0, *itertools.accumulate(len(own) + 1 for own in access.pieces)]
    return [pieces.shape[i:j].numel() for i, j in itertools.pairwise(ends)]


def _whole(tensor: torch.Tensor, load: tuple[Node, Access], columns: int) -> torch.Tensor:
    pieces, access = _pieces(tensor, load[1]), load[1]
    found = pieces.reshape(_extents(pieces, access))
    return found.repeat(1, columns // access.period, 1) if access.period else found


def _counted(node: Node, extents: dict[str, int]) -> torch.Tensor:
    found = torch.zeros((), dtype=torch.int32)
    for position, factor in enumerate(node.attr):
        shape = [extents[axis] if axis == factor.axis else 1 for axis in "mnl"]
        place = torch.arange(extents[factor.axis], dtype=torch.int32).view(shape) // factor.stride
        found = found + place % factor.size(extents) * dim_size(node.attr[position + 1 :], extents)
    return found.to(torch.int32)


class _Meaning(NamedTuple):
    """The meaning, in PyTorch, of a reduction that only Hopper's kernel has."""

    meaning: Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]


_MEANINGS = {
    "sum_of_exponentials": _Meaning(lambda x, dims, keep: (x - x.amax(dims, True)).exp().sum(dims, keep)),
    "place_of_largest": _Meaning(lambda x, dims, keep: x.argmax(dims[0], keep).float()),
}


def _value(node: Node, args: list[torch.Tensor]) -> torch.Tensor:
    if node.op == "reduce" and segments.width(node):
        return _of_segments(node, args[0])
    if node.op == "reduce":
        name, gone = node.attr
        dims = tuple({"mnl".index(factor.axis) for factor in gone})
        return _MEANINGS.get(name, REDUCTIONS.get(name)).meaning(args[0], dims, True)
    if node.op == "pick":
        return _picked(node, args[0])
    if node.op == "cast":
        return args[0].to(node.attr)
    found: torch.Tensor = VOCABULARY[str(node.attr) if node.op == "call" else node.op].function(*args)
    return found


def _picked(node: Node, x: torch.Tensor) -> torch.Tensor:
    """The value at one place along each factor of the columns, repeated in all columns of that factor."""
    for factor, place in node.attr:
        pieces = x.unflatten(1, (-1, factor.extent, factor.stride))
        x = pieces[:, :, place : place + 1].expand_as(pieces).flatten(1, 3)
    return x


def _of_segments(node: Node, x: torch.Tensor) -> torch.Tensor:
    """The result of each segment of columns, repeated in all columns of the segment."""
    width = segments.width(node)
    found = REDUCTIONS[node.attr[0]].meaning(x.unflatten(1, (-1, width)), (2,), True)
    return found.expand(-1, -1, width, -1).flatten(1, 2)


# --- running ---------------------------------------------------------------------------------------------------------


class Launched:
    """A kernel of Hopper whose launches are emulated."""

    def __init__(self, kernel: Kernel) -> None:
        self.prepared = Prepared.of(kernel.plan)

    def run(self, args: ef.GemmArguments) -> None:
        """Launch once."""
        self.prepared.launch(args.call)


class Emulated(Machine):
    """A machine that makes Hopper's plans, and whose launches PyTorch computes. See `emulated`."""

    def kernel(self, args: ef.GemmArguments) -> Any:
        """The best kernel for `args`."""
        (kernel,) = ef.get_kernels(args, cc=90, providers=["cutedsl"], limit=1)
        return Launched(kernel)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """A machine for the tests of tests/gpu. Here they judge the kernel's text, and the views that a launch is given."""
    monkeypatch.setattr(launch, "function", function)
    monkeypatch.setattr(launch, "resident_clusters", lambda index, size: 100)
    monkeypatch.setattr(launch, "rank_table", lambda *_: RANKED)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    return Emulated("cpu")


@pytest.fixture
def on_hopper(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Make the whole library take the CPU for a Hopper GPU: its plans, its launches, and what each launch is given.

    Nothing is compiled.
    """
    monkeypatch.setattr(settle, "target_of", lambda _: TARGETS[90])
    monkeypatch.setattr(background, "_is_submitted", lambda _: False)
    forget()  # forget calls that were planned for the CPU
    yield Machine("cpu")
    forget()
