"""Which design is likely to be the fastest: a model of waves of tiles, and of what L2 and memory send to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from epifuse.base.processors import Processor
from epifuse.plan import Estimate
from epifuse.providers.cutedsl import code, multistage, tensor_memory, tuned
from epifuse.providers.cutedsl.design import WGMMA, Design
from epifuse.providers.cutedsl.inputs import LINE, is_shared, itemsize
from epifuse.providers.cutedsl.length import k_in_halfwords
from epifuse.request.problem import Problem, TensorInfo


class Parts(NamedTuple):
    """What the model knows of a design that splits K: the number of parts, and the time that their sums take a tile."""

    number: int
    sums: int

    @staticmethod
    def of(design: Design) -> Parts | None:
        """None if K is not split."""
        if design.split == 1:
            return None
        each = (design.split - 1) * tuned.SUM_READ.value + tuned.SUM_WRITTEN.value
        return Parts(design.split, each * design.tile[0] * design.tile[1])


class Rewritten(NamedTuple):
    """What the model knows of rewriting: bytes read and written of A and of B for 16 bits of K, and how many parts."""

    of_a: int
    of_b: int
    parts: int

    @staticmethod
    def of(design: Design) -> Rewritten | None:
        """None if neither A nor B is rewritten."""
        how = design.rewritten
        if how is None:
            return None
        written = 2 * how.parts
        read = 2 if how.narrow is None else 1
        return Rewritten((2 + written) * how.of_a, (read + written) * how.of_b, how.parts)


class Rated(NamedTuple):
    """What the model needs of a design whatever the extents. Times are in the unit of `Terms`.

    - `down`, `across`: rows and columns of a cluster; `merged`: for A and for B, how many neighbouring clusters, which
      read the same part, L2 sends it to at once; 1 if it sends the part to each.
    - `ctas`: CTAs of a cluster, for all parts of K; `resident`: CTAs that run at once.
    - `byte`, `byte_of_l2`: the time in which memory moves a byte, and in which L2 sends one.
    - `exposed_k`: the time of an epilogue's loads and stores that no other tile hides, in elements along K.
    - `exposed_epilogue`: the time in which a tile's epilogue computes, and moves data without TMA, if no other tile
      hides it. `hidden_epilogue`: the same if another tile hides it, so that it only follows the last tile.
    - `tile`: the time of a tile for each element along K.
    - `spilling`: the factor by which registers that spill slow the kernel down; 1 where none do.
    - `launching`: what the launch of clusters and waiting for code take in addition; `overlapped`: what a launch saves
      because it begins while the one before it ends.
    - `swapped`: whether A and B are exchanged, and `for_few_rows`: whether for few rows.
    - `parts`: None where K is not split; `rewritten`: None where no first kernel writes A and B anew.
    """

    down: int
    across: int
    merged: tuple[int, int]
    ctas: int
    resident: int
    byte: float
    byte_of_l2: float
    exposed_k: int
    exposed_epilogue: float
    hidden_epilogue: float
    tile: float
    spilling: float
    launching: float
    overlapped: float
    swapped: bool
    for_few_rows: bool
    parts: Parts | None
    rewritten: Rewritten | None

    @staticmethod
    def of(
        design: Design, processor: Processor, instructions: int, *, moving: float, shares_rows: bool, spills: bool
    ) -> Rated:
        """`instructions` are those that compute one value, and `moving` those that load and store it without TMA.
        `shares_rows`: values need whole rows, which the CTAs of a cluster share."""
        (m, n), second = design.tile, processor.multiplications_a_second
        tile = m * n * design.abreast / _rate(design) * (_exchanging(design) if shares_rows else 1.0)
        if design.converts:
            tile = max(tile, tuned.CONVERTED.value[design.sharing] * m)
        is_launched = design.ctas > 1 and not design.in_pairs  # measured on Hopper
        launching = tuned.CLUSTER_LAUNCH.value * second if is_launched else 0.0
        computing = going = 0.0  # measured where each CTA has its own rows, on Hopper
        if not (shares_rows or design.is_simple):
            each = processor.operations_a_second / (2 * processor.instructions_a_second)  # its time in multiplications
            computing, going = (count * m * design.columns * each for count in (instructions, moving))
            launching += second * code.waited_for(instructions, design)
        return Rated(
            *design.step,
            _merged(design),
            design.ctas * design.split,
            processor.at_once(design.ctas),
            second / (tuned.BANDWIDTH.value * processor.bytes_a_second),
            tuned.L2_EXPOSED.value * second / processor.l2_bytes_a_second,
            0 if design.pingpong else tuned.EXPOSED_K.value,
            0.0 if design.pingpong else computing + going,
            tuned.BY_ONE_GROUP.value * computing + going if design.pingpong else 0.0,
            tile,
            tuned.SPILLING.value if spills else 1.0,
            launching,
            tuned.NEXT_LAUNCH.value * second if design.for_few_rows and design.rewritten is None else 0.0,
            design.swapped,
            design.for_few_rows,
            Parts.of(design),
            Rewritten.of(design),
        )


def _merged(design: Design) -> tuple[int, int]:
    """The field `merged` of `Rated`. What CTAs of a cluster share is sent to each cluster. For all else see `raster`:
    a group of multiprocessors has eight neighbouring clusters of two CTAs, or 8 x 2 clusters of one."""
    if design.instruction != WGMMA or min(design.cluster) > 1:
        return 1, 1
    beside = _GROUP // design.ctas
    if design.ctas == 1:
        return beside // 8, beside // 2
    return (beside, 1) if design.cluster[0] > 1 else (1, beside)


_GROUP = 16
"""Multiprocessors of a group."""


def _rate(design: Design) -> float:
    """How fast a tile of the design is multiplied, as a part of the processor's `operations_a_second`."""
    if design.by_warps:
        return multistage.rate(design)
    if design.in_tensor_memory:
        return tensor_memory.rate(design)
    tile = design.exchanged_sides.tile if design.swapped else design.tile
    promoted = tuned.PROMOTED_RATE.value[design.pingpong, any(design.scaled)] if design.promoted else 1.0
    if design.for_few_rows:  # reading B takes the time, however sums are added up (few_columns_h200.json)
        promoted = promoted if any(design.scaled) or design.rewritten else 1.0
        return tuned.FEW_ROWS_RATES.value[tile[0]] * promoted
    return tuned.RATES.value[tile, design.pingpong] * promoted


def _exchanging(design: Design) -> float:
    """The factor by which a tile takes longer because the CTAs of a cluster share rows."""
    across = design.cluster[1]
    pairs = tuned.PAIRS_THAT_EXCHANGE.value if design.pingpong and across > 1 else 1.0
    return pairs * (tuned.CLUSTERS_OF_FOUR.value if across == 4 else 1.0)


class Terms(NamedTuple):
    """The model's times of a launch. Their unit is the time of one multiplication of a multiprocessor.

    `cost` is the whole time. Multiplying, L2 and memory count as the root of the sum of their squares, because the
    three overlap, and the longest decides if the others are much shorter. All other times are added.
    """

    cost: float
    splitting: float
    multiplying: float
    reading: float
    of_l2: float
    sums: float
    spilling: float
    besides: float

    def text(self, processor: Processor) -> str:
        """The times in microseconds as text, with the GPU: plans for another machine use what is known of an H100."""
        named = {
            "rewriting A and B": self.splitting,
            "multiplying": self.multiplying,
            "memory": self.reading,
            "L2": self.of_l2,
            "sums of parts of K": self.sums,
            "launch and last epilogue": self.besides,
        }
        parts = [f"{name} {processor.microseconds(term):.1f}" for name, term in named.items() if term]
        spilling = f"; {self.spilling:g} times that, because registers spill" if self.spilling > 1.0 else ""
        whole = f"{processor.microseconds(self.cost):.1f} us on {processor.name} by the model"
        return f"{whole} ({', '.join(parts)}{spilling})"


class Priced(NamedTuple):
    """What the model needs of a design at a problem of which only the number of rows of the result is open.

    `rows` are those of a cluster, and `abreast` the CTAs of one row of clusters, for all columns, batches and parts of
    K. `resident` CTAs run at once, and a wave of them takes the time `wave`. With R rows of the result there are
    C = ceil(R / rows) rows of clusters and W = ceil(C * abreast / resident) waves, and `terms` estimates these times:

        L2                 sent * C + together * ceil(C / merged)
        memory             moved + moved_a_row * R + moved_again * C
        rewriting A and B  rewritten + rewritten_a_row * R
        sums of parts of K summed * W + handed_over

    `spilling` is the factor for registers that spill, and `besides` what is added to all that, less `overlapped` where
    all CTAs take at most half of the multiprocessors.
    """

    rows: int
    abreast: int
    resident: int
    wave: float
    sent: float
    merged: int
    together: float
    moved: float
    moved_a_row: float
    moved_again: float
    rewritten: float
    rewritten_a_row: float
    summed: float
    handed_over: float
    spilling: float
    besides: float
    overlapped: float


class _Lying(NamedTuple):
    """The problem as a design reads it: its extents, and elements along K (`k`). For A and for B: how many matrices are
    in memory (`copies`), the bytes of a row of A or a column of B, the time in which L2 sends it, and the time that
    rewriting it takes."""

    extents: Mapping[str, int]
    copies: tuple[int, int]
    bytes: tuple[float, float]
    of_l2: tuple[float, float]
    rewritten: tuple[float, float]
    k: float

    @staticmethod
    def of(one: Rated, problem: Problem) -> _Lying:
        k, copies, shares = k_in_halfwords(problem), _copies(problem), _shares(problem)
        (of_a, of_b), lines, rewritten = copies, (_lines(problem.a), _lines(problem.b)), (0.0, 0.0)
        if (how := one.rewritten) is not None:  # read, and written
            rewritten = k * how.of_a * of_a * one.byte, k * how.of_b * of_b * one.byte
            k, shares = how.parts * k, (1.0, 1.0)
            lines = 1.0 if how.of_a else lines[0], 1.0 if how.of_b else lines[1]
        a, b = (2 * k * share for share in shares)
        return _Lying(
            problem.extents,
            copies,
            (a, b),
            (a * lines[0] * one.byte_of_l2, b * lines[1] * one.byte_of_l2),
            rewritten,
            k,
        )


def priced(designs: Iterable[Rated], problem: Problem) -> list[Priced]:
    """Return what the model needs of each design at a problem, for any number of rows.

    L2 sends A and B to each cluster, whose CTAs share what the cluster reads, or to several clusters at once if their
    requests are merged. Memory sends A and B once.
    """
    found = []
    for one in designs:
        lying = _Lying.of(one, problem)
        price = _exchanged if one.swapped else _as_it_is
        rows, beside, l2, memory, rewriting = price(one, lying)
        number, summed, handed_over = (1, 0, 0) if one.parts is None else (*one.parts, tuned.HANDED_OVER.value)
        wave = (lying.k / number + one.exposed_k) * one.tile + one.exposed_epilogue
        # While two tiles pass, a group multiplies and has its epilogue.
        wave = max(wave, (wave + one.hidden_epilogue) / 2)
        moved, moved_a_row, moved_again = memory
        found.append(Priced(
            rows, beside * one.ctas, one.resident, wave, *l2, moved * one.byte, moved_a_row * one.byte,
            moved_again * one.byte, *rewriting, summed, handed_over, one.spilling, one.launching + one.hidden_epilogue,
            one.overlapped,
        ))  # fmt: skip
    return found


_Prices = tuple[int, int, tuple[float, int, float], tuple[float, float, float], tuple[float, float]]
"""Rows of a cluster, clusters beside each other with these rows, and fields of `Priced` for L2, memory, rewriting."""


def _as_it_is(one: Rated, lying: _Lying) -> _Prices:
    extents, (of_a, of_b), (a, b), row_times, (a_written, b_written), _ = lying
    batches, width = extents["l"], extents["n"]
    columns = -(-width // one.across)
    sent = _sent(row_times, (one.down, one.across), columns, one.merged)
    moved = of_b * b * width, of_a * a + 2 * batches * width, 0.0  # D, of 16 bits
    return one.down, batches * columns, _times(batches, sent), moved, (b_written * width, a_written)


def _exchanged(one: Rated, lying: _Lying) -> _Prices:
    """`_as_it_is` for a design that exchanges A and B: the rows of the result are N of the problem. In a design for few
    rows, each row of clusters reads the long operand again."""
    extents, (of_a, of_b), (a, b), row_times, (a_written, b_written), _ = lying
    batches, height = extents["l"], extents["m"]
    rows = -(-height // one.down)
    sent = _sent(row_times[::-1], (one.across, one.down), rows, one.merged[::-1])
    long, by_row = of_a * a * height, of_b * b + 2 * batches * height
    moved = (0.0, by_row, long) if one.for_few_rows else (long, by_row, 0.0)
    return one.across, batches * rows, _times(batches, sent), moved, (a_written * height, b_written)


def _sent(
    row_times: tuple[float, float], sides: tuple[int, int], beside: int, merged: tuple[int, int]
) -> tuple[float, int, float]:
    """Return `sent`, `merged` and `together` of `Priced` for one batch. The first of each pair is for the matrix of the
    rows, the second for the matrix of which the `beside` clusters of one row of clusters read different parts.
    `row_times` are the times of one row or column of a matrix, and `sides` how many of these a cluster reads."""
    part, (of_rows, of_others) = tuned.MERGED.value, merged
    each, all_ = row_times[0] * sides[0], row_times[1] * sides[1] * beside
    each *= beside if of_rows == 1 else (1 - part) * beside + part * -(-beside // of_rows)
    alone = 1.0 if of_others == 1 else 1 - part
    return each + alone * all_, of_others, (1 - alone) * all_


def _times(batches: int, sent: tuple[float, int, float]) -> tuple[float, int, float]:
    each, merged, together = sent
    return batches * each, merged, batches * together


def terms(designs: Iterable[Priced], rows: int) -> Iterator[tuple[float, ...]]:
    """Yield the fields of `Terms` for each design, with `rows` rows of the result.

    Multiplying takes whole waves of tiles, less a part of one, because a multiprocessor begins its next tile without
    waiting for the others. This runs for every design and every new M, so it makes no calls.
    """
    hidden = tuned.WAVE_HIDDEN.value
    for (
        tile, abreast, resident, wave, sent, merged, together, moved, moved_a_row, moved_again, rewritten,
        rewritten_a_row, summed, handed_over, spilling, besides, overlapped,
    ) in designs:  # fmt: skip
        clusters = -(-rows // tile)
        # The two tiles of a ping-pong pair share a multiprocessor, so its waves are of tiles as well.
        waves = -(-abreast * clusters // resident)
        multiplying = (waves - hidden) * wave
        of_l2 = sent * clusters + together * -(-clusters // merged)
        reading = moved + moved_a_row * rows + moved_again * clusters
        sums, splitting = waves * summed + handed_over, rewritten + rewritten_a_row * rows
        rest = (multiplying * multiplying + of_l2 * of_l2 + reading * reading) ** 0.5  # math.sqrt would take longer
        if overlapped and 2 * abreast * clusters <= resident:
            besides -= min(overlapped, rest / 2)
        cost = splitting + (rest + sums) * spilling + besides
        yield cost, splitting, multiplying, reading, of_l2, sums, spilling, besides


def costs(designs: Iterable[Priced], rows: int) -> list[float]:
    """The model's `cost` of each design, with `rows` rows of the result."""
    return [found[0] for found in terms(designs, rows)]


def rows_of(problem: Problem, *, swapped: bool) -> int:
    """Rows of the result of one batch. If A and B are exchanged, they are N of the problem."""
    return problem.extents["n" if swapped else "m"]


def cost(rated: Rated, problem: Problem) -> float:
    """The model's `cost` of one design."""
    return costs(priced((rated,), problem), rows_of(problem, swapped=rated.swapped))[0]


def estimate(rated: Rated, problem: Problem) -> Estimate:
    """The model's estimate for one design, as a plan holds it."""
    rows = rows_of(problem, swapped=rated.swapped)
    idle = rated._replace(exposed_epilogue=0.0, hidden_epilogue=0.0)
    all_, bare = (Terms(*found) for found in terms(priced((rated, idle), problem), rows))
    multiplying = (all_.multiplying + all_.sums) * all_.spilling
    shown = all_.splitting + multiplying + all_.besides - bare.multiplying
    return Estimate(all_.text(problem.target.processor), bare.multiplying, shown)


def _shares(problem: Problem) -> tuple[float, float]:
    """For A and for B, the bytes of a number in memory over the bytes of a number that is multiplied."""
    wide = itemsize(problem)
    return problem.a.dtype.itemsize / wide, problem.b.dtype.itemsize / wide


def _lines(info: TensorInfo) -> float:
    """The time that L2 takes to send one row of a stage, as a multiple of the time of one line."""
    # A stage takes 128 bytes of a row, which are one line, or parts of two where rows begin within one. A single row
    # has no stride but that of its elements.
    pairs = zip(info.strides[-2:], info.shape[-2:], strict=True)
    row = max(stride if extent > 1 and stride > 1 else 0 for stride, extent in pairs) * info.dtype.itemsize
    return tuned.TWO_LINES.value if row % LINE else 1.0


def _copies(problem: Problem) -> tuple[int, int]:
    """How many batches of A and of B there are in memory."""
    a, b = (1 if is_shared(info) else info.shape[0] for info in (problem.a, problem.b))
    return a, b
