"""Planted faults: each replaces a small piece of code by a wrong one. The random epilogues must notice each fault."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from fuzzing.case import Case

from epifuse import passes
from epifuse.base import cache
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.plan import settle
from epifuse.providers.cpu import code, kernel, lowered, primitives, program, reduce, space, store
from epifuse.runtime import launch

Patch = Callable[[pytest.MonkeyPatch], None]


def _row(table: Mapping[str, Any], name: str, wrong: Callable[..., Any]) -> Patch:
    """A patch by which the row `name` of a table computes `wrong(*tensors)` instead."""

    def row(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(wrong(*tensors))

    return lambda monkeypatch: monkeypatch.setitem(table, name, row)  # type: ignore[arg-type]  # the tables are dicts


def _primitive(name: str, wrong: Callable[..., Any]) -> Patch:
    return _row(primitives.PRIMITIVE_ROWS, name, wrong)


def _attribute(owner: Any, name: str, wrong: Callable[[Any], Any]) -> Patch:
    """A patch that replaces `owner.name` by `wrong(owner.name)`."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))


def _module(name: str) -> Any:
    """The module of a pass. The package's attribute of that name is the function instead."""
    return sys.modules[f"epifuse.passes.{name}"]


def _drops_last(original: Callable[..., Iterator[space.Tile]]) -> Callable[..., Iterator[space.Tile]]:
    def tiles(*args: Any) -> Iterator[space.Tile]:
        found = list(original(*args))
        yield from found[:-1] if len(found) > 1 else found

    return tiles


def _one_output_short(original: Callable[..., Any]) -> Callable[..., Any]:
    def sweep(self: Any, number: int) -> Any:
        made = original(self, number)
        return made._replace(stored=made.stored[:-1] if len(made.stored) > 1 else made.stored)

    return sweep


def _frozen_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    first: dict[Any, Any] = {}
    return lambda graph, problem, kinds, given: first.setdefault(graph, original(graph, problem, kinds, given))


def _one_more(original: Callable[..., None]) -> Callable[..., None]:
    return lambda self, count, *held, out: original(self, count + 1, *held, out=out)


def _first_batch(matrix: torch.Tensor, batches: int) -> torch.Tensor:
    first = matrix[:1] if matrix.dim() == 3 else matrix.unsqueeze(0)
    return first.expand(batches, -1, -1)


def _shared_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, node, dtype, factors, dying: (dtype, factors, 0)


def _inverse(original: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    def permuted(order: Any, rank: int) -> tuple[int, ...]:
        right = original(order, rank)
        return tuple(right.index(position) for position in range(rank))

    return permuted


def _unrescaled(x: torch.Tensor, over: list[int], value: torch.Tensor, largest: torch.Tensor) -> None:
    largest.copy_(torch.maximum(largest, torch.amax(x, over, keepdim=True)))
    value += torch.sum(torch.exp(x - largest), over, keepdim=True)


def _from_one(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda self, node: original(self, node) + 1


def _clamped_short(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def to_integer(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return original(value.clamp(max=torch.iinfo(dtype).max - 1), dtype)

    return to_integer


def _narrow_squares(value: torch.Tensor, x: torch.Tensor, over: list[int]) -> None:
    value += torch.sum(x * x, over, keepdim=True)


def _by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def identity(*args: Any) -> Any:
        found = original(*args)
        return found._replace(names=tuple(sorted(found.names)))

    return identity


def _overlapping(original: Callable[..., Iterator[space.Tile]]) -> Callable[..., Iterator[space.Tile]]:
    """The ragged last tile begins earlier so that it is a whole tile, and some columns are computed twice."""

    def tiles(extents: Mapping[str, int], rows: int, columns: int) -> Iterator[space.Tile]:
        for tile in original(extents, rows, columns):
            yield tile._replace(n=(max(tile.n[1] - columns, 0), tile.n[1]))

    return tiles


def _nan_as_zero(original: Callable[..., None]) -> Callable[..., None]:
    def stored(value: torch.Tensor, destination: torch.Tensor) -> None:
        original(value.nan_to_num(0.0) if destination.dtype in store._FP8_MAX else value, destination)

    return stored


def _columns_for_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """If M = N, a vector is taken to lie along the other axis."""

    def align(shape: Any, partner: Any, accum: Any, extents: Mapping[str, int]) -> Any:
        found = original(shape, partner, accum, extents)
        if len(shape) == 1 and extents["m"] == extents["n"] and found == accum[-1:]:
            return (accum[-2], ())
        return found

    return align


def _inner_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """If a dim is split into two equal pieces, the inner piece is taken for the outer one."""

    def regroup(dims: Any, want: Any, extents: Mapping[str, int]) -> Any:
        found = list(original(dims, want, extents))
        for i, (outer, inner) in enumerate(itertools.pairwise(found)):
            same = len(outer) == len(inner) == 1 and outer[0].axis == inner[0].axis
            if same and outer[0].size(extents) == inner[0].size(extents):
                found[i : i + 2] = [inner, outer]
        return tuple(found)

    return regroup


FAULTS: dict[str, Patch] = {
    "subtraction swapped": _primitive("sub", lambda x, y: y - x),
    "division swapped": _primitive("div", lambda x, y: y / x),
    "maximum drops NaN": _primitive("maximum", torch.fmax),
    "minimum drops NaN": _primitive("minimum", torch.fmin),
    "where takes the other branch": _primitive("where", lambda condition, x, y: torch.where(condition, y, x)),
    "round goes half up": _primitive("round", lambda x: torch.floor(x + 0.5)),
    "ge is gt": _primitive("ge", torch.gt),
    "lt is le": _primitive("lt", torch.le),
    "not is identity": _primitive("logical_not", lambda x: x),
    "remainder has the dividend's sign": _primitive("remainder", torch.fmod),
    "floor division truncates": _primitive("floor_divide", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    "clip forgets the upper bound": _primitive("clip", lambda x, low, high: torch.maximum(x, low)),
    "sign of zero is one": _primitive("sign", lambda x: torch.where(x == 0, torch.ones_like(x), torch.sign(x))),
    "rsqrt is sqrt": _primitive("rsqrt", torch.sqrt),
    "log1p is log": _primitive("log1p", torch.log),
    "gelu is its approximation": _row(
        primitives.FAST, "gelu_erf", lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    ),
    "stores saturate one short": _attribute(store, "_to_integer", _clamped_short),
    "stores truncate": _attribute(
        store, "_to_integer", lambda right: lambda x, dtype: right(torch.trunc(x.double()), dtype)
    ),
    "e4m3 saturates too early": lambda monkeypatch: monkeypatch.setitem(store._FP8_MAX, torch.float8_e4m3fn, 240.0),
    "maximum starts from zero": _attribute(reduce, "_identity", lambda _: lambda name, dtype, count: 0),
    "mean divides by one more": _attribute(reduce.Accumulator, "result", _one_more),
    "logsumexp is not rescaled": _attribute(reduce, "_add_exponentials", lambda _: _unrescaled),
    "row results are forgotten": _attribute(reduce, "in_tile", lambda _: lambda name, dims, x, out: out.zero_()),
    "the last output is dropped": _attribute(lowered._Lowering, "sweep", _one_output_short),
    "the last tile is skipped": _attribute(kernel, "tiles", _drops_last),
    "every batch is the first": _attribute(kernel, "_batched", lambda _: _first_batch),
    "buffers are shared": _attribute(program._Allocator, "take", _shared_buffer),
    "casts do not round": _attribute(program, "_cast", lambda _: lambda to: lambda x, out: out.copy_(x)),
    "coordinates start at one": _attribute(kernel._Launch, "_index", _from_one),
    "numbers are frozen": _attribute(launch, "numbers_of", _frozen_numbers),
    "permute is its inverse": _attribute(_module("layout"), "permuted", _inverse),
    "the ragged tile is met twice": _attribute(kernel, "tiles", _overlapping),
    "fp8 turns NaN into zero": _attribute(code, "store", _nan_as_zero),
    "a row lies along columns": _attribute(_module("alignment"), "align", _columns_for_rows),
    "reshape counts the inner piece first": _attribute(_module("layout"), "regroup", _inner_first),
    "integers are added in float32": _attribute(
        kernel, "largest_product", lambda _: lambda a, b: None if a.is_floating_point else 1
    ),
    "whole literals are floats": _attribute(_module("kinds"), "const_kind", lambda _: lambda value: "float"),
    "squares of integers wrap": lambda monkeypatch: monkeypatch.setitem(
        reduce._MERGE, "sum_of_squares", _narrow_squares
    ),
    "a shared operand is forgotten": _attribute(settle, "check_overlaps", lambda _: lambda *args: ()),
}


def _has(name: str) -> Callable[[Case], bool]:
    return lambda case: name in case.source()


SHOWN_BY: dict[str, Callable[[Case], bool]] = {
    "gelu is its approximation": _has("gelu"),
    "fp8 turns NaN into zero": lambda case: any(output.dtype in store._FP8_MAX for output in case.outputs),
    "a row lies along columns": lambda case: case.sizes["m"] == case.sizes["n"],
    "reshape counts the inner piece first": _has("reshape"),
    "integers are added in float32": lambda case: not case.dtypes[0].is_floating_point,
    "squares of integers wrap": _has("sum_of_squares"),
}
"""For faults that few cases can show: whether a case can show it. Other cases need not run."""


IDENTITY_FAULTS: dict[str, Patch] = {
    "the digest sorts every argument": _attribute(passes, "COMMUTATIVE", lambda _: frozenset(PRIMITIVES)),
    "the digest numbers operands by name": _attribute(passes, "identity", _by_name),
}
"""Faults that make two different epilogues equal. They show if a kernel built for one is used for the other."""


def forget() -> None:
    """Empty every cache, so that nothing built before hides a fault, and nothing built with a fault outlives it."""
    cache.forget()
