"""Select: ask every kernel, keep each answer, order the plans best first. A pure function of structure and problem."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
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

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Sequence[Allocation | Refusal]: ...


@dataclass(frozen=True)
class Selection:
    """The plans, best first, and why every other kernel refused. `ranked` are the kernels of the plans."""

    structure: Structure = field(repr=False)
    problem: Problem
    ranked: tuple[tuple[KernelSpec, Allocation], ...]
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

    def _plan(self, spec: KernelSpec, allocation: Allocation) -> Plan:
        structure = self.structure
        return Plan(spec, self.problem, structure.digest, structure.binding, allocation, structure.graph)

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


def select(structure: Structure, problem: Problem, candidates: Iterable[tuple[KernelSpec, Planner]]) -> Selection:
    """Ask each provider about its candidates. Kernels for another target are refused here, in one place."""
    found: list[tuple[KernelSpec, Allocation]] = []
    refusals: list[Refusal] = []
    for provider, group in groupby(candidates, key=lambda candidate: candidate[1]):
        specs = [spec for spec, _ in group]
        for spec, answer in zip(specs, _answers(provider, specs, structure, problem), strict=True):
            if isinstance(answer, Refusal):
                refusals.append(answer)
            else:
                found.append((spec, answer))
    found.sort(key=lambda each: each[1].cost)
    return Selection(structure, problem, tuple(found), tuple(refusals))


def _answers(
    provider: Planner, specs: Sequence[KernelSpec], structure: Structure, problem: Problem
) -> Iterable[Allocation | Refusal]:
    target = problem.target
    fits = [spec.device == target.device and target.cc in spec.ccs for spec in specs]
    here = [spec for spec, fit in zip(specs, fits, strict=True) if fit]
    work = structure.work(here[0].provider, provider.lower, problem) if here else None
    answers = iter(provider.supports(here, work, problem) if here else ())
    return [
        next(answers) if fit else Refusal(spec.name, partial(_other_target, spec, target))
        for spec, fit in zip(specs, fits, strict=True)
    ]


def _other_target(spec: KernelSpec, target: Target) -> str:
    built = "the CPU" if spec.device == "cpu" else f"compute capability {', '.join(map(str, spec.ccs))}"
    return f"runs on {built}, and the target is {target.name}"
