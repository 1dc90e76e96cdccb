"""The vectorised CPU kernel: torch's GEMM by large panels, the epilogue as one compiled loop over each panel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from epifuse.config import CONFIG
from epifuse.ir import Graph, Load, Node
from epifuse.passes.assign_stages import assign_stages, sweeps
from epifuse.passes.canonicalise import canonicalise
from epifuse.passes.lower import lower
from epifuse.plan import Plan
from epifuse.problem import Problem, TensorInfo
from epifuse.providers.cpu import product, toolchain
from epifuse.providers.cpu.emit_cpp import LANES, NAMES, ROWS, SLEEF, Stream, emit
from epifuse.providers.cpu.space import Space, viewed

FEWEST_ROWS = 32  # of one batch; each batch is a call of its own here
SCRATCH = (512, 2048)  # rows and columns, 4 MiB: stays in cache between the product and the epilogue

Place = tuple[int, slice, slice]
"""A panel: its batch, rows and columns."""


def lowered(graph: Graph, problem: Problem) -> Graph:
    """The graph as the loop computes it: primitives only."""
    return assign_stages(canonicalise(lower(graph, frozenset()), problem), problem)


def refusal(graph: Graph, problem: Problem) -> str | None:
    """Why the loop cannot carry this epilogue, or None."""
    elements = problem.extents["l"] * problem.extents["m"] * problem.extents["n"]
    if elements < CONFIG.native_elements:
        return (
            f"{elements} elements do not pay for half a second of compiling; it takes {CONFIG.native_elements} or more"
        )
    if problem.extents["l"] > 1 and problem.extents["m"] < FEWEST_ROWS:
        return f"batches of fewer than {FEWEST_ROWS} rows run one by one here"
    if torch.backends.cpu.get_cpu_capability() not in LANES:
        return f"it needs AVX2 or AVX-512, and this machine has {torch.backends.cpu.get_cpu_capability()}"
    if (missing := toolchain.missing()) is not None:
        return missing
    if problem.accumulator != torch.float32:
        return f"it computes in float32, and the accumulator is {problem.accumulator}"
    return _unsupported_node(lowered(graph, problem), problem) or _unsupported_tensor(graph, problem)


def _unsupported_node(graph: Graph, problem: Problem) -> str | None:
    if sweeps(graph) > 1 or graph.effects:
        return "it makes one sweep and prints nothing"
    for node in graph.nodes:
        if node.op not in ROWS and node.op not in SLEEF and node.op not in ("accum", "load", "const"):
            return f"it has no {node.attr[0] if node.op == 'reduce' else node.op}"
        if graph.types[node].kind not in ("float", "mask") and node.op != "const":
            return "it computes floats and masks, not integers"
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


def _unsupported_tensor(graph: Graph, problem: Problem) -> str | None:
    dtypes = dict(problem.dtypes)
    for output in graph.outputs:
        if dtypes[output.name] not in NAMES:
            return f"it stores float32 and bfloat16, and '{output.name}' is {dtypes[output.name]}"
        info = dict(problem.outputs).get(output.name)
        if info is not None and _row_stride(info, output.dims) is None:
            return f"'{output.name}' is not stored by rows"
    for node in graph.loads():
        operand = problem.by_name.get(node.attr.name)
        if not isinstance(operand, TensorInfo) or graph.types[node].factors == ():
            continue
        if operand.dtype not in NAMES or node.attr.views:
            return f"it loads float32 and bfloat16 as they are, and '{node.attr.name}' is {operand}"
        if "n" in graph.types[node].axes and _row_stride(operand, node.attr.dims) is None:
            return f"'{node.attr.name}' is not stored by rows"
    return None


def _row_stride(info: TensorInfo, dims: Any) -> int | None:
    """Zero or more where the n axis is contiguous."""
    inner = [stride for dim, stride in zip(dims or (), info.strides, strict=False) if any(f.axis == "n" for f in dim)]
    return 0 if inner in ([1], []) else None


class NativeKernel:
    """One plan, ready to launch."""

    def __init__(self, plan: Plan) -> None:
        self.problem = plan.problem
        self.graph = graph = lowered(plan.graph, plan.problem)
        self.space = Space.of(graph, plan.problem.extents)
        types = graph.types
        leaves = [node for node in graph.nodes if node.op in ("accum", "load")]
        self.scalars = [node for node in leaves if node.op == "load" and not types[node].axes & {"m", "n"}]
        self.columns = [node for node in leaves if types[node].axes & {"m", "n"} == {"m"}]
        rows = [node for node in leaves if "n" in types[node].axes]
        dtypes = dict(plan.problem.dtypes)
        self.streams = [Stream(node, self._dtype(node), False) for node in rows]
        self.streams += [Stream(output.node, dtypes[output.name], True) for output in graph.outputs]
        self.uses_accum = any(node.op == "accum" for node in leaves)
        lanes = LANES[torch.backends.cpu.get_cpu_capability()]
        self.function = toolchain.build(emit(graph, self.streams, self.columns, self.scalars, lanes))

    def _dtype(self, node: Node) -> torch.dtype:
        info = self.problem.by_name.get(node.attr.name) if isinstance(node.attr, Load) else None
        return info.dtype if isinstance(info, TensorInfo) else torch.float32

    @torch.no_grad()
    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Run. `operands` holds tensors and numbers, `outputs` the destinations."""
        extents = self.problem.extents
        if 0 in (extents["l"], extents["m"], extents["n"]):
            return
        a = a if a.dim() == 3 else a.unsqueeze(0)
        b = product.prepare(a, b if b.dim() == 3 else b.unsqueeze(0), self.problem.accumulator)
        views = {o.name: self.space.view(outputs[o.name], o.dims or ()) for o in self.graph.outputs}
        loads = {node: self._view(node, operands) for node in self.graph.loads()}
        home = self._home(views)
        whole = home is not None and b.dtype == torch.float32
        step = (product.PANEL_ROWS, extents["n"]) if whole else SCRATCH
        size = (min(step[0], extents["m"]), min(step[1], extents["n"])) if home is None else (0, 0)
        scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        for place in _places(extents, step):
            batch, rows, columns = place
            panel = _corner(scratch, rows, columns) if home is None else home[place]
            if self.uses_accum:
                product.multiply(a[batch % a.shape[0], rows], b[batch % b.shape[0], :, columns], panel, None)
            self._epilogue(panel, loads, views, place)

    def _view(self, node: Node, operands: Mapping[str, Any]) -> torch.Tensor:
        value = operands[node.attr.name]
        if not isinstance(value, torch.Tensor):
            return torch.full((1, 1, 1), value, dtype=torch.float32, device="cpu")
        view = self.space.view(viewed(value, node.attr), node.attr.dims or ())
        return view if "n" in self.graph.types[node].axes else view.to(torch.float32)

    def _home(self, views: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """A float32 destination to hold the accumulator; the loop reads a row's vector before it writes it."""
        aliased = dict(self.problem.aliases)
        shape = tuple(self.problem.extents[axis] for axis in "lmn")
        for name, view in views.items():
            if view.dtype == torch.float32 and tuple(view.shape) == shape and name not in aliased:
                return view
        return None

    def _epilogue(
        self,
        panel: torch.Tensor,
        loads: Mapping[Node, torch.Tensor],
        views: Mapping[str, torch.Tensor],
        place: Place,
    ) -> None:
        inputs = [panel if s.node.op == "accum" else _cut(loads[s.node], place) for s in self.streams if not s.output]
        outputs = [_cut(view, place) for view in views.values()]
        walked = [*inputs, *outputs, *(_cut(loads[node], place) for node in self.columns)]
        pointers = (ctypes.c_void_p * len(walked))(*(tensor.data_ptr() for tensor in walked))
        strides = (ctypes.c_long * len(walked))(
            *(tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else 0 for tensor in walked)
        )
        values = [float(_cut(loads[node], place).flatten()[0]) for node in self.scalars]
        numbers = (ctypes.c_float * max(len(values), 1))(*values)
        rows, columns = map(ctypes.c_long, panel.shape)
        self.function(pointers, strides, numbers, rows, columns, torch.get_num_threads())


def _places(extents: Mapping[str, int], step: tuple[int, int]) -> Iterator[Place]:
    """Panels of each batch, row after row."""
    for batch in range(extents["l"]):
        for m in range(0, extents["m"], step[0]):
            for n in range(0, extents["n"], step[1]):
                yield batch, slice(m, min(m + step[0], extents["m"])), slice(n, min(n + step[1], extents["n"]))


def _corner(scratch: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    return scratch[: rows.stop - rows.start, : columns.stop - columns.start]


def _cut(view: torch.Tensor, place: Place) -> torch.Tensor:
    """The panel's part of one batch; what does not vary along an axis has one there."""
    batch, rows, columns = place
    matrix = view[batch % view.shape[0]]
    every = slice(None)
    return matrix[rows if matrix.shape[0] > 1 else every, columns if matrix.shape[1] > 1 else every]
