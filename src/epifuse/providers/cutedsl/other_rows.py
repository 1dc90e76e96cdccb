"""Kernels that a product takes with another M, and that add up K in another order. Imports no cutlass.

Whether a split of K pays follows from M. No kernel stands in for one with other bits, so a server that meets such an M
would wait for the compiler long after its first call: the first call has one kernel of each order compiled beside its
own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from epifuse.plan import KernelSpec
from epifuse.providers.cutedsl import swap, weave
from epifuse.providers.cutedsl.family import Carried
from epifuse.providers.cutedsl.heuristic import costs, priced
from epifuse.providers.cutedsl.invariance import bits
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.providers.cutedsl.sizes import sized
from epifuse.request.problem import Problem

_ROWS = (*range(16, 1024, 32), *range(1024, 8193, 256))
"""Where the model is asked: it changes its mind where a row of tiles begins."""


def kernels(
    plain: Sequence[KernelSpec], swapped: Sequence[KernelSpec], work: Lowered, problem: Problem, own: Hashable
) -> tuple[str, ...]:
    """One text for each order but `own`, of kernels that multiply A and B as they are: those serve any M."""
    carried = sized(work, problem).family.answers(plain)
    found: dict[Hashable, str] = {}
    for wanted, taken in _wanted(carried, swapped, work, problem):
        if wanted not in found:
            able = [i for i, arranged in enumerate(carried.arranged) if bits(arranged.design, problem) == wanted]
            found |= {wanted: carried.arranged[min(able, key=taken.__getitem__)].text} if able else {}
    return tuple(text for order, text in found.items() if order != own)


def _wanted(
    carried: Carried, swapped: Sequence[KernelSpec], work: Lowered, problem: Problem
) -> Iterator[tuple[Hashable, list[float]]]:
    """The order of the best kernel with so many rows, and what each plain one costs then."""
    of_parts = weave.problem_of(work.order, problem, work.typed)
    transposed = swap.problem_of(problem)
    few = work.swapped if swapped else ""
    family = None if isinstance(few, str) else sized(few, transposed).family
    exchanged = None if family is None or family.key.refused is not None else family.answers(swapped)
    own, theirs = priced(carried.rates, of_parts), () if exchanged is None else priced(exchanged.rates, transposed)
    for rows in _ROWS if carried.arranged else ():
        found = costs(own, rows)
        best, order = min(found), bits(carried.arranged[found.index(min(found))].design, problem)
        if exchanged is not None and theirs and rows <= swap.most_rows(problem):
            others = costs(theirs, rows)
            if min(others) < best:
                order = bits(exchanged.arranged[others.index(min(others))].design, problem)
        yield order, found
