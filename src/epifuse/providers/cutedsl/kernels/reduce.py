"""Reductions on the device: how values are merged, and which partial results a warp writes for its tiles.

Sums are merged pairwise within a thread, and in the order of the tiles across the result: sums of floats in float32, of
integers and masks in int64. Maxima propagate NaN, as PyTorch's do. A logsumexp is a pair (largest value, sum of
exponentials relative to it), merged online.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl import partials, segments
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.kernels.fragment import ALL_LANES, Fragment
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.store_math import as_kind

INFINITY, NAN = float("inf"), float("nan")


class Pool(NamedTuple):
    """A number that stands for up to `most` arguments of one thread, and is cheap to merge. 0 stands for none.

    `lift` makes it of one argument, and `partial` makes a partial result of it.
    """

    most: int
    lift: Callable[[Any], Any]
    merge: Callable[[Any, Any], Any]
    partial: Callable[[Any], tuple]


class ReductionRule(NamedTuple):
    """One reduction on scalars. `lift` makes a partial result, a tuple, of one argument; `merge` merges two of them.

    `neutral` is an argument that changes nothing. `gather` returns the partial result of several arguments, if there is
    a cheaper way than to lift and merge each. If `placed`, an argument is a pair of a value and its place along the
    reduced axis.
    """

    neutral: float
    lift: Callable[[Any], Any]
    merge: Callable[[Any, Any], Any]
    gather: Callable[[list], Any] | None = None
    pool: Pool | None = None
    placed: bool = False


def _largest(x, y):
    return cute.arch.fmax(x, y, nan=True) if isinstance(x, Float32) else cutlass.max(x, y)


def _smallest(x, y):
    return cute.arch.fmin(x, y, nan=True) if isinstance(x, Float32) else cutlass.min(x, y)


def _by(function: Callable[[Any, Any], Any]) -> Callable[[tuple, tuple], tuple]:
    return lambda x, y: (function(x[0], y[0]),)


def _online(x: tuple, y: tuple) -> tuple:
    largest = _largest(x[0], y[0])
    # If the largest is infinite, do not subtract it: exp(inf - inf) would be NaN.
    shift = cutlass.select_(cute.arch.fmax(largest, -largest) < INFINITY, largest, Float32(0.0))
    return largest, x[1] * cute.math.exp(x[0] - shift) + y[1] * cute.math.exp(y[0] - shift)


def _online_of(xs: list) -> tuple:
    largest = fold(RULES["amax"], [(x,) for x in xs])[0]
    shift = cutlass.select_(cute.arch.fmax(largest, -largest) < INFINITY, largest, Float32(0.0))
    return largest, fold(RULES["sum"], [(cute.math.exp(x - shift),) for x in xs])[0]


def _first_largest(x: tuple, y: tuple) -> tuple:
    """Merge pairs (value, place). NaN is larger than any number, as for `argmax`. Of equal values the first wins."""
    unknown, others = x[0] != x[0], y[0] != y[0]
    equal = (x[0] == y[0]) | (unknown & others)
    is_first = (x[0] > y[0]) | (unknown & (y[0] == y[0])) | (equal & (x[1] < y[1]))
    return tuple(Float32(value) for value in _select(is_first, x, y))


def _exp_below_one(x):
    """exp(x) of x <= 0, as if x were rounded to float32 once more. Subnormal results are 0, which changes no sum.

    The error is up to 6e-8 |x|. If x is a sum, it has such an error already. To correct it takes three more
    instructions, where a binary cross-entropy has some eleven a value (kernel_variants.json#fewer-instructions).
    """
    return dm.ex2(x * dm.LOG2_E)


_ROUNDED = float(np.float32(dm.LOG2_E)) / dm.LOG2_E - 1.0


def _log_of_product(excess) -> tuple:
    """The sum of log1p(exp(x)), computed from `excess`: the product of all 1 + exp(x), minus one.

    `_exp_below_one` gives exp(x) to the power of 1 + `_ROUNDED`: a relative error of _ROUNDED * x, 1e-6 at x = -70.
    If all exp(x) are small, `excess` is their sum. Its logarithm, which is the largest x to within log(64), corrects
    this error.
    """
    logarithm = cute.arch.fmax(cute.math.log2(excess, fastmath=True), Float32(-200.0))  # for 0: inf * 0 would be NaN
    moved = cute.arch.fmin(logarithm, Float32(0.0)) * (_ROUNDED * dm.LN_2)
    return (cute.math.log1p(cute.math.fma(excess, -moved, excess)),)


_SUM = _by(lambda x, y: x + y)
_SQUARES = ReductionRule(0.0, lambda x: (x * x,), _SUM)
# The product of 1 + exp(x) <= 2 over 64 values is within 2^64. Minus one, it is as exact as its smallest term.
_PRODUCT = Pool(64, _exp_below_one, lambda p, q: cute.math.fma(p, q, p) + q, _log_of_product)
_LOG1P_EXP = ReductionRule(-INFINITY, lambda x: (cute.math.log1p(cute.math.exp(x)),), _SUM, pool=_PRODUCT)
_EXPONENTIALS = ReductionRule(-INFINITY, lambda x: (x, Float32(1.0)), _online, _online_of)
RULES: dict[str, ReductionRule] = {
    "sum": ReductionRule(0.0, lambda x: (x,), _SUM),
    "mean": ReductionRule(0.0, lambda x: (x,), _SUM),
    "prod": ReductionRule(1.0, lambda x: (x,), _by(lambda x, y: x * y)),
    "sum_of_squares": _SQUARES,
    "norm": _SQUARES,
    "amax": ReductionRule(-INFINITY, lambda x: (x,), _by(_largest)),
    "amin": ReductionRule(INFINITY, lambda x: (x,), _by(_smallest)),
    "absmax": ReductionRule(0.0, lambda x: (_largest(x, -x),), _by(_largest)),
    "any": ReductionRule(0.0, lambda x: (x,), _by(_largest)),
    "all": ReductionRule(1.0, lambda x: (x,), _by(_smallest)),
    "logsumexp": _EXPONENTIALS,
    "sum_of_exponentials": _EXPONENTIALS,
    "place_of_largest": ReductionRule(-INFINITY, lambda placed: placed, _first_largest, placed=True),
    "sum_log1p_exp": _LOG1P_EXP,
    "mean_log1p_exp": _LOG1P_EXP,
}


def fold(rule: ReductionRule | Pool, values: list) -> Any:
    """Merge partial results, or the numbers of a pool, pairwise."""
    while len(values) > 1:
        pairs = [rule.merge(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


def gather(rule: ReductionRule, xs: list) -> Any:
    """Return the partial result of several values of one thread."""
    return fold(rule, [rule.lift(x) for x in xs]) if rule.gather is None else rule.gather(xs)


def across(rule: ReductionRule, value: tuple, offsets: tuple[int, ...]) -> Any:
    """Merge a partial result over the lanes whose numbers differ in the bits `offsets`."""
    for offset in offsets:
        value = rule.merge(value, exchanged(value, offset))
    return value


def exchanged(value: tuple, offset: int) -> tuple:
    """The partial result of the lane whose number differs in this bit."""
    return tuple(
        joined(type(x), [cute.arch.shuffle_sync_bfly(word, offset=offset) for word in words(x)]) for x in value
    )


def words(x) -> list:
    """A number in 32-bit words, the low one first."""
    return [x.to(Int32), (x >> 32).to(Int32)] if isinstance(x, Int64) else [x]


def joined(held, parts: list) -> Any:
    """Return the number of type `held` that consists of these words."""
    return (Int64(parts[1]) << 32) | (Int64(parts[0]) & 0xFFFFFFFF) if held is Int64 else parts[0]


def halved(rule: ReductionRule, values: list, offset: int) -> list:
    """Merge values with those of the lane whose number differs in `offset`. The lower lane keeps the first half.

    A lane sends the half that it does not keep. For eight values and three bits these are seven exchanges a word; eight
    butterflies take 24.
    """
    high = (cute.arch.lane_idx() // offset) % 2 == 1
    half = len(values) // 2
    kept = [_select(high, values[half + i], values[i]) for i in range(half)]
    sent = [_select(high, values[i], values[half + i]) for i in range(half)]
    came = [exchanged(value, offset) for value in sent]
    return [rule.merge(mine, other) for mine, other in zip(kept, came, strict=True)]


def _select(condition, x: tuple, y: tuple) -> tuple:
    return tuple(cutlass.select_(condition, a, b) for a, b in zip(x, y, strict=True))


def argument(reduction: Any) -> Any:
    """A value that changes nothing when it is reduced."""
    value = RULES[reduction.name].neutral
    if reduction.kind != "float":
        limits = torch.iinfo(getattr(torch, reduction.kind))
        value = int(min(max(value, limits.min), limits.max))
    return HELD[reduction.kind](value)


def arguments(reduction: Any, fragment: Any, kind: str) -> list:
    """Return the values of a fragment, in the kind in which the reduction merges them."""
    if reduction.name in ("any", "all") and kind != "mask":
        fragment, kind = fragment != cute.full_like(fragment, 0), "mask"
    return list(dm.numbers(as_kind(fragment, kind, reduction.kind)))


def neutral(reduction: Any) -> Any:
    """A partial result that changes nothing."""
    value = argument(reduction)
    return (value, Float32(0.0)) if reduction.numbers > 1 else RULES[reduction.name].lift(value)


def as_words(reduction: Any, workspace: Any) -> Any:
    """Return the workspace as words of the reduction: float32, or else int32."""
    return workspace if reduction.kind == "float" else cute.recast_tensor(workspace, Int32)


def finished(node, values: tuple, shape):
    """Return a complete reduction as its kind's fragment. `values`: a fragment of each number. `shape`: (M, N, L)."""
    name, x = node.attr[0], values[0]
    if name in ("any", "all"):
        return x != 0.0
    if name in ("mean", "mean_log1p_exp"):
        gone = {factor.axis for factor in node.attr[1]}
        count = Float32(1.0)
        for axis, extent in zip("mnl", shape, strict=True):
            count = count * (Float32(extent) if axis in gone else Float32(1.0))
        count = Float32(segments.width(node)) if segments.width(node) else count
        return dm.divide(x, cute.full_like(x, count))
    if name == "norm":
        return dm.sqrt(x)
    if name == "logsumexp":
        shift = cute.where(abs(x) < INFINITY, x, cute.full_like(x, 0.0))
        return cute.where(x == INFINITY, x, cute.math.log(values[1]) + shift)
    if name == "sum_of_exponentials":  # of x - amax(x), which is NaN where the largest is infinite
        return cute.where(abs(x) < INFINITY, values[1], cute.full_like(x, NAN))
    if name == "place_of_largest":
        return values[1]
    return x


class Partials:
    """What the main kernel does for `reductions`: it holds partial results, merges them, and writes them."""

    def __init__(
        self, design: Design, program: Program, fragment: Fragment, reductions: tuple[partials.Reduction, ...]
    ) -> None:
        self.design, self.program, self.fragment, self.reductions = design, program, fragment, reductions
        self.rules = [RULES[reduction.name] for reduction in self.reductions]

    def carry(self):
        """Before the first tile: registers for what is carried from tile to tile, by number of the reduction."""
        carried = {}
        for number, reduction in enumerate(self.reductions):
            if partials.is_carried(reduction):
                values = neutral(reduction)
                carried[number] = cute.make_rmem_tensor(len(values), HELD[reduction.kind])
                for i, value in enumerate(values):
                    carried[number][i] = value
        return carried

    def begin(self, slots):
        """Return empty partial results of a tile: of each reduction a number, or one for each row, column or slot."""
        down = slots.division.down
        counts = {"": 1, "m": down * len(self.fragment.by_row), "n": len(self.fragment.by_column), "mn": slots.count}
        kinds = zip(self.reductions, self.rules, strict=True)
        return [Held(rule, neutral(reduction), counts[reduction.axis]) for reduction, rule in kinds]

    def add(self, held, found, spot, shape, slots):
        """Merge the values `found` of a subtile into `held`. `slots` are those of its block."""
        by_row, by_column = self.fragment.by_row, self.fragment.by_column
        known = {"": {0: range(len(spot.rows))}, "m": _numbered(by_row, spot.down), "n": _numbered(by_column, 0)}
        for reduction, kept in zip(self.reductions, held, strict=True):
            bounds = self._bounds(reduction.axis, spot.rows, spot.columns, shape)
            xs = self._values(reduction, found[reduction.source], bounds)
            inside = [places[0] < end for places, end, edge in bounds if edge == "subtiles"]
            own = (
                known[reduction.axis] if reduction.axis in known else slots.merged(spot, segments.width(reduction.node))
            )
            for slot, registers in own.items():
                kept.add(slot, [xs[register] for register in registers], inside)

    def leave_columns(self, held, columns, place, warp_part, given):
        """Called after the last rows of a column of subtiles: write its partial results to the workspace."""
        for reduction, rule, kept, base in self._with_bases(held, given.shape):
            if reduction.axis == "n":
                mine = [kept.take(slot) for slot in range(len(self.fragment.by_column))]
                lane, at, wanted = cute.arch.lane_idx(), columns[0], True
                for bit, left in self.fragment.merging_columns:
                    high = lane // bit % 2
                    if left < len(mine):
                        at = at + high * self.fragment.columns[left]
                        mine = halved(rule, mine, bit)
                    else:
                        wanted = wanted & (high == 0)
                        mine = [across(rule, value, (bit,)) for value in mine]
                for slot, value in enumerate(mine):
                    column = at + self.fragment.columns[slot]
                    self._put(given, base, reduction, value, warp_part, column, wanted, place.l, given.shape[1])

    def leave_carried(self, carried, part, given):
        """Called after the last tile: write one partial result a warp."""
        for number, (reduction, rule, _, base) in enumerate(self._with_bases(self.rules, given.shape)):
            if number in carried:
                value = across(rule, as_tuple(carried[number]), ALL_LANES)
                first = cute.arch.lane_idx() == 0
                self._put(given, base, reduction, value, part, Int32(0), first, Int32(0), Int32(1))

    def leave(self, held, carried, row_numbers, place, warp_part, given):
        """Called after a tile: write partial results of rows and numbers, and merge those that are carried."""
        lane, shape = cute.arch.lane_idx(), given.shape
        for number, (reduction, rule, kept, base) in enumerate(self._with_bases(held, shape)):
            if number in carried:
                for i, value in enumerate(rule.merge(as_tuple(carried[number]), kept.take(0))):
                    carried[number][i] = value
            elif reduction.axis == "m":
                first = self.fragment.rank(lane) == 0
                for slot, at in enumerate(row_numbers):
                    value = across(rule, kept.take(slot), self.fragment.along_row)
                    self._put(given, base, reduction, value, place.n, at, first, place.l, shape[0])
            elif reduction.axis == "":
                value = across(rule, kept.take(0), ALL_LANES)
                part = warp_part * partials.tiles_across(self.design, shape[1]) + place.n
                self._put(given, base, reduction, value, part, Int32(0), lane == 0, place.l, Int32(1))

    def _with_bases(self, held, shape):
        bases, base = [], Int64(0)
        for reduction in self.reductions:
            bases.append(base)
            base = base + plane_of(reduction, self.design, shape) * reduction.words
        return zip(self.reductions, self.rules, held, bases, strict=True)

    def _put(self, given, base, reduction, value, part, at, wanted, batch, limit):
        shape = given.shape
        kept, length = partials.parts(reduction, self.design, shape[0], shape[1])
        index = base + (Int64(batch) * kept + part) * length + at
        plane = plane_of(reduction, self.design, shape)
        workspace = as_words(reduction, given.workspace)
        for number, word in enumerate([word for x in value for word in words(x)]):
            _put_if(workspace, index + number * plane, word, wanted, at < limit)

    def _bounds(self, axis, rows, columns, shape):
        """For each reduced axis: the places of values along it, where the axis ends, and what lies beyond (`Edge`).

        Other axes need none: the result of a row or segment that lies outside is never stored.
        """
        m, n = zip((rows, columns), shape[:2], self.program.edges, strict=True)
        return {"m": [n], "n": [m], "": [m, n], "mn": []}[axis]

    def _values(self, reduction, fragment, bounds):
        """Return the values of a fragment as they are merged. Those outside the result are neutral."""
        xs = arguments(reduction, fragment, self.program.graph.types[reduction.source].kind)
        for places, end, edge in bounds:
            if edge == "values":
                xs = [cutlass.select_(at < end, x, argument(reduction)) for at, x in zip(places, xs, strict=True)]
        if not RULES[reduction.name].placed:
            return xs
        return [(x, at.to(Float32)) for x, at in zip(xs, bounds[0][0], strict=True)]


class Held:
    """Partial results in registers. Each is None until something is merged, which saves a merge with a neutral one."""

    def __init__(self, rule, neutral, count) -> None:
        self.rule, self.neutral = rule, neutral
        self.slots: list = [None] * count
        self.pooled: list = [(None, 0)] * count  # a number of the rule's pool, and for how many arguments it stands

    def add(self, slot, xs, inside):
        """Merge arguments, which count only if all of `inside` hold."""
        pool = self.rule.pool
        if pool is None:
            self._merge(slot, _where(inside, gather(self.rule, xs), self.neutral))
            return
        value = fold(pool, [pool.lift(x) for x in xs])
        (value,) = _where(inside, (value,), (Float32(0.0),))
        known, count = self.pooled[slot]
        if known is not None and count + len(xs) > pool.most:
            self._merge(slot, pool.partial(known))
            known, count = None, 0
        self.pooled[slot] = (value if known is None else pool.merge(known, value), count + len(xs))

    def take(self, slot):
        """Return the partial result of all that was added to a slot, and empty the slot."""
        known, _ = self.pooled[slot]
        if known is not None:
            self._merge(slot, self.rule.pool.partial(known))
        value, self.slots[slot], self.pooled[slot] = self.slots[slot], None, (None, 0)
        return value

    def _merge(self, slot, value):
        known = self.slots[slot]
        self.slots[slot] = value if known is None else self.rule.merge(known, value)


def _numbered(slots, repeat) -> dict:
    """The registers of each slot, in subtile number `repeat` from above."""
    return {repeat * len(slots) + i: registers for i, registers in enumerate(slots)}


def _where(conditions, value: tuple, otherwise: tuple) -> tuple:
    for condition in conditions:
        value = _select(condition, value, otherwise)
    return value


def as_tuple(values) -> tuple:
    return tuple(dm.numbers(values.load()))


def plane_of(reduction, design, shape):
    """The distance between the words of a partial result in the workspace, as a 64-bit number of elements."""
    kept, length = partials.parts(reduction, design, shape[0], shape[1])
    return Int64(kept) * length * partials.batches(reduction, shape[2])


@cute.jit
def _put_if(workspace: cute.Tensor, index, value, wanted, inside):
    if wanted and inside:
        workspace[index] = value
