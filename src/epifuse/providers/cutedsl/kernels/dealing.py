"""Slots dealt out to the lanes that share a row: each lane completes some of them, and shows the others what it found.

Where each lane completes all, an e8m0 scale of 32 columns is computed in four lanes, and its store branches in each.
Gelu with such scales then takes 1.09 of the time of gelu alone at 16384 x 8192 x 1024, and 1.48 at 8192 x 8192 x 512;
dealt out, it takes 1.05 and 1.33 (dealing_h100.json). Stores under a predicate instead of branches gain nothing more.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.reduce import Row, across, halved, joined, words
from epifuse.providers.cutedsl.kernels.slots import Places


class Dealing:
    """How `slots` slots are dealt out: of each bit of the lanes' numbers, whether it halves them.

    The lower lane of two has the first half. An odd number of slots stays in both lanes, and so do all where they are
    not `dealt` at all: what the CTAs of a cluster exchange, and reductions of several widths.
    """

    def __init__(self, fragment: Fragment, slots: int, *, dealt: bool) -> None:
        self.steps: list[tuple[int, bool]] = []
        self.count, self.slots = slots, slots
        for bit in fragment.along_row:
            halves = dealt and self.count % 2 == 0
            self.count //= 2 if halves else 1
            self.steps.append((bit, halves))

    def merged(self, row: Row, values: list[Any]) -> list[Any]:
        """A lane's partial results of all slots, merged over the lanes that share the row: those of its own."""
        for bit, halves in self.steps:
            values = halved(row, values, bit) if halves else [across(row, value, (bit,)) for value in values]
        return values

    def places(self, of: Places) -> Places:
        """Where a lane's own slots lie; `rank` counts the lanes that have the same ones."""
        rank, weight, lane = Int32(0), 1, cute.arch.lane_idx()
        for bit, halves in self.steps:
            if not halves:
                rank = rank + lane // bit % 2 * weight
                weight *= 2
        rows, columns, down, right = (self._own(each) for each in (of.rows, of.columns, of.down, of.right))
        return Places(rows, columns, down, right, rank)

    def _own(self, values: list[Any]) -> list[Any]:
        for bit, halves in self.steps:
            if halves:
                is_high, half = cute.arch.lane_idx() // bit % 2 == 1, len(values) // 2
                pairs = zip(values[half:], values[:half], strict=True)
                values = [cutlass.select_(is_high, Int32(second), Int32(first)) for second, first in pairs]
        return values

    def shown(self, own: Sequence[Any]) -> Sequence[Any]:
        """Of all slots, from the lanes that have them."""
        if self.count == self.slots:
            return own
        others = sum(bit for bit, halves in self.steps if halves)
        first = cute.arch.lane_idx() & ~others
        return [_shown(own[index], first + lane) for lane, index in map(self._owner, range(self.slots))]

    def _owner(self, slot: int) -> tuple[int, int]:
        """The lane of those that share a row, and the slot's number there."""
        lane, left = 0, self.slots
        for bit, halves in self.steps:
            if halves:
                left //= 2
                lane, slot = lane + bit * (slot // left), slot % left
        return lane, slot


def _shown(value: Any, lane: Any) -> Any:
    return joined(type(value), [cute.arch.shuffle_sync(word, offset=lane) for word in words(value)])
