"""Writing a cone as the graph of an epilogue. The result is the *form* of the cone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from epifuse.frontend import fx
from epifuse.frontend.fx import Numerics, value_of
from epifuse.frontend.fx.rows import arguments
from epifuse.ir import Graph
from epifuse.pytorch.cone import (
    PRODUCTS,
    Cone,
    dims_of,
    is_constant,
    is_cut,
    is_join,
    is_reduction,
    is_view,
    name_of,
    tensors_of,
)
from epifuse.pytorch.flat import Axes, Layout
from epifuse.pytorch.leaves import Extent, Value
from epifuse.pytorch.random import LIBRARY as LIBRARY  # registers what draws numbers

aten = torch.ops.aten


class Operand(NamedTuple):
    """An operand of the epilogue: its node in the graph, its name, and the shape that the leaf takes."""

    node: FxNode
    name: str
    shape: tuple[Extent, ...]


class Written(NamedTuple):
    """The form of a cone: its epilogue. `outputs` are the nodes of the cone that `values` take the place of."""

    graph: Graph
    operands: tuple[Operand, ...]
    outputs: tuple[FxNode, ...]
    values: tuple[Value, ...]

    def of(self, cone: Cone) -> Written:
        """The same form for another cone that is `alike`."""
        operands = zip(self.operands, cone.operands, strict=True)
        return self._replace(operands=tuple(old._replace(node=node) for old, node in operands), outputs=cone.outputs)


def alike(cone: Cone, flat: Mapping[FxNode, Layout] | None) -> Hashable:
    """A key of all that decides the form and the plan of a cone. Equal layers of a model have equal keys."""
    operands, body = cone.operands, cone.body
    places = {node: place for place, node in enumerate((*operands, *body))}

    def argument(given: Any) -> Hashable:
        if isinstance(given, FxNode):
            return places.get(given)  # None for a node outside the cone: the argument of `full_like`
        if isinstance(given, (tuple, list)):
            return tuple(map(argument, given))
        return repr(given)  # 1, 1.0 and True are equal

    return (
        tuple([_lying(node) for node in (*cone.a_and_b, *operands)]),
        tuple([(node.target, argument(node.args), argument([*node.kwargs.items()]), _shapes(node)) for node in body]),
        tuple([places[node] for node in cone.outputs]),
        None if flat is None else tuple([flat.get(node) for node in places]),
    )


def _lying(node: FxNode) -> Hashable:
    value = value_of(node)
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device


def _shapes(node: FxNode) -> Hashable:
    return tuple([(tuple(value.shape), value.dtype) for value in tensors_of(node)])


def written(cone: Cone, numerics: Numerics, flat: Mapping[FxNode, Layout] | None) -> Written:
    """The form of `cone`, with the layouts `flat` or, if None, in the shapes of the graph. Raises `Boundary`."""
    writer = _Writer(cone, flat)
    for node in cone.body:
        writer.add(node)
    outputs = cone.outputs
    names = [f"o{index}" for index in range(len(outputs))]
    shown = {name: writer.made[node] for name, node in zip(names, outputs, strict=True)}
    operands = {writer.made[operand.node]: operand.name for operand in writer.operands}
    body = tuple(node for node in writer.graph.nodes if node.op == "call_function")
    graph = fx.read(fx.Cone(writer.accum, body, operands, shown), numerics)
    values = [
        Value(name, value_of(node).dtype, writer.extents(node)) for name, node in zip(names, outputs, strict=True)
    ]
    return Written(graph, tuple(writer.operands), outputs, tuple(values))


class _Writer:
    """Writes a new fx graph of the cone alone; `made` has the new nodes by the old ones."""

    def __init__(self, cone: Cone, flat: Mapping[FxNode, Layout] | None) -> None:
        self.cone, self.flat, self.axes = cone, flat, Axes(cone.product)
        self.graph = FxGraph()
        self.made: dict[FxNode, FxNode] = {}
        self.operands: list[Operand] = []
        value = value_of(cone.product)
        # addmm adds its tensor in float32, and the result is rounded once.
        adds = PRODUCTS[cone.product.target].added is not None
        wide = torch.float32 if adds and value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        self.accum = self._placed(self.graph.placeholder("accum"), cone.product, tuple(value.shape), wide)
        for index, node in enumerate(cone.operands):
            own = value_of(node)
            shape = tuple(own.shape) if flat is None or not own.shape else self.axes.flat(flat[node])
            operand = Operand(node, f"x{index}", self.extents(node) if own.shape else ())
            self.made[node] = self._placed(self.graph.placeholder(operand.name), node, shape, own.dtype)
            self.operands.append(operand)

    def extents(self, node: FxNode) -> tuple[Extent, ...]:
        """The shape of an operand or an output of the leaf, by axes of the product where `flat` layouts are used."""
        if self.flat is None:
            return tuple(value_of(node).shape)
        held = zip(self.axes.placed(self.flat[node]), self.axes.flat(self.flat[node]), strict=True)
        return tuple(extent if "/" in axis else axis or 1 for axis, extent in held)

    def add(self, node: FxNode) -> None:
        """Write one node. Its inputs have to be written before."""
        if node is self.cone.product:
            self.made[node] = self._product(node)
        elif is_constant(node):
            self.made[node] = self._call(node, aten.full.default, ([], _number(node)))
        elif self.flat is not None and (is_join(node) or (is_cut(node) and name_of(node) != "getitem")):
            self.made[node] = self._along_last(node)
        elif self.flat is not None and is_view(node) and not is_cut(node):
            self.made[node] = self.made[node.all_input_nodes[0]]
        elif self.flat is not None and is_reduction(node):
            self.made[node] = self._reduction(node, self.flat)
        elif name_of(node) == "inductor_random":
            self.made[node] = self._random(node)
        else:
            args = torch.fx.map_arg(node.args, self.made.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, self.made.__getitem__)
            self.made[node] = self._call(node, node.target, args, kwargs)

    def _random(self, node: FxNode) -> FxNode:
        """Write `inductor_random` as the operator of its backend, which the new nodes' meta device would not tell."""
        given = arguments(node)
        places = self._call(node, torch.ops.epifuse.positions.default, (given["size"],))
        drawn = getattr(torch.ops.epifuse, str(fx.numbers_of(node))).default
        return self._call(node, drawn, (self.made[given["seed"]], places))

    def _product(self, node: FxNode) -> FxNode:
        row = PRODUCTS[node.target]
        if row.added is None:
            return self.accum
        added = self.made[node.args[row.added]]  # type: ignore[index]  # a node
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        shape, made, wide = self._shape(node), self.accum, value_of(self.accum).dtype
        if alpha != 1:
            made = self._placed(self.graph.call_function(aten.mul.Tensor, (made, alpha)), node, shape, wide)
        # beta = 0 adds nothing, NaN included.
        made = made if beta == 0 else self.graph.call_function(aten.add.Tensor, (made, added), {"alpha": beta})
        return made if made is self.accum else self._placed(made, node, shape, value_of(node).dtype)

    def _along_last(self, node: FxNode) -> FxNode:
        """Write a cut or a join of columns, which are the last dim both in the old graph and in the new one."""
        given = arguments(node) | {"dim": len(self.axes.order) - 1}
        args = [torch.fx.map_arg(given[each.name], self.made.__getitem__) for each in node.target._schema.arguments]  # type: ignore[union-attr]
        return self._call(node, node.target, tuple(args))

    def _reduction(self, node: FxNode, flat: Mapping[FxNode, Layout]) -> FxNode:
        """Write a reduction over whole axes of the product. They are kept as dims of extent 1."""
        x, name, given = node.all_input_nodes[0], name_of(node), arguments(node)
        order = list(self.axes.placed(flat[x]))
        if name in ("_softmax", "_log_softmax"):
            dim = order.index(flat[x][given["dim"] % len(flat[x])])
            return self._call(node, node.target, (self.made[x], dim, given["half_to_float"]))
        dims = [order.index(axis) for axis in order if axis and axis in {flat[x][dim] for dim in dims_of(node)}]
        if name in ("var", "var_mean"):
            correction = given.get("correction")
            correction = int(given.get("unbiased", True)) if correction is None else correction
            target = aten.var.correction if name == "var" else aten.var_mean.correction
            return self._call(node, target, (self.made[x], dims), {"correction": correction, "keepdim": True})
        if not dims:  # all reduced dims have extent 1
            return self.made[x]
        return self._call(node, _OVER_DIMS[name], (self.made[x], dims, True))

    def _call(self, node: FxNode, target: Any, args: Any, kwargs: Any = None) -> FxNode:
        made = self.graph.call_function(target, args, kwargs or {})
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            shape = self._shape(node)
            made.meta["val"] = tuple(torch.empty(shape, dtype=one.dtype, device="meta") for one in value)
            return made
        return self._placed(made, node, () if is_constant(node) else self._shape(node), value.dtype)

    def _shape(self, node: FxNode) -> tuple[int, ...]:
        value = node.meta["val"]
        own = value[0] if isinstance(value, (tuple, list)) else value
        return tuple(own.shape) if self.flat is None else self.axes.flat(self.flat[node])

    def _placed(self, made: FxNode, node: FxNode, shape: tuple[int, ...], dtype: torch.dtype) -> FxNode:
        made.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        made.stack_trace = node.stack_trace
        return made


_OVER_DIMS: Mapping[str, Any] = {
    "sum": aten.sum.dim_IntList,
    "mean": aten.mean.dim,
    "amax": aten.amax.default,
    "amin": aten.amin.default,
    "any": aten.any.dims,
    "all": aten.all.dims,
    "logsumexp": aten.logsumexp.default,
}


def _number(node: FxNode) -> Any:
    """The number that a constant node is filled with."""
    name, given = name_of(node), arguments(node)
    if name == "scalar_tensor":
        return given["s"]
    return given["fill_value"] if "full" in name else 0 if "zeros" in name else 1
