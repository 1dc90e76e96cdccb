"""Which design is likely to be the fastest: a model of waves of tiles, with rates of designs measured on one H200."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from epifuse.base.processors import Processor
from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.request.problem import Problem

_PART_K = 512
"""What a value of a part's sums costs their leader, in multiplications: 4 bytes, of some 25 a nanosecond that reach a
multiprocessor from others of its cluster (arXiv 2402.13499), beside 3000 multiplications."""
_HANDED_OVER = 3_000_000
"""What the first of them takes beside, in what `estimates` gives: a microsecond of 3e12 multiplications a second."""


class Parts(NamedTuple):
    """What the model knows of a design that splits K: in how many parts, what their sums take a tile, and the time of a
    byte of memory: parts are all read at once, and not faster than that."""

    number: int
    sums: int
    byte: float

    @staticmethod
    def of(design: Design, processor: Processor) -> Parts | None:
        """None where K is whole."""
        if design.split == 1:
            return None
        multiplications = processor.operations_a_second / (2 * processor.multiprocessors)
        sums = (design.split - 1) * _PART_K * design.tile[0] * design.tile[1]
        # Where A and B are exchanged, waves that are not full tell it already.
        return Parts(design.split, sums, 0.0 if design.swapped else multiplications / processor.bytes_a_second)


class Rated(NamedTuple):
    """What the model needs of a design whatever the extents.

    Rows of a tile; rows and CTAs along M, then columns and CTAs along N, of a cluster; CTAs at once; what an exposed
    epilogue adds to K; the rate; three losses, of a first pair, of rows that are exchanged and of registers that spill;
    what a wave that is not full takes at least of a full one's time, where each tile reads rows that no other does; by
    how many rows of tiles there are the area of a tile, the cost of the cluster and of the last epilogue; and what
    parts of K take.
    """

    rows: int
    down: int
    high: int
    across: int
    wide: int
    resident: int
    exposed: int
    rate: float
    pair: float
    exchange: float
    spilling: float
    least: float
    several: tuple[int, float, int]
    one: tuple[int, float, int]
    few: tuple[int, float, int]
    parts: Parts | None

    @staticmethod
    def of(design: Design, processor: Processor, *, shares_rows: bool, spills: bool) -> Rated:
        """`shares_rows` where values need whole rows, which the CTAs of a cluster share."""
        (m, n), (cm, cn), pingpong = design.tile, design.cluster, design.pingpong
        exposed, exchanges = tuned.EPILOGUE_K.value, shares_rows and cn > 1

        def among(rows: str, area: int) -> tuple[int, float, int]:
            return area, tuned.CLUSTER_COST.value[design.cluster, rows], exposed * area if pingpong else 0

        return Rated(
            m,
            m * cm,
            cm,
            design.columns * cn,
            cn,
            processor.at_once(design.ctas),
            0 if pingpong else exposed,
            tuned.RATES.value[design.tile, pingpong],
            tuned.FIRST_PAIR.value if pingpong and not design.swapped else 1.0,
            tuned.PAIRS_THAT_EXCHANGE.value if pingpong and exchanges else 1.0,
            tuned.SPILLING.value if spills else 1.0,
            tuned.LEAST_WAVE.value if design.swapped else 1.0,
            among("several", m * n),
            among("one", m * n),
            among("few", m * n if design.swapped else max(m * n, tuned.LEAST_AREA.value)),
            Parts.of(design, processor),
        )


def estimates(designs: Iterable[Rated], extents: Mapping[str, int], k: float) -> list[float]:
    """Estimated times in arbitrary units: waves of tiles, times the time of a tile, and the last epilogue.

    Where K is in parts, each takes a CTA, memory has to bring A and B meanwhile, and the sums of the parts follow. `k`
    are elements of 16 bits along K. Asked of every design for every problem.
    """
    batches, height, width = extents["l"], extents["m"], extents["n"]
    found = []
    for rated in designs:
        rows, down, high, across, wide, resident, exposed, rate, pair, exchange, spilling, least, *areas, parts = rated
        several, one, few = areas
        tiles = batches * -(-height // down) * high * -(-width // across) * wide
        own = k
        if parts is not None:
            tiles, own = tiles * parts.number, k / parts.number
        # The two tiles of a ping-pong pair share a multiprocessor, so its waves are of tiles as well.
        waves: float = -(-tiles // resident)
        if least < 1.0 and width <= across and tiles % resident:
            waves += max(least, tiles % resident / resident) - 1.0
        area, cluster, tail = several if height > rows else one if 2 * height > rows else few
        work = (own + exposed) * area / rate
        cost = waves * work * (pair if waves == 2 else 1.0) * exchange * cluster
        if parts is not None:
            read = 2 * k * batches * (height + width)
            cost = max(cost, read * parts.byte) + waves * parts.sums + _HANDED_OVER
        found.append((cost + tail) * spilling)
    return found


def band(problem: Problem) -> int:
    """Clusters along M in a raster band: where K is small it is outputs that count, which want longer lines."""
    return (tuned.SHORT_BAND if _k_bytes(problem) <= tuned.SHORT_K.value else tuned.BAND).value


def is_short(problem: Problem) -> bool:
    """Whether K is so short that an epilogue that reduces takes longer than the main loop of a tile."""
    return _k_bytes(problem) < tuned.SHORT_K.value


def is_long(problem: Problem) -> bool:
    """Whether K is so long that stages of A and B are worth more than room for what the epilogue reads and writes."""
    return _k_bytes(problem) >= tuned.LONG_K.value


def length_class(problem: Problem) -> tuple[int, bool, bool]:
    """How long K is, as far as kernels differ by it."""
    return band(problem), is_short(problem), is_long(problem)


def wide_k(problem: Problem) -> float:
    """Elements of 16 bits along K."""
    return _k_bytes(problem) / 2


def _k_bytes(problem: Problem) -> int:
    return problem.extents["k"] * problem.a.dtype.itemsize
