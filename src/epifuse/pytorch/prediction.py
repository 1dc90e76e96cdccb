"""How long a product and what is around it take, fused and apart, as the rates of the device predict.

On a GPU a fused kernel overlaps three things, the product, memory and arithmetic, and takes the root of the sum of
their squares. cuBLAS hides what it reads behind the product, and not what it writes; Inductor's loops take as long as
their bytes.
"""

from __future__ import annotations

from math import hypot
from typing import NamedTuple

from torch.fx import Node as FxNode

from epifuse.base.rates import Rates, rates_of
from epifuse.plan import Plan
from epifuse.pytorch.cone import Cone, elements_of, is_reduction, is_work, name_of, tensors_of
from epifuse.pytorch.payoff import Moved, is_own_kernel, moved


class Site(NamedTuple):
    """What the prediction depends on.

    `device` is its name in PyTorch, `operations` those of the product on 16-bit values, `factors` the bytes of A and B,
    `work` instructions of the epilogue, and `cost` that of the plan, where there is one: multiply-adds of 16-bit values
    on one multiprocessor.
    """

    device: str
    operations: float
    factors: int
    moved: Moved
    work: float
    cost: float | None = None


class Prediction(NamedTuple):
    """Seconds of one kernel, and of the product and the loops in its place; what both hold is in neither."""

    fused: float
    apart: float

    @property
    def gain(self) -> float:
        """Seconds that fusing saves; negative where it loses."""
        return self.apart - self.fused


def site_of(cone: Cone, plan: Plan | None = None) -> Site:
    """What the prediction for `cone` depends on."""
    a, b = (tensors_of(node)[0] for node in cone.factors)
    operations = 2.0 * elements_of(cone.product) * a.shape[-1] * a.element_size() / 2
    cost = None if plan is None else plan.allocation.cost
    factors = a.numel() * a.element_size() + b.numel() * b.element_size()
    return Site(str(a.device), operations, factors, moved(cone), _work(cone), cost)


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


_KERNEL = 3e-6
"""Seconds from one kernel to the next."""
_REACHED = 0.85
"""Of the memory's rate, by a kernel that does little else."""
_BY_LOOPS = 0.65
"""The same, by a loop of Inductor's that reads and writes."""
_INSTRUCTIONS = 128 * 1.7e9
"""Of one multiprocessor in a second: a lane a cycle."""


def _on_gpu(site: Site, rates: Rates) -> Prediction:
    parts, memory = site.moved, _REACHED * rates.bytes_a_second
    product = site.operations / rates.operations_a_second
    alone = max(product + parts.product / memory, (site.factors + parts.product) / memory)
    loops = _BY_LOOPS * rates.bytes_a_second
    apart = alone + parts.loops_apart / loops + (1 + parts.kernels) * _KERNEL
    if site.cost is not None:
        product = 2 * site.cost * rates.multiprocessors / rates.operations_a_second
    moving = (site.factors + parts.operands + parts.outputs) / memory
    computing = site.work / (rates.multiprocessors * _INSTRUCTIONS)
    return Prediction(hypot(product, moving, computing) + parts.loops_fused / loops + _KERNEL, apart)


# --- arithmetic -------------------------------------------------------------------------------------------------------

_PLAIN, _SPECIAL, _ALONG_N, _ALONG_M = 2, 4, 25, 10
"""Instructions of an operation on one value, of a function, and of a reduction."""
_FUNCTIONS = ("erf", "exp", "tanh", "sigmoid", "log", "log1p", "expm1", "pow", "sin", "cos", "rsqrt", "sqrt", "div")
_SOFTMAX = 3 * _PLAIN + _SPECIAL + 2 * _ALONG_N


def _work(cone: Cone) -> float:
    return sum(_instructions(node) for node in cone.body if node is not cone.product and is_work(node))


def _instructions(node: FxNode) -> float:
    if name_of(node) in ("_softmax", "_log_softmax"):
        return _SOFTMAX * elements_of(node)
    if is_reduction(node):
        each = _ALONG_M if is_own_kernel(node) else _ALONG_N
        return float(each * elements_of(node.all_input_nodes[0]))
    return float((_SPECIAL if name_of(node) in _FUNCTIONS else _PLAIN) * elements_of(node))
