"""The vectorised CPU kernel: torch's GEMM by large panels, the epilogue as one compiled loop over each panel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch

from epifuse.base.config import CONFIG
from epifuse.ir import Dims, Factor, Graph, Load, Node
from epifuse.ir.types import shape_of
from epifuse.passes.assign_stages import assign_stages, sweeps
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower
from epifuse.providers.base import Step
from epifuse.providers.cpu import product, toolchain
from epifuse.providers.cpu.emit_cpp import LANES, NAMES, RANDOM, ROWS, SLEEF, Inputs, Stream, emit
from epifuse.providers.cpu.space import Space, viewed
from epifuse.providers.cpu.unfold import PartIndex, Unfolded, unfolded
from epifuse.request.problem import Problem, TensorInfo, dense
from epifuse.request.scaled import dequantised

FEWEST_ROWS = 32  # least rows of a batch, because each batch is a call of its own
SCRATCH = (512, 2048)  # rows and columns, 4 MiB: it stays in cache between the product and the epilogue

Place = tuple[int, slice, slice]
"""A panel: its batch, rows and columns."""


@dataclass(frozen=True, eq=False)
class Loop:
    """An epilogue lowered to primitives for the loop, for any extents.

    `graph` is what the loop computes. `rows` are its inputs that vary along a row, `inputs` the others. `reason` says
    why the loop cannot run it, or is None. `typed` is the graph in which rows may be cut into parts, and `space` the
    space of its values. If they are cut, `parts` is that graph unfolded (see `unfold`), or None if that fails.
    """

    graph: Graph
    typed: Graph
    parts: Unfolded | None
    space: Space
    rows: tuple[Node, ...]
    inputs: Inputs
    reason: str | None

    @staticmethod
    def of(typed: Graph, problem: Problem) -> Loop:
        """The loop of a typed graph."""
        typed = canonicalise(lower(typed, frozenset()), problem)
        cut = any(node.op == "pick" for node in typed.nodes)
        parts = unfolded(typed, problem.extents) if cut and not problem.aliases else None
        graph = assign_stages(parts.graph if parts else typed, problem)
        types = graph.types
        leaves = [node for node in graph.nodes if node.op in ("accum", "load")]
        single = [node for node in leaves if node.op == "load" and not types[node].axes & {"m", "n"}]
        inputs = Inputs(
            columns=tuple(node for node in leaves if types[node].axes & {"m", "n"} == {"m"}),
            scalars=tuple(node for node in single if types[node].kind == "float"),
            seeds=tuple(node for node in single if types[node].kind != "float"),
            positions=tuple(node for node in graph.nodes if node.op == "index"),
        )
        rows = tuple(node for node in leaves if "n" in types[node].axes)
        space = Space.of(typed, problem.extents)
        return Loop(graph, typed, parts, space, rows, inputs, _unsupported_node(graph))


def unfit(problem: Problem) -> str | None:
    """Why the loop does not suit this problem on this machine, for any epilogue, or None."""
    elements = problem.extents["l"] * problem.extents["m"] * problem.extents["n"]
    if elements < CONFIG.native_elements:
        return (
            f"the result has {elements} elements: compiling a loop, which takes half a second, pays from "
            f"{CONFIG.native_elements} on (EPIFUSE_NATIVE_ELEMENTS)"
        )
    if problem.extents["l"] > 1 and problem.extents["m"] < FEWEST_ROWS:
        return f"it computes each batch by itself, which is slow where a batch has fewer than {FEWEST_ROWS} rows"
    if torch.backends.cpu.get_cpu_capability() not in LANES:
        return f"it needs AVX2 or AVX-512, and this machine has {torch.backends.cpu.get_cpu_capability()}"
    if (missing := toolchain.missing()) is not None:
        return missing
    if problem.accumulator != torch.float32:
        return f"it computes in float32, and the accumulator is {problem.accumulator}"
    return None


def refusal(loop: Loop, problem: Problem) -> str | None:
    """Why the loop cannot run this epilogue, or None."""
    return loop.reason or _unsupported_tensor(loop, problem)


def _said(node: Node) -> str:
    return str(node.attr[0]) if node.op == "reduce" else {"pick": "parts of a row"}.get(node.op, node.op)


def _unsupported_node(graph: Graph) -> str | None:
    if sweeps(graph) > 1 or graph.effects:
        return "the epilogue prints, or needs a second sweep over the product, and this kernel does neither"
    whole = frozenset(node for node in graph.nodes if _is_integer(node, graph))
    for node in graph.nodes:
        if node.op in RANDOM and _is_drawn(node, graph):
            continue
        if node in whole:
            if node.op not in ("load", "index") or (graph.types[node].axes & {"m", "n"} and node.op == "load"):
                return "it computes floats and masks, not integers"
            continue
        if node.op not in ROWS and node.op not in SLEEF and node.op not in ("accum", "load", "const"):
            return f"it has no {_said(node)}"
        if not whole.isdisjoint(node.args):
            return "it takes integers only as the seed and the positions of random numbers"
        if isinstance(node.attr, Load) and (kind := graph.types[node]).kind != "float":
            return f"it loads floats, and '{node.attr.name}' is {kind}"
    if any(
        factor.extent is not None or factor.stride > 1 for type_ in graph.types.values() for factor in type_.factors
    ):
        return "it has no reshaped axes"
    for output in graph.outputs:
        if not {"m", "n"} <= graph.types[output.node].axes or graph.types[output.node].kind != "float":
            return f"it stores full-size floats, and '{output.name}' is {graph.types[output.node]}"
    return None


def _is_integer(node: Node, graph: Graph) -> bool:
    """Whether a node is an integer. A constant does not count as one, because beside floats it is a float."""
    return graph.types[node].kind not in ("float", "mask") and node.op != "const"


def _is_drawn(node: Node, graph: Graph) -> bool:
    """Whether random numbers are drawn with one seed in all, from the positions of their elements."""
    seed, position = node.args
    return seed.op in ("load", "const") and not graph.types[seed].factors and position.op == "index"


def _unsupported_tensor(loop: Loop, problem: Problem) -> str | None:
    dtypes, graph = dict(problem.dtypes), loop.graph
    for output in loop.typed.outputs:
        if dtypes[output.name] not in NAMES:
            return f"it stores float32 and bfloat16, and '{output.name}' is {dtypes[output.name]}"
        info = dict(problem.outputs).get(output.name)
        dims = output.dims or ()
        columns = Factor("n") if loop.parts is None else loop.parts.columns
        if not _has_rows(dense(shape_of(dims, problem.extents)) if info is None else info.strides, dims, columns):
            return f"'{output.name}' is not stored by rows"
    for node in graph.loads():
        operand = problem.by_name.get(node.attr.name)
        if not isinstance(operand, TensorInfo) or graph.types[node].factors == ():
            continue
        along = graph.types[node].axes
        if operand.dtype not in NAMES or not all(_is_range(view, loop, along) for view in node.attr.views):
            return f"it loads float32 and bfloat16 as they are, and '{node.attr.name}' is {operand}"
        if "n" in along and not _has_contiguous_columns(operand, node.attr.dims):
            return f"'{node.attr.name}' is not stored by rows"
    return None


def _has_rows(strides: Sequence[int], dims: Dims, columns: Factor) -> bool:
    """Whether an output's columns, or those of its parts, are contiguous in memory."""
    found = [(dim[-1], stride) for dim, stride in zip(dims, strides, strict=False) if columns in dim]
    return all(_is_column(last, columns) and stride == 1 for last, stride in found)


def _is_column(factor: Factor, columns: Factor) -> bool:
    return factor.axis == "n" and factor.stride == columns.stride


def _is_range(view: tuple[str, Any], loop: Loop, axes: frozenset[str]) -> bool:
    """Whether a layout operation takes a range of an operand, with contiguous columns. If the operand is one row, the
    range may have a step, because a copy makes its columns contiguous."""
    step, how = view
    return loop.parts is not None and step == "part" and not how[4] and (how[3] == 1 or axes == {"n"})


def _has_contiguous_columns(info: TensorInfo, dims: Any) -> bool:
    """Whether the n axis is contiguous or absent."""
    inner = [stride for dim, stride in zip(dims or (), info.strides, strict=False) if any(f.axis == "n" for f in dim)]
    return inner in ([1], [])


def source(loop: Loop, problem: Problem) -> str:
    """The C++ text of the loop, for the vectors of this CPU."""
    lanes = LANES[torch.backends.cpu.get_cpu_capability()]
    return emit(loop.graph, _streams(loop, problem), loop.inputs, lanes)


def _streams(loop: Loop, problem: Problem) -> list[Stream]:
    operands, outputs = problem.by_name, dict(problem.dtypes)

    def dtype(node: Node) -> torch.dtype:
        info = operands.get(node.attr.name) if isinstance(node.attr, Load) else None
        return info.dtype if isinstance(info, TensorInfo) else torch.float32

    loads = [Stream(node, dtype(node), False) for node in loop.rows]
    names = [name for name, _ in loop.parts.outputs] if loop.parts else [output.name for output in loop.graph.outputs]
    stores = zip(names, loop.graph.outputs, strict=True)
    return loads + [Stream(output.node, outputs[name], True) for name, output in stores]


def _in_turn(launch: Step) -> Step:
    """`launch` under a lock. Threads run it one after the other, because the product may be computed in an output."""
    lock = Lock()

    def step() -> None:
        with lock:
            launch()

    return step


class NativeKernel:
    """One plan, ready to launch."""

    def __init__(self, loop: Loop, problem: Problem) -> None:
        self.loop, self.problem = loop, problem
        self.space = loop.space.of_extents(problem.extents)
        self.streams = _streams(loop, problem)
        self.extents, self.inner, self.count, self.column_stride = problem.extents, self.space, 1, 1
        if loop.parts is not None:
            self.extents = {**problem.extents, "n": loop.parts.width}
            self.inner, self.count = Space.of(loop.graph, self.extents), problem.extents["n"] // loop.parts.width
            self.column_stride = loop.parts.column_stride
        self.products = [_number(node) for node in loop.rows if node.op == "accum"]
        self.function = toolchain.build(source(loop, problem))

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        """Bind the tensors. `operands` holds tensors and numbers, `outputs` the destinations."""
        views = {o.name: self.space.view(outputs[o.name].detach(), o.dims or ()) for o in self.loop.typed.outputs}
        if self.loop.parts is not None:
            stored = zip(self.loop.graph.outputs, self.loop.parts.outputs, strict=True)
            views = {output.name: self._part(views[name], places) for output, (name, places) in stored}
        loads = {node: self._view(node, operands) for node in self.loop.graph.loads()}
        if self.problem.scales:
            return _in_turn(lambda: self._launch(*_with_batch(*dequantised(a, b, operands)), loads, views))
        a, b = _with_batch(a.detach(), b.detach())
        return _in_turn(partial(self._launch, a, b, loads, views))

    def _launch(
        self, a: torch.Tensor, b: torch.Tensor, loads: Mapping[Node, torch.Tensor], views: Mapping[str, torch.Tensor]
    ) -> None:
        extents = self.extents
        if 0 in (extents["l"], extents["m"], extents["n"]):
            return
        b = b.to(product.operand_dtype(a.dtype, b.dtype, self.problem.accumulator))
        # The loop reads columns and scalars in float32.
        numbers = (*self.loop.inputs.columns, *self.loop.inputs.scalars)
        loads = {**loads, **{node: loads[node].to(torch.float32) for node in numbers}}
        if self.column_stride > 1:
            loads |= {node: view.contiguous() for node, view in loads.items() if view.stride(-1) > 1}
        parts = {number: self._columns(b, number) for number in self.products}
        home = self._home(views)
        whole = home is not None and b.dtype == torch.float32
        step = (product.PANEL_ROWS, extents["n"]) if whole else (SCRATCH[0], SCRATCH[1] // self.count)
        size = (min(step[0], extents["m"]), min(step[1], extents["n"])) if home is None else (0, 0)
        scratch = torch.empty((self.count, *size), dtype=torch.float32, device="cpu")
        for place in _places(extents, step):
            batch, rows, columns = place
            panels = [_corner(each, rows, columns) if home is None else home[place] for each in scratch]
            for number in self.products:
                there = parts[number][batch % b.shape[0], :, columns]
                product.multiply(a[batch % a.shape[0], rows], there, panels[number], None)
            self._epilogue(panels, loads, views, place)

    def _part(self, view: torch.Tensor, places: PartIndex) -> torch.Tensor:
        """The view of one part of an output."""
        assert self.loop.parts is not None
        known = dict(places)
        for at, factor in reversed(list(enumerate(self.space.factors))):
            if factor.axis == "n" and factor != self.loop.parts.columns:
                view = view.select(at, known.get(factor, 0))
        return view

    def _columns(self, b: torch.Tensor, number: int) -> torch.Tensor:
        """The columns of B for the part `number` of each row. They are a copy if they are not contiguous in B."""
        apart, width = self.column_stride, self.extents["n"]
        if apart == 1:
            return b[..., number * width : (number + 1) * width]
        return b[..., number::apart].contiguous()

    def _view(self, node: Node, operands: Mapping[str, Any]) -> torch.Tensor:
        value = operands[node.attr.name]
        if not isinstance(value, torch.Tensor):
            dtype = torch.int64 if node in self.loop.inputs.seeds else torch.float32
            return torch.full((1, 1, 1), value, dtype=dtype, device="cpu")
        return self.inner.view(viewed(value.detach(), node.attr), node.attr.dims or ())

    def _home(self, views: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """A float32 destination that can hold the accumulator, or None. The loop reads a vector before it writes it."""
        if self.loop.parts is not None:
            return None
        aliased = dict(self.problem.aliases)
        shape = tuple(self.problem.extents[axis] for axis in "lmn")
        for name, view in views.items():
            if view.dtype == torch.float32 and tuple(view.shape) == shape and name not in aliased:
                return view
        return None

    def _epilogue(
        self,
        panels: Sequence[torch.Tensor],
        loads: Mapping[Node, torch.Tensor],
        views: Mapping[str, torch.Tensor],
        place: Place,
    ) -> None:
        read = [s.node for s in self.streams if not s.output]
        inputs = [panels[_number(node)] if node.op == "accum" else _cut(loads[node], place) for node in read]
        outputs = [_cut(view, place) for view in views.values()]
        walked = [*inputs, *outputs, *(_cut(loads[node], place) for node in self.loop.inputs.columns)]
        pointers = (ctypes.c_void_p * len(walked))(*(tensor.data_ptr() for tensor in walked))
        strides = (ctypes.c_long * len(walked))(
            *(tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else 0 for tensor in walked)
        )
        values = [float(_cut(loads[node], place).flatten()[0]) for node in self.loop.inputs.scalars]
        numbers = (ctypes.c_float * max(len(values), 1))(*values)
        counts = [int(_cut(loads[node], place).flatten()[0]) for node in self.loop.inputs.seeds]
        counts += [each for node in self.loop.inputs.positions for each in self._counted(node, place)]
        integers = (ctypes.c_long * max(len(counts), 1))(*counts)
        rows, columns = map(ctypes.c_long, panels[0].shape)
        self.function(pointers, strides, numbers, integers, rows, columns, torch.get_num_threads())

    def _counted(self, node: Node, place: Place) -> tuple[int, int, int]:
        """The linear position of a panel's first element, and the steps from row to row and from column to column."""
        batch, rows, columns = place
        steps, step = dict.fromkeys("lmn", 0), 1
        for factor in reversed(node.attr):
            steps[factor.axis], step = step, step * self.problem.extents[factor.axis]
        return batch * steps["l"] + rows.start * steps["m"] + columns.start * steps["n"], steps["m"], steps["n"]


def _with_batch(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a if a.dim() == 3 else a.unsqueeze(0), b if b.dim() == 3 else b.unsqueeze(0)


def _number(accum: Node) -> int:
    """The number of the part of a row that `accum` is of; 0 if rows are not cut."""
    return accum.attr if isinstance(accum.attr, int) else 0


def _places(extents: Mapping[str, int], step: tuple[int, int]) -> Iterator[Place]:
    """Yield the panels of each batch, one row of panels after the other."""
    for batch in range(extents["l"]):
        for m in range(0, extents["m"], step[0]):
            for n in range(0, extents["n"], step[1]):
                yield batch, slice(m, min(m + step[0], extents["m"])), slice(n, min(n + step[1], extents["n"]))


def _corner(scratch: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    return scratch[: rows.stop - rows.start, : columns.stop - columns.start]


def _cut(view: torch.Tensor, place: Place) -> torch.Tensor:
    """The panel's part of one batch. A value that does not vary along an axis has size 1 there, and is not cut."""
    batch, rows, columns = place
    matrix = view[batch % view.shape[0]]
    every = slice(None)
    return matrix[rows if matrix.shape[0] > 1 else every, columns if matrix.shape[1] > 1 else every]
