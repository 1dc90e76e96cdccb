"""The kernel for tcgen05.mma, as planning knows it: when it is used, and what it does not support. Imports no cutlass.

It is for GPUs with tensor memory. It has been compiled, but never run on one, so it is used only if that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from epifuse.base.dtypes import short
from epifuse.plan import Reason
from epifuse.providers.cutedsl import untested
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.request.problem import Problem

_RATES: Mapping[tuple[int, int], float] = {(128, 256): 1.0, (128, 128): 0.9, (128, 64): 0.6}
_ALONE = 0.9
"""Rates by tile, as fractions of the best one, and the factor for a CTA that multiplies alone. All of these are
assumed, because no such kernel has run."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def is_considered(problem: Problem) -> bool:
    """Whether this kernel may be used at all. If not, `refused` says why."""
    return untested.are_allowed()


def refused(problem: Problem) -> str | None:
    """Why tcgen05.mma does not multiply A and B, or None. `problem` is `inputs.filled`."""
    a, b = problem.a.dtype, problem.b.dtype
    for name, dtype in (("A", a), ("B", b)):
        if dtype not in _DTYPES:
            return f"it multiplies float16, bfloat16, and floats of 8 bits, and {name} is {dtype}: convert it"
    if a.itemsize != b.itemsize:
        return f"it multiplies numbers of one size, and A is {a} and B {b}: convert B to A's dtype first"
    if problem.accumulator != torch.float32:
        return f"it adds up products of {a} in {short(torch.float32)}, not {problem.accumulator}: leave that out"
    if problem.scales:
        return "it applies no block scales: pass scales of rows and columns as operands of the epilogue"
    return None


def of_graph(work: Lowered, problem: Problem) -> str | None:
    """Why this kernel does not support an epilogue that Hopper's kernel may support, or None."""
    if not work.order:
        return None
    graph = work.walked
    parts = (node for node in graph.nodes if node.op == "accum" and node.attr is not None)
    node = next(parts, graph.outputs[0].node)
    why = "it does not combine parts of a row, such as the two halves of a gate or every second column"
    return Reason(f"{why}: store the product, and combine its parts in PyTorch", graph.loc(node))


def spills(design: Design, work: Lowered) -> bool:
    """Whether registers spill: 4 to 440 bytes in the widest tile, if the code is unrolled for each subtile."""
    return design.tile == (128, 256) and bool(work.reduces or work.span or len(work.walks) > 1)


def rate(design: Design) -> float:
    """The design's rate, as a fraction of the best tile's."""
    return _RATES[design.tile] * (1.0 if design.in_pairs else _ALONE)


def notes(design: Design, problem: Problem) -> list[str]:
    """What a plan tells people of this kernel."""
    sharing = "two CTAs multiply together" if design.in_pairs else "each CTA multiplies alone"
    return [f"tcgen05.mma, sums in tensor memory; {sharing}", untested.note(problem.target)]
