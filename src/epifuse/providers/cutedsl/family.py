"""Families: what all problems of a class have in common, programs and refusals for each design. Imports no cutlass.

A problem with new extents in a known class finds its family here, and only its cost in each design is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from epifuse.base.cache import LRU
from epifuse.base.lazy import cached_property
from epifuse.base.target import Target
from epifuse.ir import Node
from epifuse.plan import Details, KernelSpec, Refusal
from epifuse.providers.cutedsl import (
    budget,
    inputs,
    invariance,
    multistage,
    refusals,
    rows,
    tensor_memory,
    tuned,
    weave,
)
from epifuse.providers.cutedsl.accesses import Layout, Sides, carried, layouts, sides
from epifuse.providers.cutedsl.costs import instructions, moving
from epifuse.providers.cutedsl.design import MMA_SYNC, SUBTILE, TCGEN05, WGMMA, Design, Rewriting
from epifuse.providers.cutedsl.designs import (
    HEAD_DESIGNS,
    MULTISTAGE_SPECS,
    PLAIN_DESIGNS,
    PLAIN_SPECS,
    ROW_DESIGNS,
    SPLIT_ROW_DESIGNS,
    SWAPPED_DESIGNS,
    SWAPPED_SPECS,
    TENSOR_MEMORY_SPECS,
    WIDE_SWAPPED_SPECS,
)
from epifuse.providers.cutedsl.heuristic import Rated
from epifuse.providers.cutedsl.kernel_text import KernelSource, written
from epifuse.providers.cutedsl.length import band, is_long, is_short, length_class
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.providers.cutedsl.partials import edges
from epifuse.providers.cutedsl.precision import Accuracy, accuracies
from epifuse.providers.cutedsl.program import NO_EDGES, Program
from epifuse.providers.cutedsl.ways import Access
from epifuse.request.problem import Problem


@dataclass(frozen=True, eq=False)
class Arranged:
    """What a kernel of one design is generated from. `spills`: the epilogue does not fit in the registers."""

    source: KernelSource
    spills: bool

    @property
    def program(self) -> Program:
        """The epilogue."""
        return self.source.program

    @property
    def design(self) -> Design:
        """The design with its stages."""
        return self.source.design

    @cached_property
    def text(self) -> str:
        """The text of the kernel, which is compiled."""
        return written(self.source)

    @cached_property
    def number_names(self) -> tuple[str, ...]:
        """The names of the numbers that a launch takes, in order."""
        return tuple(name for program in self.source.programs for name in program.number_names)

    def details(self, work: Lowered, problem: Problem) -> Details:
        """The details that `explain` shows. They are made for this problem: a reason to go direct may name a stride."""
        own = carried(sides(work, problem), self.design.instruction)
        kept = [(access, mine) for (_, access), mine in zip(self.program.loads, own.loads, strict=True)]
        loads = [_shown_access(*pair) for pair in kept if not pair[0].travels.is_number]
        stores = [_shown_access(*pair) for pair in zip(self.program.stores, own.stores, strict=True)]
        return Details(refusals.transports(loads, stores), refusals.notes(self.design, problem, spills=self.spills))


def _shown_access(kept: Access, own: Access | None) -> Access:
    """The access to show: the problem's `own`, with its reason to go direct, unless the kernel's (`kept`) differs."""
    return own if own is not None and own.travels.in_place and own.travels is kept.travels else kept


class Key(NamedTuple):
    """Problems with equal keys have the same programs and refusals, and in one design the same compiled function.

    - `work`: the lowered epilogue, which is of one layout class already.
    - `layouts`: how operands and outputs lie, as far as kernels differ by it.
    - `by_rows`: whether A, and whether B, is contiguous along its last dim.
    - `k`: the class of K's length.
    - `cuts`: where a whole axis is reduced, the least M and N at which the tiles of every design end as they do here.
    - `columns`: N where values need whole rows, else 0.
    - `by_tma`, `stands_in_the_way`: the tensors that were asked to travel by TMA, and why tensors here cannot.
    - `refused`: why A and B cannot be multiplied, or None.
    - `copied`: with mma.sync, elements of A and of B that one copy takes; None where TMA brings A and B.
    - `rewritten`: how a first kernel writes A and B anew; a design says it too.
    """

    work: Lowered
    layouts: tuple[Layout | None, ...]
    by_rows: tuple[bool, bool]
    k: tuple[int, bool, bool]
    cuts: tuple[int, int]
    columns: int
    by_tma: tuple[str, ...]
    stands_in_the_way: tuple[str, ...]
    target: Target
    refused: str | None
    instruction: str
    copied: tuple[int, int] | None
    rewritten: Rewriting | None


def family_of(work: Lowered, problem: Problem, instruction: str = WGMMA) -> Family:
    """Return the problem's family among the kernels that multiply by this instruction."""
    rewritten = inputs.rewritten(problem) if instruction == WGMMA else None
    problem, is_copied = inputs.multiplied(problem, rewritten), instruction == MMA_SYNC
    refused = (None if is_copied else inputs.refused(problem)) or weave.refused(work.order, problem)
    copied = multistage.copied(problem) if is_copied else None
    problem = weave.problem_of(work.order, problem)
    extents, lying = problem.extents, layouts(work, problem)
    key = Key(
        work,
        tuple([layout for layout, _ in lying]),
        (problem.a.strides[-1] == 1, problem.b.strides[-1] == 1),
        length_class(problem),
        cuts(extents, swapped=work.is_swapped) if work.reduces_axes else (0, 0),
        extents["n"] if work.shares_rows else 0,
        problem.by_tma,
        tuple([why for layout, why in lying if layout]) if problem.by_tma else (),
        problem.target,
        refused,
        instruction,
        copied,
        rewritten,
    )
    found: Family = FAMILIES.get(key) or FAMILIES.put(key, Family(key, problem))
    return found


_STEPS = tuple(
    math.lcm(*(one.tile[i] * one.cluster[i] for one in PLAIN_DESIGNS if not one.has_narrow_subtiles)) for i in (0, 1)
)
_LEAST_SWAPPED = min(design.exchanged_sides.subtile for design in SWAPPED_DESIGNS)


def cuts(extents: Mapping[str, int], *, swapped: bool) -> tuple[int, int]:
    """Return the least M and N for which `partials.edges` is the same as for `extents` in every design."""
    common = math.gcd(extents["m"], _STEPS[0]), math.gcd(extents["n"], _STEPS[1])
    subtile = _LEAST_SWAPPED if swapped else SUBTILE
    m, n = (size if size % own == 0 else 1 for size, own in zip(common, subtile, strict=True))
    return m, n


_WHOLE = (PLAIN_SPECS, SWAPPED_SPECS, WIDE_SWAPPED_SPECS, MULTISTAGE_SPECS, TENSOR_MEMORY_SPECS)
"""The groups of kernels that planning asks for unless the call names kernels. A family keeps the answers for them."""
_OF_GRAPH = {MMA_SYNC: multistage.of_graph, TCGEN05: tensor_memory.of_graph}
"""By instruction, a function that says why its kernel does not support an epilogue that Hopper's kernel may support."""


class Carried(NamedTuple):
    """The kernels that can run the problems of a family, what each is generated from, and why the others cannot."""

    specs: tuple[KernelSpec, ...]
    arranged: tuple[Arranged, ...]
    rates: tuple[Rated, ...]
    refusals: tuple[Refusal, ...]


class Family:
    """The answers for a class of problems. Each is made when it is first asked for, from its first `problem`."""

    def __init__(self, key: Key, problem: Problem) -> None:
        self.key, self.work, self.problem = key, key.work, problem
        self._found: dict[str, Arranged | str] = {}
        self._whole: dict[str, Carried] = {}

    def answers(self, specs: Sequence[KernelSpec]) -> Carried:
        """Which of these kernels can run the problems, and why the others cannot."""
        if specs not in _WHOLE:
            return self._carried(specs)
        found = self._whole.get(specs[0].name)
        return found or self._whole.setdefault(specs[0].name, self._carried(specs))

    def _carried(self, specs: Sequence[KernelSpec]) -> Carried:
        answers = [(spec, self.of(spec)) for spec in specs]
        able = [(spec, found) for spec, found in answers if isinstance(found, Arranged)]
        work, computed = self.work, instructions(self.work.stored, self._accuracies)
        processor = self.problem.target.processor
        rated = partial(Rated.of, processor=processor, instructions=computed, shares_rows=work.shares_rows)
        return Carried(
            tuple(spec for spec, _ in able),
            tuple(found for _, found in able),
            tuple(rated(found.design, moving=moving(found.program), spills=found.spills) for _, found in able),
            tuple(Refusal(spec.name, why) for spec, why in answers if isinstance(why, str)),
        )

    def of(self, spec: KernelSpec) -> Arranged | str:
        """What is compiled for this kernel, or why the kernel is refused."""
        found = self._found.get(spec.name)
        return self._found.setdefault(spec.name, self.arrange(spec.design)) if found is None else found

    @cached_property
    def sides(self) -> Sides:
        """How operands and outputs lie, and could travel with this instruction."""
        return carried(sides(self.work, self.problem), self.key.instruction)

    @cached_property
    def refused(self) -> str | None:
        """Why no design can run the epilogue, or multiply A and B, or None."""
        further = _OF_GRAPH.get(self.key.instruction)  # first, because a remedy for the other reasons does not help
        reason = None if further is None else further(self.work, self.problem)
        return reason or self.key.refused or refusals.of_graph(self.work, self.problem, self.sides)

    @cached_property
    def _accuracies(self) -> Mapping[Node, Accuracy]:
        problem = self.problem
        dtypes = {**dict(problem.dtypes), **self.work.printed}
        return accuracies(self.work.stored, dtypes, fast_math=problem.constraints.fast_math)

    def arrange(self, design: Design) -> Arranged | str:
        """Return the program and the design with its stages, or why the design is refused."""
        work, problem = self.work, self.problem
        own = self.with_derived_fields(design)
        reason = refusals.not_asked_for(design, problem) or invariance.refused(own, work, problem)
        if work.shares_rows or work.span:
            reason = reason or rows.refused(own, work.walked, problem)
        reason = (
            reason
            or refusals.unsplit(own, problem)
            or budget.unpromoted(own)
            or refusals.unscaled(own, work.order, problem)
            or (refusals.few(own.exchanged_sides, work, problem) if own.swapped else None)
        )
        reason = reason or (multistage.unfit(own, problem) if own.by_warps else None)
        if reason is not None:
            return reason
        if design in (*ROW_DESIGNS, *SPLIT_ROW_DESIGNS) and not work.shares_rows:
            return "its cluster is for values that need whole rows, and there are none"
        has_heads = work.span and work.span % design.columns == 0
        if design in HEAD_DESIGNS and not (work.is_of_region or has_heads):
            return "its tile is for heads of 128 columns and for regions of N"
        if not design.is_simple and (reason := weave.unfit(design, work.order, problem)):
            return reason
        found = self.fitted(design.exchanged_sides if design.swapped else design)
        if found is None:
            return (
                f"its tile leaves too little shared memory for {budget.fewest(design)} stages of A and B beside what "
                "the epilogue holds there: combine vectors before the call"
            )
        program, design = found
        refused = refusals.not_by_tma(program, problem) or refusals.untried(design, program, problem)
        crowded = budget.crowded(program, design, short=is_short(problem), long=is_long(problem))
        if design.split == 1 and rows.is_held_by_one_width(work.span, design):
            spills = crowded is not None and budget.go_direct(program)
        else:
            refused, spills = refused or crowded, budget.spills(program, design, long=is_long(problem))
        spills = spills or (design.by_warps and multistage.spills(design, work, problem))
        spills = spills or (design.in_tensor_memory and tensor_memory.spills(design, work))
        return refused or Arranged(KernelSource.of(problem, program, design), spills)

    def with_derived_fields(self, design: Design) -> Design:
        """Return the design with the fields that follow from the epilogue, and from A and B."""
        parts, problem = weave.PARTS if self.work.order else 1, self.problem
        if self.key.copied is not None:
            return multistage.with_copies(replace(design, parts=parts), self.key.copied, problem)
        if design.in_tensor_memory:
            return design
        return replace(
            design,
            parts=parts,
            promoted=inputs.promoted(problem),
            rewritten=self.key.rewritten,
            converts=inputs.converts(problem),
            scaled=inputs.scaled(problem),
        )

    def fitted(self, design: Design) -> tuple[Program, Design] | None:
        """Return the program and the design with its stages; None if A and B get too little shared memory."""
        work, problem, graph = self.work, self.problem, self.work.stored
        loads, stores = [access for access in self.sides.loads if access is not None], list(self.sides.stores)
        several, short = len(work.walks) > 1, is_short(problem)
        design = replace(design, exchanged=work.exchanged if design.cluster[1] > 1 else 0)
        design = replace(design, raster=band(problem, design))
        design = self.with_derived_fields(design)
        if design.is_low:
            why = f"TMA takes no subtile of {design.tile[0]} columns"
            loads, stores = _untiled(loads, why), _untiled(stores, why)
        loaded = any(a.travels.staged for a in loads)
        if design.for_few_rows and not loaded:  # few_columns_h200.json
            stores = _untiled(stores, "its tile has few rows", problem.by_tma)
        # Outputs by columns need stages of their own (`budget.fit`).
        spared = loaded and all(a.by_rows for a in stores if a.travels.staged)
        many = work.reduces or (spared and not budget.is_heavy(graph))
        enough = tuned.SHORT_STAGES if short and loaded else tuned.ENOUGH_STAGES if many else tuned.FEWER_STAGES
        least = budget.least_stages(design) if is_long(problem) and not (several or design.is_simple) else 0
        fitted = _with_room(design, (loads, stores), problem, enough.value, least)
        if fitted is None:
            return None
        found, (loads, stores) = fitted
        # Only reductions need the edges, and each different answer is one more kernel to compile.
        cut = edges(design, problem.extents["m"], problem.extents["n"]) if work.reduces_axes else NO_EDGES
        loading = tuple(zip(work.loads, loads, strict=True))
        program = Program(graph, loading, tuple(stores), self._accuracies, cut, work.prints, work.order)
        if design.is_simple:
            return program, found
        # An epilogue that walks a whole tile more than once holds what the walks found. One that reduces nothing gains
        # or loses 2 % where K is short, which is not worth a kernel of its own.
        alone = found.split > 1  # a CTA mostly has one tile, so nothing runs beside its epilogue
        held = several or (work.reduces and short)
        waited_for = alone or (held and not budget.in_segments(program))
        registers = budget.registers(found, program, waited_for=waited_for)
        spare = 0 if several or alone else budget.spare(found, program, short=short)
        return program, replace(found, registers=registers, spare=spare)


FAMILIES: LRU[Hashable, Any] = LRU(1024)
"""Three kinds of entries: a `Family` by its `Key`, a `Sized` by its `sizes.Placed`, and a launch of all regions of N by
what each region takes alone (`together.py`)."""

_Sides = tuple[list[Access], list[Access]]


def _direct(access: Access, why: str) -> Access:
    return replace(access, way=access.travels.otherwise or access.way, why=why)


def _untiled(accesses: Iterable[Access], why: str, but: Sequence[str] = ()) -> list[Access]:
    """The accesses, of which those in tiles go direct instead, except the names in `but`."""
    return [_direct(a, why) if a.travels.staged and a.name not in but else a for a in accesses]


def _with_room(
    design: Design, sides: _Sides, problem: Problem, enough: int, least: int
) -> tuple[Design, _Sides] | None:
    """Return the design with its stages, and `sides`: loads and stores, of which some go direct to make room; or None.

    They go direct until all fits. Then those of 32 bits do, whose pairs fill whole sectors of memory, until A and B
    have their `least` stages. The last access of the longer side goes first, and those asked to go by TMA go last.
    """
    asked, sides = problem.by_tma, (list(sides[0]), list(sides[1]))

    def tiles(may: Callable[[Access], bool]) -> list[list[int]]:
        return [[i for i, access in enumerate(side) if access.travels.otherwise and may(access)] for side in sides]

    while True:
        capacity = problem.target.shared_memory
        found = budget.fit(design, tuple(sides[0]), tuple(sides[1]), capacity, max(enough, least))
        if found is not None and found.stages >= least:
            return found, sides
        why = "shared memory has no room for all of them" if found is None else "A and B have more stages so"
        if found is not None:
            leaving = tiles(lambda access: access.name not in asked and access.dtype.itemsize == 4)
        elif not any(leaving := tiles(lambda access: access.name not in asked)):
            leaving = tiles(lambda _: True)
        if not any(leaving):
            return None if found is None else (found, sides)
        which = 0 if len(leaving[0]) >= len(leaving[1]) else 1
        last = leaving[which][-1]
        sides[which][last] = _direct(sides[which][last], why)
