"""The derivative of an epilogue: PyTorch differentiates it once, as a graph of ATen operations, and that graph is the
epilogue of a product again.

    dAccum, the gradient of every operand = derivative(A @ B; operands, numbers, the gradient of every output)

One for each problem and each choice of gradients: it depends on shapes, dtypes and kinds, and on no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.frontend import Parsed
from epifuse.frontend.apply import placed
from epifuse.frontend.fx import Boundary, Cone, place_of, read, value_of
from epifuse.frontend.fx.rows import ROWS
from epifuse.frontend.remembered import remembered
from epifuse.ir import Load, Node
from epifuse.ir.types import dim_size, shape_of
from epifuse.plan.settle import Settled
from epifuse.pytorch.evaluate import ACCUM, Setting, coordinate, evaluate, value_dtype
from epifuse.request.problem import TensorInfo

aten = torch.ops.aten


def gradient_of(output: str) -> str:
    """What the derivative calls the gradient of an output; no identifier, so that no operand can be it."""
    return f"gradient of {output}"


class Input(NamedTuple):
    """An argument of a derivative, by name: the product, an operand, a number, a coordinate, an output's gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Derivative:
    """What the backward of one problem computes.

    `module` runs it by PyTorch, one operation at a time: its arguments are `inputs`, its results `computed`. `results`
    says of each gradient asked for what it is: one of `computed`, one of `handed`, which are gradients that arrive, or
    None where it is zero. `parsed` is the epilogue that computes the same beside the product, where the language holds
    it; else `refused` says why not.
    """

    module: GraphModule
    inputs: tuple[Input, ...]
    handed: tuple[Input, ...]
    computed: tuple[str, ...]
    results: Mapping[str, str | None]
    parsed: Parsed | None
    refused: str | None

    @cached_property
    def needs_product(self) -> bool:
        """False where the gradients are functions of operands and of the outputs' gradients alone."""
        return any(each.name == ACCUM for each in self.inputs)

    @cached_property
    def bytes_by_operations(self) -> int:
        """What `module` reads and writes, each operation by itself."""
        nodes = [node for node in self.module.graph.nodes if node.op == "call_function" and node.target not in _VIEWS]
        return sum(_bytes(each) for node in nodes for each in (node, *node.all_input_nodes))

    @cached_property
    def bytes_fused(self) -> int:
        """What a fused launch reads and writes beside A and B."""
        graph = self.module.graph
        holders = [node for node in graph.nodes if node.op == "placeholder" and node.target != ACCUM]
        return sum(map(_bytes, (*holders, *_returned(self.module))))


def derivative_of(parsed: Parsed, settled: Settled, wanted: tuple[str, ...], arriving: tuple[str, ...]) -> Derivative:
    """As `derive` gives it, which is asked once."""
    problem = settled.problem
    key = wanted, inputs_of(settled, arriving), problem.a.dtype, problem.a.device, problem.constraints
    return remembered("derivative", parsed.key, lambda: derive(settled, wanted, arriving), key)


def derive(settled: Settled, wanted: tuple[str, ...], arriving: tuple[str, ...]) -> Derivative:
    """The gradients of `wanted`, operands by name and the product as ACCUM, from those of the outputs `arriving`."""
    inputs = inputs_of(settled, arriving)
    module = _traced(settled, inputs, wanted, arriving)
    holders = dict(zip(_placeholders(module), inputs, strict=True))
    results: dict[str, str | None] = {}
    computed: dict[FxNode, str] = {}
    for name, node in zip(wanted, _returned(module), strict=True):
        if node is None or not _depends(node):
            results[name] = None
        elif (same := _itself(node)) in holders:
            results[name] = holders[same].name
        else:
            results[name] = computed.setdefault(node, f"result {len(computed)}")
    _keep(module, tuple(computed))
    used = {node: holders[node] for node in _placeholders(module)}
    parsed, refused = _as_epilogue(module, used, computed)
    reached = tuple(used.values())
    # What arrives may itself be a gradient that is asked for.
    direct = tuple(each for each in inputs if each.name in results.values() and each not in reached)
    return Derivative(module, reached, direct, tuple(computed.values()), results, parsed, refused)


# --- tracing ---------------------------------------------------------------------------------------------------------


def inputs_of(settled: Settled, arriving: tuple[str, ...]) -> tuple[Input, ...]:
    """All that a derivative may need."""
    problem, graph = settled.problem, settled.structure.graph
    tensors = {name: info for name, info in problem.operands if isinstance(info, TensorInfo)}
    numbers = {_load(node).name: node for node in graph.loads() if _load(node).name not in tensors}
    counted = {coordinate(node): node for node in graph.nodes if node.op == "index"}
    held = problem.float_dtype if problem.accumulator.is_floating_point else torch.int32
    dtypes = dict(problem.dtypes)
    shapes = {output.name: shape_of(output.dims or (), problem.extents) for output in graph.outputs}
    return (
        Input(ACCUM, problem.accum_shape, held),
        *(Input(name, info.shape, info.dtype) for name, info in tensors.items()),
        *(Input(name, (), value_dtype(graph.types[node].kind, problem)) for name, node in numbers.items()),
        *(Input(name, (dim_size(node.attr, problem.extents),), torch.int32) for name, node in counted.items()),
        *(Input(gradient_of(name), shapes[name], dtypes[name]) for name in arriving),
    )


def _load(node: Node) -> Load:
    assert isinstance(node.attr, Load)
    return node.attr


def _traced(settled: Settled, inputs: tuple[Input, ...], wanted: tuple[str, ...], arriving: tuple[str, ...]) -> Any:
    """PyTorch's derivative as a graph of ATen operations: an argument an input, a result a gradient of `wanted`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names, device = [each.name for each in inputs], settled.problem.a.device

    def backward(*values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        known = dict(zip(names, values, strict=True))
        with torch.enable_grad():
            leaves = {name: known[name].detach().requires_grad_() for name in wanted}
            outputs = evaluate(Setting.of(settled.structure.graph, settled.problem, {**known, **leaves}))
            reached = {name: outputs[name] for name in arriving if outputs[name].requires_grad}
            if not reached:
                return (None,) * len(wanted)
            given = [known[gradient_of(name)].to(end.dtype) for name, end in reached.items()]
            return torch.autograd.grad(list(reached.values()), list(leaves.values()), given, allow_unused=True)

    with _apart(device):
        values = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in inputs]
        module = make_fx(backward, decomposition_table=_table())(*values)
        if any(_mutates(node) for node in module.graph.nodes):
            functional = torch.func.functionalize(module, remove="mutations")
            module = make_fx(functional, decomposition_table=_table())(*values)
    _tidy(module)
    return module


@contextmanager
def _apart(device: str) -> Iterator[None]:
    """Fake tensors, and nothing of what the caller has switched on: modes, autocast, checkpoints, inference mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        FakeTensorMode(),
        torch.inference_mode(False),
        torch.autocast(device.partition(":")[0], enabled=False),
        torch.autograd.graph.saved_tensors_hooks(_itself_again, _itself_again),
    ):
        yield


def _itself_again(x: Any) -> Any:
    return x


def _mutates(node: FxNode) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _tidy(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target in (aten.alias.default, aten.detach.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.view.default:  # gradients that arrive may lie in any way
            node.target = aten.reshape.default
        elif node.target is aten.sum.dim_IntList:
            _widen_in_sum(node)
    module.graph.eliminate_dead_code()


@cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    """What becomes of operations that the language has no row for. Takes a quarter of a second."""
    from torch._decomp import core_aten_decompositions

    rules: Any = core_aten_decompositions()
    kept = {op: rule for op, rule in rules.items() if op._schema.name not in ROWS}
    return {**kept, aten.linalg_vector_norm.default: _norm, aten.copy.default: _copied}


def _copied(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `old` is once `new` was written to it."""
    return new.to(old.dtype).expand_as(old)


def _norm(x: torch.Tensor, order: float = 2, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """The Euclidean norm, which is the only one here."""
    return torch.sqrt(torch.sum(x * x, dim, keepdim))


# --- the graph that was traced ----------------------------------------------------------------------------------------


def _placeholders(module: GraphModule) -> list[FxNode]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _returned(module: GraphModule) -> tuple[Any, ...]:
    return tuple(next(node for node in module.graph.nodes if node.op == "output").args[0])


def _depends(node: FxNode) -> bool:
    """Whether `node` is computed from anything."""
    below = [node]
    while below:
        found = below.pop()
        if found.op == "placeholder":
            return True
        below += found.all_input_nodes
    return False


def _itself(node: FxNode) -> FxNode:
    """What `node` is a copy of, in another dtype maybe: gradients are cast to that of what they belong to anyway."""
    while node.target is aten._to_copy.default and not _narrows(node):
        node = node.args[0]  # type: ignore[assignment]  # a node
    return node


def _narrows(node: FxNode) -> bool:
    return value_of(node).dtype.itemsize < value_of(node.args[0]).dtype.itemsize  # type: ignore[arg-type]  # a node


def _keep(module: GraphModule, results: tuple[FxNode, ...]) -> None:
    """Compute `results` alone, and take what they need alone."""
    graph = module.graph
    next(node for node in graph.nodes if node.op == "output").args = (results,)
    graph.eliminate_dead_code()
    for node in _placeholders(module):
        if not node.users:
            graph.erase_node(node)
    module.recompile()


def _widen_in_sum(node: FxNode) -> None:
    """Have the sum itself widen what it adds, so that nothing is written in between."""
    x = node.args[0]
    if isinstance(x, FxNode) and x.target is aten._to_copy.default and not _narrows(x):
        node.args = (x.args[0], *node.args[1:])
        node.kwargs = {**node.kwargs, "dtype": value_of(node).dtype}


_VIEWS = (
    *(aten.reshape.default, aten.expand.default, aten.unsqueeze.default, aten.permute.default, aten.full.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.t.default, aten.scalar_tensor.default),
)
"""What moves no data."""


def _bytes(node: FxNode) -> int:
    while node.target is aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]  # a node
    return value_of(node).nbytes


def _as_epilogue(
    module: GraphModule, used: Mapping[FxNode, Input], computed: Mapping[FxNode, str]
) -> tuple[Parsed | None, str | None]:
    """The epilogue of a product that computes the results, or why there is none."""
    accum = next((node for node, each in used.items() if each.name == ACCUM), None)
    if accum is None:
        return None, None
    operands = {node: each.name for node, each in used.items() if node is not accum}
    body = tuple(node for node in module.graph.nodes if node.op == "call_function")
    outputs = {name: node for node, name in computed.items()}
    try:
        graph = read(Cone(accum, body, operands, outputs))
    except Boundary as boundary:
        return None, boundary.reason
    return Parsed("derivative", graph, graph.inputs, {}, {}, (), placed(place_of(accum))), None
