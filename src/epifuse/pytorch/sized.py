"""A graph whose sizes are symbols, read at its current sizes.

The pass needs numbers: which values are as large as the product, and what they cost. If sizes are symbols, it reads the
sizes that the compiler was called with: the sizes *now*. What the pass writes must serve every size. Two checks show
that it does, and the cone is left alone if one fails. Each value must regroup the axes of the product for any values of
the symbols, and the text of the epilogue must be the same at other sizes. No guard is asked for, and none is added.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from epifuse.frontend.fx import Boundary, Numerics
from epifuse.frontend.fx.rows import arguments
from epifuse.pytorch.cone import Cone, is_constant, is_cut, is_view, name_of, tensors_of
from epifuse.pytorch.flat import Axes, Layout
from epifuse.pytorch.leaves import encoded
from epifuse.pytorch.write import Written, written

_SIZES = ("size", "shape")
"""Arguments for the size of a view or a constant. An epilogue written in the axes of its product does not hold them."""


class Size(NamedTuple):
    """A place where a graph has a size: the extent of `dim` of the node's tensor, or the node's own value if None."""

    node: FxNode
    dim: int | None


@dataclass
class Sized:
    """The symbolic sizes of a graph.

    `kept` has, for each node with symbols, its value, args and kwargs with these symbols. `sizes` has the number that
    each symbol stands for, and `places` the first place of each size in the graph.
    """

    kept: dict[FxNode, tuple[Any, Any, Any]] = field(default_factory=dict)
    sizes: dict[Any, int] = field(default_factory=dict)
    places: dict[Any, Size] = field(default_factory=dict)

    @staticmethod
    def of(graph: FxGraph) -> Sized:
        """The sizes of `graph`; empty if no size is a symbol, or if the number for one of the symbols is not known."""
        found = Sized()
        for node in graph.nodes:
            value = node.meta.get("val")
            place = found.places.get(_expression(value)) if name_of(node) == "sym_size" else None
            if place is not None:  # take the size from its first place, so that no value is stored for its size alone
                if place.dim is None:
                    node.replace_all_uses_with(place.node)
                    graph.erase_node(node)
                    continue
                node.args = tuple(place)
            symbols = list(_symbols(value))
            if symbols or any(map(_is_size, node.all_input_nodes)):
                found.kept[node] = value, node.args, node.kwargs
            for each in symbols:
                if each.node.expr.is_Symbol and isinstance(each.node.hint, int):  # that of a jagged extent is no int
                    found.sizes[each.node.expr] = each.node.hint
            for dim, each in [(None, value)] if _is_size(node) else enumerate(getattr(value, "shape", ())):
                if isinstance(each, torch.SymInt):
                    found.places.setdefault(each.node.expr, Size(node, dim))
        every = {symbol for value, _, _ in found.kept.values() for symbol in _names(value)}
        return found if every <= found.sizes.keys() else Sized()

    @property
    def other_sizes(self) -> dict[Any, int]:
        """Other sizes for the symbols, to check `serves` at.

        They are multiples of the sizes now, so that guards about divisors still hold, each by a prime of its own.
        """
        primes = (n for n in count(3) if all(n % each for each in range(2, n)))
        return {symbol: size * prime for (symbol, size), prime in zip(self.sizes.items(), primes, strict=False)}

    @contextmanager
    def as_numbers(self, graph: FxGraph) -> Iterator[dict[FxNode, str | None]]:
        """Set all sizes of `graph` to the numbers they are now, while the context lasts.

        Yields the nodes that no epilogue can hold, each with the reason. Afterwards all nodes have symbols again, new
        nodes too.
        """
        computing: dict[FxNode, str | None] = {
            node: "it computes with a size that is a symbol" for node in self.kept if _computes(node)
        }
        older = set(graph.nodes)
        try:
            self._set(self.kept, self.sizes)
            yield computing
        finally:
            if self.kept:
                self._restore(graph, older)

    def _set(self, nodes: Iterable[FxNode], sizes: Mapping[Any, int]) -> None:
        """Give the nodes these `sizes`, or the symbols that they had if `sizes` is empty."""
        for node in nodes:
            if node in self.kept:
                value, args, kwargs = self.kept[node]
                node.args = self._merged(args, node.args, sizes)
                node.kwargs = self._merged(kwargs, node.kwargs, sizes)
                node.meta["val"] = _at(value, sizes) if sizes else value

    def _restore(self, graph: FxGraph, older: set[FxNode]) -> None:
        self._set(graph.nodes, {})
        stable_topological_sort(graph)
        for node in graph.nodes:
            if node not in older:
                given = torch.fx.map_arg(node.args, lambda each: each.meta["val"])
                with next(_fake_modes(node)):
                    node.meta["val"] = node.target(*given)

    def _merged(self, old: Any, now: Any, sizes: Mapping[Any, int]) -> Any:
        """The current arguments `now`, with sizes as numbers, or as the nodes in `old` if `sizes` is empty."""
        if isinstance(old, FxNode):
            size = self.kept[old][0] if old in self.kept else None
            return now if not isinstance(size, torch.SymInt) else _at(size, sizes) if sizes else old
        if isinstance(old, (tuple, list)):
            return type(old)([self._merged(*pair, sizes) for pair in zip(old, now, strict=True)])
        if isinstance(old, dict):
            return {name: self._merged(each, now[name], sizes) for name, each in old.items()}
        return now

    # --- checks that hold at every size -------------------------------------------------------------------------------

    def value(self, node: FxNode) -> Any:
        """The fake value of a node, with symbols for its sizes."""
        return self.kept[node][0] if node in self.kept else node.meta["val"]

    def extents(self, cone: Cone) -> Hashable:
        """The symbolic shapes of a cone, as a key: cones of equal sizes now may differ in these."""
        kept = [self.value(node) for node in (*cone.body, *cone.operands) if node in self.kept]
        return tuple([tuple(map(_expression, _first(value).shape)) for value in kept])

    def serves(self, cone: Cone, form: Written, numerics: Numerics, flat: Mapping[FxNode, Layout] | None) -> bool:
        """Whether `form`, written with the layouts `flat`, is the form of the cone at every size."""
        looked_at = (*cone.body, *cone.operands)
        if not any(node in self.kept for node in looked_at):
            return True
        if flat is None or not self._regroups(cone.product, flat):
            return False
        try:
            self._set(looked_at, self.other_sizes)
            other = written(cone, numerics, flat)
        except (Boundary, RuntimeError):  # shapes do not broadcast, because guards do not hold at those sizes
            return False
        finally:
            self._set(looked_at, self.sizes)
        is_same = encoded(other.graph, other.values) == encoded(form.graph, form.values)
        return is_same and other.operands == form.operands

    def _regroups(self, product: FxNode, flat: Mapping[FxNode, Layout]) -> bool:
        """Whether the dims of each value that lie on one axis have as many elements as that axis, at every size."""
        axes = dict(zip(Axes(product).order, map(_expression, self.value(product).shape), strict=True))
        for node, layout in flat.items():
            shape = [*map(_expression, _first(self.value(node)).shape)]
            for label in set(layout):
                axis, _, width = label.partition("/")
                extents = [extent for extent, own in zip(shape, layout, strict=True) if own == label]
                if not axis:  # the extent is 1, or the dim repeats a value; it must not be 1 only at the sizes now
                    is_known = all(isinstance(each, int) or each.xreplace(self.sizes) != 1 for each in extents)
                elif width:
                    is_known = isinstance(axes[axis], int) and extents == [int(width)]
                else:
                    is_known = _is_zero(math.prod(extents) - axes[axis])
                if not is_known:
                    return False
        return True

    def view(self, shape: Sequence[Any], product: FxNode) -> list[int | Size] | None:
        """`shape` as arguments of a reshape: numbers, sizes that the graph has before `product`, and at most one -1.

        None if the graph lacks more than one of the sizes there.
        """
        symbols = [extent for extent in shape if isinstance(extent, torch.SymInt)]
        if len(symbols) == 1:
            return [-1 if isinstance(extent, torch.SymInt) else extent for extent in shape]
        places = {each: self.places[each] for each in map(_expression, symbols) if each in self.places}
        older = {size: at for size, at in places.items() if at.node < product and not at.node._erased}
        found = [older.get(extent.node.expr, -1) if isinstance(extent, torch.SymInt) else extent for extent in shape]
        return found if found.count(-1) <= 1 else None


def _at(value: Any, sizes: Mapping[Any, int]) -> Any:
    """`value` with numbers for its symbolic sizes. A value that is neither a tensor nor a size is returned as it is."""
    if isinstance(value, torch.SymInt):
        return int(value.node.expr.xreplace(sizes))
    if isinstance(value, (tuple, list)):
        return type(value)([_at(each, sizes) for each in value])
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = _at(tuple(value.shape), sizes), _at(value.stride(), sizes)
    start = _at(value.storage_offset(), sizes)
    with value.fake_mode:  # type: ignore[attr-defined]  # of a FakeTensor
        if start == 0:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        size = start + 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        return torch.empty(size, dtype=value.dtype, device=value.device).as_strided(shape, strides, start)


def _first(value: Any) -> torch.Tensor:
    """The tensor itself, or the first of several, which all have the same shape."""
    found: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return found


def _expression(extent: Any) -> Any:
    """The sympy expression of a symbolic extent; a number as it is."""
    return extent.node.expr if isinstance(extent, torch.SymInt) else extent


def _is_zero(term: Any) -> bool:
    return bool(term == 0 or (not isinstance(term, int) and term.expand() == 0))


def _is_size(node: FxNode) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _symbols(value: Any) -> Iterator[torch.SymInt]:
    """Yield the symbolic sizes, strides, offsets and numbers of a value."""
    if isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _symbols(each)
    elif isinstance(value, torch.Tensor):
        yield from _symbols((*value.shape, *value.stride(), value.storage_offset()))


def _names(value: Any) -> set[Any]:
    return {symbol for each in _symbols(value) for symbol in each.node.expr.free_symbols}


def _computes(node: FxNode) -> bool:
    """Whether the node uses a symbolic size for more than the shape of a view or a constant."""
    if not any(map(_is_size, node.all_input_nodes)):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or is_cut(node) or not (is_view(node) or is_constant(node)):
        return True
    others = [given for name, given in arguments(node).items() if name not in _SIZES]
    return any(_is_size(each) for each in others if isinstance(each, FxNode))


def _fake_modes(node: FxNode) -> Iterator[Any]:
    for each in (*node.all_input_nodes, node):
        for value in tensors_of(each):
            yield value.fake_mode  # type: ignore[attr-defined]  # of a FakeTensor
