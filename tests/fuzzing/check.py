"""Run a case fused and by plain PyTorch, and compare the results."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import epifuse as ef
from epifuse.base.errors import EpifuseError
from epifuse.fusion.vocabulary import VOCABULARY
from epifuse.request.problem import Constraints
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.tools.testing import Bounded, Verdict, bounded, compare_bounded, compare_exact
from fuzzing.case import Case, draw_number, shape_of
from fuzzing.forms import HELPERS
from fuzzing.operands import Operand, fill, handed, lay_out, poison
from fuzzing.sibling import sibling

_FILES = itertools.count()
_NAMESPACE: dict[str, Any] = {
    **{name: entry.function for name, entry in VOCABULARY.items()},
    "torch": torch,
    "F": torch.nn.functional,
    "math": math,
}


class MismatchError(AssertionError):
    """The fused result differs from the result of the function run by PyTorch."""


@dataclass
class Data:
    """The tensors of one run. `memory` is the whole buffer in which each operand or output lies."""

    a: torch.Tensor
    b: torch.Tensor
    operands: dict[str, Any]
    outputs: dict[str, torch.Tensor]
    memory: dict[str, torch.Tensor]


def function_of(text: str, outside: dict[str, Any]) -> Callable[..., Any]:
    """`text` as a function whose source can be found, like that of a function in a module."""
    file = f"<fuzz {next(_FILES)}>"
    whole = HELPERS + "\n\n" + text
    linecache.cache[file] = (len(whole), None, whole.splitlines(keepends=True), file)
    namespace = {**_NAMESPACE, **outside, "__name__": "fuzzed"}
    exec(compile(whole, file, "exec", dont_inherit=True), namespace)
    return namespace["epi"]  # type: ignore[no-any-return]


# --- data ----------------------------------------------------------------------------------------------------------


def draw(case: Case) -> Data:
    """Make all tensors of the case. Outputs are filled with poison."""
    generator = torch.Generator().manual_seed(case.seed)
    l, m, n, k = case.sizes["l"], case.sizes["m"], case.sizes["n"], case.depth
    shapes = ((l,) * case.batches[0] + (m, k), (l,) * case.batches[1] + (k, n))
    a, b = (
        lay_out(_matrix(shape, dtype, case, generator), layout)[0]
        for shape, dtype, layout in zip(shapes, case.dtypes[:2], case.layouts, strict=True)
    )
    operands: dict[str, Any] = dict(case.numbers)
    memory: dict[str, torch.Tensor] = {}
    for operand in case.operands:
        operands[operand.name], memory[operand.name] = lay_out(_values(operand, case, generator), operand.layout)
    outputs = {}
    for output in case.outputs:
        if output.alias is not None:
            outputs[output.name], memory[output.name] = operands[output.alias], memory[output.alias]
        elif output.layout is not None:
            blank = torch.empty(shape_of(case, output.dims), dtype=output.dtype)
            outputs[output.name], memory[output.name] = lay_out(blank, output.layout)
            poison(memory[output.name])
    return Data(a, b, operands, outputs, memory)


def _matrix(shape: tuple[int, ...], dtype: torch.dtype, case: Case, generator: torch.Generator) -> torch.Tensor:
    if case.extreme:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.max - 3, limits.max + 1, shape, generator=generator).to(dtype)
    return fill(shape, dtype, case.exact, generator)


def _values(operand: Operand, case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = operand.shape if operand.shape is not None else shape_of(case, operand.dims)
    values = fill(shape, operand.dtype, case.exact, generator)
    if case.special and operand.dtype.is_floating_point and operand.dims:
        flat = values.to(torch.float32).reshape(-1)
        for i in range(0, len(flat), 5):
            flat[i] = (torch.nan, torch.inf, -torch.inf, -0.0)[i // 5 % 4]
        values = flat.reshape(shape).to(operand.dtype)
    return values


# --- the oracle ----------------------------------------------------------------------------------------------------


def expected(case: Case, data: Data, numbers: dict[str, Any], captured: dict[str, Any]) -> list[torch.Tensor]:
    """The results of the function run by PyTorch: exact ones, or in float64 with an error bound."""
    accum = _accum(case, data)
    operands = {name: handed(value, wide=case.wide or not case.exact) for name, value in data.operands.items()}
    operands |= numbers
    if not case.exact:
        eps = torch.finfo(torch.float64 if case.wide else torch.float32).eps
        operands = {name: bounded(value, eps) for name, value in operands.items()}
        # Coordinates do not come from an operand, which would give them an error bound.
        captured = captured | {name: _with_bound(_NAMESPACE[name], eps) for name in ("index_l", "index_m", "index_n")}
    wide = case.wide or not case.exact
    function = ef.reference(function_of(case.source(wide=wide), captured))
    with _default_dtype(torch.float64 if wide else torch.float32):
        results = function(accum, **operands)
    results = results if isinstance(results, tuple) else (results,)
    # A result may be an operand itself, and the kernel may overwrite this operand.
    return [r.clone() for r in results]


def _with_bound(function: Callable[..., torch.Tensor], eps: float) -> Callable[..., Any]:
    return lambda x: bounded(function(x), eps)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _accum(case: Case, data: Data) -> torch.Tensor:
    a, b = data.a.to(torch.float64), data.b.to(torch.float64)
    product = a @ b
    integers = not case.dtypes[0].is_floating_point
    if case.exact or integers:
        held = torch.int32 if integers else torch.float64 if case.wide else torch.float32
        accum = product.to(held)
        return accum if case.exact else bounded(accum, torch.finfo(torch.float32).eps)  # type: ignore[no-any-return]
    eps = torch.finfo(torch.float64 if case.wide else torch.float32).eps
    bound = (a.abs() @ b.abs()) * (case.depth + 1) * eps
    if case.dtypes[2] == torch.float16:
        bound += product.abs() * torch.finfo(torch.float16).eps
    return Bounded.of(product, bound, eps)


# --- running -------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The elements that were judged, out of all elements of a passed case, and the arguments that ran."""

    judged: int
    total: int
    args: GemmArguments


def run(case: Case) -> Report:
    """Run and judge a case. Raises `MismatchError`, or any error of the library, since the generator writes only legal
    epilogues."""
    data = draw(case)
    function: Any = case.source() if case.as_string else function_of(case.source(), case.captured)
    report = _once(case, data, function, case.numbers, case.captured)
    if not any(output.alias for output in case.outputs):
        if case.numbers or case.captured:
            _again(case, data, function)
        if case.seed % 3 == 0 and (other := sibling(case)) is not None:
            _beside(other, data)
    return report


def _beside(other: Case, data: Data) -> None:
    """Run another epilogue on the same tensors: the kernel of one must not be taken for the other."""
    for name in data.outputs:
        poison(data.memory[name])
    function: Any = other.source() if other.as_string else function_of(other.source(), other.captured)
    _once(other, data, function, other.numbers, other.captured)


def _again(case: Case, data: Data, function: Any) -> None:
    """Run again with other numbers, for which the same kernel can be used."""
    rng = random.Random(case.seed)
    numbers = {name: draw_number(rng, "float") for name in case.numbers}
    captured = {name: draw_number(rng, "int" if isinstance(v, int) else "float") for name, v in case.captured.items()}
    if not case.as_string:
        function.__globals__.update(captured)
    for name in data.outputs:
        poison(data.memory[name])
    _once(case, data, function, numbers, captured)


def _once(case: Case, data: Data, function: Any, numbers: dict[str, Any], captured: dict[str, Any]) -> Report:
    wants = expected(case, data, numbers, captured)
    padding = {name: _outside(data.outputs[name], data.memory[name]) for name in data.outputs}
    given = {**data.operands, **numbers, **data.outputs}
    args, results = _fused(case, data, function, given)
    judged = total = 0
    for output, want in zip(case.outputs, wants, strict=True):
        got = results[output.name]
        if tuple(got.shape) != tuple(want.shape):
            raise MismatchError(f"{output.name} has the shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        verdict = _compare(case, got, want)
        if verdict.wrong:
            raise MismatchError(
                f"{output.name} ({got.dtype}): {verdict.wrong} of {verdict.total} wrong, {verdict.detail}"
            )
        judged, total = judged + verdict.judged, total + verdict.total
    for name, before in padding.items():
        if not torch.equal(before, _outside(data.outputs[name], data.memory[name])):
            raise MismatchError(f"{name}: memory around the destination was written")
    return Report(judged, total, args)


def _compare(case: Case, got: torch.Tensor, want: torch.Tensor) -> Verdict:
    return compare_exact(got, want) if case.exact else compare_bounded(got, want)


def _fused(
    case: Case, data: Data, function: Any, given: dict[str, Any]
) -> tuple[GemmArguments, dict[str, torch.Tensor]]:
    """Run with the first of three tiles that the kernel accepts. The last is its own choice, which it must accept."""
    epilogue = EpilogueArguments.partial(function, given)
    dtypes = {o.name: o.dtype for o in case.outputs if o.dtype is not None and o.name not in data.outputs}
    # Four tiles along an axis are enough: the first, the last, a ragged one and one between them.
    rows, columns = max(case.tile[0], -(-case.sizes["m"] // 4)), max(case.tile[1], -(-case.sizes["n"] // 4))
    inner = case.sizes.get("s", 1)
    for tile in ((rows, columns), (rows * inner, max(case.sizes["n"], 1)), None):
        args = GemmArguments(
            data.a, data.b, accumulator_type=case.dtypes[2], epilogue=epilogue, out_dtypes=dtypes,
            constraints=Constraints(tile=tile),
        )  # fmt: skip
        kernels = ef.get_kernels(args)
        if kernels:
            return args, kernels[0].run(args)
    raise MismatchError(f"no kernel: {ef.explain(args)}")


def _outside(view: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The bytes of `memory` that do not belong to `view`."""
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    if not memory.dim():
        return memory.new_empty(0)
    return memory.view(torch.uint8).reshape(*memory.shape, memory.dtype.itemsize)[~inside]


__all__ = ["EpifuseError", "MismatchError", "Report", "draw", "run"]
