"""Reductions on the device: how values merge, what a warp leaves of a tile, and the kernel that merges what was left.

Sums are merged pairwise within a thread and in the order of the tiles across the result, in float32. Maxima propagate
NaN, as PyTorch's do. A logsumexp is a pair (largest value, sum of exponentials over it), merged online.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from epifuse.providers.cutedsl import partials
from epifuse.providers.cutedsl.emit import walk
from epifuse.providers.cutedsl.program import Design, Program

try:
    from cutlass.memory import SmemAllocator
except ImportError:  # its home in CuTe DSL 4.7
    from cutlass.utils import SmemAllocator

INFINITY = float("inf")
THREADS = 256  # of the merging kernel
ELEMENTS = 32  # results of one of its blocks, where there is more than one


class Row(NamedTuple):
    """One reduction on scalars. A partial result is a tuple; `neutral` is an argument that changes nothing."""

    neutral: float
    lift: Callable[[Any], tuple]
    merge: Callable[[tuple, tuple], tuple]


def _largest(x, y):
    return cute.arch.fmax(x, y, nan=True)


def _smallest(x, y):
    return cute.arch.fmin(x, y, nan=True)


def _by(function: Callable[[Any, Any], Any]) -> Callable[[tuple, tuple], tuple]:
    return lambda x, y: (function(x[0], y[0]),)


def _online(x: tuple, y: tuple) -> tuple:
    largest = _largest(x[0], y[0])
    # Of infinities only: exp(inf - inf) would be NaN.
    shift = cutlass.select_(cute.arch.fmax(largest, -largest) < INFINITY, largest, Float32(0.0))
    return largest, x[1] * cute.math.exp(x[0] - shift) + y[1] * cute.math.exp(y[0] - shift)


_SUM = _by(lambda x, y: x + y)
ROWS: dict[str, Row] = {
    "sum": Row(0.0, lambda x: (x,), _SUM),
    "mean": Row(0.0, lambda x: (x,), _SUM),
    "sum_of_squares": Row(0.0, lambda x: (x * x,), _SUM),
    "norm": Row(0.0, lambda x: (x * x,), _SUM),
    "amax": Row(-INFINITY, lambda x: (x,), _by(_largest)),
    "amin": Row(INFINITY, lambda x: (x,), _by(_smallest)),
    "absmax": Row(0.0, lambda x: (cute.arch.fmax(x, -x, nan=True),), _by(_largest)),
    "any": Row(0.0, lambda x: (x,), _by(_largest)),
    "all": Row(1.0, lambda x: (x,), _by(_smallest)),
    "logsumexp": Row(-INFINITY, lambda x: (x, Float32(1.0)), _online),
}


def fold(row: Row, values: list) -> tuple:
    """Partial results merged pairwise."""
    while len(values) > 1:
        pairs = [row.merge(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


def gather(row: Row, xs: list) -> tuple:
    """The partial result of several values of one thread."""
    if row.merge is not _online:
        return fold(row, [row.lift(x) for x in xs])
    largest = fold(ROWS["amax"], [(x,) for x in xs])[0]
    shift = cutlass.select_(cute.arch.fmax(largest, -largest) < INFINITY, largest, Float32(0.0))
    return largest, fold(ROWS["sum"], [(cute.math.exp(x - shift),) for x in xs])[0]


def across(row: Row, value: tuple, offsets: tuple[int, ...]) -> tuple:
    """Merged over the lanes that differ in these bits of their number."""
    for offset in offsets:
        other = tuple(cute.arch.shuffle_sync_bfly(x, offset=offset) for x in value)
        value = row.merge(value, other)
    return value


class Partials:
    """What the main kernel does for the reductions of `program`: it holds, merges and leaves partial results."""

    def __init__(self, design: Design, program: Program) -> None:
        self.design, self.program = design, program
        self.reductions = partials.reductions_of(program.graph)
        self.rows = [ROWS[reduction.name] for reduction in self.reductions]

    def begin(self, down):
        """Partial results of a tile: a number, one for each of a thread's rows, or one for each of its columns."""
        counts = {"": 1, "m": 2 * down, "n": 8}
        return [_Held(counts[reduction.axis]) for reduction in self.reductions]

    def add(self, held, found, s, down, rows, columns, shape):
        """Merge subtile `s`, whose rows of subtiles are walked first. Values i and i ^ 2 share a column."""
        for reduction, row, kept in zip(self.reductions, self.rows, held, strict=True):
            xs = _values(found[reduction.source], row, rows, columns, shape, self.program.ragged)
            step = s % down
            if reduction.axis == "":
                kept.merge(0, row, gather(row, xs))
            elif reduction.axis == "m":
                for half in (0, 1):
                    kept.merge(2 * step + half, row, gather(row, [x for v, x in enumerate(xs) if v & 2 == 2 * half]))
            else:
                firsts = [v for v in range(len(xs)) if v & 2 == 0]
                for place, v in enumerate(firsts):
                    kept.merge(place, row, gather(row, [xs[v], xs[v | 2]]))

    def leave_columns(self, held, workspace, columns, place, warp_part, shape):
        """After the last rows of a column of subtiles: its partial results go to the workspace."""
        for reduction, row, kept, base in self._with_bases(held, shape):
            if reduction.axis == "n":
                lane = cute.arch.lane_idx()
                firsts = [v for v in range(len(columns)) if v & 2 == 0]
                for slot, v in enumerate(firsts):
                    value = across(row, kept.take(slot), (4, 8, 16))
                    column = columns[v]
                    self._put(workspace, base, reduction, value, warp_part, column, lane < 4, shape, place.l, shape[1])

    def leave(self, held, workspace, row_numbers, place, warp_part, shape):
        """After a tile: partial results of rows and numbers."""
        lane = cute.arch.lane_idx()
        for reduction, row, kept, base in self._with_bases(held, shape):
            if reduction.axis == "m":
                for slot in range(len(row_numbers)):
                    value = across(row, kept.take(slot), (1, 2))
                    at = row_numbers[slot]
                    self._put(workspace, base, reduction, value, place.n, at, lane % 4 == 0, shape, place.l, shape[0])
            elif reduction.axis == "":
                value = across(row, kept.take(0), (1, 2, 4, 8, 16))
                step = self.design.tile[1] * self.design.cluster[1]
                tiles_n = (shape[1] + (step - 1)) // step * self.design.cluster[1]
                part = warp_part * tiles_n + place.n
                self._put(workspace, base, reduction, value, part, Int32(0), lane == 0, shape, place.l, Int32(1))

    def _with_bases(self, held, shape):
        bases, base = [], Int64(0)
        for reduction in self.reductions:
            bases.append(base)
            base = base + _elements(reduction, self.design, shape)
        return zip(self.reductions, self.rows, held, bases, strict=True)

    def _put(self, workspace, base, reduction, value, part, at, wanted, shape, batch, limit):
        kept, length = partials.parts(reduction, self.design, shape[0], shape[1])
        index = base + (Int64(batch) * kept + part) * length + at
        plane = Int64(kept) * length * shape[2]
        for number, x in enumerate(value):
            _put_if(workspace, index + number * plane, x, wanted, at < limit)


class _Held:
    """Partial results in registers; None until something is merged, which saves the merge with a neutral one."""

    def __init__(self, count) -> None:
        self.slots: list = [None] * count

    def merge(self, slot, row, value):
        known = self.slots[slot]
        self.slots[slot] = value if known is None else row.merge(known, value)

    def take(self, slot):
        value, self.slots[slot] = self.slots[slot], None
        return value


def _elements(reduction, design, shape):
    kept, length = partials.parts(reduction, design, shape[0], shape[1])
    return Int64(kept) * length * shape[2] * reduction.planes


def _values(fragment, row, rows, columns, shape, ragged):
    """Values of a fragment; those outside the result are neutral."""
    if fragment.element_type is Boolean:
        ones = cute.full(fragment.shape, 1.0, Float32)
        fragment = cute.where(fragment, ones, cute.full_like(ones, 0.0))
    xs = [fragment[i] for i in range(len(rows))]
    if not ragged:
        return xs
    inside = [cute.elem_less((rows[i], columns[i]), (shape[0], shape[1])) for i in range(len(rows))]
    return [cutlass.select_(ok, x, Float32(row.neutral)) for ok, x in zip(inside, xs, strict=True)]


@cute.jit
def _put_if(workspace: cute.Tensor, index, value, wanted, inside):
    if wanted and inside:
        workspace[index] = value


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
        self.nodes = partials.finish_nodes(graph, [graph.outputs[i].node for i in self.outputs])
        self.reductions = partials.reductions_of(graph)
        self.elements = ELEMENTS if axis else 1
        self.lanes = THREADS // self.elements

    def _is_mine(self, axes):
        return "".join(sorted(axes - {"l"})) == self.axis and ("l" in axes) == self.batched

    def launch(self, workspace, tensors, numbers, outputs, shape, stream):
        """On the host."""
        length = {"m": shape[0], "n": shape[1], "": Int32(1)}[self.axis]
        total = length * shape[2] if self.batched else length
        blocks = (total + (self.elements - 1)) // self.elements
        self.kernel(workspace, tensors, numbers, outputs, shape, length, total).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
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
    ):
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
                # Batches that are merged too are only more parts.
                rounds = kept if const_expr(self.batched) else kept * shape[2]
                origin = base + Int64(batch) * kept * length + at
                plane = Int64(kept) * length * shape[2]
                one, two = self.neutral(number)
                for k in cutlass.range((rounds - lane + (self.lanes - 1)) // self.lanes, unroll=4):
                    index = origin + Int64(lane + k * self.lanes) * length
                    one, two = self.read(number, one, two, workspace, index, plane)
                self.keep(number, buffer, column, lane, one, two)
                cute.arch.sync_threads()
                for level in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                    if lane < self.lanes >> (level + 1):
                        self.merge_lanes(number, buffer, column, lane, self.lanes >> (level + 1))
                    cute.arch.sync_threads()
                merged.append(buffer)
            base = base + _elements(self.reductions[number], self.design, shape)
        if block * self.elements + column < total and lane == 0:
            self.store(merged, column, tensors, numbers, outputs, at, batch, shape)

    def is_needed(self, number):
        """Whether one of this kernel's outputs reads the reduction."""
        return self.reductions[number].node in self.nodes

    def buffer(self, number):
        """Shared memory for each thread's partial result."""
        shape = (self.elements, self.lanes, self.reductions[number].planes)
        return SmemAllocator().allocate_tensor(Float32, cute.make_layout(shape), 16)

    def neutral(self, number):
        """What merging starts from; the second number counts only where there are two planes."""
        return Float32(ROWS[self.reductions[number].name].neutral), Float32(0.0)

    def read(self, number, one, two, workspace, index, plane):
        """Merge one part of the workspace."""
        row = ROWS[self.reductions[number].name]
        if self.reductions[number].planes == 1:
            return row.merge((one,), (workspace[index],))[0], two
        return row.merge((one, two), (workspace[index], workspace[index + plane]))

    def keep(self, number, buffer, column, lane, one, two):
        """This thread's partial result into shared memory."""
        for plane, value in enumerate((one, two)[: self.reductions[number].planes]):
            buffer[column, lane, plane] = value

    def merge_lanes(self, number, buffer, column, lane, distance):
        """Merge the partial result of the lane at a distance into this lane's."""
        planes = range(self.reductions[number].planes)
        mine = tuple(buffer[column, lane, plane] for plane in planes)
        other = tuple(buffer[column, lane + distance, plane] for plane in planes)
        both = ROWS[self.reductions[number].name].merge(mine, other)
        for plane in planes:
            buffer[column, lane, plane] = both[plane]

    def store(self, merged, column, tensors, numbers, outputs, at, batch, shape):
        """One thread an element: compute the outputs and write them."""
        needed = [r for number, r in enumerate(self.reductions) if self.is_needed(number)]
        values = {
            reduction.node: tuple(buffer[column, 0, plane] for plane in range(reduction.planes))
            for reduction, buffer in zip(needed, merged, strict=True)
        }
        m = at if self.axis == "m" else Int32(0)
        n = at if self.axis == "n" else Int32(0)
        for i, value in zip(self.outputs, self.finished(values, tensors, numbers, m, n, batch, shape), strict=True):
            outputs[i][m, n, batch] = value.to(outputs[i].element_type)

    def finished(self, merged, tensors, numbers, m, n, batch, shape):
        """The outputs' values, by walking what is computed of merged reductions."""
        graph, program = self.program.graph, self.program
        loads = {node: i for i, (node, _) in enumerate(program.tensors)}
        like = cute.full((1,), 0.0, Float32)

        def leaf(node):
            kind = graph.types[node].kind
            if node.op == "reduce":
                return self.result(node, merged[node], like, shape)
            if node in program.numbers:
                value = cute.full_like(like, numbers[program.numbers.index(node)])
            else:
                value = cute.full_like(like, tensors[loads[node]][m, n, batch].to(Float32))
            return value != 0.0 if kind == "mask" else value

        found = walk(graph, leaf, like, nodes=self.nodes)
        return [found[graph.outputs[i].node][0] for i in self.outputs]

    def result(self, node, value, like, shape):
        """A merged reduction as its kind's fragment."""
        name = node.attr[0]
        x = cute.full_like(like, value[0])
        if name in ("any", "all"):
            return x != 0.0
        if name == "mean":
            gone = {factor.axis for factor in node.attr[1]}
            count = Float32(1.0)
            for axis, extent in zip("mnl", shape, strict=True):
                count = count * (Float32(extent) if axis in gone else Float32(1.0))
            return x / cute.full_like(like, count)
        if name == "norm":
            return cute.math.sqrt(x)
        if name == "logsumexp":
            summed = cute.full_like(like, value[1])
            finite = abs(x) < INFINITY
            shift = cute.where(finite, x, cute.full_like(x, 0.0))
            return cute.where(x == INFINITY, x, cute.math.log(summed) + shift)
        return x


def merging_kernels(design: Design, program: Program) -> list[Finish]:
    """One kernel for the outputs of each extent."""
    stores = zip(program.graph.outputs, program.stores, strict=True)
    axes = dict.fromkeys(program.graph.types[o.node].axes for o, access in stores if access.way == "finish")
    return [Finish(design, program, "".join(sorted(found - {"l"})), "l" in found) for found in axes]
