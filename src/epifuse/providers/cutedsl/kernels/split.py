"""Split-K: neighbouring clusters multiply a part of K each, and the leader, which has the first part, adds up all sums.

A warp group writes its sums of a tile into the workspace, which L2 holds, and then sets a flag. The same warp group of
the leader waits for the flags of all other parts, and adds up in ascending order of K. A split therefore does not
depend on how many clusters of four or eight CTAs a GPU runs at once (split_cluster_h100.json).

The leader is the last of the neighbours, so that a CTA only waits for CTAs with a lower index. GPUs start CTAs in the
order of their indices. CUDA does not promise this order; CUTLASS's stream-K relies on it as well.

The workspace is not cleared before a launch, because that would take another launch. A set flag is one 64-bit number:
memory that was never written holds it with a probability of 2^-64. The leader clears a flag once it has seen it, so
that a launch that is replayed on the same memory finds no set flag.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import WARP_GROUP, Design

_QUAD = 16  # bytes of four sums, which one instruction moves
_SENT = 0x5DD13B5F9C2E47A6
_MOST_QUADS = 32
"""The most loads of a thread under way at once: the sums of one part of a tile of 128 x 128, or of four parts of a tile
of 64 x 64. Products of four to eight small tiles take 4 to 8 % less time than with the sums of one part at a time
(split_one_at_a_time_h100.json)."""


class Sums(NamedTuple):
    """Addresses, in the workspace, of a thread's sums and a warp group's flag, for one tile and the second part of K.
    Those of the later parts follow."""

    sums: Any
    flags: Any


class Split:
    """The parts of K of `design`. There may be only one."""

    def __init__(self, design: Design, accumulator: Any = Float32) -> None:
        self.accumulator = accumulator
        self.parts, self.ctas, self.width = design.split, design.ctas, design.cluster[0]
        self.row = WARP_GROUP * design.sharing * _QUAD  # bytes that all threads move at once
        self.bytes = budget.part_bytes(design)
        self.quads = self.bytes // self.row
        self.at_once = max(1, _MOST_QUADS // self.quads)  # parts that are read at once

    def part(self, block):
        """The part of K that the CTA with index `block` multiplies."""
        return self.parts - 1 - block % self.parts

    def blocks(self, count, part):
        """Return the first of a part's blocks of K, and how many of `count` it has. Planning leaves no part empty."""
        if self.parts == 1:
            return 0, count
        first = count * part // self.parts
        return first, count * (part + 1) // self.parts - first

    def place(self, workspace, turn, cta, thread) -> Sums:
        """Return the addresses for a CTA's tile, for one of the threads that share the tile."""
        slots = Int64(cta.turns.total * self.ctas * (self.parts - 1))
        flags = workspace.iterator.toint() + cute.size(workspace) * 4 - slots * budget.FLAG_BYTES
        rank = cta.place[0] + self.width * cta.place[1]
        slot = Int64((turn * self.ctas + rank) * (self.parts - 1))
        sums = flags - (slots - slot) * self.bytes + thread * _QUAD
        return Sums(sums, flags + slot * budget.FLAG_BYTES + thread // WARP_GROUP * 8)

    @cute.jit
    def send(self, registers: cute.Tensor, at: Sums, part: Int32, thread: Int32, barrier: Int32):
        """Write this warp group's sums of a tile, of a part that is not the first one, and set its flag."""
        for quad in cutlass.range_constexpr(self.quads):
            values = cute.make_tensor(registers.iterator + 4 * quad, cute.make_layout(4))
            self._quad(at, part - 1, quad).store(values.load())
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARP_GROUP)
        if thread % WARP_GROUP == 0:
            flag = self._flag(at, part - 1)
            cute.arch.store(flag, Int64(_SENT), sem="release", scope="gpu")

    @cute.jit
    def gather(self, registers: cute.Tensor, at: Sums, thread: Int32, barrier: Int32):
        """Wait for all other parts, and add them to this warp group's sums of the first, in ascending order of K."""
        own = thread % WARP_GROUP
        if own < self.parts - 1:
            flag = self._flag(at, own)
            seen = Int64(0)
            while seen != Int64(_SENT):
                seen = cute.arch.load(flag, Int64, sem="acquire", scope="gpu")
            cute.arch.store(flag, Int64(0), sem="relaxed", scope="gpu")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARP_GROUP)
        for other in cutlass.range(self.parts - 1, unroll=self.at_once):
            for quad in cutlass.range_constexpr(self.quads):
                values = self._quad(at, other, quad).load()
                for i in cutlass.range_constexpr(4):
                    registers[4 * quad + i] = registers[4 * quad + i] + values[i]

    def _quad(self, at, other, quad):
        start = at.sums + Int64(other * self.bytes) + quad * self.row
        return cute.make_tensor(
            cute.make_ptr(self.accumulator, start, cute.AddressSpace.gmem, assumed_align=_QUAD), cute.make_layout(4)
        )

    def _flag(self, at, other):
        start = at.flags + Int64(other * budget.FLAG_BYTES)
        return cute.make_ptr(Int64, start, cute.AddressSpace.gmem, assumed_align=8)
