"""The operators that the compiler's pass puts into a graph: `epifuse::fused1` to `fused8`, a product with its epilogue.

One for each number of outputs, since an operator that returns a list has no `.out`.
What is computed travels as text: a graph that PyTorch has on disk runs in a process that never saw the pass. The text
is base32 of a compressed value of JSON, because generated C++ escapes nothing.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import Loc, fail
from epifuse.frontend import Parsed
from epifuse.frontend.apply import placed
from epifuse.frontend.remembered import remembered
from epifuse.ir import Graph
from epifuse.ir.text import packed, unpacked
from epifuse.request.options import Options
from epifuse.request.signature import Request
from epifuse.runtime.run import run

MOST_OUTPUTS = 8

Extent = int | str
"""A number, or the axis of the product whose extent it is: a spec in axes serves every size."""


class Value(NamedTuple):
    """An output of a leaf."""

    name: str
    dtype: torch.dtype
    shape: tuple[Extent, ...]


class Leaf(NamedTuple):
    """What a leaf computes."""

    parsed: Parsed
    values: tuple[Value, ...]


_OPTIONS = Options(None, fallback="torch")
"""What was planned for an aligned tensor must run for one that is not, too."""
_IN_FULL = _OPTIONS._replace(precision="ieee")
_PLACE = Loc("<fused by epifuse>", 1, 0, 1, "")


def encoded(graph: Graph, values: Sequence[Value]) -> str:
    """The spec of a leaf: letters and digits alone."""
    shown = [[value.name, str(value.dtype).removeprefix("torch."), value.shape] for value in values]
    text = json.dumps([packed(graph), shown], separators=(",", ":"))
    return base64.b32encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def decoded(spec: str) -> Leaf:
    """What `encoded` made `spec` of. Raises `ArgumentError` for any other text."""
    return remembered("leaf", spec, lambda: _decoded(spec))


def _decoded(spec: str) -> Leaf:
    try:
        data = zlib.decompress(base64.b32decode(spec + "=" * (-len(spec) % 8)))
        graph, shown = json.loads(data)
        values = tuple(Value(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in shown)
        return Leaf(parsed_of(unpacked(graph), values), values)
    except (ValueError, zlib.error, KeyError, AttributeError) as error:
        raise fail("leaf_spec", None, detail=error) from None


def parsed_of(graph: Graph, values: Sequence[Value]) -> Parsed:
    """A graph as written as an epilogue whose outputs have the dtypes of `values`."""
    dtypes = {value.name: value.dtype for value in values}
    return Parsed("fused", graph, graph.inputs, {}, {}, (), placed(_PLACE), dtypes=dtypes)


def shape_of(shape: Sequence[Extent], a: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
    """A shape as numbers for these operands of the product; sizes that are symbols stay so."""
    extents = {"l": a.shape[0], "m": a.shape[-2], "n": b.shape[-1]}
    return tuple(extents[extent] if isinstance(extent, str) else extent for extent in shape)


def options_of(a: torch.Tensor, b: torch.Tensor) -> Options:
    """How a leaf multiplies A and B: as PyTorch would.

    cuBLAS multiplies one row or one column of float32 in full, also where tf32 is allowed. With tf32 there, a DLRM's
    loss and gradients had up to 1.31 x the error of PyTorch's (models_tf32_dlrm_before_h100.json).
    """
    in_full = a.dtype is torch.float32 and a.is_cuda and 1 in (a.shape[-2], b.shape[-1])
    return _IN_FULL if in_full else _OPTIONS


def _run(a: torch.Tensor, b: torch.Tensor, operands: list[torch.Tensor], spec: str) -> Any:
    outputs = _launched(decoded(spec), a, b, operands, {})
    return tuple(outputs.values()) if len(outputs) > 1 else next(iter(outputs.values()))


def _run_out(a: torch.Tensor, b: torch.Tensor, operands: list[torch.Tensor], spec: str, **out: torch.Tensor) -> Any:
    leaf = decoded(spec)
    _launched(leaf, a, b, operands, dict(zip((value.name for value in leaf.values), out.values(), strict=True)))
    return tuple(out.values()) if len(out) > 1 else next(iter(out.values()))


def _launched(
    leaf: Leaf, a: torch.Tensor, b: torch.Tensor, operands: list[torch.Tensor], out: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs by name, in the order of the spec."""
    with torch.no_grad():  # the graph around it has its backward already
        return run(request(leaf, a, b, operands, out))


def request(
    leaf: Leaf, a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor], out: dict[str, torch.Tensor]
) -> Request:
    """What a leaf asks for."""
    given = dict(zip(leaf.parsed.parameters, operands, strict=True))
    return Request(a, b, leaf.parsed, {**given, **out}, options_of(a, b))


def _fake(a: torch.Tensor, b: torch.Tensor, operands: list[torch.Tensor], spec: str) -> Any:
    made = [a.new_empty(shape_of(value.shape, a, b), dtype=value.dtype) for value in decoded(spec).values]
    return tuple(made) if len(made) > 1 else made[0]


def _fake_out(a: torch.Tensor, b: torch.Tensor, operands: list[torch.Tensor], spec: str, **out: torch.Tensor) -> Any:
    return tuple(out.values()) if len(out) > 1 else next(iter(out.values()))


def leaf_operator(outputs: int) -> Any:
    """The operator with so many outputs."""
    return getattr(torch.ops.epifuse, f"fused{outputs}").default


def _tags(name: str) -> tuple[Any, ...]:
    """A tag of operators, where this version of PyTorch has it."""
    return (getattr(torch.Tag, name),) if hasattr(torch.Tag, name) else ()


def _define() -> torch.library.Library:
    library: Any = torch.library.Library("epifuse", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped
    inputs, tags = "Tensor a, Tensor b, Tensor[] operands, str spec", _tags("needs_exact_strides")
    for count in range(1, MOST_OUTPUTS + 1):
        name, marks = f"fused{count}", [f"Tensor({chr(ord('a') + i)}!)" for i in range(count)]
        plain, written = ", ".join(["Tensor"] * count), ", ".join(marks)
        out = ", ".join(f"{mark} out{i}" for i, mark in enumerate(marks))
        several = count > 1
        library.define(f"{name}({inputs}) -> {f'({plain})' if several else plain}", tags=tags)
        library.define(
            f"{name}.out({inputs}, *, {out}) -> {f'({written})' if several else written}",
            tags=tags,  # without `out`, by which PyTorch 2.13 would call this through the dispatcher: see direct.py
        )
        library.impl(name, _run, "CompositeExplicitAutograd")
        library.impl(f"{name}.out", _run_out, "CompositeExplicitAutograd")
        library.impl(name, _fake, "Meta")  # FakeTensors ask it too
        library.impl(f"{name}.out", _fake_out, "Meta")
    return library  # type: ignore[no-any-return]  # a Library, see above


LIBRARY = _define()
"""What keeps the operators registered."""
