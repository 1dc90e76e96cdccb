"""Slots are dealt out to the lanes that share a row: each lane completes some, and shows the results to the others.

If each lane completes all slots, an e8m0 scale of 32 columns is computed in four lanes, and its store branches in each.
Gelu with such scales then takes 1.09 of the time of gelu alone at 16384 x 8192 x 1024, and 1.48 at 8192 x 8192 x 512;
dealt out, it takes 1.05 and 1.33 (dealing_h100.json). Stores under a predicate instead of branches gain nothing more.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.reduce import ReductionRule, across, halved, joined, words
from epifuse.providers.cutedsl.kernels.slots import Places


class Dealing:
    """How `slots` slots are dealt out. `steps` says for each bit of the lanes' numbers whether it halves the slots.

    Of two lanes the lower one has the first half. Both keep all if the number of slots is odd. If not `dealt`, each
    lane keeps all slots: for what the CTAs of a cluster exchange, and for reductions of several widths.
    """

    def __init__(self, fragment: Fragment, slots: int, *, dealt: bool) -> None:
        self.steps: list[tuple[int, bool]] = []
        self.count, self.slots = slots, slots
        for bit in fragment.along_row:
            halves = dealt and self.count % 2 == 0
            self.count //= 2 if halves else 1
            self.steps.append((bit, halves))

    def merged(self, rule: ReductionRule, values: list[Any]) -> list[Any]:
        """Merge partial results of all slots over the lanes that share a row. Return those of the lane's own slots."""
        for bit, halves in self.steps:
            values = halved(rule, values, bit) if halves else [across(rule, value, (bit,)) for value in values]
        return values

    def places(self, of: Places) -> Places:
        """Return the places of a lane's own slots. `rank` numbers the lanes that have the same slots."""
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
        """Return the values of all slots; each comes from a lane that has it."""
        if self.count == self.slots:
            return own
        others = sum(bit for bit, halves in self.steps if halves)
        first = cute.arch.lane_idx() & ~others
        return [_shown(own[index], first + lane) for lane, index in map(self._owner, range(self.slots))]

    def _owner(self, slot: int) -> tuple[int, int]:
        """Return the number of the lane that has a slot, among those that share a row, and the slot's number there."""
        lane, left = 0, self.slots
        for bit, halves in self.steps:
            if halves:
                left //= 2
                lane, slot = lane + bit * (slot // left), slot % left
        return lane, slot


def _shown(value: Any, lane: Any) -> Any:
    return joined(type(value), [cute.arch.shuffle_sync(word, offset=lane) for word in words(value)])
