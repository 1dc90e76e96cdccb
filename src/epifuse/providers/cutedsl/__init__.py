"""The CuTe DSL provider: one kernel for Hopper. Planning imports no cutlass; compiling does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from epifuse.ir import Graph
from epifuse.plan import Allocation, Answer, KernelSpec, Offer, Plan, Refusal
from epifuse.providers import sequence
from epifuse.providers.base import Runner
from epifuse.providers.cutedsl import inputs, load, partials, recompute
from epifuse.providers.cutedsl.designs import DESIGNS, ROW_DESIGNS, SPECS
from epifuse.providers.cutedsl.family import SPILLING, Arranged, family_of
from epifuse.providers.cutedsl.heuristic import estimate, wide_k
from epifuse.providers.cutedsl.launch import GpuKernel
from epifuse.providers.cutedsl.lowering import Lowered, lower
from epifuse.request.problem import Problem

__all__ = ["DESIGNS", "ROW_DESIGNS", "CuteDslProvider"]


class CuteDslProvider:
    """See `providers.base.Provider`."""

    name = "cutedsl"

    def specs(self) -> tuple[KernelSpec, ...]:
        """One kernel in the designs it can be built in."""
        return SPECS

    def lower(self, graph: Graph, problem: Problem) -> Lowered:
        """The graph as the kernel walks it, beside the one that several launches would split."""
        return lower(graph, problem)

    def supports(self, specs: Sequence[KernelSpec], work: Lowered, problem: Problem) -> Sequence[Answer]:
        """Epilogues over 16-bit and tf32 inputs that TMA can address; in several launches where that is allowed."""
        return recompute.supports(specs, work, problem, _one_launch)

    def build(self, plan: Plan) -> Runner:
        """Load the kernel, compiled for sm_90a where it is not stored yet."""
        if launches := plan.allocation.launches:
            between = sequence.slots(recompute.parts_of(plan), plan.problem)
            return sequence.in_sequence(list(map(self.build, launches)), between, plan.allocation.workspace_bytes)
        return GpuKernel(plan, plan.allocation.program)

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """One, or one a launch; none where the result has no elements."""
        if launches := plan.allocation.launches:
            return tuple(text for launch in launches for text in self.kernels(launch))
        is_empty = 0 in (plan.problem.extents[axis] for axis in "lmn")
        return () if is_empty else (plan.allocation.program.text,)

    def is_loaded(self, text: str) -> bool:
        """See `load.function`."""
        return load.is_loaded(text)

    def is_stored(self, text: str) -> bool:
        """Raises `UnsupportedError` where CuTe DSL's runtime library is not installed."""
        return load.find(text) is not None

    def compile(self, text: str) -> None:
        """For sm_90a; needs no GPU."""
        load.stored(text)


_BITS = "K ascending in one accumulator"
"""What every design does: tile and cluster only decide in which order values of several elements are added."""


def _one_launch(specs: Sequence[KernelSpec], work: Lowered, problem: Problem) -> list[Answer]:
    """What each design takes for one product and its epilogue, or why it cannot."""
    problem = inputs.filled(problem)
    reason = inputs.refused(problem)
    if reason is None:
        family, own = family_of(work, problem)
        reason = family.refused
    if reason is not None:
        return [Refusal(spec.name, reason) for spec in specs]

    extents, k, reductions = problem.extents, wide_k(problem), work.reductions

    def allocated(found: Arranged, cost: float) -> Allocation:
        return Allocation(
            found.design.tile,
            cost,
            partial(partials.workspace_bytes, reductions, found.design, extents) if reductions else 0,
            partial(found.details, own, problem),
            program=found,
            bits=None if work.reduces else _BITS,
        )

    def answer(spec: KernelSpec) -> Answer:
        found = family.of(spec)
        if isinstance(found, str):
            return Refusal(spec.name, found)
        cost = estimate(found.design, extents, k, work.shares_rows) * (SPILLING if found.spills else 1.0)
        return Offer(cost, partial(allocated, found, cost))

    return list(map(answer, specs))
