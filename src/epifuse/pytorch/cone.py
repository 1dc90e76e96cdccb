"""The cone of a product in a graph of ATen operations: the nodes that one kernel may compute together with the product.

These are nodes that depend on the product, and nodes that are computed for the cone from older values alone. The other
inputs of a cone do not depend on the product, so the graph has no cycle when one node takes the cone's place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Node as FxNode

from epifuse.frontend.fx import why_not
from epifuse.frontend.fx.rows import arguments

Level = Literal["rows", "sums", "points"]
"""Which reductions a cone may hold. *rows*: all whose result is known in a tile's rows or at the end of the launch.
*sums*: only those whose result no value of the product's size reads. *points*: none."""

aten = torch.ops.aten


class Product(NamedTuple):
    """The positions of a product's operands among the arguments of its node; `added` is that of the tensor which addmm
    and baddbmm add."""

    a: int
    b: int
    added: int | None = None


PRODUCTS: Mapping[Any, Product] = {
    aten.mm.default: Product(0, 1),
    aten.bmm.default: Product(0, 1),
    aten.addmm.default: Product(1, 2, 0),
    aten.baddbmm.default: Product(1, 2, 0),
}

_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "permute", "transpose", "t")
_ALIASES = ("alias", "detach", "expand")
_CUTS, _JOINS = ("slice", "split", "split_with_sizes"), ("cat", "slice_scatter")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "any", "all", "logsumexp", "var", "var_mean", "_softmax", "_log_softmax")
_CONSTANTS = (
    *("full", "full_like", "new_full", "scalar_tensor"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
)


def name_of(node: FxNode) -> str:
    """The name of the node's operation without its namespace, such as `add` or `getitem`. It is empty for an input of
    the graph, because an input may have the name of an operation."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return str(getattr(node.target, "__name__", node.target))


def is_view(node: FxNode) -> bool:
    """Whether the node moves no data."""
    return name_of(node) in _VIEWS or name_of(node) in _ALIASES or is_cut(node)


def is_cut(node: FxNode) -> bool:
    """Whether the node takes a part of its input: a slice, a split, or one result of a split."""
    return name_of(node) in _CUTS or (name_of(node) == "getitem" and name_of(node.args[0]) in _CUTS)  # type: ignore[arg-type]


def is_expand(node: FxNode) -> bool:
    """Whether the node repeats its input along dims."""
    return name_of(node) == "expand"


def is_reduction(node: FxNode) -> bool:
    return name_of(node) in _REDUCTIONS


def is_constant(node: FxNode) -> bool:
    return name_of(node) in _CONSTANTS


def is_cast(node: FxNode) -> bool:
    return name_of(node) in ("convert_element_type", "_to_copy")


def is_join(node: FxNode) -> bool:
    """Whether the node joins parts to one value."""
    return name_of(node) in _JOINS


def is_picked_result(node: FxNode) -> bool:
    """Whether the node picks one of the several results of an operation that is no split."""
    return name_of(node) == "getitem" and not is_cut(node)


def is_drawn(node: FxNode) -> bool:
    """Whether the node draws random numbers from a seed, or counts the positions that they are drawn for."""
    return name_of(node) in ("inductor_random", "philox_rand", "philox_rand_cpp", "positions")


def is_work(node: FxNode) -> bool:
    """Whether the node computes something: it is no view, no pick of a result and no constant."""
    return not (is_view(node) or is_picked_result(node) or is_constant(node))


def tensors_of(node: FxNode) -> list[torch.Tensor]:
    """The results of the node, as tensors without data."""
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, torch.Tensor)]


def bytes_of(node: FxNode) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node))


def elements_of(node: FxNode) -> int:
    return sum(t.numel() for t in tensors_of(node))


def dims_of(node: FxNode) -> tuple[int, ...]:
    """The dims that a reduction reduces, counted from the front."""
    rank = tensors_of(node.args[0])[0].dim()  # type: ignore[arg-type]  # the node that is reduced
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    given = (given,) if isinstance(given, int) and not isinstance(given, bool) else given
    return tuple(sorted({dim % rank for dim in given})) if given else tuple(range(rank))


def inputs_of(node: FxNode) -> list[FxNode]:
    """The nodes that `node` reads besides A and B: for a product only the tensor that it adds, for a constant none."""
    if (row := PRODUCTS.get(node.target)) is not None:
        return [] if row.added is None else [node.args[row.added]]  # type: ignore[list-item]  # a node
    return [] if is_constant(node) else node.all_input_nodes


@dataclass
class Cone:
    """A product and the nodes that it takes with it. `inside` are the product and nodes that depend on it. `pulled` are
    nodes computed for the cone from older values alone. Both are in the order of the graph."""

    product: FxNode
    inside: dict[FxNode, None] = field(default_factory=dict)
    pulled: dict[FxNode, None] = field(default_factory=dict)

    @property
    def body(self) -> dict[FxNode, None]:
        """All nodes of the cone, each after its arguments."""
        return {**self.pulled, **self.inside}

    @property
    def a_and_b(self) -> tuple[FxNode, FxNode]:
        """A and B."""
        row = PRODUCTS[self.product.target]
        return self.product.args[row.a], self.product.args[row.b]  # type: ignore[return-value]  # of a product

    @property
    def operands(self) -> tuple[FxNode, ...]:
        """The nodes outside the cone that it reads, except A and B."""
        body, found = self.body, {}
        for node in body:
            found.update(dict.fromkeys(each for each in inputs_of(node) if each not in body))
        return tuple(found)

    @property
    def kept(self) -> dict[FxNode, None]:
        """Views that a node outside the cone reads. They stay in the graph, as views of the cone's outputs."""
        found: dict[FxNode, None] = {}
        for node in reversed(self.inside):
            if is_view(node) and any(user not in self.inside or user in found for user in node.users):
                found[node] = None
        return found

    @property
    def outputs(self) -> tuple[FxNode, ...]:
        """The nodes that nodes outside the cone read, directly or through `kept` views."""
        kept = self.kept
        found = []
        for node in self.inside:
            left = any(user not in self.inside or user in kept for user in node.users)
            if left and node not in kept:
                found.append(node)
        return tuple(found)

    @property
    def work(self) -> int:
        """The number of operations besides the product that depend on it."""
        return sum(map(is_work, self.inside)) - 1

    def readers(self, node: FxNode) -> Iterator[FxNode]:
        """Yield the nodes outside the cone that read `node`, directly or through views."""
        for user in node.users:
            if is_view(user):
                yield from self.readers(user)
            elif user not in self.inside:
                yield user

    def drop(self, node: FxNode) -> None:
        """Remove `node` from the cone, and views that only served it."""
        del self.inside[node]
        self.trim()

    def trim(self) -> None:
        """Remove views and picked results that no node inside reads. A picked result that is read outside stays."""
        for node in reversed(list(self.inside)):
            if (is_view(node) or is_picked_result(node)) and not any(user in self.inside for user in node.users):
                if is_picked_result(node) and node.users:
                    continue
                del self.inside[node]

    def drop_last(self) -> None:
        """Remove the last node that computes something."""
        last = next(node for node in reversed(self.inside) if is_work(node))
        for part in last.users:  # if it has several results, the nodes that pick them go, too
            self.inside.pop(part, None)
        self.drop(last)


Refusals = dict[FxNode, str | None]
"""By node, why the epilogue language cannot express it; None if it can."""


def refused(node: FxNode, product: FxNode, known: Refusals) -> str | None:
    """Why an epilogue of `product` cannot hold `node`; None if it can. `known` keeps the answers."""
    if node not in known:
        known[node] = _elsewhere(node, product) or why_not(node, product)
    return known[node]


def _elsewhere(node: FxNode, product: FxNode) -> str | None:
    """The reason that keeps `node` out if it has tensors on another device than the product; else None."""
    devices = {value.device for each in (node, *node.all_input_nodes) for value in tensors_of(each)}
    own = tensors_of(product)[0].device
    return None if devices <= {own} else f"{name_of(node)} has tensors on another device than {own}"


def below(product: FxNode) -> set[FxNode]:
    """All nodes that depend on `product`, and `product` itself."""
    found, stack = {product}, [product]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def grow(product: FxNode, level: Level, known: Refusals, dependent: Container[FxNode], *, cuts: bool) -> Cone:
    """The largest cone of `product` that the language can express at this level. `dependent` are the nodes `below` the
    product. With `cuts` the cone may hold nodes that take parts of a row or join them."""
    cone = Cone(product, {product: None})
    reduced_axes: dict[FxNode, frozenset[str]] = {product: frozenset()}
    seen, waiting = {product}, [*product.users]
    heapify(waiting)
    while waiting:  # in the order of the graph
        node = heappop(waiting)
        if node in seen:
            continue
        seen.add(node)
        if (
            all(each in cone.inside or each not in dependent for each in node.all_input_nodes)
            and refused(node, product, known) is None
            and (cuts or name_of(node) not in (*_CUTS, *_JOINS))
            and (gone := _reduced_axes(node, reduced_axes, product, level)) is not None
        ):
            cone.inside[node] = None
            reduced_axes[node] = gone
            for user in node.users:
                heappush(waiting, user)
    cone.trim()
    return cone


def _reduced_axes(
    node: FxNode, reduced_axes: Mapping[FxNode, frozenset[str]], product: FxNode, level: Level
) -> frozenset[str] | None:
    """The axes of the product that the value of `node` no longer has; None if a cone of this level cannot hold it.
    `reduced_axes` has these axes for the nodes inside."""
    full = elements_of(product)
    if elements_of(node) > 2 * full or not _keeps_columns(node, product):
        return None
    known = [reduced_axes[each] for each in node.all_input_nodes if each in reduced_axes]
    gone: frozenset[str] = frozenset().union(*known)
    if name_of(node) in ("_softmax", "_log_softmax"):
        return gone if level == "rows" and not gone else None
    if is_reduction(node):
        shape, dims = tensors_of(node.args[0])[0].shape, dims_of(node)  # type: ignore[arg-type]  # what is reduced
        along_n = dims == (len(shape) - 1,) and shape[-1] == tensors_of(product)[0].shape[-1]
        return None if gone or level == "points" else frozenset("n" if along_n else "m")
    if is_expand(node) and elements_of(node) > elements_of(node.all_input_nodes[0]):
        # The language has no `expand`, and every elementwise operation broadcasts its arguments by itself.
        return gone if all(is_work(user) and not is_reduction(user) for user in node.users) else None
    if gone and _spreads(node, reduced_axes, full):  # a reduced value broadcasts to full size again
        return frozenset() if "m" not in gone and level == "rows" else None
    return gone


def _spreads(node: FxNode, reduced_axes: Mapping[FxNode, frozenset[str]], full: int) -> bool:
    """Whether `node` has the size of the product, or of a part of it, so that a reduced input broadcasts to it."""
    if is_view(node):
        return False
    whole = [elements_of(each) for each in node.all_input_nodes if each in reduced_axes and not reduced_axes[each]]
    return elements_of(node) >= min([full, *whole])


def _keeps_columns(node: FxNode, product: FxNode) -> bool:
    """Whether `node`, if it cuts or joins values, does so along the product's columns in equal parts. A cone ends
    before other ranges of the columns: each of these has outputs of its own."""
    name, columns = name_of(node), tensors_of(product)[0].shape[-1]
    if name in ("select", "unbind", "stack"):
        return False
    if name in _JOINS:
        value = tensors_of(node)[0]
        return arguments(node)["dim"] % value.dim() == value.dim() - 1 and value.shape[-1] == columns
    return name not in _CUTS or _cuts_columns(node, columns)


def _cuts_columns(node: FxNode, columns: int) -> bool:
    x, parts, given = tensors_of(node.all_input_nodes[0])[0], tensors_of(node), arguments(node)
    width, start = parts[0].shape[-1], given.get("start") or 0
    return (
        given.get("dim", 0) % x.dim() == x.dim() - 1
        and x.shape[-1] == columns
        and all(part.shape == parts[0].shape for part in parts)
        and parts[0].shape[:-1] == x.shape[:-1]
        and columns % width == 0
        and (start % width == 0 if given.get("step", 1) == 1 else start < given["step"] == columns // width)
    )


def pull(cone: Cone, known: Refusals, holds: Callable[[FxNode], bool]) -> None:
    """Take in nodes that compute operands of the cone, if they read no more bytes than their result would move.

    `holds` says whether a node is of a sort that may be pulled. Constants always are pulled.
    """
    cone.pulled = {}
    while found := [node for node in cone.operands if _is_pulled(node, cone, known, holds)]:
        cone.pulled = {**dict.fromkeys(found), **{n: None for n in cone.pulled if n not in found}}
    cone.pulled = dict.fromkeys(sorted(cone.pulled))


def _is_pulled(node: FxNode, cone: Cone, known: Refusals, holds: Callable[[FxNode], bool]) -> bool:
    if node.op != "call_function" or refused(node, cone.product, known) is not None:
        return False
    if is_constant(node):
        return True
    if not is_work(node) or is_reduction(node) or name_of(node) in ("clone", "lift_fresh_copy") or not holds(node):
        return False
    body, own = cone.body, bytes_of(node)
    alone = all(user in body for user in node.users)
    if is_drawn(node):
        return alone  # drawing twice takes longer than reading a mask
    others = (each for each in node.all_input_nodes if not is_constant(each) and each not in body)
    read = sum(bytes_of(each) for each in others if not (alone and is_drawn(each) and len(each.users) == 1))
    # A value that only the cone reads would be written once and read once.
    return read <= (2 * own if alone else own)
