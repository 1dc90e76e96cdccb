"""How long a product and what is around it take, fused and apart, as the rates of the device predict.

On a GPU a fused kernel overlaps the product, memory and arithmetic, but for the arithmetic of the last tiles; where a
row is spread over the CTAs of a cluster, which wait for each other, the product overlaps with nothing. cuBLAS overlaps
the product and memory. Inductor's loops take as long as their bytes or as their instructions, whichever is longer.

The constants are fitted to 240 drawn sites on two H200 (benchmarks/results/sites.json and sites_second.json). docs/
pytorch.md tells how well they do on sites that they were not fitted to.
"""

from __future__ import annotations

from math import ceil, hypot, prod
from typing import NamedTuple

from epifuse.base.processors import Processor
from epifuse.base.target import Target
from epifuse.frontend import activation_body
from epifuse.ir import Node
from epifuse.passes.assign_stages import shares_rows
from epifuse.plan import Plan
from epifuse.providers.cutedsl import costs, tuned
from epifuse.providers.cutedsl.inputs import PARTS, is_full, time_of_one
from epifuse.pytorch.cone import Cone, tensors_of
from epifuse.pytorch.payoff import Moved, moved


class Extents(NamedTuple):
    """Of a product, and of the tiles in which a kernel computes it; `k` in elements of 16 bits."""

    batches: int
    m: int
    n: int
    k: float
    tile: tuple[int, int]

    @property
    def operations(self) -> float:
        """On values of 16 bits."""
        return 2.0 * self.batches * self.m * self.n * self.k

    def tiles(self, tile: tuple[int, int]) -> int:
        """How many of a size there are."""
        return self.batches * ceil(self.m / tile[0]) * ceil(self.n / tile[1])


class Site(NamedTuple):
    """What the prediction depends on.

    `target` is the device, `factors` are the bytes of A and B, `work` instructions of the epilogue, and `cost`
    that of the plan: multiply-adds of 16-bit values on one multiprocessor. With `waits`, values need whole rows, and a
    row is in several tiles. With `full`, float32 is multiplied in full.
    """

    target: Target
    extents: Extents
    factors: int
    moved: Moved
    work: float
    cost: float
    waits: bool = False
    full: bool = False


class Prediction(NamedTuple):
    """Seconds of one kernel, and of the product and the loops in its place, but for the start of the first and for what
    loops move either way."""

    fused: float
    apart: float

    @property
    def gain(self) -> float:
        """Seconds that fusing saves; negative where it loses."""
        return self.apart - self.fused


def site_of(cone: Cone, plan: Plan) -> Site:
    """What the prediction for `cone` depends on."""
    a, b = (tensors_of(node)[0] for node in cone.factors)
    factors = a.numel() * a.element_size() + b.numel() * b.element_size()
    sizes, allocation = plan.problem.extents, plan.allocation
    full = plan.problem.target.device == "cuda" and is_full(plan.problem)
    each = time_of_one(plan.problem) if full else a.element_size() / 2
    extents = Extents(sizes["l"], sizes["m"], sizes["n"], sizes["k"] * each, allocation.tile)
    waits = "row" in plan.stages and shares_rows(plan.graph) and sizes["n"] > allocation.tile[1]
    # `predicted` adds the time of reading A and B itself, with what the epilogue reads and writes.
    cost = allocation.cost if allocation.estimate is None else allocation.estimate().without_memory
    moves = moved(cone, plan.problem.target)
    return Site(plan.problem.target, extents, factors, moves, _work(plan), cost, waits, full)


def predicted(site: Site) -> Prediction:
    """What the rates of the site's device give."""
    return (_on_gpu if site.target.device == "cuda" else _on_cpu)(site, site.target.processor)


def seconds_gained(site: Site) -> float:
    """The predicted time that fusing saves; negative where it loses."""
    return predicted(site).gain


_CPU_CALL = 20e-6
"""What a call of ours costs the host more than one of MKL's: the dispatcher's way through Python (12 us), and the panel
kernel's operations. Assumed, not fitted."""


def _on_cpu(site: Site, rates: Processor) -> Prediction:
    product = site.extents.operations / rates.operations_a_second
    apart, fused = _bytes(site)
    return Prediction(product + fused / rates.bytes_a_second + _CPU_CALL, product + apart / rates.bytes_a_second)


def _bytes(site: Site) -> tuple[int, int]:
    """All that moves apart, and fused."""
    parts = site.moved
    apart = site.factors + parts.product + parts.loops_apart + parts.sums
    return apart, site.factors + parts.operands + parts.outputs + parts.loops_fused


_KERNEL = 2e-6
"""Seconds from one kernel to the next."""
_REACHED = 0.85
"""Of the memory's rate, by a fused kernel. Loops reach all of it, as the L2 cache still has some of what they read."""
_LIBRARY_REACHED = 0.74
"""Of the memory's rate, by cuBLAS. With it the time of half of the 240 products is within 4 % of the one measured."""
_BY_LANES = 0.84
"""Of the multiply-adds of all lanes, by cuBLAS's float32 products: 48 to 49 TFLOP/s (full_float32_h100.json)."""
_OVERLAP = 1.65
"""The exponent of the norm that three overlapping times have together: 1 where they follow each other, 2 a hypotenuse.
The two files alone give 1.6 and 1.8."""
_EXPOSED = 0.7
"""Of what the last tile computes, what no product hides. The two files alone give 0.4 and 1.0."""
_PLANNED = 0.95
"""Of the time that the plan's cost gives at the rate of large products."""
_IDLE = 0.38
"""How much idle multiprocessors speed the others up, as all share the power limit and the L2 cache: the weight of the
product's own time in a geometric mean with the plan's. It is 0 where idle ones help nothing, and 1 where they cost
nothing. The two files alone give 0.37 and 0.36."""


def _on_gpu(site: Site, rates: Processor) -> Prediction:
    parts, extents, memory = site.moved, site.extents, _REACHED * rates.bytes_a_second
    product = extents.operations / rates.operations_a_second
    by_lanes = extents.operations / (2 * PARTS * 2 * _BY_LANES * rates.instructions_a_second)
    library = by_lanes if site.full else max(product, _SPLIT * _of_tiles(extents, rates))
    alone = hypot(library, (site.factors + parts.product) / (_LIBRARY_REACHED * rates.bytes_a_second))
    loops = max(parts.loops_apart / rates.bytes_a_second, parts.instructions / rates.instructions_a_second)
    apart = alone + loops + parts.sums / rates.bytes_a_second + parts.kernels * _KERNEL
    planned = 2 * site.cost * rates.multiprocessors / rates.operations_a_second
    multiplying = _PLANNED * planned ** (1 - _IDLE) * product**_IDLE
    moving = (site.factors + _AGAIN * _read_again(extents, rates) + parts.operands + parts.outputs) / memory
    computing = site.work / rates.instructions_a_second
    own = multiplying + _norm(moving, computing) if site.waits else _norm(multiplying, moving, computing)
    last = computing / max(1.0, extents.tiles(extents.tile) / rates.multiprocessors)
    return Prediction(own + _EXPOSED * last + parts.loops_fused / rates.bytes_a_second, apart)


def _norm(*seconds: float) -> float:
    return float(sum(each**_OVERLAP for each in seconds) ** (1 / _OVERLAP))


_KEPT = 0.572
"""Of the L2 cache, that operands have: some of it holds things twice."""
_AGAIN = 1.4
"""How much what is read again weighs beside what is read once. The two files alone give 1.4 and 1.6."""
_BAND = 16
"""Tiles along M that are worked on side by side: eight clusters of two."""


def _read_again(extents: Extents, rates: Processor) -> float:
    """Bytes of A and B that leave the L2 cache before all tiles that need them are done.

    Tiles are worked on in bands of rows. While a band of A is kept, B is read once a band; where K is too long for
    that, each wave of tiles reads its rows and columns.
    """
    batches, m, n, k, (high, wide) = extents
    if batches > 1:
        return 0.0
    rows = min(m, _BAND * high)
    band, b, kept = 2 * rows * k, 2 * n * k, _KEPT * rates.l2
    if band <= kept:
        return (ceil(m / rows) - 1) * b if b + band > kept else 0.0
    wave = rates.multiprocessors * high * wide
    columns = min(n, wave / rows)
    return max(0.0, max(1.0, m * n / wave) * 2 * (rows + columns) * k - 2 * (m + n) * k)


_SPLIT = 0.7
"""Of the time that whole waves of tiles take by the rate of large products. The two files alone give 0.72 and 0.66."""
_RATES = {tile: rate for (tile, _), rate in tuned.RATES.value.items()}
"""Of tiles that cuBLAS may choose, beside the best: those of our own kernels."""
_SPLITS = (1, 2, 3, 4, 5, 6, 8)
_SHORTEST = 512
"""Elements of a part of K."""


def _of_tiles(extents: Extents, rates: Processor) -> float:
    """Seconds of cuBLAS's product in whole waves of the best tiles, with K split where there are few of them; the parts
    are written and read in float32."""
    each, k = rates.operations_a_second / rates.multiprocessors, extents.k
    best = float("inf")
    for tile, rate in _RATES.items():
        tiles = extents.tiles(tile)
        for split in _SPLITS:
            if split > 1 and (k < split * _SHORTEST or split * tiles > rates.multiprocessors):
                break
            waves = ceil(split * tiles / rates.multiprocessors)
            merged = 8 * split * extents.batches * extents.m * extents.n if split > 1 else 0
            best = min(best, waves * 2 * prod(tile) * k / (split * rate * each) + merged / rates.bytes_a_second)
    return best


def _work(plan: Plan) -> float:
    graph, extents = plan.graph, plan.problem.extents
    total = 0.0
    for node in graph.nodes:
        spread = graph.types[node.args[0] if node.op == "reduce" else node]
        total += _instructions(node) * prod(factor.size(extents) for factor in spread.factors)
    return total


def _instructions(node: Node) -> int:
    """Of one value: what has no row is made of what has, or is gone from the lowered graph."""
    name = costs.name_of(node)
    if name in costs.COSTS:
        return costs.COSTS[name].instructions
    return sum(map(_instructions, activation_body(name).nodes)) if node.op == "call" else 0
