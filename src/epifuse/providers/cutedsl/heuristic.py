"""Which design is likely to be the fastest: a model of waves of tiles, with rates of designs measured on one H200."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from epifuse.base.processors import Processor
from epifuse.providers.cutedsl.design import Design
from epifuse.request.problem import Problem

_RATE = {
    ((128, 128), True): 1.0,
    ((128, 192), True): 0.995,
    ((64, 256), True): 0.96,
    ((128, 256), False): 0.95,
    ((256, 128), False): 0.95,
    ((64, 128), True): 0.8,
    ((128, 64), True): 0.6,
    ((64, 64), True): 0.46,
}
"""Rate of a design beside the best, by tile and ping-pong: on one H200, plain products of bfloat16, K >= 1024."""
_FIRST_PAIR = 1.1
"""What a multiprocessor that gets one pair of ping-pong tiles loses beside one tile twice as large: less reuse, and
nothing to hide the pair's start. 1024 x 4096 x 4096 with gelu: 128 x 256 cooperative 46.8 us, 128 x 128 pairs 48.2."""
_EPILOGUE_K = 160
"""What an exposed epilogue costs, in elements of 16 bits along K of the main loop."""


_PAIRS_THAT_EXCHANGE = 1.08
"""What ping-pong loses where a cluster shares rows: each group waits for its like in all CTAs, and its pair for it.
Softmax of 16384 x 512 x 4096: 128 x 256 cooperative in pairs 96 us, 64 x 256 ping-pong 109, 128 x 128 in fours 114."""


SPILLING = 2.0
"""What a design that spills loses at least beside its estimate, where 64 x 128, whose rate is 0.8, is to be chosen."""


class Rated(NamedTuple):
    """What the model needs of a design whatever the extents.

    Rows of a tile; rows and CTAs along M, then columns and CTAs along N, of a cluster; CTAs at once; what an exposed
    epilogue adds to K; the rate; three losses, of a first pair, of rows that are exchanged and of registers that spill;
    and by how many rows of tiles there are the area of a tile, the cost of the cluster and of the last epilogue.
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
    several: tuple[int, float, int]
    one: tuple[int, float, int]
    few: tuple[int, float, int]

    @staticmethod
    def of(design: Design, processor: Processor, *, shares_rows: bool, spills: bool) -> Rated:
        """`shares_rows` where values need whole rows, which the CTAs of a cluster share."""
        (m, n), (cm, cn), pingpong = design.tile, design.cluster, design.pingpong

        def among(rows: str, area: int) -> tuple[int, float, int]:
            return area, _CLUSTER_COST[design.cluster, rows], _EPILOGUE_K * area if pingpong else 0

        return Rated(
            m,
            m * cm,
            cm,
            n * cn,
            cn,
            processor.at_once(cm * cn),
            0 if pingpong else _EPILOGUE_K,
            _RATE[design.tile, pingpong],
            _FIRST_PAIR if pingpong else 1.0,
            _PAIRS_THAT_EXCHANGE if pingpong and shares_rows and cn > 1 else 1.0,
            SPILLING if spills else 1.0,
            among("several", m * n),
            among("one", m * n),
            among("few", max(m * n, _LEAST_AREA)),
        )


def estimates(designs: Iterable[Rated], extents: Mapping[str, int], k: float) -> list[float]:
    """Estimated times in arbitrary units: waves of tiles, times the time of a tile, and the last epilogue.

    `k` are elements of 16 bits along K. Asked of every design for every problem.
    """
    batches, height, width = extents["l"], extents["m"], extents["n"]
    found = []
    for rows, down, high, across, wide, resident, exposed, rate, pair, exchange, spilling, several, one, few in designs:
        tiles = batches * -(-height // down) * high * -(-width // across) * wide
        # The two tiles of a ping-pong pair share a multiprocessor, so its waves are of tiles as well.
        waves = -(-tiles // resident)
        area, cluster, tail = several if height > rows else one if 2 * height > rows else few
        work = (k + exposed) * area / rate
        found.append((waves * work * (pair if waves == 2 else 1.0) * exchange * cluster + tail) * spilling)
    return found


def band(problem: Problem) -> int:
    """Clusters along M in a raster band.

    Eight share operands best: at 4096 x 4096 x 4096 four are 1.5 % slower. Where K is small it is outputs that count,
    and four leave longer lines of them: 22 of 23 products with K of 512 and 1024 are faster, by up to 2.5 %. Two are
    another 0.7 % faster on nine of these, and not tried on the rest (benchmarks/results/kernel_variants.json).
    """
    return 4 if _k_bytes(problem) <= _SHORT_K else 8


def is_short(problem: Problem) -> bool:
    """Whether K is so short that an epilogue that reduces takes longer than the main loop of a tile."""
    return _k_bytes(problem) < _SHORT_K


def is_long(problem: Problem) -> bool:
    """Whether K is so long that stages of A and B are worth more than room for what the epilogue reads and writes."""
    return _k_bytes(problem) >= _LONG_K


def length_class(problem: Problem) -> tuple[int, bool, bool]:
    """How long K is, as far as kernels differ by it."""
    return band(problem), is_short(problem), is_long(problem)


def wide_k(problem: Problem) -> float:
    """Elements of 16 bits along K."""
    return _k_bytes(problem) / 2


def _k_bytes(problem: Problem) -> int:
    return problem.extents["k"] * problem.a.dtype.itemsize


_SHORT_K, _LONG_K = 2048, 8192  # bytes
_LEAST_AREA = 64 * 128
"""Where most of a tile's rows are empty, memory is waited for, and a tile smaller than this gains nothing."""
_CLUSTER_COST = {
    ((2, 1), "several"): 0.97,
    ((1, 2), "several"): 0.98,
    ((1, 1), "several"): 1.0,
    ((2, 1), "one"): 1.1,
    ((1, 2), "one"): 1.02,
    ((1, 1), "one"): 1.0,
    ((2, 1), "few"): 1.1,
    ((1, 2), "few"): 0.95,
    ((1, 1), "few"): 1.0,
    **{((1, 4), rows): 1.06 for rows in ("several", "one", "few")},
    **{((1, 8), rows): 0.96 for rows in ("several", "one", "few")},
}
"""By cluster, and how many rows of tiles there are: one, or one with few rows in it. Sharing B pays where several rows
read it, sharing A where it is mostly what lies beyond it. Of four and eight: softmax of 16384 x 1024 x 4096, 128 x 256
in fours 221 us, 128 x 128 ping-pong in eights 199."""
