"""The kernel that merges partial results and computes what the epilogue makes of them, in the same launch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl import partials, tuned
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.kernels.modes import coordinate
from epifuse.providers.cutedsl.kernels.reduce import (
    ROWS,
    across,
    as_tuple,
    as_words,
    finished,
    joined,
    neutral,
    plane_of,
)
from epifuse.providers.cutedsl.program import Program
from epifuse.providers.cutedsl.rows import finish_nodes
from epifuse.providers.cutedsl.store_math import stored

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # its home in CuTe DSL 4.7
    from cutlass.utils import SmemAllocator

WARP = 32
LANES = (16, 8, 4, 2, 1)  # bits of a lane's number
ELEMENTS = WARP  # results of a block, where there is more than one


class Finish:
    """The merging kernel of the outputs that run along one axis: a block of threads for some results.

    Threads merge every n-th part each, then lanes and warps each other's results in a fixed order.
    """

    def __init__(self, design: Design, program: Program, axis: str, batched: bool) -> None:
        self.design, self.program, self.axis, self.batched = design, program, axis, batched
        graph = program.graph
        self.outputs = [
            i
            for i, (output, access) in enumerate(zip(graph.outputs, program.stores, strict=True))
            if access.travels.merged and self._is_mine(graph.types[output.node].axes)
        ]
        self.nodes = finish_nodes(graph, [graph.outputs[i].node for i in self.outputs])
        self.reductions = partials.reductions_of(graph)
        self.elements = ELEMENTS if axis else 1
        self.warps = tuned.MERGING_WARPS.value
        self.lanes = self.warps * WARP // self.elements
        self.needed = [number for number, each in enumerate(self.reductions) if each.node in self.nodes]
        words = sum(self.reductions[number].words for number in self.needed)
        self.at_once = max(1, min(tuned.PARTS_AT_ONCE.value, tuned.WORDS_AT_ONCE.value // words))

    def _is_mine(self, axes):
        return "".join(sorted(axes - {"l"})) == self.axis and ("l" in axes) == self.batched

    def launch(self, workspace, tensors, numbers, outputs, shape, ctas, stream):
        """On the host, after the main kernel of `ctas` CTAs; it starts while that one ends."""
        length = {"m": shape[0], "n": shape[1], "": Int32(1)}[self.axis]
        total = length * shape[2] if self.batched else length
        blocks = (total + (self.elements - 1)) // self.elements
        self.kernel(workspace, tensors, numbers, outputs, shape, length, total, ctas).launch(
            grid=(blocks, 1, 1), block=(self.warps * WARP, 1, 1), stream=stream, use_pdl=True
        )

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
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = thread // WARP
        element = cutlass.min(block * self.elements + thread % self.elements, total - 1)
        rounds, where = self.parts(element, length, shape, ctas)
        held = [self.start(number) for number in self.needed]
        start = thread // self.elements
        first = self.places(start, rounds, where)
        cute.arch.griddepcontrol_wait()
        self.read(held, workspace, first, where)
        step = self.at_once * self.lanes
        for later in cutlass.range(start + step, rounds, step, unroll=1):
            self.read(held, workspace, self.places(later, rounds, where), where)
        buffers = [self.buffer(number) for number in self.needed]
        self.keep(held, buffers, thread)
        cute.arch.sync_threads()
        # As many threads an element as there are warps: each has what one of them kept of it.
        own, part = thread // self.warps, thread % self.warps
        if warp < (self.elements * self.warps + WARP - 1) // WARP:
            values = self.merged(buffers, own % self.elements, part)
            mine = block * self.elements + own
            if own < self.elements and mine < total and part == 0:
                at, batch = self.whose(mine, length)
                self.store(values, tensors, numbers, outputs, at, batch, shape)

    def whose(self, element, length):
        """Which result of which batch an element is."""
        return (element % length, element // length) if self.batched else (element, Int32(0))

    def parts(self, element, length, shape, ctas):
        """How many parts there are to merge, and of each reduction where an element's first lies, and the next ones.

        All that one kernel merges run along the same axes, and so have as many.
        """
        at, batch = self.whose(element, length)
        rounds, where, base = Int32(0), {}, Int64(0)
        for number, reduction in enumerate(self.reductions):
            plane = plane_of(reduction, self.design, shape)
            if number in self.needed:
                kept, _ = partials.parts(reduction, self.design, shape[0], shape[1])
                rounds = self.rounds(number, kept, shape, ctas)
                where[number] = (base + Int64(batch) * kept * length + at, length, plane)
            base = base + plane * reduction.words
        return rounds, where

    def buffer(self, number):
        """Shared memory for the partial results of warps, an element's in different banks."""
        numbers = self.reductions[number].numbers
        row = self.warps + 1  # partials.MERGED_BYTES a word at most
        layout = cute.make_layout((self.elements, self.warps, numbers), stride=(row, 1, row * WARP))
        return SmemAllocator().allocate_tensor(HELD[self.reductions[number].kind], layout, 16)

    def start(self, number):
        """What merging starts from, in registers."""
        values = neutral(self.reductions[number])
        held = cute.make_rmem_tensor(len(values), HELD[self.reductions[number].kind])
        _put(held, values)
        return held

    def rounds(self, number, kept, shape, ctas):
        """How many parts there are to merge; batches that are merged too are only more parts."""
        reduction = self.reductions[number]
        if partials.is_carried(reduction):
            return ctas * partials.MATH_WARPS
        return kept if reduction.batched else kept * shape[2]

    def places(self, first, rounds, where):
        """Of parts that a thread reads at once: which exist, and of each reduction where they lie.

        Those beyond the last are at its place; there is one at least, as nothing is launched for empty results.
        """
        parts = [first + k * self.lanes for k in range(self.at_once)]
        starts = {}
        for number in self.needed:
            origin, length, _ = where[number]
            starts[number] = [origin + Int64(cutlass.min(part, rounds - 1)) * length for part in parts]
        return [part < rounds for part in parts], starts

    def read(self, held, workspace, places, where):
        """Merge parts of the workspace, all loaded before the first is waited for; what is no part is neutral."""
        exist, starts = places
        loaded = []
        for number in self.needed:
            reduction, (_, _, plane) = self.reductions[number], where[number]
            values = as_words(reduction, workspace)
            each = [[values[start + word * plane] for word in range(reduction.words)] for start in starts[number]]
            loaded.append(each)
        for number, kept, found in zip(self.needed, held, loaded, strict=True):
            reduction = self.reductions[number]
            for exists, words in zip(exist, found, strict=True):
                numbers = words if reduction.numbers > 1 else [joined(HELD[reduction.kind], words)]
                pairs = zip(numbers, neutral(reduction), strict=True)
                inside = tuple(cutlass.select_(exists, number, nothing) for number, nothing in pairs)
                _put(kept, ROWS[reduction.name].merge(as_tuple(kept), inside))

    def keep(self, held, buffers, thread):
        """Each warp's partial results into shared memory; where all its threads have one element, merged before."""
        warp, lane = thread // WARP, thread % WARP
        for number, kept, buffer in zip(self.needed, held, buffers, strict=True):
            if self.elements == 1:
                _put(kept, across(ROWS[self.reductions[number].name], as_tuple(kept), LANES))
                _put_first(buffer[0, warp, None], kept, lane)
            else:
                _put(buffer[thread % self.elements, warp, None], as_tuple(kept))

    def merged(self, buffers, element, part):
        """An element's complete reductions, merged over the neighbouring threads that hold its parts."""
        offsets = tuple(bit for bit in LANES if bit < self.warps)
        return {
            self.reductions[number].node: across(
                ROWS[self.reductions[number].name], as_tuple(buffer[element, part, None]), offsets
            )
            for number, buffer in zip(self.needed, buffers, strict=True)
        }

    def store(self, values, tensors, numbers, outputs, at, batch, shape):
        """One thread: compute the outputs of an element and write them."""
        m = at if self.axis == "m" else Int32(0)
        n = at if self.axis == "n" else Int32(0)
        for i, value in zip(self.outputs, self.finished(values, tensors, numbers, m, n, batch, shape), strict=True):
            outputs[i][m, n, batch] = value

    def finished(self, merged, tensors, numbers, m, n, batch, shape):
        """The outputs' values, by walking what is computed of merged reductions."""
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

        found = walk(graph, leaf, like, nodes=self.nodes)
        roots = [(graph.outputs[i].node, program.stores[i].dtype) for i in self.outputs]
        return [stored(found[node], graph.types[node].kind, dtype)[0] for node, dtype in roots]


def _put(values, numbers) -> None:
    for i, number in enumerate(numbers):
        values[i] = number


@cute.jit
def _put_first(to: cute.Tensor, values: cute.Tensor, lane: Int32):
    if lane == 0:
        _put(to, as_tuple(values))


def merging_kernels(design: Design, program: Program) -> list[Finish]:
    """One kernel for the outputs of each extent."""
    stores = zip(program.graph.outputs, program.stores, strict=True)
    axes = dict.fromkeys(program.graph.types[o.node].axes for o, access in stores if access.travels.merged)
    return [Finish(design, program, "".join(sorted(found - {"l"})), "l" in found) for found in axes]
