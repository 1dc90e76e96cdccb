"""Plan and run an epilogue whose outputs have different ranges of columns, by any provider.

A *region* is a range of columns of N. It is a problem of its own over its columns of B, and can be a launch of its own.
This module imports no provider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

import torch

from epifuse.base.lazy import cached_property
from epifuse.ir import Graph
from epifuse.passes.spans import WAY_OUT, UnsplitError
from epifuse.passes.split_regions import Region, Split, problem_of, split_regions
from epifuse.passes.structure import Structure
from epifuse.plan import Allocation, Answers, Details, KernelSpec, Plan, Reason, Refusal
from epifuse.providers.base import Runner, Step
from epifuse.request.problem import Problem
from epifuse.request.scaled import BLOCK, SCALES, of_columns

Lower = Callable[[Graph, Problem], Any]
Together = Callable[[KernelSpec, Sequence[tuple[int, int]], Sequence[Allocation], Problem], Allocation | str]
"""Returns the allocation of one launch of all regions, given that of each region alone; or why there is none."""
Supports = Callable[[Sequence[KernelSpec], Any, Problem], Answers]


class Rules(NamedTuple):
    """Whether the same columns may be computed in several launches, and whether a launch may begin within a block of
    columns of B that share a scale."""

    may_overlap: bool
    may_cut_blocks: bool


class LoweredRegion(NamedTuple):
    """A region, its structure, and `work`, which is what a provider lowered it to."""

    region: Region
    structure: Structure
    work: Any


class Regions:
    """The regions of a typed graph, or why it cannot be split. They are computed when they are first needed.

    If `shares` is set, each region writes its own columns of the outputs that have all columns; see `split_regions`.
    """

    def __init__(self, graph: Graph, problem: Problem, lower: Lower, *, shares: bool) -> None:
        self.graph, self._problem, self._lower, self._shares = graph, problem, lower, shares

    @cached_property
    def _split(self) -> Split:
        """Raises `UnsplitError`."""
        return split_regions(self.graph, self._problem, shares=self._shares)

    @cached_property
    def parts(self) -> tuple[LoweredRegion, ...] | Reason:
        """The part of each region, or why there are none. It is a single part if all outputs have all columns."""
        try:
            return tuple(map(self._part, self._split.regions))
        except UnsplitError as error:
            return Reason(error.reason, self.graph.loc(error.node))

    @property
    def are_some(self) -> bool:
        """Whether some outputs do not have all columns."""
        whole = 0, self._problem.extents["n"]
        return not isinstance(self.parts, Reason) and any(part.region.columns != whole for part in self.parts)

    def _overlapping(self, parts: Sequence[LoweredRegion]) -> Reason | None:
        """Why some columns would be computed twice, or None if none would."""
        for (first, *_), (second, *_) in combinations(sorted(parts, key=lambda part: part.region.columns), 2):
            if second.columns.start < first.columns.stop:
                told = " and ".join(f"{start}:{stop}" for start, stop in (first.columns, second.columns))
                why = f"it computes columns {told} in a launch each, and these overlap"
                if self._split.unshared is not None:
                    node, needs = self._split.unshared
                    return Reason(f"{why}, because {needs}", self.graph.loc(node))
                return Reason(f"{why}: {WAY_OUT}", None)
        return None

    def _part(self, region: Region) -> LoweredRegion:
        problem = problem_of(region, self._problem)
        return LoweredRegion(region, Structure.of(region.graph, problem), self._lower(region.graph, problem))

    def supports(
        self, specs: Sequence[KernelSpec], problem: Problem, one: Supports, together: Together, rules: Rules
    ) -> Answers:
        """The answer of each kernel for all regions. `one` answers for one region, `together` for one launch of all.

        All regions use the same kernel, in one launch if `together` allows it. If no kernel can run all regions, each
        region uses the kernel that costs least there.
        """
        parts = self.parts if isinstance(self.parts, Reason) else _in_order(self.parts, problem)
        if isinstance(parts, Reason):
            return Answers.none(lambda: [Refusal(spec.name, parts) for spec in specs])
        if not rules.may_overlap and (reason := self._overlapping(parts)):

            def refusals() -> list[Refusal]:
                twice = self.supports(specs, problem, one, together, rules._replace(may_overlap=True))
                way_out = ", or pass allow_recompute=True" if twice.specs else ""
                return [Refusal(spec.name, Reason(reason + way_out, reason.loc)) for spec in specs]

            return Answers.none(refusals)
        problems = [problem_of(part.region, problem) for part in parts]
        each = [one(specs, part.work, own).by_name() for part, own in zip(parts, problems, strict=True)]
        columns = [part.region.columns for part in parts]
        shared = _sharing(parts, problem)
        cut = "" if rules.may_cut_blocks or problem.is_empty else _cut(columns, problem)

        def answer(spec: KernelSpec) -> Allocation | Refusal:
            allocations = _allocations(columns, [own[spec.name] for own in each])
            if isinstance(allocations, Refusal):
                return allocations
            found = shared or together(spec, columns, allocations, problem)
            if isinstance(found, Allocation):
                return found
            if cut:
                return Refusal(spec.name, cut.format(why=found))
            return _joined([spec] * len(parts), parts, problems, allocations, found)

        found = [(spec, answer(spec)) for spec in specs]
        if not cut and all(isinstance(own, Refusal) for _, own in found):
            mixed = _each_by_its_own(specs, parts, problems, each)
            found = [(spec, mixed.get(spec.name, refused)) for spec, refused in found]
        return Answers.of(found)


def _cut(columns: Sequence[tuple[int, int]], problem: Problem) -> str:
    """The reason to refuse one launch for each region if one begins within a block of scales, else "". The text has a
    field `why`, for the reason why one launch of all is not possible."""
    if SCALES[1] not in dict(problem.scales):
        return ""
    found = next(((start, stop) for start, stop in columns if start % BLOCK), None)
    if found is None:
        return ""
    told = f"columns {found[0]}:{found[1]} need a launch of their own, because {{why}}; they begin within a block"
    return f"{told} of {BLOCK} columns that share a scale: begin at a multiple of {BLOCK}"


def _in_order(parts: Sequence[LoweredRegion], problem: Problem) -> Sequence[LoweredRegion] | Reason:
    """The parts in an order such that none reads an operand whose memory an earlier part has written, or why no order
    is possible."""
    if not _sharing(parts, problem):
        return parts
    aliases, left, found = dict(problem.aliases), [*parts], []
    while left:
        safe = [
            part
            for part in left
            if all(_writes_nothing_read_by(part, other, aliases) for other in left if other is not part)
        ]
        if not safe:
            graph = left[0].region.graph
            first = next(output for output in graph.outputs if output.name in aliases)
            names = f"'{first.name}' has the memory of '{aliases[first.name]}'"
            return Reason(f"{names}, which other columns read: pass another tensor", graph.loc(first.node))
        found.append(safe[0])
        left.remove(safe[0])
    return found


def _sharing(parts: Sequence[LoweredRegion], problem: Problem) -> str:
    """Why one launch cannot have all parts, or "" if it can. The tiles of one launch are computed in no fixed order."""
    aliases = dict(problem.aliases)
    if not aliases or all(_writes_nothing_read_by(*pair, aliases) for pair in permutations(parts, 2)):
        return ""
    return "an output has the memory of an operand that another region reads"


def _writes_nothing_read_by(part: LoweredRegion, other: LoweredRegion, aliases: Mapping[str, str]) -> bool:
    """Whether `part` writes no memory that `other` reads. An output of which each region writes a part does not count,
    because each reads only its own part of the operand: see `destinations.check_overlaps`."""
    outputs = part.region.graph.outputs
    written = {aliases[output.name] for output in outputs if output.name in aliases and not output.views}
    return written.isdisjoint(node.attr.name for node in other.region.graph.loads())


def is_uneven(graph: Graph) -> bool:
    """Whether some value has a range of columns that is not one of several equal parts of a row."""
    if "region" in graph.ops:
        return True
    factors = (factor for type_ in graph.types.values() for factor in type_.factors)
    return any(factor.along == "n" and factor.axis != "n" for factor in factors)  # coordinates or constants of a region


def _allocations(
    columns: Sequence[tuple[int, int]], answers: Sequence[Allocation | Refusal]
) -> list[Allocation] | Refusal:
    """The allocation of each region, or a refusal if a region has none."""
    found = []
    for (start, stop), answer in zip(columns, answers, strict=True):
        if isinstance(answer, Refusal):
            return Refusal(answer.kernel, Reason(f"in columns {start}:{stop}: {answer.reason}", answer.loc))
        found.append(answer)
    return found


def _each_by_its_own(
    specs: Sequence[KernelSpec],
    parts: Sequence[LoweredRegion],
    problems: Sequence[Problem],
    each: Sequence[Mapping[str, Allocation | Refusal]],
) -> Mapping[str, Allocation]:
    """The allocation in which each region has the kernel that costs least there, by the name of the costliest region's
    kernel. Empty if no kernel can run one of the regions."""
    chosen: list[tuple[KernelSpec, Allocation]] = []
    for own in each:
        able = [(spec, found) for spec in specs if isinstance(found := own[spec.name], Allocation)]
        if not able:
            return {}
        chosen.append(min(able, key=lambda pair: pair[1].cost))
    kernels, allocations = [spec for spec, _ in chosen], [allocation for _, allocation in chosen]
    name = max(chosen, key=lambda pair: pair[1].cost)[0].name
    return {name: _joined(kernels, parts, problems, allocations, "no kernel takes all of them")}


def _joined(
    specs: Sequence[KernelSpec],
    parts: Sequence[LoweredRegion],
    problems: Sequence[Problem],
    allocations: Sequence[Allocation],
    why: str,
) -> Allocation:
    """The allocation of a launch for each region. `why` says why several regions are not one launch."""
    notes = (f"each region of columns takes a launch of its own, because {why}",) if len(parts) > 1 else ()
    plans = tuple(
        Plan(spec, own, part.structure.digest, part.structure.binding, allocation, part.region.graph)
        for spec, part, own, allocation in zip(specs, parts, problems, allocations, strict=True)
    )
    return Allocation(
        allocations[0].tile,
        cost=sum(allocation.cost for allocation in allocations),
        workspace=lambda: max(allocation.workspace_bytes for allocation in allocations),
        details=Details(notes=notes),
        launches=plans,
        columns=tuple(part.region.columns for part in parts),
    )


def one_after_another(runners: Sequence[Runner], plan: Plan) -> Runner:
    """The runner of a plan of several regions. Each runs on its columns of B. They share a workspace."""
    columns = plan.allocation.columns

    def bind(
        a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        steps = [
            runner(a, b[..., start:stop], of_columns(operands, start, stop), outputs)
            for runner, (start, stop) in zip(runners, columns, strict=True)
        ]

        def run() -> None:
            for step in steps:
                step()

        return run

    return bind
