"""Errors of the device functions against float64, in units of the last place, over bit patterns; needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from accuracy.cases import Case
from accuracy.probe import BLOCK, WIDTH, compiled
from epifuse.providers.cutedsl.primitives import FAST_MATH
from epifuse.request.problem import Constraints

CHUNK = 1 << 25
STRIDE = 251
"""Every so manieth pattern of float32 is taken; 1 takes all."""
PRIMITIVE_ULP = 4.0
"""What a primitive in float32 may be off, and a composite beyond twice PyTorch's own error."""
NEIGHBOUR_ULP = 1.5
"""A neighbour of the correctly rounded value is at most so far from the exact one, in 16 bits."""
_FORMATS = {torch.float32: (24, -149, 128), torch.bfloat16: (8, -133, 128), torch.float16: (11, -24, 16)}


class Worst(NamedTuple):
    """The largest error of a case in ulp, where, PyTorch's own largest, and whether it is within what is promised."""

    ulp: float
    at: tuple[float, ...]
    torch: float
    kept: bool


def float_patterns(first: int, last: int, stride: int) -> torch.Tensor:
    """float32 values by their bits."""
    return torch.arange(first, last, stride, device="cuda").to(torch.int32).view(torch.float32)


def short_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype, as float32, shuffled: a thread's values have nothing in common."""
    values = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(dtype).float()
    return values[torch.randperm(values.numel(), generator=torch.Generator("cuda").manual_seed(1), device="cuda")]


def chunks(stride: int) -> Iterator[torch.Tensor]:
    """All float32 values, every `stride`-th."""
    step = CHUNK * stride
    for first in range(-(1 << 31), 1 << 31, step):
        yield float_patterns(first, min(first + step, 1 << 31), stride)


def operands(case: Case, key: torch.Tensor) -> list[torch.Tensor]:
    """The case's operands: `key` in its place, the others drawn beside it, always the same."""
    generator = torch.Generator("cuda").manual_seed(0)

    def uniform() -> torch.Tensor:
        return torch.rand(key.shape, generator=generator, device="cuda")

    def other() -> torch.Tensor:
        if case.others == "patterns":
            bits = torch.randint(-(1 << 31), 1 << 31, key.shape, generator=generator, device="cuda")
            return torch.where(uniform() < 0.5, bits.to(torch.int32).view(torch.float32), key * (uniform() + 0.5))
        if case.others == "powers":
            exponent = (300 * uniform() - 150) / torch.log2(key.abs())
            whole = (uniform() < 0.5) | (key < 0)
            return torch.where(whole, exponent.round(), exponent).nan_to_num(nan=2.0)
        return torch.randn(key.shape, generator=generator, device="cuda")

    return [key if i == case.key else other() for i in range(case.arity)]


def run(kernel: Any, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The kernel on flat tensors of any length."""
    count = inputs[0].numel()
    padded = -(-count // BLOCK) * BLOCK
    wide = [torch.nn.functional.pad(x, (0, padded - count)).view(-1, WIDTH) for x in inputs]
    out = torch.full((padded // WIDTH, WIDTH), float("nan"), device="cuda")
    kernel(wide, out)
    return out.view(-1)[:count]


def ulps(got: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """|got - truth| in units of the last place of `dtype` at the truth; infinite where one of them alone is NaN."""
    precision, smallest, largest = _FORMATS[dtype]
    limit = 2.0**largest
    truth = truth.clamp(-limit, limit)
    exponent = (truth.view(torch.int64) >> 52 & 2047).clamp(max=largest + 1022)  # biased, of 2 * truth
    unit = ((exponent + 1 - precision).clamp(min=smallest + 1023) << 52).view(torch.float64)
    error = (got.double().clamp(-limit, limit) - truth).abs() / unit
    return torch.where(got.isnan() & truth.isnan(), 0.0, error.nan_to_num(nan=float("inf")))


def kernels(case: Case) -> dict[str, Any]:
    """Compiled in full, for 16-bit outputs and, where that differs, with `fast_math`."""
    loads = (torch.float32,) * case.arity
    found = {
        "full": compiled(case.expression, loads, torch.float32),
        "narrow": compiled(case.expression, loads, torch.bfloat16),
    }
    if case.name in FAST_MATH:
        found["fast"] = compiled(case.expression, loads, torch.float32, constraints=Constraints(fast_math=True))
    return found


def measure_full(case: Case, kernel: Any, stride: int = STRIDE) -> Worst:
    """In float32. A composite is held to twice PyTorch's error within each binade of its key operand, plus 4 ulp.

    Where its result passes through zero, to twice PyTorch's largest absolute error there, relative to the other
    operand: how many ulp an error is depends there on how near to the root a sample happens to lie.
    """
    worst, at, most, kept = -1.0, (), 0.0, True
    for key in chunks(stride):
        inputs = operands(case, key)
        truth = case.truth(*(x.double() for x in inputs))
        got, reference = run(kernel, inputs), case.torch(*inputs)
        error = _unless_both_nan(ulps(got, truth, torch.float32), got, reference)
        theirs = _finite(ulps(reference, truth, torch.float32))
        allowed = 2 * _by_binade(key, theirs) + PRIMITIVE_ULP if case.composite else PRIMITIVE_ULP
        kept = kept and bool(((error <= allowed) | kept_at_root(case, inputs, got, reference, truth)).all())
        most = max(most, float(theirs.max()))
        index = int(error.argmax())
        if float(error[index]) > worst:
            worst, at = float(error[index]), tuple(float(x[index]) for x in inputs)
    return Worst(worst, at, most, kept)


def measure_short(case: Case, kernel: Any, dtype: torch.dtype, key: torch.Tensor, by_binade: bool = False) -> Worst:
    """Stored in 16 bits: the correctly rounded value, a neighbour, or no further off than PyTorch's.

    Than PyTorch's at the same operand or, `by_binade`, than its worst in the operand's binade; where the result passes
    through zero see `measure_full`.
    """
    inputs = operands(case, key)
    truth = case.truth(*(x.double() for x in inputs))
    got, reference = run(kernel, inputs).to(dtype), case.torch(*inputs).to(dtype)
    error = _unless_both_nan(ulps(got, truth, dtype), got, reference)
    theirs = ulps(reference, truth, dtype)
    if by_binade:
        theirs = _by_binade(key, _finite(theirs))
    beyond = torch.where(error <= theirs, torch.zeros_like(error), error)
    index = int(beyond.argmax())
    kept = bool(((beyond <= NEIGHBOUR_ULP) | kept_at_root(case, inputs, got, reference, truth)).all())
    return Worst(float(beyond[index]), tuple(float(x[index]) for x in inputs), float(_finite(theirs).max()), kept)


def _by_binade(key: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The largest error among all operands of the same sign and exponent."""
    binade = (key.view(torch.int32) >> 23 & 511).long()
    return torch.zeros(512, device="cuda").double().scatter_reduce_(0, binade, error, "amax")[binade]


def kept_at_root(case: Case, inputs: Sequence[torch.Tensor], *results: torch.Tensor) -> torch.Tensor:
    """Where the key operand lies within `case.root`, and the result is off by no more than twice PyTorch's worst."""
    low, high = case.root
    inside = (inputs[case.key] > low) & (inputs[case.key] < high)
    if not inside.any():
        return inside
    got, reference, truth = (result.double() for result in results)
    scale = inputs[1 - case.key].double().abs() if case.arity == 2 else 1.0
    ours, theirs = (got - truth).abs() / scale, (reference - truth).abs() / scale
    return inside & (ours <= 2 * theirs[inside].nan_to_num(nan=0.0).max())


def _finite(error: torch.Tensor) -> torch.Tensor:
    """NaN where there should be a number says nothing about PyTorch's rounding."""
    return torch.where(error.isinf(), torch.zeros_like(error), error)


def _unless_both_nan(error: torch.Tensor, got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """A function is NaN wherever PyTorch's is, also where inf * 0 within its formula is the reason."""
    return torch.where(got.isnan() & reference.isnan(), torch.zeros_like(error), error)


def measure_fast(case: Case, kernel: Any) -> dict[str, float]:
    """With `fast_math`: largest absolute and relative error for arguments up to 16."""
    key = torch.linspace(-16, 16, (1 << 22) + 1, device="cuda")
    inputs = operands(case._replace(others="normal"), key)
    truth, got = case.truth(*(x.double() for x in inputs)), run(kernel, inputs).double()
    fine = truth.isfinite() & (truth.abs() > 2.0**-126) & got.isfinite()
    error = torch.where(fine, (got - truth).abs(), torch.zeros_like(truth))
    relative = torch.where(fine, error / truth.abs(), torch.zeros_like(truth))
    return {"absolute": float(error.max()), "relative": float(relative.max())}
