"""Which design is likely to be the fastest: a model of waves of tiles, with rates measured on one H200."""

from __future__ import annotations

from epifuse.problem import Problem
from epifuse.providers.cutedsl.budget import round_up
from epifuse.providers.cutedsl.program import Design

_MULTIPROCESSORS = 132  # of an H100 or H200
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


def estimate(design: Design, problem: Problem) -> float:
    """Estimated time in arbitrary units: waves of tiles, times the time of a tile, and the last epilogue."""
    e = problem.extents
    (m, n), (cm, cn) = design.tile, design.cluster
    blocks = -(-e["m"] // m), -(-e["n"] // n)
    tiles = e["l"] * round_up(blocks[0], cm) * round_up(blocks[1], cn)
    exposed = 0 if design.pingpong else _EPILOGUE_K
    k = e["k"] * problem.a.dtype.itemsize / 2
    rows = "several" if e["m"] > m else "one" if 2 * e["m"] > m else "few"
    area = max(m * n, _LEAST_AREA) if rows == "few" else m * n
    work = (k + exposed) * area / _RATE[design.tile, design.pingpong]
    tail = _EPILOGUE_K * area if design.pingpong else 0
    # The two tiles of a ping-pong pair share a multiprocessor, so its waves are of tiles as well.
    waves = -(-tiles // _MULTIPROCESSORS)
    alone = _FIRST_PAIR if design.pingpong and waves == 2 else 1.0
    return waves * work * alone * _CLUSTER_COST[design.cluster, rows] + tail


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
}
"""By cluster, and how many rows of tiles there are: one, or one with few rows in it. Sharing B pays where several rows
read it, sharing A where it is mostly what lies beyond it."""
