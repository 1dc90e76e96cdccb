"""Select: ask every kernel, keep each answer, order the plans best first. A pure function of graph and problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epifuse import passes
from epifuse.ir import Graph
from epifuse.places import Loc
from epifuse.plan.plan import Allocation, Plan, Refusal
from epifuse.plan.spec import KernelSpec
from epifuse.problem import Problem

Supports = Callable[[KernelSpec, Graph, Problem], Allocation | Refusal]


@dataclass(frozen=True)
class Selection:
    """The plans, best first, and why every other kernel refused."""

    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]

    @property
    def loc(self) -> Loc | None:
        """The place in the user's source that the first refusal with one is about, where nothing can run."""
        return None if self.plans else next((refusal.loc for refusal in self.refusals if refusal.loc), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The refusals for people, one line a reason: a kernel in twenty designs says the same thing once."""
        kernels: dict[str, list[str]] = {}
        for refusal in self.refusals:
            kernels.setdefault(refusal.reason, []).append(refusal.kernel)
        return tuple(f"{_named(names)}: {reason}" for reason, names in kernels.items())


def _named(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def select(graph: Graph, problem: Problem, candidates: Iterable[tuple[KernelSpec, Supports]]) -> Selection:
    """Ask each candidate kernel. Kernels for another target are refused here, in one place."""
    plans: list[Plan] = []
    refusals: list[Refusal] = []
    target = problem.target
    digest, binding = passes.identity(graph, problem)
    for spec, supports in candidates:
        if spec.device != target.device or target.cc not in spec.ccs:
            built = "the CPU" if spec.device == "cpu" else f"compute capability {', '.join(map(str, spec.ccs))}"
            answer: Allocation | Refusal = Refusal(spec.name, f"runs on {built}, and the target is {target.name}")
        else:
            answer = supports(spec, graph, problem)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        else:
            plans.append(Plan(spec, problem, digest, binding, answer, graph))
    plans.sort(key=lambda plan: plan.allocation.cost)
    return Selection(tuple(plans), tuple(refusals))
