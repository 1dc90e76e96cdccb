"""Select: ask every provider, keep its answer, and order the plans best first. It depends on structure and problem
only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

from epifuse.base.lazy import cached_property
from epifuse.base.places import Loc
from epifuse.base.target import Target
from epifuse.ir import Graph
from epifuse.passes.structure import Structure
from epifuse.plan.plan import Answers, Plan, Refusal
from epifuse.plan.spec import KernelSpec
from epifuse.request.problem import Problem


class Planner(Protocol):
    """The part of a provider that planning needs; see `providers.base.Provider`."""

    def lower(self, graph: Graph, problem: Problem) -> Any: ...

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Answers: ...


Candidates = tuple[Planner, Sequence[KernelSpec]]
"""A provider and its kernels."""


@dataclass(frozen=True)
class Selection:
    """The plans, best first, and why every other kernel refused. All are made on demand: a call needs `best` only."""

    structure: Structure = field(repr=False)
    problem: Problem
    answers: tuple[Answers, ...] = field(repr=False)
    preferred: str | None = None
    """The name of the kernel that is taken as best, if it can run the problem, whatever the estimated costs are."""

    @cached_property
    def best(self) -> Plan | None:
        """The plan that would run, or None if no kernel can."""
        able = [answers for answers in self.answers if answers.specs]
        if not able:
            return None
        if self.preferred is not None and (plan := self.named(self.preferred)) is not None:
            return plan
        answers = able[0] if len(able) == 1 else min(able, key=_least)
        return self._plan(answers, answers.costs.index(_least(answers)))

    def named(self, kernel: str) -> Plan | None:
        """The plan of the kernel of this name, or None if it cannot run the problem."""
        for answers in self.answers:
            for index, spec in enumerate(answers.specs):
                if spec.name == kernel:
                    return self._plan(answers, index)
        return None

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Every plan, best first."""
        return () if self.best is None else (self.best, *self._others())

    def stand_ins(self) -> Iterator[Plan]:
        """The other plans whose results are equal to the best one's to the last bit, best first."""
        bits = self.best.allocation.bits if self.best else None
        return (plan for plan in self._others() if plan.allocation.bits == bits) if bits is not None else iter(())

    def _others(self) -> Iterator[Plan]:
        """All plans except the best one, in the order of cost."""
        ranked = [(cost, answers, index) for answers in self.answers for index, cost in enumerate(answers.costs)]
        ranked.sort(key=itemgetter(0))
        best = self.best.spec if self.best else None
        return (self._plan(answers, index) for _, answers, index in ranked if answers.specs[index] is not best)

    def _plan(self, answers: Answers, index: int) -> Plan:
        structure, spec = self.structure, answers.specs[index]
        allocation = answers.allocation(index)
        return Plan(spec, self.problem, structure.digest, structure.binding, allocation, structure.graph)

    @cached_property
    def refusals(self) -> tuple[Refusal, ...]:
        """The refusal of each kernel that cannot run the problem."""
        return tuple(refusal for answers in self.answers for refusal in answers.refusals())

    @property
    def loc(self) -> Loc | None:
        """If no kernel can run: the first place in the user's source that a refusal is about. Otherwise None."""
        return None if self.best else next((refusal.loc for refusal in self.refusals if refusal.loc), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The refusals for people, one line for each reason: twenty designs of a kernel may give the same one."""
        kernels: dict[str, list[str]] = {}
        for refusal in self.refusals:
            kernels.setdefault(refusal.reason, []).append(refusal.kernel)
        return tuple(f"{_named(names)}: {reason}" for reason, names in kernels.items())


def _named(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def select(structure: Structure, problem: Problem, candidates: Iterable[Candidates]) -> Selection:
    """Ask each provider about its candidates. Kernels for another target are refused here, in one place."""
    found: list[Answers] = []
    elsewhere: list[Answers] = []  # refusals of kernels for other targets come last, as they matter least
    target = problem.target
    device, cc = target.device, target.cc
    for provider, specs in candidates:
        here = [spec for spec in specs if cc in spec.ccs and spec.device == device]
        if len(here) < len(specs):
            elsewhere.append(Answers.none(partial(_elsewhere, specs, here, target)))
        if here:
            found.append(_asked(provider, specs if len(here) == len(specs) else here, structure, problem))
    return Selection(structure, problem, (*found, *elsewhere))


def _asked(provider: Planner, specs: Sequence[KernelSpec], structure: Structure, problem: Problem) -> Answers:
    # A provider that does not know of block scales would compute without them.
    if problem.scales and not getattr(provider, "scales_blocks", False):
        return Answers.none(lambda: [Refusal(spec.name, "it does not apply block scales") for spec in specs])
    return provider.supports(specs, structure.work(specs[0].provider, provider.lower, problem), problem)


def _least(answers: Answers) -> float:
    return min(answers.costs)


def _elsewhere(specs: Sequence[KernelSpec], here: Sequence[KernelSpec], target: Target) -> list[Refusal]:
    others = (spec for spec in specs if spec not in here)
    return [Refusal(spec.name, partial(_other_target, spec, target)) for spec in others]


def _other_target(spec: KernelSpec, target: Target) -> str:
    built = "the CPU" if spec.device == "cpu" else f"compute capability {', '.join(map(str, spec.ccs))}"
    return f"runs on {built}, and the target is {target.name}"
