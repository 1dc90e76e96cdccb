"""A graph whose sizes are symbols, read at the sizes that it has now.

The pass reads numbers: which values are as large as the product, what they cost. Where sizes are symbols it reads those
that the compiler was called with. What it then writes must serve every size. Two things say so, else the cone is left
alone: each value regroups the axes of the product as a matter of symbols, and the text is the same at other sizes.
Guards are neither asked for nor added.
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
"""Arguments that say how large a view or a constant is, which an epilogue in the axes of its product does not hold."""


class Size(NamedTuple):
    """Where a graph has a size: the extent of a dim, or the node itself."""

    node: FxNode
    dim: int | None


@dataclass
class Sized:
    """The sizes of a graph: `kept` are what nodes with symbols were, `now` what each symbol stands for, `places` the
    first place of each size."""

    kept: dict[FxNode, tuple[Any, Any, Any]] = field(default_factory=dict)
    now: dict[Any, int] = field(default_factory=dict)
    places: dict[Any, Size] = field(default_factory=dict)

    @staticmethod
    def of(graph: FxGraph) -> Sized:
        """Nothing is kept where no size is a symbol, or where what one stands for is not known."""
        found = Sized()
        for node in graph.nodes:
            value = node.meta.get("val")
            place = found.places.get(_expression(value)) if name_of(node) == "sym_size" else None
            if place is not None:  # no value is to be stored for the sake of its size
                if place.dim is None:
                    node.replace_all_uses_with(place.node)
                    graph.erase_node(node)
                    continue
                node.args = tuple(place)
            symbols = list(_symbols(value))
            if symbols or any(map(_is_size, node.all_input_nodes)):
                found.kept[node] = value, node.args, node.kwargs
            for each in symbols:
                if each.node.expr.is_Symbol and each.node.hint is not None:
                    found.now[each.node.expr] = int(each.node.hint)
            for dim, each in [(None, value)] if _is_size(node) else enumerate(getattr(value, "shape", ())):
                if isinstance(each, torch.SymInt):
                    found.places.setdefault(each.node.expr, Size(node, dim))
        every = {symbol for value, _, _ in found.kept.values() for symbol in _names(value)}
        return found if every <= found.now.keys() else Sized()

    @property
    def elsewhere(self) -> dict[Any, int]:
        """Other sizes. They are multiples, which keeps what guards say of divisors, and no two have the same factor."""
        primes = (n for n in count(3) if all(n % each for each in range(2, n)))
        return {symbol: size * prime for (symbol, size), prime in zip(self.now.items(), primes, strict=False)}

    @contextmanager
    def as_numbers(self, graph: FxGraph) -> Iterator[dict[FxNode, str | None]]:
        """The graph at the sizes of now; gives what no epilogue can hold, with the reason. Then it has its symbols
        again, and so have the nodes that are new."""
        computing: dict[FxNode, str | None] = {
            node: "it computes with a size that is a symbol" for node in self.kept if _computes(node)
        }
        older = set(graph.nodes)
        try:
            self._set(self.kept, self.now)
            yield computing
        finally:
            if self.kept:
                self._restore(graph, older)

    def _set(self, nodes: Iterable[FxNode], sizes: Mapping[Any, int]) -> None:
        """Give nodes these sizes; without any, the symbols that they had."""
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
        """The arguments of now, with sizes as numbers, or as the nodes that they were."""
        if isinstance(old, FxNode):
            size = self.kept[old][0] if old in self.kept else None
            return now if not isinstance(size, torch.SymInt) else _at(size, sizes) if sizes else old
        if isinstance(old, (tuple, list)):
            return type(old)([self._merged(*pair, sizes) for pair in zip(old, now, strict=True)])
        if isinstance(old, dict):
            return {name: self._merged(each, now[name], sizes) for name, each in old.items()}
        return now

    # --- what serves every size ---------------------------------------------------------------------------------------

    def value(self, node: FxNode) -> Any:
        """What a node looks like, with symbols for sizes."""
        return self.kept[node][0] if node in self.kept else node.meta["val"]

    def extents(self, cone: Cone) -> Hashable:
        """The shapes of a cone with symbols: what is known of it beside the sizes of now."""
        kept = [self.value(node) for node in (*cone.body, *cone.operands) if node in self.kept]
        return tuple([tuple(map(_expression, _first(value).shape)) for value in kept])

    def serves(self, cone: Cone, form: Written, numerics: Numerics, flat: Mapping[FxNode, Layout] | None) -> bool:
        """Whether `form`, which was written with these layouts, is that of the cone at every size."""
        looked_at = (*cone.body, *cone.operands)
        if not any(node in self.kept for node in looked_at):
            return True
        if flat is None or not self._regroups(cone.product, flat):
            return False
        try:
            self._set(looked_at, self.elsewhere)
            other = written(cone, numerics, flat)
        except (Boundary, RuntimeError):  # shapes that do not broadcast: guards do not hold at those sizes
            return False
        finally:
            self._set(looked_at, self.now)
        is_same = encoded(other.graph, other.values) == encoded(form.graph, form.values)
        return is_same and other.operands == form.operands

    def _regroups(self, product: FxNode, flat: Mapping[FxNode, Layout]) -> bool:
        """Whether the dims of each value are as many elements as the axes that they are on, whatever the sizes are."""
        axes = dict(zip(Axes(product).order, map(_expression, self.value(product).shape), strict=True))
        for node, layout in flat.items():
            shape = [*map(_expression, _first(self.value(node)).shape)]
            for label in set(layout):
                axis, _, width = label.partition("/")
                extents = [extent for extent, own in zip(shape, layout, strict=True) if own == label]
                if not axis:  # 1, or it repeats a value; not 1 by chance
                    is_known = all(isinstance(each, int) or each.xreplace(self.now) != 1 for each in extents)
                elif width:
                    is_known = isinstance(axes[axis], int) and extents == [int(width)]
                else:
                    is_known = _is_zero(math.prod(extents) - axes[axis])
                if not is_known:
                    return False
        return True

    def view(self, shape: Sequence[Any], product: FxNode) -> list[int | Size] | None:
        """A shape as arguments of a view: numbers, sizes that the graph has before `product`, and one -1 at most."""
        symbols = [extent for extent in shape if isinstance(extent, torch.SymInt)]
        if len(symbols) == 1:
            return [-1 if isinstance(extent, torch.SymInt) else extent for extent in shape]
        places = {each: self.places[each] for each in map(_expression, symbols) if each in self.places}
        older = {size: at for size, at in places.items() if at.node < product and not at.node._erased}
        found = [older.get(extent.node.expr, -1) if isinstance(extent, torch.SymInt) else extent for extent in shape]
        return found if found.count(-1) <= 1 else None


def _at(value: Any, sizes: Mapping[Any, int]) -> Any:
    """A value with numbers for its sizes; what is no tensor and no size as it is."""
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
    """A tensor, or the first of several, which are equally large."""
    found: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return found


def _expression(extent: Any) -> Any:
    """An extent as a term of symbols; a number as it is."""
    return extent.node.expr if isinstance(extent, torch.SymInt) else extent


def _is_zero(term: Any) -> bool:
    return bool(term == 0 or (not isinstance(term, int) and term.expand() == 0))


def _is_size(node: FxNode) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _symbols(value: Any) -> Iterator[torch.SymInt]:
    """The sizes, strides and numbers of a value that are symbols."""
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
    """Whether a size is more to the node than how large its value is."""
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
