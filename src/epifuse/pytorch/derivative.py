"""The derivative of an epilogue. PyTorch differentiates the epilogue once, as a graph of ATen operations; this graph is
itself the epilogue of a product.

    dAccum, the gradient of every operand = derivative(A @ B; operands, numbers, the gradient of every output)

There is one derivative for each structure and each choice of gradients. It depends on dtypes, kinds and on which
operands broadcast, but on no value. Extents are symbols while it is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from epifuse.base.dtypes import dtype_of
from epifuse.frontend import Parsed
from epifuse.frontend.apply import placed
from epifuse.frontend.fx import Boundary, Cone, place_of, read, value_of
from epifuse.frontend.remembered import remembered
from epifuse.ir import Load, Node
from epifuse.ir.types import dim_size, shape_of
from epifuse.plan.settle import Settled
from epifuse.pytorch.chosen import slice_sums
from epifuse.pytorch.evaluate import ACCUM, Setting, coordinate, counts_elements, evaluate
from epifuse.pytorch.steps import has_step
from epifuse.pytorch.sums import rows_alone
from epifuse.pytorch.symbols import OTHER, Size, Symbols, is_tensor, table
from epifuse.pytorch.traffic import Traffic, traffic
from epifuse.pytorch.unfused import ByInductor, call_directly, leave_out_casts
from epifuse.request.problem import Problem, TensorInfo

aten = torch.ops.aten


def gradient_of(output: str) -> str:
    """The name of the gradient of an output among a derivative's inputs. It is no identifier, so no operand has it."""
    return f"gradient of {output}"


class Input(NamedTuple):
    """An argument of a derivative: the product, an operand, a number, a coordinate, or the gradient of an output."""

    name: str
    shape: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Derivative:
    """What the backward computes for the problems of one structure.

    `module` is the derivative as PyTorch runs it, one operation at a time. Its arguments are `inputs` and the extents
    of `axes`, and it returns `computed`. `results` names for each gradient asked for one of `computed`, or the argument
    that it equals, or None if it is zero. `handed` are arriving gradients that are such results and not in `inputs`.
    `unsummed_dims` has the dims that a computed value still has to be summed over.

    `with_product` is the epilogue that computes the same from the product; None if the derivative does not read accum.
    `without_product` is the epilogue that reads accum as an operand, or no accum. Both read `extents` as numbers. If
    the language can express neither, `refused` says why. `exact` has the extents that the derivative is limited to, by
    axis. An axis for which it serves all extents is not in it.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    axes: tuple[str, ...]
    handed: tuple[str, ...]
    computed: tuple[str, ...]
    results: Mapping[str, str | None]
    unsummed_dims: Mapping[str, tuple[int, ...]]
    with_product: Parsed | None
    without_product: Parsed | None
    refused: str | None
    extents: Mapping[str, Size]
    exact: Mapping[str, int]
    decides: bool
    """Whether a value computed from accum and others is compared. With a rounded accum the comparison may differ."""
    widens: bool
    """Whether `module` also takes accum in the narrower dtype that it was stored in."""
    traffic: Traffic
    compiled: dict[tuple[torch.dtype, ...], ByInductor] = field(default_factory=dict)
    """`module` compiled by Inductor, by the dtypes of the results."""

    @property
    def needs_product(self) -> bool:
        """Whether the derivative reads accum. If not, it reads operands and the outputs' gradients alone."""
        return ACCUM in self.inputs

    def by_inductor(self, dtypes: tuple[torch.dtype, ...]) -> ByInductor:
        """Return `module` compiled by Inductor, with results in these dtypes."""
        found = self.compiled.get(dtypes)
        return self.compiled.setdefault(dtypes, ByInductor(self.module, dtypes)) if found is None else found


def derivative_of(settled: Settled, wanted: tuple[str, ...], arriving: tuple[str, ...]) -> Derivative:
    """The result of `derive`, cached: one for a structure if it is valid for all extents, otherwise one for each value
    of the extents that it depends on."""
    problem, structure = settled
    key: tuple[Any, ...] = wanted, arriving, problem.dtypes, problem.a.device
    while True:
        found = remembered("derivative", structure, lambda: derive(settled, wanted, arriving), key)
        if found.exact.items() <= problem.extents.items():
            return found
        key = *key, *((axis, problem.extents[axis]) for axis in found.exact)


def derive(settled: Settled, wanted: tuple[str, ...], arriving: tuple[str, ...]) -> Derivative:
    """Return the derivative that computes the gradients of `wanted` (operands by name, the product as ACCUM) from the
    gradients of the outputs `arriving`."""
    at = Symbols.of(settled)
    inputs = inputs_of(settled, arriving, at.extents)
    module = _traced(at, settled, inputs, wanted, arriving)
    axes = at.axes(module)
    holders = dict(zip(_placeholders(module), inputs, strict=True))
    by_rows = rows_alone(module, settled.problem)
    results: dict[str, str | None] = {}
    computed: dict[FxNode, str] = {}
    for name, node in zip(wanted, _returned(module), strict=True):
        if node is None or not _depends(node):
            results[name] = None
        elif (same := _itself(node)) in holders:
            results[name] = holders[same].name
        else:
            results[name] = computed.setdefault(by_rows.get(node, (node,))[0], f"result {len(computed)}")
    unsummed_dims = {computed[node]: dims for node, dims in by_rows.values() if node in computed}
    _keep(module, tuple(computed))
    read = tuple(holders[node] for node in _placeholders(module))
    names = tuple(each.name for each in read)
    product, made = inputs[-1], tuple(computed.values())
    (with_product, without_product), refused, counts, exact = _as_epilogues(at, module, (read, product, axes), made)
    accum = dict(zip(names, _placeholders(module), strict=True)).get(ACCUM)
    decides = accum is not None and has_step(module, accum)
    widens = leave_out_casts(module, accum, settled.problem.a.device)
    gradients = [name for name, result in results.items() if result in made]
    named = dict(zip(_placeholders(module), names, strict=True))
    moved = traffic(module, named, settled, gradients, [*map(gradient_of, arriving)])
    call_directly(module)
    return Derivative(
        module,
        names,
        axes,
        # An arriving gradient may itself be a gradient that is asked for.
        tuple(each.name for each in inputs if each.name in results.values() and each.name not in names),
        tuple(computed.values()),
        results,
        unsummed_dims,
        with_product,
        without_product,
        refused,
        counts,
        exact,
        decides,
        widens,
        moved,
    )


# --- tracing ---------------------------------------------------------------------------------------------------------


def inputs_of(settled: Settled, arriving: tuple[str, ...], extents: Mapping[str, Any]) -> tuple[Input, ...]:
    """All arguments that a derivative may need, for axes with these extents. Accum is the last one."""
    problem, graph = settled.problem, settled.structure.graph
    axes = {problem.extents[axis]: extents[axis] for axis in "lmn"}
    axes.setdefault(problem.extents["l"] * problem.extents["m"], extents["l"] * extents["m"])  # merged by a reshape
    tensors = {name: info for name, info in problem.operands if isinstance(info, TensorInfo)}
    numbers = {_load(node).name: node for node in graph.loads() if _load(node).name not in tensors}
    counted = {coordinate(node): node for node in graph.nodes if node.op == "index" and not counts_elements(node)}
    held = problem.float_dtype if problem.accumulator.is_floating_point else torch.int32
    dtypes = dict(problem.dtypes)
    shapes = {output.name: shape_of(output.dims or (), extents) for output in graph.outputs}
    whole = tuple(extents[axis] for axis in ("lmn" if problem.batched else "mn"))
    return (
        *(Input(gradient_of(name), shapes[name], as_it_arrives(dtypes[name], problem)) for name in arriving),
        *(Input(name, tuple(axes.get(x, x) for x in info.shape), info.dtype) for name, info in tensors.items()),
        *(Input(name, (), dtype_of(graph.types[node].kind, problem.float_dtype)) for name, node in numbers.items()),
        *(Input(name, (dim_size(node.attr, extents),), torch.int32) for name, node in counted.items()),
        Input(ACCUM, whole, held),
    )


def as_it_arrives(dtype: torch.dtype, problem: Problem) -> torch.dtype:
    """The dtype in which the derivative reads the gradient of an output. A gradient of 8 bits is converted first."""
    return dtype if dtype.itemsize > 1 else problem.float_dtype


def _load(node: Node) -> Load:
    assert isinstance(node.attr, Load)
    return node.attr


def _traced(
    at: Symbols, settled: Settled, inputs: tuple[Input, ...], wanted: tuple[str, ...], arriving: tuple[str, ...]
) -> Any:
    """PyTorch's derivative as a graph of ATen operations, with an argument for each of `inputs` and a result for each
    gradient of `wanted`."""
    names = [each.name for each in inputs]

    def backward(*values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        known = dict(zip(names, values, strict=True))
        with torch.enable_grad():
            leaves = {name: known[name].detach().requires_grad_() for name in wanted}
            outputs = evaluate(Setting.of(settled.structure.graph, settled.problem, {**known, **leaves}, at.extents))
            reached = {name: outputs[name] for name in arriving if outputs[name].requires_grad}
            if not reached:
                return (None,) * len(wanted)
            given = [known[gradient_of(name)].to(end.dtype) for name, end in reached.items()]
            return torch.autograd.grad(list(reached.values()), list(leaves.values()), given, allow_unused=True)

    module = at.recorded(backward, inputs)
    if any(_mutates(node) for node in module.graph.nodes):
        _view_in_any_layout(module)  # without mutations values may have other strides
        module = at.recorded(torch.func.functionalize(module, remove="mutations"), inputs)
    _tidy(module)
    places = {coordinate(node) for node in settled.structure.graph.nodes if node.op == "index" and at.cuts(node.attr)}
    slice_sums(module, [node for node, name in zip(_placeholders(module), names, strict=True) if name in places])
    return module


def _mutates(node: FxNode) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _view_in_any_layout(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
    module.recompile()


def _tidy(module: GraphModule) -> None:
    _view_in_any_layout(module)  # gradients that arrive may have any strides
    for node in list(module.graph.nodes):
        if node.target in (aten.alias.default, aten.detach.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.sum.dim_IntList:
            _widen_in_sum(node)
        if node.target in _REGROUPED:
            _leave_out_in_sum(module, node)
            _undo(node)
    module.graph.eliminate_dead_code()
    module.recompile()


# --- the graph that was traced ----------------------------------------------------------------------------------------


def _placeholders(module: GraphModule) -> list[FxNode]:
    """The arguments that are tensors."""
    return [node for node in module.graph.nodes if node.op == "placeholder" and is_tensor(node)]


def _returned(module: GraphModule) -> tuple[Any, ...]:
    return tuple(next(node for node in module.graph.nodes if node.op == "output").args[0])


def _depends(node: FxNode) -> bool:
    """Whether `node` depends on an argument of the graph."""
    below = [node]
    while below:
        found = below.pop()
        if found.op == "placeholder":
            return True
        below += found.all_input_nodes
    return False


def _itself(node: FxNode) -> FxNode:
    """The node that `node` is a copy of, possibly in a wider dtype. A gradient is cast to its operand's dtype later."""
    while node.target is aten._to_copy.default and not _narrows(node):
        node = node.args[0]  # type: ignore[assignment]  # a node
    return node


def _narrows(node: FxNode) -> bool:
    return value_of(node).dtype.itemsize < value_of(node.args[0]).dtype.itemsize  # type: ignore[arg-type]  # a node


def _keep(module: GraphModule, results: tuple[FxNode, ...]) -> None:
    """Have `module` return `results` alone, and take only the tensors that these need."""
    graph = module.graph
    next(node for node in graph.nodes if node.op == "output").args = (results,)
    graph.eliminate_dead_code()
    for node in _placeholders(module):
        if not node.users:
            graph.erase_node(node)
    module.recompile()


_REGROUPED = (aten.reshape.default, aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default)
"""Operations that keep the order of the elements."""


def _undo(node: FxNode) -> None:
    """Replace `node`, the last of several regroupings, by an earlier value that has the same shape."""
    x = node
    while x.target in _REGROUPED:
        x = x.args[0]  # type: ignore[assignment]  # a node
        if value_of(x).shape == value_of(node).shape:
            node.replace_all_uses_with(x)


def _leave_out_in_sum(module: GraphModule, node: FxNode) -> None:
    """Have a sum with keepdim drop its dims itself, in place of the reshape `node`, which would contain extents."""
    total = node.args[0]
    if not (isinstance(total, FxNode) and total.target is aten.sum.dim_IntList and total.args[2:] == (True,)):
        return
    x, dims, _ = total.args
    shape = value_of(total).shape
    gone = {int(dim) % len(shape) for dim in dims}  # type: ignore[union-attr, arg-type]  # a list of numbers
    if value_of(node).shape == tuple(extent for dim, extent in enumerate(shape) if dim not in gone):
        with module.graph.inserting_before(node):
            made = module.graph.call_function(total.target, (x, dims, False), total.kwargs)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)


def _widen_in_sum(node: FxNode) -> None:
    """Have the sum itself widen its input, so that no widened copy is written."""
    x = node.args[0]
    if isinstance(x, FxNode) and x.target is aten._to_copy.default and not _narrows(x):
        node.args = (x.args[0], *node.args[1:])
        node.kwargs = {**node.kwargs, "dtype": value_of(node).dtype}


_COUNTING = frozenset(("part", "join", "full_like"))
"""Operations with numbers that follow from an extent. It is the extent of columns, because rows have no parts."""


_UNREAD = "a product that nobody reads"


def _as_epilogues(
    at: Symbols, module: GraphModule, given: tuple[tuple[Input, ...], Input, tuple[str, ...]], results: tuple[str, ...]
) -> tuple[tuple[Parsed | None, Parsed | None], str | None, Mapping[str, Size], Mapping[str, int]]:
    """Return the epilogues `with_product` and `without_product` of a `Derivative`, which compute `results`, and its
    `refused`, `extents` and `exact`. Without epilogues `exact` is that of `module`. `given` are the tensor arguments of
    `module`, the product, and the axes whose extents are further arguments."""
    of_module, (inputs, product, axes) = at.exact, given
    if not results:
        return (None, None), None, {}, of_module

    def function(*values: torch.Tensor) -> Any:
        *tensors, whole = values
        return module(*tensors, *(dict(zip("nml", reversed(whole.shape), strict=False))[axis] for axis in axes))

    decomposed = at.recorded(function, (*inputs, product), table())
    _tidy(decomposed)
    numbers = at.numbers(decomposed)
    used = dict(zip(_placeholders(decomposed), (*[each.name for each in inputs], _UNREAD, *numbers), strict=True))
    body = tuple(node for node in decomposed.graph.nodes if node.op == "call_function" and is_tensor(node))
    outputs = dict(zip(results, _returned(decomposed), strict=True))

    def epilogue(name: str) -> Parsed:
        accum = next(node for node, known in used.items() if known == name)
        operands = {node: known for node, known in used.items() if known not in (name, _UNREAD)}
        graph = read(Cone(accum, body, operands, outputs, expands_operands=name is _UNREAD))
        return Parsed("derivative", graph, graph.inputs, {}, {}, (), placed(place_of(accum)))

    try:
        without_product = epilogue(_UNREAD)
        with_product = epilogue(ACCUM) if ACCUM in used.values() else None
    except Boundary as boundary:
        return (None, None), boundary.reason if ACCUM in used.values() else None, {}, of_module
    extents, exact, graph = at.settled.problem.extents, at.exact, without_product.graph
    is_named = any(node.op == "reshape" and max(node.attr, default=1) > 1 for node in graph.nodes)
    if is_named or not _COUNTING.isdisjoint(graph.ops):  # the graph has numbers that follow from N
        exact = {**exact, "n": extents["n"]}
    for node in filter(is_tensor, decomposed.graph.nodes):
        node.meta["val"] = node.meta.get(OTHER, node.meta["val"])
    try:
        serves_others = str(epilogue(_UNREAD).graph) == str(graph)
    except (Boundary, RuntimeError):  # a dim that is as long as M by chance does not broadcast at other extents
        serves_others = False
    return (with_product, without_product), None, numbers, exact if serves_others else extents
