"""Epilogues that need the product more than once: planned as one launch for each sweep, if the caller allows it.

A sweep is one pass over the product (`passes.assign_stages`). A part is what one sweep computes, as an epilogue of its
own (`passes.split_sweeps`). A way is one split of an epilogue into several launches. Imports no cutlass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from epifuse.base.lazy import cached_property
from epifuse.base.processors import BETWEEN_KERNELS, Processor
from epifuse.ir import Load, Node
from epifuse.ir.graph import topological
from epifuse.passes.spelling import reductions_under, spelled
from epifuse.passes.split_sweeps import SweepPart, crossing_names, part_of
from epifuse.plan import Allocation, Answers, Estimate, KernelSpec, Plan, Reason, Refusal
from epifuse.providers import sequence
from epifuse.providers.cutedsl.lowering import Launch, Lowered
from epifuse.request.problem import Problem

OneLaunch = Callable[[Sequence[KernelSpec], Lowered, Problem], Answers]


def supports(specs: Sequence[KernelSpec], work: Lowered, problem: Problem, one_launch: OneLaunch) -> Answers:
    """What one launch can do; else what several launches can do, if they are allowed; else why neither can, and what
    the user can write instead. `one_launch` answers for a single launch."""
    answers = one_launch(specs, work, problem)
    ways = _LaunchSplits(specs, work, problem, one_launch)
    # Whether one launch or several run would depend on M, and they merge rows differently.
    invariant = problem.constraints.batch_invariant and len(answers.specs) > 0
    if invariant or not (problem.constraints.allow_recompute and ways.found):
        return answers._replace(refusals=lambda: [ways.refused(one) for one in answers.refusals()])
    own = answers.by_name()
    return Answers.of([(spec, ways.settled(own[spec.name])) for spec in specs])


class _LaunchSplits:
    """The ways to split one problem into several launches, found when they are first asked for."""

    def __init__(self, specs: Sequence[KernelSpec], work: Lowered, problem: Problem, one_launch: OneLaunch) -> None:
        self.specs, self.work, self.problem, self.one_launch = specs, work, problem, one_launch

    @cached_property
    def found(self) -> tuple[_LaunchSplit, ...]:
        """The ways, first the one whose clusters hold whole rows: a value of a held row needs no further launch."""
        return tuple(self._found())

    def _found(self) -> Iterator[_LaunchSplit]:
        for whole_rows in (True, False) if self.work.typed_shares_rows else (True,):
            launches = self.work.launches(self.problem, whole_rows=whole_rows)
            if len(launches) > 1:  # there is one launch if no value varies over rows and columns
                yield _LaunchSplit(self, launches)

    def settled(self, answer: Allocation | Refusal) -> Allocation | Refusal:
        """`answer` if one launch can do it, else the allocation of several launches or a refusal."""
        if isinstance(answer, Allocation):
            return answer
        several = (way.answers[answer.kernel] for way in self.found)
        return next((one for one in several if isinstance(one, Allocation)), None) or self.refused(answer)

    def refused(self, refusal: Refusal) -> Refusal:
        """`refusal`, of one launch, with a reason that also says what several launches could do."""
        return Refusal(refusal.kernel, partial(self.reason, refusal))

    def reason(self, refusal: Refusal) -> Reason:
        """Why one launch cannot compute the epilogue, and how many launches can, or why several cannot either."""
        text = refusal.reason
        for way in self.found:
            several = way.answers[refusal.kernel]
            if isinstance(several, Allocation):
                text = f"{text}; {_ways_out(way.parts, self.problem)}"
                break
            # If several launches are not asked for, it is enough that some design can: its own line says so.
            some = any(isinstance(one, Allocation) for one in way.answers.values())
            if several.reason != refusal.reason and (self.problem.constraints.allow_recompute or not some):
                text = f"{text}; with {len(way.parts)} launches: {several.reason}"
        return Reason(text, refusal.loc)


class _LaunchSplit:
    """One way to split a problem, and the answer of each kernel."""

    def __init__(self, of: _LaunchSplits, launches: Sequence[Launch]) -> None:
        self.of, self.launches = of, launches
        self.parts = tuple(SweepPart(launch.sweep.graph, part_of(launch.sweep, of.problem)) for launch in launches)

    @cached_property
    def answers(self) -> dict[str, Allocation | Refusal]:
        """The answer for all launches together, by the name of the kernel."""
        of = self.of
        each = [
            of.one_launch(of.specs, launch.work, part.problem).by_name()
            for launch, part in zip(self.launches, self.parts, strict=True)
        ]
        return {spec.name: self._joined(spec, [own[spec.name] for own in each]) for spec in of.specs}

    def _joined(self, spec: KernelSpec, answers: Sequence[Allocation | Refusal]) -> Allocation | Refusal:
        allocations = []
        for answer in answers:
            if isinstance(answer, Refusal):
                return answer
            allocations.append(answer)
        plans = tuple(
            Plan(spec, part.problem, launch.structure.digest, launch.structure.binding, allocation, part.graph)
            for launch, part, allocation in zip(self.launches, self.parts, allocations, strict=True)
        )
        processor = self.of.problem.target.processor
        waiting = BETWEEN_KERNELS * (len(plans) - 1) * processor.multiplications_a_second
        cost = sum((allocation.cost for allocation in allocations), waiting)
        return Allocation(
            allocations[0].tile,
            cost=cost,
            workspace=partial(self._workspace_bytes, allocations),
            launches=plans,
            estimate=partial(_estimate, allocations, cost, processor),
        )

    def _workspace_bytes(self, allocations: Sequence[Allocation]) -> int:
        between = sequence.slots(self.parts, self.of.problem)
        return sequence.workspace_bytes(between, [allocation.workspace_bytes for allocation in allocations])


def _estimate(allocations: Sequence[Allocation], cost: float, processor: Processor) -> Estimate:
    each = [f"{processor.microseconds(one.cost):.1f}" for one in allocations]
    whole = f"{processor.microseconds(cost):.1f} us on {processor.name} by the model"
    return Estimate(f"{whole} ({len(each)} launches: {', '.join(each)}, and the time between them)", cost, 0.0)


def parts_of(plan: Plan) -> tuple[SweepPart, ...]:
    """The parts that a plan of several launches consists of."""
    return tuple(SweepPart(launch.graph, launch.problem) for launch in plan.allocation.launches)


# --- the refusal of what would take several ----------------------------------------------------------------------


def _ways_out(parts: tuple[SweepPart, ...], problem: Problem) -> str:
    """Text on what the user can write instead, and on the cost of computing the product again."""
    count = len(parts)
    further = "a second launch recomputes" if count == 2 else f"{count - 1} further launches recompute"
    return (
        f"{_what_to_store(parts, problem)}, or pass allow_recompute=True: {further} the product, {count}.0 x the FLOPs"
    )


def _what_to_store(parts: tuple[SweepPart, ...], problem: Problem) -> str:
    if dependent := _reductions_of_crossing(parts):
        reductions = ((part.graph, node) for part in parts for node in part.graph.nodes if node.op == "reduce")
        if len({graph.loc(node) for graph, node in reductions}) == 1:  # one function, such as var or argmax
            return "store the product and reduce it in PyTorch"
        squares = any(node.attr[0] == "mean" and _is_square(node.args[0]) for node in dependent)
        example = " (mean(x * x) - mean(x) ** 2 for a variance, less exact where the mean is large)" if squares else ""
        unless = f"its reductions need one another: where they can be written so that none does{example}, "
        return f"{unless}store and apply them {_WHERE}"
    stored = _reductions_between(parts, problem)
    many = {count: "both " if count == 2 else f"all {count} " for count in stored.values() if count > 1}
    each = [many.get(count, "") + text for text, count in stored.items()]
    what, them = " and ".join(each), "it" if stored.total() == 1 else "them"
    if any(text.startswith("logsumexp(") for text in stored):
        # No epilogue can apply it alone: exp(x) overflows, and exp(x - logsumexp(x)) needs x itself.
        return f"store x and {what}, and apply {them} where x is read next (softmax(x) is exp(x - logsumexp(x)))"
    return f"store {what} and apply {them} {_WHERE}"


_WHERE = "in the next GEMM's epilogue"


def _reductions_of_crossing(parts: tuple[SweepPart, ...]) -> list[Node]:
    """Reductions that need the result of another one, from an earlier launch: one launch cannot store both."""
    known: set[str] = set()
    found = []
    for part in parts:
        for node in part.graph.nodes:
            below = topological([node]) if node.op == "reduce" else ()
            if any(isinstance(each.attr, Load) and each.attr.name in known for each in below):
                found.append(node)
        known |= {output.name for output in part.graph.outputs}
    return found


def _is_square(node: Node) -> bool:
    return node.op == "mul" and node.args[0] is node.args[1]


def _reductions_between(parts: tuple[SweepPart, ...], problem: Problem) -> Counter[str]:
    """The reductions that parts hand over, as the user would write them, with how often each text occurs.

    Equal texts can be different reductions: x stands for different values."""
    found: dict[Node, tuple[str, str]] = {}
    for part in parts:
        names = crossing_names(part, problem)
        for output in part.graph.outputs:
            if output.name in names:
                found |= {node: spelled(node, problem) for node in reductions_under(output.node)}
    # Beside a logsumexp, amax is not needed: exp(x - amax(x)) / sum(exp(x - amax(x))) is exp(x - logsumexp(x)).
    exponentials = {dims for name, dims in found.values() if name == "logsumexp"}
    return Counter(f"{name}(x{dims})" for name, dims in found.values() if name != "amax" or dims not in exponentials)
