"""The typed graph of an epilogue as PyTorch operations that autograd differentiates and make_fx records.

Values are whole tensors, not tiles. They have one dimension for each factor of the iteration space: a factor is an axis
of the product, or a part of an axis that is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from epifuse.base.dtypes import dtype_of
from epifuse.fusion.reduction import along
from epifuse.ir import Dims, Factor, Graph, Load, Node
from epifuse.ir.graph import Side, sides
from epifuse.ir.types import shape_of
from epifuse.providers.cpu.space import Space, columns, picked, viewed
from epifuse.pytorch import random
from epifuse.pytorch.operations import Arithmetic, computed, softmax_of
from epifuse.request.problem import Problem, TensorInfo

ACCUM = "the product"
"""The name of the product among operands. It is no identifier, so no operand can have it."""


class Setting(NamedTuple):
    """A graph with its problem, the space that its values lie in, and its leaves by name: the product is ACCUM."""

    graph: Graph
    problem: Problem
    space: Space
    leaves: Mapping[str, torch.Tensor]

    @staticmethod
    def of(graph: Graph, problem: Problem, leaves: Mapping[str, torch.Tensor], extents: Mapping[str, Any]) -> Setting:
        """The space has a dimension for each factor, at least one for each dim of accum. `extents` may be symbols."""
        space = Space.of(graph, extents, "lmn" if problem.batched else "mn")
        return Setting(graph, problem, space, leaves)

    @property
    def accum(self) -> torch.Tensor:
        return self.leaves[ACCUM]

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(self.problem.float_dtype, self.accum.device)


def coordinate(node: Node) -> str:
    """The name of the leaf that holds the coordinates of an `index` node."""
    return "index " + "*".join(map(str, node.attr))


def counts_elements(node: Node) -> bool:
    """Whether an `index` node counts along several axes: its coordinates as a leaf would be as large as the product."""
    return len({factor.axis for factor in node.attr}) > 1


def evaluate(at: Setting) -> dict[str, torch.Tensor]:
    """Return the outputs by name, in the shapes that the user gets, before they are converted to be stored."""
    values: dict[Node, Any] = {}
    gates = _gates(at)
    for node in at.graph.nodes:
        seen = values if node not in gates else {**values, **_gated(node, values, gates[node])}
        values[node] = _value(node, [seen[arg] for arg in node.args], seen, at)
    found = {}
    for name, node, dims, *_ in at.graph.outputs:
        value = values[node]
        whole = value if isinstance(value, torch.Tensor) else at.arithmetic.filled(value)
        found[name] = _returned(whole, dims or (), at)
    return found


def _gates(at: Setting) -> dict[Node, list[Side]]:
    """Return for each node the sides of conditionals that it belongs to.

    Python would compute only the side that is taken, and its derivative. Here both sides are computed. The derivative
    of the other side may be infinite. The gradient that arrives there is zero, and zero times infinity is NaN.
    """
    found: dict[Node, list[Side]] = {}
    for side in sides(at.graph, lambda node: _is_number(node, at)):
        for node in side.nodes:
            if node.args:
                found.setdefault(node, []).append(side)
    return found


def _gated(node: Node, values: Mapping[Node, Any], gates: Sequence[Side]) -> dict[Node, Any]:
    """The arguments of `node`. Those from outside its side get no gradient through it if the side is not taken."""
    found = {}
    for arg in node.args:
        value = values[arg]
        for gate in gates:
            outside = not (arg.args and arg in gate.nodes) and arg is not gate.condition
            if outside and isinstance(value, torch.Tensor) and value.is_floating_point():
                pair = (value, value.detach()) if gate.is_first else (value.detach(), value)
                value = torch.where(values[gate.condition], *pair)
        found[arg] = value
    return found


def _value(node: Node, args: list[Any], values: Mapping[Node, Any], at: Setting) -> Any:
    if node.op == "accum":
        return _placed(at.accum, at.space.refined(at.problem.accum_dims), at.space)
    if node.op == "load":
        return _load(node, at)
    if node.op == "const":
        return node.attr
    if node.op == "index" and counts_elements(node):
        sizes = [factor.size(at.space.extents) for factor in node.attr]
        return _placed(random.positions(sizes, at.accum.device), tuple((factor,) for factor in node.attr), at.space)
    if node.op == "index":
        return _placed(at.leaves[coordinate(node)], (node.attr,), at.space)
    if (whole := softmax_of(node)) is not None and len(dims := _dims_of(whole.over, at)) == 1:
        return whole.function(values[whole.x], *dims)
    if node.op == "reduce":
        return along(node.attr[0], args[0], _dims_of(node.attr[1], at))
    if node.op == "pick":
        return picked(args[0], at.space.places(node.attr))
    if node.op == "region":
        return columns(args[0], at.space, node, at.graph.types)
    if (bound := _bound(node, at)) is not None:
        return torch.clamp(args[1 - bound], **{_SIDES[node.op]: args[bound]})
    made = computed(node.op, node.attr, args, at.arithmetic)
    # A value rounded to 16 bits stays in the wide dtype, because a typed graph has a node for each further rounding.
    return made.to(at.problem.float_dtype) if node.op == "cast" and made.is_floating_point() else made


def _dims_of(gone: Iterable[Factor], at: Setting) -> tuple[int, ...]:
    """The dimensions of the factors in `gone`, counted from the end. A region of one column has none."""
    return tuple(position - len(at.space.factors) for position in at.space.dimensions(gone))


_SIDES = {"maximum": "min", "minimum": "max"}


def _bound(node: Node, at: Setting) -> int | None:
    """The position of a maximum's or minimum's argument that is a number of the call, and so a clamp's bound."""
    if node.op not in _SIDES:
        return None
    return next((position for position, arg in enumerate(node.args) if _is_number(arg, at)), None)


def _is_number(node: Node, at: Setting) -> bool:
    """Whether the node loads a number that the call hands over."""
    return node.op == "load" and not isinstance(at.problem.by_name.get(node.attr.name), TensorInfo)


def _load(node: Node, at: Setting) -> torch.Tensor:
    load = node.attr
    assert isinstance(load, Load)
    value = at.leaves[load.name]
    if value.dim():
        value = _placed(viewed(value, load, torch.Tensor.reshape), load.dims or (), at.space)
    return value.to(dtype_of(at.graph.types[node].kind, at.problem.float_dtype))


# --- layout ----------------------------------------------------------------------------------------------------------


def _placed(x: torch.Tensor, dims: Dims, space: Space) -> torch.Tensor:
    """Return `x`, whose dims consist of the factors `dims`, in a shape that broadcasts over the space."""
    places = space.factors[len(space.factors) - len(dims) :]
    if len(dims) <= len(space.factors) and all(dim in ((), (place,)) for dim, place in zip(dims, places, strict=True)):
        return x
    held = [factor for dim in dims for factor in dim]
    x = x.reshape([factor.size(space.extents) for factor in held])
    order = sorted(range(len(held)), key=lambda i: space.factors.index(held[i]))
    x = x.permute(order) if order != list(range(len(held))) else x
    for position, factor in enumerate(space.factors):
        if factor not in held:
            x = x.unsqueeze(position)
    return x


def _returned(value: torch.Tensor, dims: Dims, at: Setting) -> torch.Tensor:
    """Return a value over the space in the shape of an output with these `dims`."""
    space = at.space
    held: list[Factor] = [factor for dim in dims for factor in dim]
    want = space.masked(space.mask(held))
    value = value if tuple(value.shape) == want else value.expand(want)
    absent = [position for position, factor in enumerate(space.factors) if factor not in held]
    if absent:
        value = value.squeeze(absent)
    kept = [factor for factor in space.factors if factor in held]
    order = [kept.index(factor) for factor in held]
    value = value.permute(order) if order != list(range(len(held))) else value
    shape = shape_of(dims, space.extents)
    return value if tuple(value.shape) == shape else value.reshape(shape)
