"""How long a product and what is around it take, fused and apart, as the rates of the device predict.

On a GPU a fused kernel overlaps the product and memory, but for what the epilogue of the last tiles reads. What its
instructions add is the model's by which designs are chosen. Where a row is spread over the CTAs of a cluster, which
wait for each other, nothing overlaps, and operands come at half of memory's rate, by a fit. cuBLAS overlaps the product
and memory, but not the end of a tile with the next one. Inductor's loops take as long as their bytes or as their
instructions, whichever is longer.

All constants but two, `_BY_LANES` and `_CPU_CALL`, are fitted to sites that were drawn and measured on four H100 and
four H200. docs/pytorch.md has the data and the errors.
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

    `target` is the device and `factors` are the bytes of A and B. `multiplying` is what the plan's model says of that,
    and `shown` of what the launch, the epilogue and sums of parts of K add to it: multiply-adds of 16-bit values on one
    multiprocessor. With `waits`, values need whole rows, and a row is in several tiles. With `full`, float32 is
    multiplied in full, and with `columns`, columns are reduced.
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
    # `predicted` adds the time of reading A and B itself, with what the epilogue reads and writes. It leaves out what
    # L2 sends: cuBLAS needs that too.
    told = Estimate("", allocation.cost, 0.0) if allocation.estimate is None else allocation.estimate()
    moves, columns = moved(cone, plan.problem.target), any(map(sums_columns, cone.inside))
    return Site(plan.problem.target, extents, factors, moves, told.multiplying, told.shown, waits, full, columns)


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


_BY_LANES = 0.84
"""Of the multiply-adds of all lanes, by cuBLAS's float32 products: 48 to 49 TFLOP/s (full_float32_h100.json)."""
_OVERLAP = 1.5
"""The exponent of the norm that overlapping times have together: 1 where they follow each other, 2 a hypotenuse."""
_OF_PLAN = 0.25
"""The weight of the plan's time of multiplying in its geometric mean with what all multiprocessors would take: idle
ones leave power and L2 to the others. With K = 16384 the plan's time was 1.12 to 1.14 of that, and fused kernels took
1.00 to 1.03 of cuBLAS's product (sites_h100_second.json)."""
_EPILOGUE_K = 120
"""Elements of 16 bits along K that take as long as cuBLAS's epilogue of a tile, which nothing hides. Ours hides behind
the other warp group's main loop: plain products take 0.81 of cuBLAS's time at K = 512, 0.98 at 4096
(gemm_epilogue.json)."""
_IN_THE_WAY = 0.1
"""The part of the time of loading the epilogue's operands that the main loop does not hide."""
_COLUMNS = 0.7e-6
"""Seconds for each wave of tiles in which columns are reduced, between warps that wait for each other, and for the
kernel that merges the tiles' results."""


def _on_gpu(site: Site, rates: Processor) -> Prediction:
    parts, extents, memory = site.moved, site.extents, rates.bytes_a_second
    product = extents.operations / rates.operations_a_second
    by_lanes = extents.operations / (2 * PARTS * 2 * _BY_LANES * rates.instructions_a_second)
    library = by_lanes if site.full else product * (1 + _EPILOGUE_K / extents.k)
    alone = _norm(library, (site.factors + parts.product) / memory)
    drawing = parts.drawn / rates.instructions_a_second
    loops = max(parts.loops_apart / memory, parts.instructions / rates.instructions_a_second + drawing)
    apart = alone + loops + parts.sums / memory + parts.kernels * BETWEEN_KERNELS
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
