"""Kernels that a product takes with another M, and that add up K in another order. Imports no cutlass.

Whether split-K pays depends on M. A kernel may stand in for another only if both give the same bits. Without one of the
right order, a server would have to wait for the compiler at a new M, long after its first call. The first call
therefore also compiles one kernel of each other order.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence

from epifuse.plan import KernelSpec
from epifuse.providers.cutedsl import swap, weave
from epifuse.providers.cutedsl.family import Carried
from epifuse.providers.cutedsl.heuristic import costs, priced
from epifuse.providers.cutedsl.invariance import bits
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.providers.cutedsl.sizes import sized
from epifuse.request.problem import Problem

Kinds = tuple[Sequence[KernelSpec], Sequence[KernelSpec], Sequence[KernelSpec]]
"""Kernels that multiply A and B as they are, kernels that exchange A and B for few rows, and those for more rows."""

_ROWS = (*range(16, 1024, 32), *range(1024, 8193, 256))
"""Values of M for which the model is asked. Its choice can change only where a further row of tiles begins."""


def kernel_texts(kinds: Kinds, work: Lowered, problem: Problem, own: Hashable) -> tuple[str, ...]:
    """The texts of kernels to compile, one for each order of adding up K but `own` (`invariance.bits`). They multiply A
    and B as they are, because such kernels serve any M."""
    plain, *exchanging = kinds
    carried = sized(work, problem).family.answers(plain)
    found: dict[Hashable, str] = {}
    for wanted, taken in _wanted(carried, exchanging, work, problem):
        if wanted not in found:
            able = [i for i, arranged in enumerate(carried.arranged) if bits(arranged.design, problem) == wanted]
            found |= {wanted: carried.arranged[min(able, key=taken.__getitem__)].text} if able else {}
    return tuple(text for order, text in found.items() if order != own)


def _wanted(
    carried: Carried, exchanging: Sequence[Sequence[KernelSpec]], work: Lowered, problem: Problem
) -> Iterator[tuple[Hashable, list[float]]]:
    """Yield, for each M in `_ROWS`, the order of the best kernel, and the costs of the kernels in `carried`."""
    of_parts = weave.problem_of(work.order, problem)
    transposed = swap.problem_of(problem)
    few = work.swapped if any(exchanging) else ""
    family = None if isinstance(few, str) else sized(few, transposed).family
    all_ = [(carried, priced(carried.rates, of_parts), range(1, sys.maxsize))]
    if family is not None and family.key.refused is None:
        answers = map(family.answers, exchanging)
        taken = (swap.rows_taken(problem, few=is_few) for is_few in (True, False))
        all_ += [(one, priced(one.rates, transposed), rows) for one, rows in zip(answers, taken, strict=True)]
    for rows in _ROWS if carried.arranged else ():
        able = [(one.arranged, costs(prices, rows)) for one, prices, taken in all_ if one.arranged and rows in taken]
        arranged, found = min(able, key=lambda each: min(each[1]))
        yield bits(arranged[found.index(min(found))].design, problem), able[0][1]
