"""How a product of DTensors is split over processes: along which dim of accum, and what that means for its epilogue.

If it is split along m or n, each process computes its part of the epilogue from its part of accum. A sum over the split
dim is then a partial sum. If it is split along K, each process has a partial sum of every element of accum. No epilogue
can be computed from these, so they are added first. Any other product is not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from epifuse.frontend import Parsed
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.ir import Graph, Node
from epifuse.ir.graph import topological
from epifuse.passes.dims import normalise

K = "k"
SUM = "sum"

Shape = tuple[int, ...]


class Along(NamedTuple):
    """How one dim of the device mesh splits a product.

    `dim` is the dim of accum that is split, counted from the end, or K, or None if nothing is split. `operands` and
    `outputs` give the dim along which each tensor is split, None for a whole one. SUM means a partial sum.
    """

    dim: int | str | None
    operands: Mapping[str, int | None]
    outputs: Mapping[str, int | str | None]


class Unsplit(Exception):  # noqa: N818 - it is no error: the product is computed whole
    """Raised with the reason why an epilogue cannot be computed in parts."""


def chosen(a: int | None, b: int | None, sizes: tuple[int, int]) -> int | str | None:
    """The dim of accum to split, or K, or None.

    `a` and `b` are the dims along which A and B are split, counted from the end; `sizes` are their numbers of elements.
    """
    if a == -1 or b == -2:
        return K
    if a is None or b is None or a == b:
        return b if a is None else a
    return a if sizes[0] >= sizes[1] else b  # the smaller one of A and B is gathered


def split_dim_of_input(shape: Shape, dim: int | str | None, inner: int) -> int | None:
    """The dim along which A or B is split, None if it is whole. `inner` is its dim along K."""
    if dim == K:
        return inner
    return None if dim == inner or isinstance(dim, str) else _of(shape, dim)


def _of(shape: Shape, dim: int | None) -> int | None:
    """`dim` if a tensor of this shape, which broadcasts against accum, varies along it; else None."""
    return dim if dim is not None and len(shape) >= -dim and shape[dim] != 1 else None


def along(
    parsed: Parsed,
    dim: int | str | None,
    accum: Shape,
    operands: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
) -> Along:
    """How operands and outputs are split if accum is split along `dim`. Raises `Unsplit`.

    `accum` is the shape of accum, `operands` are shapes by name, and `dtypes` are those of the outputs by name.
    """
    graph = parsed.graph
    if not isinstance(dim, int):
        return Along(dim, dict.fromkeys(operands), dict.fromkeys(parsed.output_names))
    if accum[dim] == 1:
        raise Unsplit("the dim that is split has one element")
    parts = _parts(graph, dim, accum, operands)
    outputs: dict[str, int | str | None] = {}
    for name, node, *_ in graph.outputs:
        at = parts[node].at
        if at is None:
            raise Unsplit(f"'{name}' is the same for every part")
        if at == SUM and not (dtypes[name].is_floating_point or dtypes[name] == torch.int64):
            raise Unsplit(f"'{name}', a sum, is stored as {dtypes[name]}, and sums of those may overflow")
        outputs[name] = at
    return Along(dim, {name: _of(shape, dim) for name, shape in operands.items()}, outputs)


class _Part(NamedTuple):
    """A value with `rank` dims that is split along dim `at`, counted from the end; SUM: a partial sum, None: whole."""

    rank: int
    at: int | str | None = None


def _parts(graph: Graph, dim: int, accum: Shape, operands: Mapping[str, Shape]) -> dict[Node, _Part]:
    parts: dict[Node, _Part] = {}
    for node in topological(graph.roots):
        args = [parts[arg] for arg in node.args]
        if any(arg.at == SUM for arg in args):
            raise Unsplit("it computes with a sum over what is split")
        parts[node] = _part(node, args, dim, len(accum), operands)
    return parts


def _part(node: Node, args: Sequence[_Part], dim: int, rank: int, operands: Mapping[str, Shape]) -> _Part:
    if node.op == "accum" and node.attr is None:
        return _Part(rank, dim)
    if node.op == "load":
        shape = operands.get(node.attr.name, ())
        if shape and node.attr.views:
            raise Unsplit(f"it takes a view of '{node.attr.name}'")
        return _Part(len(shape), _of(shape, dim))
    if node.op == "reduce_dims":
        return _reduced(node, args[0])
    if node.op in ("rounded_like", "cast_like") or (node.op == "torch" and node.attr[0] != "prelu weight"):
        return args[0]  # a conversion, or a claim about the value
    if node.op == "unsqueeze":
        (part,) = args
        new = normalise(node.attr, part.rank + 1) - part.rank - 1
        return _Part(part.rank + 1, part.at - (part.at <= new) if isinstance(part.at, int) else None)
    if node.op in PRIMITIVES or node.op in _POINTWISE:
        split = {arg.at for arg in args} - {None}
        if len(split) > 1:
            raise Unsplit("it joins values that are split along different dims")
        return _Part(max((arg.rank for arg in args), default=0), next(iter(split), None))
    raise Unsplit(f"{_WORDS.get(node.op, node.op)} is taken of whole matrices")


_POINTWISE = ("call", "cast", "const", "expand_as", "host", "number", "select", "tensor")
_WORDS = {
    "access": "a visitor tree",
    "reduce_axes": "a visitor tree",
    "coordinate": "a coordinate",
    "extent": "an extent",
    "assume_one_hot": "ef.assume_one_hot",
    "torch": "a weight for each channel",
}


def _reduced(node: Node, part: _Part) -> _Part:
    name, dims, keepdim = node.attr
    gone = {normalise(dim, part.rank) - part.rank for dim in (range(part.rank) if dims is None else dims)}
    if part.at is None or part.at in gone:
        if part.at in gone and name not in ("sum", "sum_of_squares"):
            raise Unsplit(f"{name} is over what is split")
        return _Part(part.rank if keepdim else part.rank - len(gone), None if part.at is None else SUM)
    assert isinstance(part.at, int)
    if keepdim:
        return part
    return _Part(part.rank - len(gone), part.at + sum(dim > part.at for dim in gone))
