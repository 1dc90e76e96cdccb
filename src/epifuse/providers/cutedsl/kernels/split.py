"""K in parts: the CTAs of a cluster multiply a part of K each, and the first one, the leader, adds up what they have.

A part's sums come to the leader as a block of A and B does: into stages of its pipeline, which its loading warp takes
behind the leader's own blocks of K, in ascending order of the parts. So sums take no shared memory of their own, and
stages are free again as ever. The loading warp tells a barrier to count the bytes of a stage, and another one, in the
CTA whose turn it is, that the stage is open; asynchronous stores then bring the sums, and complete the first.

Each stage has an `opened` barrier of its own in every CTA: a stage is opened anew only after what came into it was
read, and so after its opening was waited for. A CTA whose part is sent has waited for all its openings, and the leader
waits for all that is sent: none tells or writes to another that is gone.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import WARP_GROUP, Design

_QUAD = 16  # bytes: four sums, what one instruction moves


class Way(NamedTuple):
    """Where a part of the next tile goes: the leader's stage, and the parity of the next opening of each, in bits."""

    stage: Any
    parities: Any


class Split:
    """The parts of K of `design`, of which there may be one."""

    def __init__(self, design: Design) -> None:
        self.parts, self.stages = design.split, design.stages
        self.width = design.cluster[0]
        self.ranks = design.cluster[0] * design.cluster[1]  # of the CTAs of one part; the next part's follow
        self.row = WARP_GROUP * design.sharing * _QUAD  # bytes that all threads move at once
        self.sizes = budget.stage_bytes(design)
        self.rounds, self.quads = budget.sum_stages(design)
        self.parts_in_stages = (self.parts - 1) * self.rounds

    # Every thread.

    def allocate(self, allocator):
        """Barriers of the leader's stages."""
        return allocator.allocate_array(Int64, self.stages) if self.parts > 1 else None

    def initialise(self, opened):
        """One thread."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(opened + stage, 1)

    def blocks(self, count, part):
        """Of `count` blocks of K the first of a part, and how many it has: planning sees to it that it has some."""
        if self.parts == 1:
            return 0, count
        first = count * part // self.parts
        return first, count * (part + 1) // self.parts - first

    # The loading warp.

    def received(self, place):
        """Stages of a tile in which a CTA receives sums: the leader those of all others."""
        return cutlass.select_(place[2] == 0, Int32(self.parts_in_stages), Int32(0))

    def open(self, number, state, pipe, cta):
        """The `number`-th of them, once it is empty."""
        pipe.sync_object_empty.wait(state.index, state.phase)
        part = 1 + number // self.rounds
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pipe.producer_get_barrier(state), self.row * self.quads)
            cute.arch.mbarrier_arrive(cta.opened + state.index, part * self.ranks + self._leader(cta.place))

    def _leader(self, place):
        return place[0] + self.width * place[1]

    # A warp group of the leader.

    @cute.jit
    def gather(self, registers: cute.Tensor, read: Any, pipe: Any, buffers: tuple, thread: Int32):
        """Add all other parts to the sums of the first, in ascending order of K."""
        for _ in cutlass.range(self.parts - 1, unroll=1):
            for round_ in cutlass.range_constexpr(self.rounds):
                pipe.consumer_wait(read)
                for quad in cutlass.range_constexpr(self.quads):
                    place = self._place(quad, read.index, buffers, thread)
                    values = cute.make_tensor(place, cute.make_layout(4)).load()
                    for i in cutlass.range_constexpr(4):
                        at = 4 * (round_ * self.quads + quad) + i
                        registers[at] = registers[at] + values[i]
                # As behind every read of what TMA overwrites (`accesses/tile.py`).
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                pipe.consumer_release(read)
                read.advance()
        return read

    # A warp group of another CTA.

    def first(self, cta):
        """Where its part of the first tile goes."""
        own, part = self._own(cta), cta.place[2] - 1
        return Way((own + part * self.rounds) % self.stages, Int32(0))

    def _own(self, cta):
        """Blocks of K that the leader multiplies itself."""
        return self.blocks(cute.size(cta.tiles[0], mode=[3]), 0)[1]

    def passed(self, to, cta):
        """Where the part of the next tile goes, behind one's that went `to`."""
        parities = to.parities
        for stage in self._stages(to):
            parities = parities ^ (Int32(1) << stage)
        return Way((to.stage + self._own(cta) + self.parts_in_stages) % self.stages, parities)

    def _stages(self, to):
        return [(to.stage + round_) % self.stages for round_ in range(self.rounds)]

    def send(self, registers, to, pipe, cta, thread):
        """All sums of a tile, as stages open."""
        leader, seen = self._leader(cta.place), to.parities
        for round_, stage in enumerate(self._stages(to)):
            cute.arch.mbarrier_wait(cta.opened + stage, (seen >> stage) & 1)
            seen = seen ^ (Int32(1) << stage)  # a long part may take a stage twice
            full = pipe.sync_object_full.get_barrier(stage)
            for quad in range(self.quads):
                first = 4 * (round_ * self.quads + quad)
                values = tuple(registers[first + i].bitcast(Int32) for i in range(4))
                cute.arch.store_async_dsmem(self._place(quad, stage, cta.buffers, thread), values, full, leader)

    def _place(self, quad, stage, buffers, thread):
        """Four sums of a thread in a stage: in what is A's, then in what is B's."""
        matrix, at = 0, quad
        if quad >= self.sizes[0] // self.row:
            matrix, at = 1, quad - self.sizes[0] // self.row
        start = Int32(buffers[matrix].iterator.toint()) + stage * self.sizes[matrix] + thread * _QUAD
        return cute.make_ptr(Float32, start + at * self.row, cute.AddressSpace.smem, assumed_align=_QUAD)
