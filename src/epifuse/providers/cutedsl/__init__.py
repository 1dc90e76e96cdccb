"""The CuTe DSL provider: kernels for Hopper, for GPUs with tensor memory, and one by mma.sync for all other GPUs.

Planning imports no cutlass; compiling does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial, reduce
from importlib import import_module

from epifuse.ir import Graph
from epifuse.plan import Allocation, Answers, KernelSpec, Plan, Reason, Refusal
from epifuse.plan.plan import Details
from epifuse.providers import sequence
from epifuse.providers.base import Runner
from epifuse.providers.cutedsl import (
    budget,
    inputs,
    invariance,
    load,
    multistage,
    other_rows,
    partials,
    recompute,
    refusals,
    swap,
    tensor_memory,
    untested,
    weave,
)
from epifuse.providers.cutedsl.design import MMA_SYNC, TCGEN05, Design, round_up
from epifuse.providers.cutedsl.designs import (
    DESIGNS,
    HOPPER_SPECS,
    MULTISTAGE_DESIGNS,
    MULTISTAGE_SPECS,
    NARROW_DESIGNS,
    PLAIN_SPECS,
    ROW_DESIGNS,
    SPECS,
    SPLIT_DESIGNS,
    SPLIT_ROW_DESIGNS,
    SWAPPED_DESIGNS,
    SWAPPED_SPECS,
    TENSOR_MEMORY_DESIGNS,
    WIDE_SWAPPED_SPECS,
)
from epifuse.providers.cutedsl.family import Arranged
from epifuse.providers.cutedsl.heuristic import estimate, rows_of
from epifuse.providers.cutedsl.launch import GpuKernel
from epifuse.providers.cutedsl.lowering import Lowered, lower, lower_region
from epifuse.providers.cutedsl.partials import Reduction
from epifuse.providers.cutedsl.rows import MOST_COLUMNS, columns
from epifuse.providers.cutedsl.sizes import Sized, sized
from epifuse.providers.cutedsl.together import together
from epifuse.providers.regions import Regions, Rules, is_uneven, one_after_another
from epifuse.request.problem import Problem

__all__ = [
    "DESIGNS",
    "MULTISTAGE_DESIGNS",
    "NARROW_DESIGNS",
    "ROW_DESIGNS",
    "SPLIT_DESIGNS",
    "SPLIT_ROW_DESIGNS",
    "SWAPPED_DESIGNS",
    "TENSOR_MEMORY_DESIGNS",
    "CuteDslProvider",
]


class CuteDslProvider:
    """See `providers.base.Provider`."""

    name = "cutedsl"
    scales_blocks = True

    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernels, one for each design that can be built."""
        return SPECS

    def lacks(self, spec: KernelSpec) -> str | None:
        """Which packages of the extra `cuda` are not installed, or None."""
        return load.lacking()

    def lower(self, graph: Graph, problem: Problem) -> Lowered | Regions:
        """The graph as the kernel walks it, together with the typed graph, which several launches would split. If
        regions of N are uneven, the regions, each lowered for itself."""
        return _of_ranges(graph, problem) if is_uneven(graph) else lower(graph, problem)

    def supports(self, specs: Sequence[KernelSpec], work: Lowered | Regions, problem: Problem) -> Answers:
        """The answers of one launch; else those of several sweeps or of several regions, where these are allowed."""
        rules = Rules(may_overlap=problem.constraints.allow_recompute, may_cut_blocks=False)
        if isinstance(work, Regions):
            return work.supports(specs, problem, self.supports, together, rules)
        answers = recompute.supports(specs, work, problem, _one_launch)
        if answers.specs or work.regions is None or not work.regions.are_some:
            unsplit = None if answers.specs or work.refused is None or work.regions is None else work.regions.parts
            return _none(specs, unsplit) if isinstance(unsplit, Reason) else answers
        return work.regions.supports(specs, problem, self.supports, together, rules)

    def build(self, plan: Plan) -> Runner:
        """Load the plan's kernels. A kernel that is not stored yet is compiled."""
        if plan.allocation.columns:
            return one_after_another(list(map(self.build, plan.allocation.launches)), plan)
        if launches := plan.allocation.launches:
            between = sequence.slots(recompute.parts_of(plan), plan.problem)
            return sequence.in_sequence(list(map(self.build, launches)), between, plan.allocation.workspace_bytes)
        return GpuKernel(plan, plan.allocation.program)

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """The texts of the plan's kernels, one for each launch; none if the result has no elements."""
        if launches := plan.allocation.launches:
            return tuple(text for launch in launches for text in self.kernels(launch))
        return () if plan.problem.is_empty else (plan.allocation.program.text,)

    def is_loaded(self, text: str) -> bool:
        """Whether the kernel of this text is loaded; see `load.function`."""
        return load.is_loaded(text)

    def is_stored(self, text: str) -> bool:
        """Whether the kernel of this text is stored. Raises `UnsupportedError` without CuTe DSL's runtime library."""
        return load.find(text) is not None

    def prepare(self) -> None:
        """Import CuTe DSL, and load all that it needs for a first kernel."""
        _prepared()

    def compile(self, text: str) -> None:
        """Compile and store a kernel for the GPU that its text names. No GPU is needed."""
        load.stored(text)


def _of_ranges(graph: Graph, problem: Problem) -> Regions:
    """The regions of a graph. Each of them may be divided into regions again."""

    def lowered(graph: Graph, problem: Problem) -> Lowered | Regions:
        return _of_ranges(graph, problem) if is_uneven(graph) else lower_region(graph, problem)

    return Regions(graph, problem, lowered, shares=True)


@cache
def _prepared() -> None:
    import_module(f"{__name__}.compile").warm(load.OPTIONS)


def _workspace_bytes(
    design: Design, reductions: Sequence[Reduction], extents: Mapping[str, int], rewritten: int
) -> int:
    """Bytes of workspace: first A and B if they are rewritten (`rewritten` bytes), then partial results of reductions,
    whose places follow from the shape, and at the end sums of parts of K."""
    first = rewritten + partials.workspace_bytes(reductions, design, extents)
    return round_up(first, 16) + budget.sums_bytes(design, extents) if design.split > 1 else first


def _details(found: Arranged, work: Lowered, problem: Problem) -> Details:
    """What a plan tells people of its kernel."""
    told = found.details(work, inputs.multiplied(problem, found.design.rewritten))
    given = swap.problem_of(problem) if work.is_swapped else problem
    apart = ["rows are wider than tiles hold: sum(q * (x - c)) is computed as sum(q * x) - c * sum(q)"] * work.is_wide
    return told._replace(notes=(*told.notes, *refusals.rewritten(found.design, given), *apart))


def _one_launch(specs: Sequence[KernelSpec], work: Lowered, problem: Problem) -> Answers:
    """The answer of each design for one launch: its allocation, or why it cannot run the product and its epilogue."""
    plain, few, many, simple = _by_kind(specs)
    if (uncounted := inputs.uncounted(problem)) is not None:
        return _none(specs, uncounted)
    if (overwritten := work.overwritten(problem)) is not None:
        return _none(specs, overwritten)
    further = [_simple(own, instruction, work, problem) for instruction, own in simple.items() if own]
    work = _for_row_width(work, problem, MOST_COLUMNS)
    if not plain and not few and not many:
        answers, *further = further
    elif (found := sized(work, problem)).family.refused is not None:
        answers = _none((*plain, *few, *many), found.family.refused)
    else:
        others = partial(other_rows.kernel_texts, (plain, few, many), work, problem)
        answers = _answers(plain, found, problem, others)
        for own, is_few in ((few, True), (many, False)):
            answers = answers.followed_by(_swapped(own, work, problem, others, few=is_few))
    return reduce(Answers.followed_by, further, answers)


def _for_row_width(work: Lowered, problem: Problem, most: int) -> Lowered:
    """`work`, or its variant for wide rows if a row has more than `most` columns, the most that a kernel holds."""
    return work.wide if work.wide is not None and problem.extents["n"] > most else work


def _none(specs: Sequence[KernelSpec], reason: str | Callable[[], str]) -> Answers:
    return Answers.none(lambda: [Refusal(spec.name, reason) for spec in specs])


Kinds = tuple[Sequence[KernelSpec], Sequence[KernelSpec], Sequence[KernelSpec], Mapping[str, Sequence[KernelSpec]]]
_OF_HOPPER: Kinds = PLAIN_SPECS, SWAPPED_SPECS, WIDE_SWAPPED_SPECS, {MMA_SYNC: MULTISTAGE_SPECS}
_RULES = {MMA_SYNC: multistage, TCGEN05: tensor_memory}
"""By instruction, the module that says when its kernel is used. Hopper's wgmma is not listed."""


def _by_kind(specs: Sequence[KernelSpec]) -> Kinds:
    """The kernels by kind: Hopper's that multiply A and B as they are, Hopper's that exchange A and B for few rows,
    those for more rows, and all others by instruction."""
    if tuple(specs) == HOPPER_SPECS:
        return _OF_HOPPER
    own = [s for s in specs if not s.design.is_simple]
    return (
        tuple(s for s in own if not s.design.swapped),
        tuple(s for s in own if s.design.for_few_rows),
        tuple(s for s in own if s.design.swapped and not s.design.for_few_rows),
        {name: tuple(s for s in specs if s.design.instruction == name) for name in _RULES},
    )


def _simple(specs: Sequence[KernelSpec], instruction: str, work: Lowered, problem: Problem) -> Answers:
    """The answers of the kernels of one instruction other than Hopper's."""
    rules = _RULES[instruction]
    if not rules.is_considered(problem):
        other = partial(refusals.not_asked_for, specs[0].design, problem, ["schedule"])
        return _none(specs, lambda: other() or _why_unused(_considered(specs, instruction, work, problem), problem))
    return _considered(specs, instruction, work, problem)


def _considered(specs: Sequence[KernelSpec], instruction: str, work: Lowered, problem: Problem) -> Answers:
    if (reason := _RULES[instruction].refused(inputs.filled(problem))) is not None:
        return _none(specs, reason)
    work = _for_row_width(work, problem, max(columns(spec.design) for spec in specs))
    found = sized(work, problem, instruction=instruction)
    if found.family.refused is not None:
        return _none(specs, found.family.refused)
    return _answers(specs, found, problem, lambda _: ())


def _why_unused(answers: Answers, problem: Problem) -> str:
    """Why no kernel with these answers is used: the first refusal if all refuse, else that none has ever run here."""
    return (untested.refused(problem.target) or "") if answers.specs else answers.refusals()[0].reason


def _swapped(
    specs: Sequence[KernelSpec],
    work: Lowered,
    problem: Problem,
    others: Callable[[Hashable], tuple[str, ...]],
    *,
    few: bool,
) -> Answers:
    """The answers of the designs that exchange A and B, for `few` rows or for more."""
    other = swap.unfit(problem, few=few) or work.swapped
    if isinstance(other, str):
        answers, too_few = _none(specs, other), not few and problem.extents["m"] < swap.LEAST_ROWS
        return answers._replace(of_rows=swap.still_unfit) if too_few else answers
    transposed = swap.problem_of(problem)
    found = sized(other, transposed)
    if (refused := found.family.key.refused) is not None:  # registers would have to convert, and no first kernel
        return _none(specs, refused)
    return _answers(specs, found, transposed, others)


def _answers(
    specs: Sequence[KernelSpec], size: Sized, problem: Problem, others: Callable[[Hashable], tuple[str, ...]]
) -> Answers:
    """The answers of these kernels for a problem of the family. `problem` is transposed if they exchange A and B.

    `others` gives the texts of kernels for other numbers of rows (`other_rows.kernel_texts`)."""
    work, rewritten = size.family.work, inputs.rewritten_bytes(problem, size.family.key.rewritten)
    problem = weave.problem_of(work.order, problem)
    carried = size.family.answers(specs)
    able, arranged, rates, refused = carried
    costs = size.costs(carried, rows_of(problem, swapped=work.is_swapped))

    def allocation(index: int) -> Allocation:
        found, reductions = arranged[index], work.reductions
        bits = None if work.reduces else invariance.bits(found.design, problem)
        return Allocation(
            able[index].design.tile,
            costs[index],
            partial(_workspace_bytes, found.design, reductions, problem.extents, rewritten)
            if reductions or found.design.split > 1 or rewritten
            else 0,
            partial(_details, found, work, problem),
            program=found,
            bits=bits,
            estimate=None if problem.is_empty else partial(estimate, rates[index], problem),
            # A kernel that exchanges A and B serves only few rows, or only many rows.
            with_other_rows=tuple if bits is None else partial(others, None if found.design.swapped else bits),
        )

    return Answers(able, costs, allocation, lambda: refused, partial(size.of_rows, carried))
