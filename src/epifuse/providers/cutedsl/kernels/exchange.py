"""The exchange of partial results between the CTAs of a cluster that share rows, through distributed shared memory.

Each warp group writes the partial results of its rows into the shared memory of every CTA of the cluster, its own
included. Each CTA merges all of them in the order of the CTAs, so that all get the same bits. A barrier in shared
memory counts the bytes that arrive. No CTA ends before all that is sent to it has arrived, so no CTA writes into the
memory of one that has ended.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from epifuse.providers.cutedsl import budget
from epifuse.providers.cutedsl.design import MATH_GROUPS, WARPS, Design
from epifuse.providers.cutedsl.kernels.fragment import Fragment
from epifuse.providers.cutedsl.kernels.reduce import fold, joined, words


class Received(NamedTuple):
    """Shared memory for what arrives: words by (row, word, CTA, warp group, slot), barriers by slot and warp group."""

    words: Any
    barriers: Any


class Exchange:
    """The exchange between the CTAs of a cluster of `design`. A cluster of one CTA exchanges nothing."""

    def __init__(self, design: Design, fragment: Fragment) -> None:
        self.fragment = fragment
        self.ranks = design.cluster[1]
        self.rows = design.rows
        self.words = design.exchanged

    def allocate(self, allocator):
        """Called by every thread, before what needs wide alignment is allocated. None if nothing is exchanged."""
        if not self.words:
            return None
        shape = (self.rows, self.words, self.ranks, MATH_GROUPS, budget.EXCHANGES)
        received = allocator.allocate_tensor(Int32, cute.make_layout(shape), 16)
        return Received(received, allocator.allocate_array(Int64, MATH_GROUPS * budget.EXCHANGES))

    def initialise(self, received):
        """Called by one thread: initialise the barriers."""
        if received is not None:
            for i in range(MATH_GROUPS * budget.EXCHANGES):
                cute.arch.mbarrier_init(received.barriers + i, WARPS)

    def complete(self, merges, partial, at, team, received):
        """Return the partial results of whole rows. `partial` has, for each slot of a thread's rows, a tuple for each
        reduction.

        `merges` has the `ReductionRule` of each reduction. `at` is (number of the exchange, this CTA's rank, slots'
        rows).
        """
        if not self.words:
            return partial
        number, rank, rows = at
        slot = number % budget.EXCHANGES
        full = received.barriers + slot * MATH_GROUPS + team.group
        count = len(_words(partial[0]))
        with cute.arch.elect_one():  # each warp says how many bytes are to come for its rows
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * self.rows * count * self.ranks // WARPS)
        sharing, own = self.fragment.sharing_row, self.fragment.rank(cute.arch.lane_idx())
        for row, values in zip(rows, partial, strict=True):
            for number_, word in enumerate(_words(values)):
                place = self._place(received, (row, number_, rank, team.group, slot))
                for first in range(0, self.ranks, sharing):
                    _store_remote(place, word, full, first + own, self.ranks)
        cute.arch.mbarrier_wait(full, (number // budget.EXCHANGES) & 1)
        return [
            self._merged(merges, row, values, team.group, slot, received)
            for row, values in zip(rows, partial, strict=True)
        ]

    def _merged(self, merges, row, values, group, slot, received):
        count = len(_words(values))
        said = [iter([received.words[row, i, rank, group, slot] for i in range(count)]) for rank in range(self.ranks)]
        return [
            fold(merge, [tuple(_number(type(x), words_) for x in value) for words_ in said])
            for merge, value in zip(merges, values, strict=True)
        ]

    def _place(self, received, at):
        return received.words.iterator + cute.crd2idx(at, received.words.layout)


def _words(values):
    """Return partial results as a list of 32-bit integers."""
    found = [word for value in values for x in value for word in words(x)]
    return [word.bitcast(Int32) if isinstance(word, Float32) else word for word in found]


def _number(held, said):
    """Return the next number of type `held` of what a CTA sent, an iterator over 32-bit integers."""
    if held is Float32:
        return next(said).bitcast(Float32)
    return joined(held, [next(said) for _ in range(held.width // 32)])


@cute.jit
def _store_remote(place: cute.Pointer, value: Int32, barrier: cute.Pointer, rank: Int32, ranks: cutlass.Constexpr):
    if rank < ranks:
        cute.arch.store_async_dsmem(place, value, barrier, rank)
