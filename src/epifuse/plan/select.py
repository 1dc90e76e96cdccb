"""Select: ask every kernel, keep each answer, order the plans best first. A pure function of structure and problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from epifuse.ir import Graph
from epifuse.passes.structure import Structure
from epifuse.places import Loc
from epifuse.plan.plan import Allocation, Plan, Refusal
from epifuse.plan.spec import KernelSpec
from epifuse.problem import Problem
from epifuse.target import Target


class Planner(Protocol):
    """What planning asks of a provider; see `providers.base.Provider`."""

    def lower(self, graph: Graph, problem: Problem) -> Any: ...

    def supports(self, spec: KernelSpec, work: Any, problem: Problem) -> Allocation | Refusal: ...


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


def select(structure: Structure, problem: Problem, candidates: Iterable[tuple[KernelSpec, Planner]]) -> Selection:
    """Ask each candidate kernel of its provider. Kernels for another target are refused here, in one place."""
    plans: list[Plan] = []
    refusals: list[Refusal] = []
    target = problem.target
    for spec, provider in candidates:
        if spec.device != target.device or target.cc not in spec.ccs:
            refusals.append(Refusal(spec.name, partial(_other_target, spec, target)))
            continue
        answer = provider.supports(spec, structure.work(spec.provider, provider.lower, problem), problem)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        else:
            plans.append(Plan(spec, problem, structure.digest, structure.binding, answer, structure.graph))
    plans.sort(key=lambda plan: plan.allocation.cost)
    return Selection(tuple(plans), tuple(refusals))


def _other_target(spec: KernelSpec, target: Target) -> str:
    built = "the CPU" if spec.device == "cpu" else f"compute capability {', '.join(map(str, spec.ccs))}"
    return f"runs on {built}, and the target is {target.name}"
