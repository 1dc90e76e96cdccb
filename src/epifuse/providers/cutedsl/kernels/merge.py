"""The kernel that merges partial results and computes what the epilogue makes of them, in the same launch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from epifuse.providers.cutedsl import partials
from epifuse.providers.cutedsl.device_types import HELD
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.kernels.epilogue import coordinate
from epifuse.providers.cutedsl.kernels.reduce import ROWS, as_words, finished, joined, neutral, plane_of
from epifuse.providers.cutedsl.program import Design, Program
from epifuse.providers.cutedsl.rows import finish_nodes
from epifuse.providers.cutedsl.store_math import stored

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # its home in CuTe DSL 4.7
    from cutlass.utils import SmemAllocator

THREADS = 1024
AT_ONCE = 4
"""Parts that a thread loads before it waits: gelu and its column sums take 0.6 % longer one after the other."""
ELEMENTS = 32  # results of a block, where there is more than one


class Finish:
    """The merging kernel of the outputs that run along one axis: a block of threads for some results.

    Threads merge every n-th part each, then each other's results in a fixed tree.
    """

    def __init__(self, design: Design, program: Program, axis: str, batched: bool) -> None:
        self.design, self.program, self.axis, self.batched = design, program, axis, batched
        graph = program.graph
        self.outputs = [
            i
            for i, (output, access) in enumerate(zip(graph.outputs, program.stores, strict=True))
            if access.way == "finish" and self._is_mine(graph.types[output.node].axes)
        ]
        self.nodes = finish_nodes(graph, [graph.outputs[i].node for i in self.outputs])
        self.reductions = partials.reductions_of(graph)
        self.elements = ELEMENTS if axis else 1
        self.lanes = THREADS // self.elements

    def _is_mine(self, axes):
        return "".join(sorted(axes - {"l"})) == self.axis and ("l" in axes) == self.batched

    def launch(self, workspace, tensors, numbers, outputs, shape, ctas, stream):
        """On the host, after the main kernel of `ctas` CTAs; it starts while that one ends."""
        length = {"m": shape[0], "n": shape[1], "": Int32(1)}[self.axis]
        total = length * shape[2] if self.batched else length
        blocks = (total + (self.elements - 1)) // self.elements
        self.kernel(workspace, tensors, numbers, outputs, shape, length, total, ctas).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
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
        cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        column, lane = thread % self.elements, thread // self.elements
        element = cutlass.min(block * self.elements + column, total - 1)
        batch, at = element // length, element % length
        merged = []
        base = Int64(0)
        for number in cutlass.range_constexpr(len(self.reductions)):
            if const_expr(self.is_needed(number)):
                buffer = self.buffer(number)
                kept, _ = partials.parts(self.reductions[number], self.design, shape[0], shape[1])
                rounds = self.rounds(number, kept, shape, ctas)
                origin = base + Int64(batch) * kept * length + at
                plane = plane_of(self.reductions[number], self.design, shape)
                one, two = self.start(number)
                for first in cutlass.range(lane, rounds, AT_ONCE * self.lanes, unroll=1):
                    parts = [first + k * self.lanes for k in range(AT_ONCE)]
                    one, two = self.read(number, one, two, workspace, (origin, parts, length, rounds), plane)
                self.keep(number, buffer, column, lane, one, two)
                cute.arch.sync_threads()
                for level in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                    if lane < self.lanes >> (level + 1):
                        self.merge_lanes(number, buffer, column, lane, self.lanes >> (level + 1))
                    cute.arch.sync_threads()
                merged.append(buffer)
            base = base + plane_of(self.reductions[number], self.design, shape) * self.reductions[number].words
        if block * self.elements + column < total and lane == 0:
            self.store(merged, column, tensors, numbers, outputs, at, batch, shape)

    def is_needed(self, number):
        """Whether one of this kernel's outputs reads the reduction."""
        return self.reductions[number].node in self.nodes

    def buffer(self, number):
        """Shared memory for each thread's partial result."""
        reduction = self.reductions[number]
        shape = (self.elements, self.lanes, partials.NUMBERS.get(reduction.name, 1))
        return SmemAllocator().allocate_tensor(HELD[reduction.kind], cute.make_layout(shape), 16)

    def start(self, number):
        """What merging starts from; the second number counts only where there are two."""
        return (*neutral(self.reductions[number]), Float32(0.0))[:2]

    def rounds(self, number, kept, shape, ctas):
        """How many parts there are to merge; batches that are merged too are only more parts."""
        reduction = self.reductions[number]
        if partials.is_carried(reduction):
            return ctas * partials.MATH_WARPS
        return kept if reduction.batched else kept * shape[2]

    def read(self, number, one, two, workspace, where, plane):
        """Merge some parts of the workspace, all loaded before the first is waited for; those beyond it are neutral."""
        reduction = self.reductions[number]
        origin, parts, length, rounds = where
        values = as_words(reduction, workspace)
        found = []
        for part in parts:
            index = origin + Int64(cutlass.min(part, rounds - 1)) * length
            found.append([values[index + word * plane] for word in range(reduction.words)])
        merge = ROWS[reduction.name].merge
        for part, words in zip(parts, found, strict=True):
            numbers = words if reduction.name in partials.NUMBERS else [joined(HELD[reduction.kind], words)]
            pairs = zip(numbers, neutral(reduction), strict=True)
            inside = tuple(cutlass.select_(part < rounds, number, nothing) for number, nothing in pairs)
            one, two = (*merge((one, two)[: len(inside)], inside), two)[:2]
        return one, two

    def keep(self, number, buffer, column, lane, one, two):
        """This thread's partial result into shared memory."""
        for i in range(cute.size(buffer, mode=[2])):
            buffer[column, lane, i] = (one, two)[i]

    def merge_lanes(self, number, buffer, column, lane, distance):
        """Merge the partial result of the lane at a distance into this lane's."""
        mine, other = _numbers(buffer, column, lane), _numbers(buffer, column, lane + distance)
        for i, value in enumerate(ROWS[self.reductions[number].name].merge(mine, other)):
            buffer[column, lane, i] = value

    def store(self, merged, column, tensors, numbers, outputs, at, batch, shape):
        """One thread an element: compute the outputs and write them."""
        needed = [r for number, r in enumerate(self.reductions) if self.is_needed(number)]
        values = {reduction.node: _numbers(buffer, column, 0) for reduction, buffer in zip(needed, merged, strict=True)}
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


def _numbers(buffer, column, lane) -> tuple:
    return tuple(buffer[column, lane, i] for i in range(cute.size(buffer, mode=[2])))


def merging_kernels(design: Design, program: Program) -> list[Finish]:
    """One kernel for the outputs of each extent."""
    stores = zip(program.graph.outputs, program.stores, strict=True)
    axes = dict.fromkeys(program.graph.types[o.node].axes for o, access in stores if access.way == "finish")
    return [Finish(design, program, "".join(sorted(found - {"l"})), "l" in found) for found in axes]
