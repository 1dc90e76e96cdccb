"""Early loads of the operands of a CTA's last tile, into stages of A and B that no block of K needs any more.

A round is as many subtiles as operands have stages. The first round of a tile arrives in time. Each further round is
requested only when the round before has been read, and takes a round trip to memory. The main loop of another tile
hides this time, except in a CTA's last tile. So all rounds of the last tile but the first are loaded here at once.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import MATH_GROUPS, Design
from epifuse.providers.cutedsl.program import Program

_PATTERN = 1024  # bytes of the longest swizzle pattern; a subtile is a whole number of patterns


class Spare:
    """The spare stages of `design`. There may be none."""

    def __init__(self, design: Design, program: Program) -> None:
        self.design = design
        self.places = budget.spare_places(design, program) if design.spare else {}
        self.rounds = sorted({round_ for _, round_, _ in self.places})
        self.first = 2 * MATH_GROUPS * design.load_stages
        self.barriers = design.sharing * len(self.rounds)

    def arrival_barrier(self, barriers, within, round_):
        """The barrier that says that a warp group's round has arrived; behind those of the epilogue's stages."""
        return barriers + (self.first + within * len(self.rounds) + self.rounds.index(round_))

    def own_start(self, slot, operand) -> Any:
        """Where a slot begins in an operand's own buffer, in swizzle patterns."""
        return slot * (math.prod(self.design.subtile) * operand.element_type.width // (8 * _PATTERN))

    def starts(self, within, state, buffers, operands) -> dict[int, list[Any]]:
        """Return for each round where its operands are loaded early: swizzle patterns from the start of their buffers.

        `state` is the pipeline's state behind the last block of K. `buffers` are those of A and B, `operands` those of
        the operands.
        """
        parts = {}
        for stage in range(self.design.spare):
            at = (state.index + stage) % self.design.stages
            for matrix, (buffer, size) in enumerate(zip(buffers, budget.stage_bytes(self.design), strict=True)):
                parts[stage, matrix] = Int32(buffer.iterator.toint()) + at * size
        return {
            round_: [
                (self._place(within, round_, number, parts) - Int32(operand.iterator.toint())) // _PATTERN
                for number, operand in enumerate(operands)
            ]
            for round_ in self.rounds
        }

    def _place(self, within, round_, number, parts):
        places = [self.places[one, round_, number] for one in range(self.design.sharing)]
        addresses = [parts[stage, matrix] + first for stage, matrix, first in places]
        return addresses[0] if len(addresses) == 1 else cutlass.select_(within == 0, *addresses)


def shifted(tensor, start):
    """Return the tensor moved by `start` swizzle patterns, with the same layout."""
    offset = cute.crd2idx(start, cute.make_layout(2, stride=8 * _PATTERN // tensor.element_type.width))
    return cute.make_tensor(tensor.iterator + offset, tensor.layout)


@cute.jit
def wait_either(is_last: Boolean, arrived: cute.Pointer, full: cute.Pointer, parity: Int32):
    """Wait for a round of the last tile (`arrived`), or for a stage of another tile (`full`)."""
    if is_last:
        cute.arch.mbarrier_wait(arrived, 0)
    else:
        cute.arch.mbarrier_wait(full, parity)


@cute.jit
def leave_unless(is_last: Boolean, empty: cute.Pointer):
    """Say that a warp has read a stage, of any tile but the last one: nothing comes into that stage again.

    An arrival that nobody waits for is an error (compute-sanitizer's synccheck: "missing wait").
    """
    if not is_last:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)
