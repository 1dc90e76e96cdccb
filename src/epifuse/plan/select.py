"""Select: ask every kernel, keep each answer, order the plans best first. A pure function of structure and problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import starmap
from typing import Any, Protocol

from epifuse.base.places import Loc
from epifuse.base.target import Target
from epifuse.ir import Graph
from epifuse.passes.structure import Structure
from epifuse.plan.plan import Allocation, Answer, Offer, Plan, Refusal, accepted
from epifuse.plan.spec import KernelSpec
from epifuse.request.problem import Problem


class Planner(Protocol):
    """What planning asks of a provider; see `providers.base.Provider`."""

    def lower(self, graph: Graph, problem: Problem) -> Any: ...

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Sequence[Answer]: ...


Candidates = tuple[Planner, Sequence[KernelSpec]]
"""Kernels of one provider."""


@dataclass(frozen=True)
class Selection:
    """The plans, best first, and why every other kernel refused. `ranked` are the kernels of the plans."""

    structure: Structure = field(repr=False)
    problem: Problem
    ranked: tuple[tuple[KernelSpec, Allocation | Offer], ...]
    refusals: tuple[Refusal, ...]

    @cached_property
    def best(self) -> Plan | None:
        """The plan that would run, if there is one."""
        return self._plan(*self.ranked[0]) if self.ranked else None

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Every plan; a call that only runs needs `best` alone."""
        rest = tuple(self._plan(*each) for each in self.ranked[1:])
        return rest if self.best is None else (self.best, *rest)

    def stand_ins(self) -> Iterator[Plan]:
        """The other plans whose results have the same bits as the best one's, best first."""
        bits = self.best.allocation.bits if self.best else None
        others = starmap(self._plan, self.ranked[1:] if bits is not None else ())
        return (plan for plan in others if plan.allocation.bits == bits)

    def _plan(self, spec: KernelSpec, answer: Allocation | Offer) -> Plan:
        structure = self.structure
        return Plan(spec, self.problem, structure.digest, structure.binding, accepted(answer), structure.graph)

    @property
    def loc(self) -> Loc | None:
        """The place in the user's source that the first refusal with one is about, where nothing can run."""
        return None if self.ranked else next((refusal.loc for refusal in self.refusals if refusal.loc), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The refusals for people, one line a reason: a kernel in twenty designs says the same thing once."""
        kernels: dict[str, list[str]] = {}
        for refusal in self.refusals:
            kernels.setdefault(refusal.reason, []).append(refusal.kernel)
        return tuple(f"{_named(names)}: {reason}" for reason, names in kernels.items())


def _named(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def select(structure: Structure, problem: Problem, candidates: Iterable[Candidates]) -> Selection:
    """Ask each provider about its candidates. Kernels for another target are refused here, in one place."""
    found: list[tuple[KernelSpec, Allocation | Offer]] = []
    refusals: list[Refusal] = []
    target = problem.target
    for provider, specs in candidates:
        here = [spec for spec in specs if spec.device == target.device and target.cc in spec.ccs]
        if len(here) < len(specs):
            others = (spec for spec in specs if spec not in here)
            refusals += [Refusal(spec.name, partial(_other_target, spec, target)) for spec in others]
        if not here:
            continue
        work = structure.work(here[0].provider, provider.lower, problem)
        for spec, answer in zip(here, provider.supports(here, work, problem), strict=True):
            if isinstance(answer, Refusal):
                refusals.append(answer)
            else:
                found.append((spec, answer))
    found.sort(key=_cost)
    return Selection(structure, problem, tuple(found), tuple(refusals))


def _cost(each: tuple[KernelSpec, Allocation | Offer]) -> float:
    return each[1].cost


def _other_target(spec: KernelSpec, target: Target) -> str:
    built = "the CPU" if spec.device == "cpu" else f"compute capability {', '.join(map(str, spec.ccs))}"
    return f"runs on {built}, and the target is {target.name}"
