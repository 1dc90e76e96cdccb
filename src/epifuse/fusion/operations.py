"""The operations of a graph: in which graphs each may stand, how many arguments it takes, and what its `attr` holds.

A front end makes a *written* graph. Type inference makes a *typed* graph of it. *Host* expressions are the parts of a
graph that are computed from numbers alone, at each launch. An operation has the same form in all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.ir import Factor, Load, Node
from epifuse.ir.types import AXES

Place = Literal["written", "typed", "host"]


class Form(NamedTuple):
    """What an `attr` must be: in words, for messages, and as a test."""

    words: str
    holds: Callable[[Any], bool]


class Operation(NamedTuple):
    """One row of the table. `arity` is None if the operation takes any number of arguments.

    `reads_extents` says whether inference writes extents into the typed graph, as factors or as counts. Such a graph
    holds for one N only, and for other M only if `structure.reads_rows` is False. Extents that later passes write into
    it are in `Structure.exact`.
    """

    places: tuple[Place, ...]
    arity: int | None
    form: Form
    reads_extents: bool


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_size(value: Any) -> bool:
    return value is None or _is_whole(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _each(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(holds, value))


def _fields(*holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, tuple) and len(value) == len(holds) and all(h(v) for h, v in zip(holds, value, strict=True))
    )


def _is_axis(value: Any) -> bool:
    return value in AXES


def _is_factor(value: Any) -> bool:
    return isinstance(value, Factor)


def _is_load(value: Any) -> bool:
    return (
        isinstance(value, Load)
        and _is_text(value.name)
        and _each(_fields(_is_text, lambda _: True))(value.views)
        and (value.dims is None or _each(_each(_is_factor))(value.dims))
    )


NOTHING = Form("None", lambda value: value is None)
_ORDER = Form("None, or the order of its dims", lambda value: value is None or value == "mln")
_NUMBER = Form("a number", lambda value: type(value) in (bool, int, float))
_TEXT = Form("a string", _is_text)
_LOAD = Form("a Load", _is_load)
_DTYPE = Form("a dtype", lambda value: isinstance(value, torch.dtype))
_MAYBE_DTYPE = Form("None, or a dtype", lambda value: value is None or isinstance(value, torch.dtype))
_COUNTED = Form(
    "dims or None, and how many there must be",
    _fields(lambda dims: dims is None or _each(_is_whole)(dims), _is_whole),
)
_SIZES = Form("integers, and None for each further argument", _each(_is_size))
_PART = Form("a dim, how it is parted, and sizes", _fields(_is_whole, _is_text, _each(_is_size)))
_REARRANGED = Form("how its dims change, and sizes", _fields(_is_text, _each(_is_size)))
_ROLLED = Form("a dim, and an integer", _fields(_is_whole, _is_whole))
_JOINED = Form("a dim, and cat or stack", _fields(_is_whole, lambda how: how in ("cat", "stack")))
_PICKED = Form("factors and places", _each(_fields(_is_factor, _is_whole)))
_COLUMNS = Form("its first column, and the one behind its last", _fields(_is_whole, _is_whole))
_AXIS = Form("an axis", _is_axis)
_AXIS_OR_DIM = Form("an axis, or a dim", lambda value: _is_axis(value) or _is_whole(value))
_WHOLE = Form("an integer", _is_whole)
_WHOLES = Form("a tuple of integers", _each(_is_whole))
_FACTORS = Form("a tuple of factors", _each(_is_factor))
_WORDS = Form("two strings", _fields(_is_text, _is_text))
_RANK = Form("a string and an integer", _fields(_is_text, _is_whole))
_ACTIVATION = Form("an activation", lambda value: value in VOCABULARY and VOCABULARY[value].group == "activation")
_REDUCED = Form("a reduction and the factors it is over", _fields(_is_text, _each(_is_factor)))
_REDUCED_AXES = Form("a reduction and the axes it is over", _fields(_is_text, _each(_is_axis)))
_REDUCED_DIMS = Form(
    "a reduction, the dims it is over or None, and whether it keeps them",
    _fields(_is_text, lambda dims: dims is None or _each(_is_whole)(dims), lambda keepdim: isinstance(keepdim, bool)),
)

OPERATIONS: Mapping[str, Operation] = {
    "accum": Operation(("written", "typed"), 0, _ORDER, reads_extents=False),
    "load": Operation(("written", "typed", "host"), 0, _LOAD, reads_extents=False),
    "const": Operation(("written", "typed", "host"), 0, _NUMBER, reads_extents=False),
    "call": Operation(("written", "typed"), None, _ACTIVATION, reads_extents=False),
    "cast": Operation(("written", "typed"), 1, _DTYPE, reads_extents=False),
    "debug_print": Operation(("written", "typed"), 1, _TEXT, reads_extents=False),
    # In written graphs: their layouts, coordinates and reductions number the dims of a value.
    "permute": Operation(("written",), 1, _WHOLES, reads_extents=False),
    "reshape": Operation(("written",), None, _SIZES, reads_extents=True),
    "unsqueeze": Operation(("written",), 1, _WHOLE, reads_extents=False),
    "rearrange": Operation(("written",), None, _REARRANGED, reads_extents=True),
    "join": Operation(("written",), None, _JOINED, reads_extents=True),
    "part": Operation(("written",), None, _PART, reads_extents=True),
    "roll": Operation(("written",), 1, _ROLLED, reads_extents=True),
    "expand_as": Operation(("written",), 2, NOTHING, reads_extents=True),
    "coordinate": Operation(("written",), 1, _AXIS_OR_DIM, reads_extents=False),
    "linear_index": Operation(("written",), 1, NOTHING, reads_extents=False),
    "assume_one_hot": Operation(("written",), 1, _WHOLE, reads_extents=True),
    "reduce_dims": Operation(("written",), 1, _REDUCED_DIMS, reads_extents=False),
    "reduce_axes": Operation(("written",), 1, _REDUCED_AXES, reads_extents=True),
    # Numbers that follow from a value: its number of elements, along some dims or in all, and a limit of its dtype.
    "extent": Operation(("written",), 1, _COUNTED, reads_extents=False),
    "limit": Operation(("written",), 1, _TEXT, reads_extents=False),
    "gather": Operation(("written",), 2, _WHOLE, reads_extents=False),
    "full_like": Operation(("written",), 2, _MAYBE_DTYPE, reads_extents=False),
    # The first argument, in the 16 bits that all other floating arguments share; in float32 if they share none.
    "rounded_like": Operation(("written",), None, NOTHING, reads_extents=False),
    "cast_like": Operation(("written",), 2, NOTHING, reads_extents=False),  # the first in the dtype of the second
    # Claims, which inference checks; the value of each is its first argument.
    "access": Operation(("written",), 1, _WORDS, reads_extents=False),
    "number": Operation(("written",), 1, _TEXT, reads_extents=False),
    "tensor": Operation(("written",), 1, _RANK, reads_extents=False),
    "torch": Operation(("written",), None, _WORDS, reads_extents=False),
    # In typed graphs: these name factors in place of dims.
    "index": Operation(("typed",), 0, _FACTORS, reads_extents=False),
    "pick": Operation(("typed",), 1, _PICKED, reads_extents=False),
    "region": Operation(("typed",), 1, _COLUMNS, reads_extents=False),
    "expand": Operation(("typed",), 1, _FACTORS, reads_extents=False),
    "one_hot": Operation(("typed",), 1, _FACTORS, reads_extents=False),
    "reduce": Operation(("typed",), 1, _REDUCED, reads_extents=False),
    # Numbers, computed by Python.
    "axis": Operation(("host",), 0, _AXIS, reads_extents=False),
    "host": Operation(("written", "host"), None, _TEXT, reads_extents=False),
    "select": Operation(("written", "host"), 3, NOTHING, reads_extents=False),
    **{
        name: Operation(("written", "typed", "host"), row.arity, NOTHING, reads_extents=False)
        for name, row in PRIMITIVES.items()
    },
}

COMMUTATIVE = frozenset(name for name, row in PRIMITIVES.items() if row.commutative)


def broken(node: Node, place: Place) -> str | None:
    """What is wrong with `node` in a graph of the kind `place`, or None."""
    row = OPERATIONS.get(node.op)
    if row is None:
        return f"{node} is no operation"
    if place not in row.places:
        return f"{node} does not belong into a {place} graph"
    if not row.form.holds(node.attr):
        return f"{node} has the attribute {node.attr!r}, not {row.form.words}"
    arity = len(VOCABULARY[node.attr].signature.parameters) if node.op == "call" else row.arity
    if arity is not None and len(node.args) != arity:
        return f"{node} has {len(node.args)} arguments, not {arity}"
    return None
