"""Comparing results: tolerances, and a reference that carries its own error bound.

The reference is the user's function run by PyTorch. It does not use epifuse's graph, so that an error in the front end,
in a pass or in a kernel shows as a difference. All tolerances of the project are in the two tables of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from epifuse.base.dtypes import is_narrow_float
from epifuse.base.errors import fail
from epifuse.request.scaled import dequantised, given_scales
from epifuse.tools.store_rule import store_reference

# --- tolerances ------------------------------------------------------------------------------------------------------

ULPS_PER_OPERATION = 6.0
"""The rounding error that a primitive may make, in units of its compute dtype's epsilon. torch's vectorised functions
are accurate to 1 ulp, its float32 tan, pow and erf to 2, and a fast form of an activation may round twice more. The erf
inside torch's own vectorised gelu was seen off by 4.6."""

DTYPE_ULPS: Mapping[torch.dtype, float] = {torch.float16: 1.0, torch.bfloat16: 1.0}
"""The rounding error, in ulps, of a value that was cast to a narrow float: each operation rounds it, at worst to the
neighbour on the other side."""

NARROW_ROOM = 2.0**-12
"""How much further off, relative to its size, a 16-bit output of a GPU may be before it is rounded: half a unit of
float16, the sum of the approximations that `providers.cutedsl.precision` admits."""

TF32_EPS = 2.0**-11
"""How much a float32 input may change, relative to its size, before a tf32 product multiplies it: half a unit of the 10
bits of fraction that it is rounded to."""

FP8_SUM_EPS = 2.0**-12
"""How far a sum of products of 8-bit floats may be off on a GPU, relative to the sum of their sizes, for numbers of
both signs: the tensor cores keep 13 bits below the leading bit of the numbers that they add up."""
FP8_FAST_SUM_EPS = 2.0**-11
"""The same if the tensor cores add up all of K. Of 1.3 million simulated sums of 528 products the worst was off by
1.28 * 2^-12 (`tests/test_eight_bits.py` repeats a part of them)."""
FP8_MEANS = (3e-4, 1e-3)
"""The mean error relative to the mean value of such sums at K = 4096, if float32 adds up every 128 products: for
numbers of both signs (1.25e-4 was measured on an H100), and for numbers of one sign (5.0e-4 was measured)."""

FLUSHED = 2.0**-120
"""A float32 as small as this may come out as zero: some instructions flush numbers below 2^-126, and x * sigmoid(x)
has lost its exponential for x < -88."""


# --- a reference with a running error bound --------------------------------------------------------------------------

_EXACT = frozenset(
    {"neg", "__neg__", "abs", "absolute", "where", "maximum", "minimum", "amax", "amin", "clamp", "sign", "relu"}
    | {"floor", "ceil", "round", "permute", "reshape", "view", "unsqueeze", "expand", "__getitem__", "__get__"}
    | {"cat", "stack", "transpose", "flatten", "unflatten", "squeeze", "t", "masked_fill"}
)
_PARTS = frozenset({"chunk", "split", "unbind"})
"""These give several tensors, parts of the value. Their bounds are the same parts of its bound."""
_NEAR_ZERO = frozenset({"any", "all", "to", "bool"})
"""These ask whether a value is zero. Moving it by its bound may step over zero, so zero is evaluated in addition."""
_NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm"})
_SOFTMAXES = frozenset({"softmax", "log_softmax"})
_WAVES = {"sin": 0.25, "cos": 0.25, "tan": 0.25, "remainder": 1.0, "__mod__": 1.0, "__rmod__": 1.0}
"""Periodic functions. If the argument moves further than this, the result may be any of their values."""
_INVERSES = {"reciprocal": 0, "rsqrt": 0, "div": 1, "__truediv__": 1, "__rtruediv__": 0, "pow": 1, "__pow__": 1}
"""The position of the argument that makes these singular: a divisor that may be zero, an exponent that may be whole."""
_EQUALITY = frozenset({"eq", "ne", "__eq__", "__ne__"})
_SUMS = frozenset({"norm", "sum", "mean", "vector_norm", "linalg_vector_norm", "logsumexp"})


class Bounded(torch.Tensor):
    """A tensor with a bound, for each element, on how far a correct evaluation in `eps` arithmetic may be from it.

    A torch function of such tensors is evaluated at the value, and at the value moved by its bound, up and down. The
    change of the result, plus the function's own rounding, is the result's bound. For a mask the bound is 1 where an
    element may be True or False.
    """

    bound: torch.Tensor
    eps: float

    @classmethod
    def of(cls, value: torch.Tensor, bound: torch.Tensor, eps: float) -> Bounded:
        """`value` with its bound."""
        made = value.as_subclass(cls)
        made.bound, made.eps = bound, eps
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Evaluate `func` at the values, and at the values moved by their bounds."""
        kwargs = kwargs or {}
        if func.__name__ == "glu":  # combines two elements of its argument, which may move in different directions
            first, second = args[0].chunk(2, kwargs.get("dim", args[1] if len(args) > 1 else -1))
            return first * second.sigmoid()
        with torch._C.DisableTorchFunctionSubclass():
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Bounded)]
            plain = tree_map_only(Bounded, _plain, (args, kwargs))
            value = func(*plain[0], **plain[1])
            if func.__name__ in _PARTS:
                bounds = func(args[0].bound.expand(args[0].shape), *plain[0][1:], **plain[1])
                return tuple(cls.of(one, bound, args[0].eps) for one, bound in zip(value, bounds, strict=True))
            if not isinstance(value, torch.Tensor):
                return value
            eps = max(leaf.eps for leaf in leaves)
            bound = torch.zeros(value.shape, dtype=torch.float64)
            for leaf in leaves:
                if leaf.bound.any():
                    bound += _moved(func, args, kwargs, leaf, value)
            if func.__name__ in _EQUALITY and len(plain[0]) == 2:
                bound += _may_touch(*args)
            if func.__name__ == "where":
                bound += _either_branch(*args)
            if value.dtype.is_floating_point:
                bound += _rounding(func.__name__, plain, value, bound, eps)
                bound = _overflow(value, bound, eps)
            if func.__name__ in _INVERSES:
                bound = _singular(value, bound, args[_INVERSES[func.__name__]])
            return cls.of(value, bound, eps)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def _with(value: torch.Tensor, leaf: Bounded, tree: Any) -> Any:
    """The tree with plain tensors, and with `value` in place of `leaf`."""
    return tree_map_only(Bounded, lambda one: value if one is leaf else _plain(one), tree)


def _shifts(leaf: Bounded, outwards: bool) -> Iterable[torch.Tensor]:
    """The value moved by its bound up and down, or with `outwards` away from zero and towards it."""
    value = _plain(leaf)
    if value.dtype == torch.bool:
        return (value ^ (leaf.bound > 0),)
    if not value.dtype.is_floating_point:
        step = leaf.bound.clamp(max=2.0**31).to(value.dtype)
        return value + step, value - step
    wide = value.to(torch.float64)
    step = torch.where(wide < 0, -leaf.bound, leaf.bound) if outwards else leaf.bound
    moved: tuple[torch.Tensor, ...] = (wide + step, wide - step)
    unknown = leaf.bound.isinf()
    if unknown.any():
        # With an unknown bound a value may also be infinite or NaN, which no step reaches and no step leaves.
        infinite = torch.full_like(wide, torch.inf)
        ends = (infinite, -infinite, torch.where(wide.isnan(), 0.0, torch.nan))
        moved = tuple(torch.where(unknown, end, near) for end, near in zip(ends, (*moved, wide), strict=True))
    return tuple(x.to(value.dtype) for x in moved)


def _snapped(leaf: Bounded) -> torch.Tensor:
    value = _plain(leaf)
    return torch.where(value.to(torch.float64).abs() <= leaf.bound, torch.zeros_like(value), value)


def _may_touch(x: Any, y: Any) -> torch.Tensor:
    """The bound of x == y: 1 where the two may or may not be equal."""
    nothing = torch.zeros(())
    room: torch.Tensor = getattr(x, "bound", nothing) + getattr(y, "bound", nothing)
    x, y = (torch.as_tensor(t).as_subclass(torch.Tensor).to(torch.float64) for t in (x, y))
    touching: torch.Tensor = (room > 0) & ((x - y).abs() <= room)
    return touching.to(torch.float64)


def _either_branch(condition: Any, x: Any, y: Any) -> torch.Tensor:
    """The part of the bound of `where` for elements whose mask may flip: the bounds of both branches. The difference of
    the branches is not in it, because the moved mask gives that."""
    flips, *rooms = (getattr(t, "bound", torch.zeros((), dtype=torch.float64)) for t in (condition, x, y))
    return torch.where(flips > 0, rooms[0] + rooms[1], torch.zeros((), dtype=torch.float64))


def _softmax_moved(name: str, leaf: Bounded, value: torch.Tensor, dim: int) -> torch.Tensor:
    """How far a softmax moves. If all elements move alike it does not, so the worst case is one against the others."""
    furthest = leaf.bound + torch.amax(leaf.bound, dim, keepdim=True)
    return furthest if name == "log_softmax" else value.to(torch.float64) * torch.expm1(furthest)


def _moved(func: Any, args: Any, kwargs: Any, leaf: Bounded, value: torch.Tensor) -> torch.Tensor:
    """How far the result moves when `leaf` moves by its bound."""
    furthest = torch.zeros(value.shape, dtype=torch.float64)
    base = value.to(torch.float64)
    if func.__name__ in _SOFTMAXES:
        return _softmax_moved(func.__name__, leaf, value, (*args, *kwargs.values())[1])
    snapped = [_snapped(leaf)] if func.__name__ in _NEAR_ZERO else []
    for shifted in (*_shifts(leaf, func.__name__ in _NORMS), *snapped):
        moved_args, moved_kwargs = _with(shifted, leaf, (args, kwargs))
        try:
            moved = func(*moved_args, **moved_kwargs).to(torch.float64)
        except RuntimeError:  # an integer division by a number that may be zero
            return torch.full(value.shape, torch.inf, dtype=torch.float64)
        same = (moved == base) | (moved.isnan() & base.isnan())
        furthest = torch.maximum(
            furthest, torch.where(same, 0.0, (moved - base).abs().nan_to_num(torch.inf, posinf=torch.inf))
        )
    far = _WAVES.get(func.__name__)
    return furthest if far is None else torch.where(leaf.bound > far, torch.inf, furthest)


def _rounding(name: str, plain: Any, value: torch.Tensor, bound: torch.Tensor, eps: float) -> torch.Tensor:
    """The error that the function itself makes, from the size of the numbers that it may have rounded."""
    size = (value.to(torch.float64).abs() + bound).nan_to_num(0.0, posinf=0.0)
    flushed = FLUSHED if eps >= torch.finfo(torch.float32).eps else 1e-44
    if value.dtype in DTYPE_ULPS:
        return size * torch.finfo(value.dtype).eps * DTYPE_ULPS[value.dtype]
    if name in _SOFTMAXES:
        return _softmax_rounding(name, value, (*plain[0], *plain[1].values())[1], eps) + flushed
    if name in _SUMS:
        terms = next(item for item in plain[0] if isinstance(item, torch.Tensor))
        count = max(terms.numel() // max(value.numel(), 1), 1)
        total = size + 1.0
        if name in ("sum", "mean") and terms.is_floating_point():
            total = getattr(torch, name)(terms.abs(), *plain[0][1:], **plain[1])
        return total.to(torch.float64).nan_to_num(0.0, posinf=0.0) * (count + ULPS_PER_OPERATION) * eps
    if name == "prod":
        factors: int = plain[0][0].numel() // max(value.numel(), 1)
        return size * (factors + ULPS_PER_OPERATION) * eps + flushed
    return size * (0.0 if name in _EXACT else eps * ULPS_PER_OPERATION) + flushed * (name not in _EXACT)


def _softmax_rounding(name: str, value: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    """The error of exp(x - largest) / sum. The sum errs by its count of terms, the difference by its size, which the
    result's logarithm bounds. A relative error of the softmax is an absolute error of its logarithm."""
    size = value.to(torch.float64).abs()
    logarithm = (size if name == "log_softmax" else -torch.log(size)).nan_to_num(0.0, posinf=0.0)
    error = (value.shape[dim] + ULPS_PER_OPERATION * (1.0 + logarithm)) * eps
    return error if name == "log_softmax" else error * size.nan_to_num(0.0)


def _overflow(value: torch.Tensor, bound: torch.Tensor, eps: float) -> torch.Tensor:
    """Make the bound infinite beyond float32's range, where an evaluation in float64 says nothing about float32."""
    if eps < torch.finfo(torch.float32).eps or value.dtype != torch.float64:
        return bound
    return torch.where(value.isfinite() & (value.abs() > 1e38), torch.inf, bound)


def _singular(value: torch.Tensor, bound: torch.Tensor, culprit: Any) -> torch.Tensor:
    """Make the bound infinite near a singularity. The inverse of zero has the zero's sign, which is unknown; a negative
    number has a power only if the exponent is whole."""
    room = getattr(culprit, "bound", torch.zeros(()))
    near_zero = (room > 0) & (torch.as_tensor(culprit).as_subclass(torch.Tensor).abs() <= room)
    return torch.where(value.isinf() | (value.isnan() & (room > 0)) | near_zero, torch.inf, bound)


def bounded(x: Any, eps: float, bound: torch.Tensor | None = None) -> Any:
    """Return an operand in float64, exact unless there is a `bound`. Numbers, integers and masks keep their dtypes."""
    if not isinstance(x, torch.Tensor):
        return x
    value = x.to(torch.float64) if x.is_floating_point() else x
    return Bounded.of(value, torch.zeros(value.shape, dtype=torch.float64) if bound is None else bound, eps)


# --- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How an output compares: how many of its elements are wrong, how many could be judged, and the first wrong one."""

    wrong: int
    judged: int
    total: int
    detail: str = ""


def compare_exact(got: torch.Tensor, want: torch.Tensor) -> Verdict:
    """Compare for equality after storing `want` in the dtype of `got`. All NaNs are equal, and so are +0 and -0."""
    expected = store_reference(want, got.dtype)
    return _verdict(got, expected, _equal(got, expected), torch.ones(got.shape, dtype=torch.bool))


def gpu_room(dtype: torch.dtype) -> float:
    """The `room` for `compare_bounded` of an output that a GPU stored in `dtype`."""
    return NARROW_ROOM if is_narrow_float(dtype) else 0.0


def compare_bounded(got: torch.Tensor, want: torch.Tensor, room: float | None = None) -> Verdict:
    """Compare `got` with the lower and the upper end that the reference allows, both stored in `got`'s dtype.

    `room` moves each end outwards, relative to the value's size. If it is None, a GPU's output of 16 bits or of fp8 has
    `NARROW_ROOM`, and any other output none.
    """
    if room is None:
        room = gpu_room(got.dtype) if got.is_cuda else 0.0
    got = got.cpu()
    value, bound = _plain(want), getattr(want, "bound", torch.zeros(want.shape, dtype=torch.float64))
    if room:
        size = value.to(torch.float64).abs().nan_to_num(0.0, posinf=0.0)
        bound = bound + room * size.clamp(min=torch.finfo(got.dtype).tiny)
    if value.dtype == torch.bool or got.dtype == torch.bool:
        near_zero = torch.ones_like(value) if value.dtype == torch.bool else value.abs() <= bound
        return _verdict(got, value != 0, _equal(got, store_reference(value, got.dtype)), (bound == 0) | ~near_zero)
    low, high = value, value
    if value.dtype.is_floating_point:
        wide = value.to(torch.float64)
        low, high = torch.where(bound > 0, wide - bound, wide), torch.where(bound > 0, wide + bound, wide)
    if got.dtype == torch.float8_e8m0fnu:  # which has no sign
        sizes = low.abs(), high.abs()
        low, high = torch.where((low < 0) & (high > 0), 0, torch.minimum(*sizes)), torch.maximum(*sizes)
    stored = [store_reference(end, got.dtype) for end in (low, high)]
    ends = [end.to(torch.float64) for end in stored]
    here = got.to(torch.float64)
    right = ((ends[0] <= here) & (here <= ends[1])) | _equal(got, stored[0])
    known = torch.isfinite(bound) & ((bound == 0) | (value.is_floating_point() & torch.ones_like(right)))
    return _verdict(got, store_reference(value, got.dtype), right, known)


def reference_product(
    a: torch.Tensor, b: torch.Tensor, accumulator: torch.dtype, scales: Mapping[str, torch.Tensor] | None = None
) -> Bounded:
    """A @ B in float64 with its bound, which is 0 if every partial sum is a whole number that the accumulator can hold.

    `scales` are the scales of blocks of A and B.
    """
    on_tensor_cores = FP8_SUM_EPS if a.is_cuda and a.is_floating_point() and a.dtype.itemsize == 1 else 0.0
    terms = a.shape[-1] + 1
    if scales:
        a, b = dequantised(a, b, scales)
        terms += 2  # both scaled factors are rounded
    a, b = a.cpu().double(), b.cpu().double()
    product = a @ b
    if not accumulator.is_floating_point:
        return Bounded.of(product.to(accumulator), torch.zeros_like(product), _EPS)
    eps = torch.finfo(accumulator).eps
    room = a.abs() @ b.abs()
    exact = bool((room * (eps + on_tensor_cores) <= 1).all())
    whole = exact and bool((a == a.round()).all()) and bool((b == b.round()).all())
    bound = torch.zeros_like(room) if whole else room * (terms * eps + on_tensor_cores)
    return Bounded.of(product, bound, max(eps, _EPS) if accumulator != torch.float64 else eps)


_EPS = torch.finfo(torch.float32).eps


def wanted(args: Any, function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """The outputs of `args`, `GemmArguments`, in float64 with error bounds. `function` is the epilogue's reference.

    They are computed from the tensors as they are now: call it before a run whose outputs overwrite operands.
    """
    given = args.epilogue.parameters
    operands = {name: _exact(given[name]) for name in args.epilogue.parsed.parameters}
    before = {name: _exact(args.epilogue.tensors[name]) for name, _ in args.problem.accumulated}
    scales = given_scales(args.call.tensors)
    result = function(reference_product(args.A, args.B, args.accumulator_type, scales), **operands)
    results = zip(args.graph.outputs, result if isinstance(result, tuple) else (result,), strict=True)
    return tuple(
        value.reshape(before[output.name].shape) + before[output.name] if output.name in before else value
        for output, value in results
    )


def _exact(value: Any) -> Any:
    # Cloned, because an output may overwrite its operand.
    return bounded(value.detach().cpu().clone(), _EPS) if isinstance(value, torch.Tensor) else value


def verified(outputs: Mapping[str, torch.Tensor], wants: Iterable[torch.Tensor]) -> dict[str, Verdict]:
    """Compare each output with the wanted one. Raises `InternalError` if one differs."""
    verdicts = {}
    for (name, got), want in zip(outputs.items(), wants, strict=True):
        verdict = compare_bounded(got, want.reshape(got.shape))
        if verdict.wrong:
            raise fail("mismatch", None, name=name, wrong=verdict.wrong, total=verdict.total, detail=verdict.detail)
        verdicts[name] = verdict
    return verdicts


def _equal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype.itemsize == 1:
        x, y = (t.to(torch.float32) for t in (x, y))
    return (x == y) | ((x != x) & (y != y))


def _verdict(got: torch.Tensor, want: torch.Tensor, right: torch.Tensor, known: torch.Tensor) -> Verdict:
    wrong = known & ~right
    count = int(wrong.sum())
    detail = ""
    if count:
        place = tuple(wrong.nonzero()[0].tolist())
        detail = f"at {place}: {got[place].item()!r}, expected {want[place].item()!r}"
    return Verdict(count, int(known.sum()), known.numel(), detail)


def assert_close_to_reference(
    got: Mapping[str, torch.Tensor] | torch.Tensor, function: Callable[..., Any], accum: Bounded, **operands: Any
) -> None:
    """Assert that outputs are close to `function` (from `ef.reference`), run on float64 values with error bounds."""
    result = function(accum, **{name: bounded(x, accum.eps) for name, x in operands.items()})
    wants = result if isinstance(result, tuple) else (result,)
    outputs = got if isinstance(got, Mapping) else {"D": got}
    for (name, output), want in zip(outputs.items(), wants, strict=True):
        verdict = compare_bounded(output, want.reshape(output.shape))
        assert verdict.wrong == 0, f"{name}: {verdict.wrong} of {verdict.total} elements, {verdict.detail}"
