"""A prediction, from the rates of the device, of how long a product and what is around it take, fused and apart.

On a GPU a fused kernel overlaps multiplying with memory traffic, except for what the epilogue of the last tiles reads.
What its instructions add comes from the model by which kernel designs are chosen. If a row is spread over the CTAs of a
cluster, these wait for each other: then nothing overlaps, and operands arrive at half of memory's rate, by a fit.
cuBLAS overlaps multiplying with memory traffic, but not the end of a tile with the start of the next one. Inductor's
loops take as long as their bytes or as their instructions, whichever is longer.

All constants except `_BY_LANES` and those of a CPU are fitted to sites that were drawn at random and measured on four
H100 and four H200. docs/pytorch.md has the data and the errors.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from epifuse.base.processors import BETWEEN_KERNELS, Processor
from epifuse.base.target import Target
from epifuse.passes.assign_stages import shares_rows
from epifuse.plan import Estimate, Plan
from epifuse.providers.cutedsl.inputs import PARTS, is_full, time_of_one
from epifuse.pytorch.cone import Cone, tensors_of
from epifuse.pytorch.payoff import Moved, moved, sums_columns


class Extents(NamedTuple):
    """The extents of a product, and of the tiles in which a kernel computes it. `k` counts elements of 16 bits."""

    batches: int
    m: int
    n: int
    k: float
    tile: tuple[int, int]

    @property
    def operations(self) -> float:
        """Multiplications and additions, as if of 16-bit values."""
        return 2.0 * self.batches * self.m * self.n * self.k

    def tiles(self, tile: tuple[int, int]) -> int:
        """How many tiles of the size `tile` cover the product."""
        return self.batches * ceil(self.m / tile[0]) * ceil(self.n / tile[1])


class Site(NamedTuple):
    """All that the prediction for one product depends on.

    `target` is the device, and `factors` are the bytes of A and B. `multiplying` and `shown` are costs by the plan's
    model, in multiply-adds of 16-bit values on one multiprocessor: of the main loop, and of what the launch, the
    epilogue and the sums over parts of K add to it. `waits` is true if values need whole rows and a row is spread over
    several tiles, `full` if float32 is multiplied in full precision, `columns` if columns are reduced.
    """

    target: Target
    extents: Extents
    factors: int
    moved: Moved
    multiplying: float
    shown: float
    waits: bool = False
    full: bool = False
    columns: bool = False


class Prediction(NamedTuple):
    """Seconds of one kernel, `fused`, and of the product and the loops that it replaces, `apart`.

    Neither counts the launch of the first kernel, or what loops move in both cases.
    """

    fused: float
    apart: float

    @property
    def gain(self) -> float:
        """Seconds that fusing saves; negative where it loses."""
        return self.apart - self.fused


def site_of(cone: Cone, plan: Plan) -> Site:
    """What the prediction for `cone` depends on."""
    a, b = (tensors_of(node)[0] for node in cone.a_and_b)
    factors = a.numel() * a.element_size() + b.numel() * b.element_size()
    sizes, allocation = plan.problem.extents, plan.allocation
    full = plan.problem.target.device == "cuda" and is_full(plan.problem)
    each = time_of_one(plan.problem) if full else a.element_size() / 2
    extents = Extents(sizes["l"], sizes["m"], sizes["n"], sizes["k"] * each, allocation.tile)
    waits = "row" in plan.stages and shares_rows(plan.graph) and sizes["n"] > allocation.tile[1]
    # `predicted` itself adds the time of reading A and B and of what the epilogue reads and writes. It leaves out the
    # time that L2 takes to send A and B, because cuBLAS needs that too.
    told = Estimate("", allocation.cost, 0.0) if allocation.estimate is None else allocation.estimate()
    moves, columns = moved(cone, plan.problem.target), any(map(sums_columns, cone.inside))
    return Site(plan.problem.target, extents, factors, moves, told.multiplying, told.shown, waits, full, columns)


def predicted(site: Site) -> Prediction:
    """The times of a site, by the rates of its device."""
    return (_on_gpu if site.target.device == "cuda" else _on_cpu)(site, site.target.processor)


def seconds_gained(site: Site) -> float:
    """The predicted time that fusing saves; negative where it loses."""
    return predicted(site).gain


_CPU_CALL = 20e-6
"""The seconds that a fused call costs the host more than a call of MKL: the dispatcher's way through Python (12 us),
and the operations of the panel kernel. Assumed, not fitted."""
_CPU_VALUE = 2e-9
"""The seconds that the panel kernel takes longer than Inductor's loop for each value, because it runs the operations of
an epilogue one after the other. Of 110 random sites on a CPU the fused kernel was faster for 15, and fusing all of them
would take 1.34 of the time of the best choices (sites_cpu.json)."""


def _on_cpu(site: Site, rates: Processor) -> Prediction:
    extents, product = site.extents, site.extents.operations / rates.operations_a_second
    apart, fused = (found / rates.bytes_a_second for found in _bytes(site))
    added = _CPU_CALL + extents.batches * extents.m * extents.n * _CPU_VALUE
    return Prediction(product + fused + added, product + apart)


def _bytes(site: Site) -> tuple[int, int]:
    """All bytes that move if the product is apart, and if it is fused."""
    parts = site.moved
    apart = site.factors + parts.product + parts.loops_apart + parts.bytes_reread_for_sums
    return apart, site.factors + parts.operands + parts.outputs + parts.loops_fused


_BY_LANES = 0.84
"""The share of all lanes' peak that cuBLAS's float32 products reach: 48 to 49 TFLOP/s (full_float32_h100.json)."""
_OVERLAP = 1.5
"""The exponent p of the p-norm that combines times which overlap in part. With p = 1 they would be added, with p = 2
they would be the legs of a right triangle."""
_OF_PLAN = 0.25
"""The weight of the plan's time of multiplying, in its geometric mean with the time if no multiprocessor were idle.
Idle multiprocessors leave power and L2 to the others. With K = 16384 the plan's time was 1.12 to 1.14 of the other one,
and fused kernels took 1.00 to 1.03 of the time of cuBLAS's product (sites_h100_second.json)."""
_EPILOGUE_K = 120
"""Elements of 16 bits along K that take as long to multiply as cuBLAS's epilogue of a tile, which nothing hides. The
epilogue of a kernel of epifuse hides behind the main loop of the other warp group: plain products take 0.81 of cuBLAS's
time at K = 512, 0.98 at 4096 (gemm_epilogue.json)."""
_IN_THE_WAY = 0.1
"""The share of the time of loading the epilogue's operands that the main loop does not hide."""
_COLUMNS = 0.7e-6
"""Seconds that reducing columns takes in each wave of tiles, where warps wait for each other, and once more in the
kernel that merges the tiles' results."""


def _on_gpu(site: Site, rates: Processor) -> Prediction:
    parts, extents, memory = site.moved, site.extents, rates.bytes_a_second
    product = extents.operations / rates.operations_a_second
    by_lanes = extents.operations / (2 * PARTS * 2 * _BY_LANES * rates.instructions_a_second)
    library = by_lanes if site.full else product * (1 + _EPILOGUE_K / extents.k)
    alone = _norm(library, (site.factors + parts.product) / memory)
    drawing = parts.drawn / rates.instructions_a_second
    loops = max(parts.loops_apart / memory, parts.instructions / rates.instructions_a_second + drawing)
    apart = alone + loops + parts.bytes_reread_for_sums / memory + parts.kernels * BETWEEN_KERNELS
    a_second = rates.multiplications_a_second
    moving, operands = (site.factors + parts.operands + parts.outputs) / memory, parts.operands / memory
    multiplying, shown = site.multiplying / a_second, site.shown / a_second
    if site.waits:
        own = multiplying + shown + moving + operands
    else:
        waves = max(1.0, extents.tiles(extents.tile) / rates.multiprocessors)
        shown += operands / waves + _IN_THE_WAY * operands + _COLUMNS * (1 + waves) * site.columns
        own = _norm(multiplying**_OF_PLAN * product ** (1 - _OF_PLAN), moving) + shown
    ahead = drawing + BETWEEN_KERNELS if drawing else 0.0
    return Prediction(ahead + own + parts.loops_fused / memory, apart)


def _norm(*seconds: float) -> float:
    return float(sum(each**_OVERLAP for each in seconds) ** (1 / _OVERLAP))
