"""How long a product and what is around it take, fused and apart, as the rates of the device predict.

On a GPU a fused kernel overlaps three things, the product, memory and arithmetic, and takes the root of the sum of
their squares; where a row is spread over the CTAs of a cluster, which wait for each other, the product overlaps with
nothing. cuBLAS hides what it reads behind the product, and not what it writes. Inductor's loops take as long as
their bytes. The constants are fitted to 120 drawn sites on an H200 (benchmarks/results/sites.json).
"""

from __future__ import annotations

from math import hypot, prod
from typing import NamedTuple

from epifuse.base.rates import Rates, rates_of
from epifuse.plan import Plan
from epifuse.pytorch.cone import Cone, elements_of, tensors_of
from epifuse.pytorch.payoff import Moved, moved


class Site(NamedTuple):
    """What the prediction depends on.

    `device` is its name in PyTorch, `operations` those of the product on 16-bit values, `factors` the bytes of A and B,
    `work` instructions of the epilogue, and `cost` that of the plan: multiply-adds of 16-bit values on one
    multiprocessor. With `waits`, values need whole rows, and a row is in several tiles.
    """

    device: str
    operations: float
    factors: int
    moved: Moved
    work: float
    cost: float
    waits: bool = False


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
    operations = 2.0 * elements_of(cone.product) * a.shape[-1] * a.element_size() / 2
    factors = a.numel() * a.element_size() + b.numel() * b.element_size()
    allocation = plan.allocation
    waits = "row" in plan.stages and plan.problem.extents["n"] > allocation.tile[1]
    return Site(str(a.device), operations, factors, moved(cone), _work(plan), allocation.cost, waits)


def predicted(site: Site) -> Prediction:
    """What the rates of the site's device give."""
    rates = rates_of(site.device)
    return _on_gpu(site, rates) if site.device.startswith("cuda") else _on_cpu(site, rates)


def seconds_gained(site: Site) -> float:
    """The predicted time that fusing saves; negative where it loses."""
    return predicted(site).gain


_CPU_CALL = 20e-6
"""What a call of ours costs the host more than one of MKL's: the dispatcher's way through Python (12 us), and the panel
kernel's operations. Assumed, not fitted."""


def _on_cpu(site: Site, rates: Rates) -> Prediction:
    product = site.operations / rates.operations_a_second
    apart, fused = _bytes(site)
    return Prediction(product + fused / rates.bytes_a_second + _CPU_CALL, product + apart / rates.bytes_a_second)


def _bytes(site: Site) -> tuple[int, int]:
    """All that moves apart, and fused."""
    parts = site.moved
    apart = site.factors + parts.product + parts.loops_apart
    return apart, site.factors + parts.operands + parts.outputs + parts.loops_fused


_KERNEL = 2.5e-6
"""Seconds from one kernel to the next."""
_REACHED = 0.85
"""Of the memory's rate, by a product. Loops reach all of it, as the L2 cache still has some of what they read."""
_INSTRUCTIONS = 128 * 1.7e9
"""Of one multiprocessor in a second: a lane a cycle."""


def _on_gpu(site: Site, rates: Rates) -> Prediction:
    parts, memory = site.moved, _REACHED * rates.bytes_a_second
    product = site.operations / rates.operations_a_second
    alone = max(product + parts.product / memory, (site.factors + parts.product) / memory)
    apart = alone + parts.loops_apart / rates.bytes_a_second + parts.kernels * _KERNEL
    planned = 2 * site.cost * rates.multiprocessors / rates.operations_a_second
    moving = (site.factors + parts.operands + parts.outputs) / memory
    computing = site.work / (rates.multiprocessors * _INSTRUCTIONS)
    own = planned + hypot(moving, computing) if site.waits else hypot(planned, moving, computing)
    return Prediction(own + parts.loops_fused / rates.bytes_a_second, apart)


_EACH = 3
"""Instructions of an operation on one value."""
_LONG = {"log1p": 200}
"""Of operations that take many more: it is computed in full."""


def _work(plan: Plan) -> float:
    graph, extents = plan.graph, plan.problem.extents
    total = 0.0
    for node in graph.nodes:
        if node.op not in ("accum", "const", "load", "cast"):
            spread = graph.types[node.args[0] if node.op == "reduce" else node]
            total += _LONG.get(node.op, _EACH) * prod(factor.size(extents) for factor in spread.factors)
    return total
