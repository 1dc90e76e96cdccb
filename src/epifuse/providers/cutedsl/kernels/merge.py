"""The kernel that merges partial results and computes what the epilogue makes of them, in the same launch."""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from epifuse.providers.cutedsl import partials, tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.finishing import Step, steps
from epifuse.providers.cutedsl.kernels.compat import SmemAllocator
from epifuse.providers.cutedsl.kernels.modes import coordinate
from epifuse.providers.cutedsl.kernels.reduce import (
    RULES,
    across,
    arguments,
    as_tuple,
    as_words,
    exchanged,
    finished,
    joined,
    neutral,
    plane_of,
    words,
)
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.store_math import stored

WARP = 32
LANES = (16, 8, 4, 2, 1)  # bits of a lane's number


class Finish:
    """The merging kernel of one step (`finishing.Step`), whose values run along one axis. A block merges some.

    Each thread merges every n-th part. Then lanes and warps merge each other's results in a fixed order.
    """

    def __init__(self, design: Design, program: Program, step: Step) -> None:
        self.design, self.program, self.step = design, program, step
        self.axis, self.batched = "".join(sorted(step.axes - {"l"})), "l" in step.axes
        self.reductions = partials.reductions_of(program.graph)
        self.elements, self.warps = partials.MERGING[self.axis]
        self.needed = step.merged
        words = sum(self.reductions[number].words for number in self.needed)
        self.bits = range(self.warps.bit_length() - 1)  # of a warp's number
        self.lanes = WARP // self.elements
        self.at_once = max(1, min(tuned.PARTS_AT_ONCE.value, tuned.WORDS_AT_ONCE.value // max(words, 1)))

    def launch(self, workspace, tensors, numbers, outputs, shape, ctas, stream):
        """Called on the host, after the main kernel of `ctas` CTAs. From Hopper on, it starts while that one ends."""
        length = {"m": shape[0], "n": shape[1], "": Int32(1)}[self.axis]
        total = length * shape[2] if self.batched else length
        blocks = (total + (self.elements - 1)) // self.elements
        doublings = self.doublings(_largest(self.counts(shape, ctas).values()))
        self.kernel(workspace, tensors, numbers, outputs, shape, length, total, ctas, doublings).launch(
            grid=(blocks, 1, 1),
            block=((1 << doublings) * WARP, 1, 1),
            max_number_threads=(self.warps * WARP, 1, 1),
            min_blocks_per_mp=1,  # else the assembler saves registers, and adds a part up before it loads the others
            stream=stream,
            use_pdl=self.design.overlaps,
        )

    def doublings(self, parts):
        """Return the logarithm of the number of warps that a block has for so many parts of each result."""
        most = [self.lanes * self.at_once << i for i in self.bits]
        return sum((cutlass.select_(parts > all_at_once, Int32(1), Int32(0)) for all_at_once in most), Int32(0))

    def counts(self, shape, ctas):
        """Return the numbers of parts to merge, by the `of` of their reductions."""
        layouts = self.layouts(shape)
        return {self.reductions[number].of: self.rounds(number, layouts, shape, ctas) for number in self.needed}

    @cute.kernel
    def kernel(
        self,
        workspace: cute.Tensor,
        tensors: tuple,
        numbers: tuple,
        outputs: tuple,
        shape: cute.Shape,
        length: Int32,
        total: Int32,
        ctas: Int32,
        doublings: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = thread // WARP
        element = cutlass.min(block * self.elements + thread % self.elements, total - 1)
        first_at, first_batch = self.whose(element, length)
        layouts = self.layouts(shape)
        where = {
            number: layouts[number].at(self.reductions[number], Int32(0), first_at, first_batch)
            for number in self.needed
        }
        rounds = self.counts(shape, ctas)
        held = [self.start(number) for number in self.needed]
        start, lanes = thread // self.elements, self.lanes << doublings
        first = self.places(start, lanes, rounds, where, layouts)
        if const_expr(self.design.overlaps):
            cute.arch.griddepcontrol_wait()
        self.read(held, workspace, first, layouts)
        step, most = self.at_once * lanes, _largest(rounds.values())
        for later in cutlass.range(start + step, most, step, unroll=1):
            self.read(held, workspace, self.places(later, lanes, rounds, where, layouts), layouts)
        buffers = [self.buffer(number) for number in self.needed]
        self.keep(held, buffers, thread)
        cute.arch.sync_threads()
        # An element has as many threads as there are warps: each thread takes what one warp kept of the element.
        own, part = thread >> doublings, thread & ((1 << doublings) - 1)
        if warp * WARP < (self.elements << doublings):
            values = self.merged(buffers, cutlass.min(own, self.elements - 1), part, doublings)
            mine = block * self.elements + own
            if own < self.elements and mine < total and part == 0:
                at, batch = self.whose(mine, length)
                self.store(values, tensors, numbers, outputs, at, batch, shape, workspace, layouts)

    def whose(self, element, length):
        """Return (number of the result, batch) of an element."""
        return (element % length, element // length) if self.batched else (element, Int32(0))

    def layouts(self, shape):
        """Return where each reduction lies in the workspace."""
        found, base = [], Int64(0)
        for reduction in self.reductions:
            plane = plane_of(reduction, self.design, shape)
            found.append(PartialsLayout(base, *partials.parts(reduction, self.design, shape[0], shape[1]), plane))
            base = base + plane * reduction.words
        return found

    def buffer(self, number):
        """Shared memory for the partial results of all warps. Those of one element lie in different banks."""
        numbers = self.reductions[number].numbers
        row = self.warps + 1  # planning counts partials.MERGED_BYTES a word
        layout = cute.make_layout((self.elements, self.warps, numbers), stride=(row, 1, row * self.elements))
        return SmemAllocator().allocate_tensor(HELD[self.reductions[number].kind], layout, 16)

    def start(self, number):
        """Return registers with a neutral partial result, from which merging starts."""
        values = neutral(self.reductions[number])
        held = cute.make_rmem_tensor(len(values), HELD[self.reductions[number].kind])
        _put(held, values)
        return held

    def rounds(self, number, layouts, shape, ctas):
        """The number of parts to merge. If batches are merged, too, they count as more parts."""
        reduction, kept = self.reductions[number], layouts[number].kept
        if partials.is_carried(reduction):
            return ctas * partials.MATH_WARPS
        merged = not reduction.batched and (reduction.of is None or "l" in reduction.of)
        return kept * shape[2] if merged else kept

    def places(self, first, lanes, rounds, where, layouts):
        """For the parts that a thread reads at once, return which exist, and where they lie for each reduction.

        Parts beyond the last have its place. There is at least one, because nothing is launched for empty results.
        """
        parts = [first + k * lanes for k in range(self.at_once)]
        starts = {}
        for number in self.needed:
            length, last = layouts[number].length, rounds[self.reductions[number].of] - 1
            starts[number] = [where[number] + Int64(cutlass.min(part, last)) * length for part in parts]
        return {of: [part < count for part in parts] for of, count in rounds.items()}, starts

    def read(self, held, workspace, places, layouts):
        """Merge parts of the workspace, all loaded before the first is waited for. Missing parts count as neutral."""
        exist, starts = places
        loaded = [
            [self.loaded(number, workspace, start, layouts) for start in starts[number]] for number in self.needed
        ]
        for number, kept, found in zip(self.needed, held, loaded, strict=True):
            reduction = self.reductions[number]
            for exists, own in zip(exist[reduction.of], found, strict=True):
                pairs = zip(self.numbers(number, own), neutral(reduction), strict=True)
                inside = tuple(cutlass.select_(exists, number, nothing) for number, nothing in pairs)
                _put(kept, RULES[reduction.name].merge(as_tuple(kept), inside))

    def loaded(self, number, workspace, start, layouts):
        """Load the words of a partial result."""
        reduction, plane = self.reductions[number], layouts[number].plane
        values = as_words(reduction, workspace)
        return [values[start + word * plane] for word in range(reduction.words)]

    def numbers(self, number, words):
        """Return the numbers of a partial result from its words."""
        reduction = self.reductions[number]
        return tuple(words if reduction.numbers > 1 else [joined(HELD[reduction.kind], words)])

    def keep(self, held, buffers, thread):
        """Write each warp's partial results to shared memory. Lanes that have the same element merge theirs first."""
        warp, lane = thread // WARP, thread % WARP
        offsets = tuple(bit for bit in LANES if bit >= self.elements)
        for number, kept, buffer in zip(self.needed, held, buffers, strict=True):
            _put(kept, across(RULES[self.reductions[number].name], as_tuple(kept), offsets))
            _put_first(buffer[lane % self.elements, warp, None], kept, lane, self.elements)

    def merged(self, buffers, element, part, doublings):
        """Return an element's complete reductions, merged over the neighbouring threads that hold its parts."""
        found = {}
        for number, buffer in zip(self.needed, buffers, strict=True):
            rule, value = RULES[self.reductions[number].name], as_tuple(buffer[element, part, None])
            for i in self.bits:
                further = rule.merge(value, exchanged(value, 1 << i))
                value = tuple(
                    type(y)(cutlass.select_(i < doublings, x, y)) for x, y in zip(further, value, strict=True)
                )
            found[self.reductions[number].node] = value
        return found

    def store(self, merged, tensors, numbers, outputs, at, batch, shape, workspace, layouts):
        """Called by one thread: compute the values of an element, write outputs, and leave what later steps read."""
        graph = self.program.graph
        m = at if self.axis == "m" else Int32(0)
        n = at if self.axis == "n" else Int32(0)
        for number in self.step.read:
            reduction = self.reductions[number]
            place = layouts[number].at(reduction, Int32(0), at, batch if reduction.batched else Int32(0))
            own = self.numbers(number, self.loaded(number, workspace, place, layouts))
            merged = {**merged, reduction.node: own}
        found = self.finished(merged, tensors, numbers, m, n, batch, shape)
        for i in self.step.outputs:
            node, dtype = graph.outputs[i].node, self.program.stores[i].dtype
            outputs[i][m, n, batch] = stored(found[node], graph.types[node].kind, dtype)[0]
        for number in self.step.kept_for_later:
            self.leave(number, merged[self.reductions[number].node], workspace, (Int32(0), at, batch), layouts)
        for number in self.step.reduced:
            reduction = self.reductions[number]
            kind = graph.types[reduction.source].kind
            (value,) = arguments(reduction, found[reduction.source], kind)
            part = Int32(0) if reduction.axis == self.axis else at
            self.leave(number, RULES[reduction.name].lift(value), workspace, (part, at, batch), layouts)

    def leave(self, number, values, workspace, place, layouts):
        """Write a partial result to the workspace, for a later step."""
        reduction, layout = self.reductions[number], layouts[number]
        to, start = as_words(reduction, workspace), layout.at(reduction, *place)
        for i, word in enumerate([word for value in values for word in words(value)]):
            to[start + i * layout.plane] = word

    def finished(self, merged, tensors, numbers, m, n, batch, shape):
        """Return the step's values, which are computed from merged reductions."""
        graph, program = self.program.graph, self.program
        loads = {node: i for i, (node, _) in enumerate(program.tensors)}
        like = cute.full((1,), 0.0, Float32)

        def leaf(node):
            kind = graph.types[node].kind
            if node.op == "reduce":
                return finished(node, tuple(cute.full_like(like, x, x.dtype) for x in merged[node]), shape)
            if node.op == "index":
                return cute.full_like(like, coordinate(node.attr, (m, n, batch), shape), Int32)
            held = HELD["float" if kind == "mask" else kind]
            if node in program.numbers:
                value = cute.full_like(like, numbers[program.numbers.index(node)], held)
            else:
                value = cute.full_like(like, tensors[loads[node]][m, n, batch].to(held), held)
            return value != 0.0 if kind == "mask" else value

        return walk(graph, leaf, like, nodes=self.step.nodes)


class PartialsLayout(NamedTuple):
    """Where a reduction's partial results lie: `kept` parts for each of `length` results, words a `plane` apart."""

    base: Any
    kept: Any
    length: Any
    plane: Any

    def at(self, reduction, part, at, batch):
        """Return the index of partial result number `part` for element `at` of a batch."""
        return self.base + (Int64(batch) * self.kept + part) * self.length + (at if reduction.axis else Int32(0))


def _largest(counts):
    return functools.reduce(cutlass.max, counts) if counts else Int32(0)


def _put(values, numbers) -> None:
    for i, number in enumerate(numbers):
        values[i] = number


@cute.jit
def _put_first(to: cute.Tensor, values: cute.Tensor, lane: Int32, lanes: cutlass.Constexpr):
    """Write the values of the first `lanes` lanes of a warp."""
    if lane < lanes:
        _put(to, as_tuple(values))


def merging_kernels(design: Design, program: Program) -> list[Finish]:
    """Return a merging kernel for each step after the tiles."""
    merged = [i for i, access in enumerate(program.stores) if access.travels.merged]
    return [Finish(design, program, step) for step in steps(program.graph, merged)]
