"""The kernel for mma.sync, as planning knows it: when it is used, how it copies A and B, and what it does not support.

It is for GPUs without a kernel of their own. On Hopper it is used only if it is asked for. Imports no cutlass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from epifuse.base.dtypes import short
from epifuse.ir import Load
from epifuse.plan import Reason
from epifuse.providers.cutedsl import inputs, untested
from epifuse.providers.cutedsl.budget import stage_bytes
from epifuse.providers.cutedsl.design import K_SPAN, MULTISTAGE, SUBTILE, Design
from epifuse.providers.cutedsl.lowering import Lowered
from epifuse.request.problem import Problem, TensorInfo

_RATES: Mapping[tuple[int, int], float] = {
    (256, 64): 0.59,
    (256, 128): 0.57,
    (128, 64): 0.50,
    (128, 256): 0.43,
    (128, 128): 0.40,
    (128, 32): 0.36,
}
"""By tile: its rate, as a fraction of that of Hopper's best tile. Measured on an H100 for 4096^3 (mma_sync_h100.json).
Tiles of 64 columns that lie abreast: from their times beside that of 256 x 128 on an H200 (mma_sync_h200.json)."""
_COPIES: Mapping[int, float] = {16: 1.0, 8: 1.0, 4: 0.9, 2: 0.8, 1: 0.27, 0: 0.14}
"""Factors of that rate, by elements of a copy. The one for 1 was measured on an H200 (unaligned_h200.json), the others
are assumed."""
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, *_NARROW)
_PAIR = 2  # numbers of 8 bits are copied and read in pairs
_PAIRS = "it copies numbers of 8 bits in pairs"
_PACKED = {"A": "A.contiguous()", "B": "B.mT.contiguous().mT"}
_LONGEST = (1 << 31) - (1 << 12)  # the largest K: it is counted in 32 bits, and copies run some stages ahead
_LARGEST = (256, 128), (128, 256)  # the largest tiles
_WHOLE_STAGES = 3
_WIDEST = 16  # bytes of the widest copy
_LEAST = 4  # bytes of the narrowest copy that does not go through registers


# --- where it is taken -----------------------------------------------------------------------------------------------


def is_considered(problem: Problem) -> bool:
    """Whether this kernel may be used at all. If not, `refused` says why, which takes longer to find."""
    return problem.constraints.schedule == MULTISTAGE if problem.target.has_wgmma else untested.are_allowed()


def refused(problem: Problem) -> str | None:
    """Why mma.sync does not multiply A and B, or None. `problem` is `inputs.filled`."""
    a, target = problem.a, problem.target
    if a.dtype not in _DTYPES:
        return f"it multiplies float16, bfloat16, float32 as tf32, and 8 bits, and A is {a.dtype}: convert it"
    if problem.scales:
        return "it applies no block scales: pass scales of rows and columns as operands of the epilogue"
    narrow = a.dtype in _NARROW or problem.b.dtype in _NARROW
    if narrow and not inputs.is_weight_only(problem) and not target.has_narrow_floats:
        return f"{target.name} does not multiply floats of 8 bits: convert A and B to bfloat16"
    if inputs.is_weight_only(problem):
        return f"it multiplies numbers of one size, and B is {problem.b.dtype}: convert it to A's dtype first"
    if inputs.is_full(problem):
        return (
            "it multiplies float32 as tf32, with 10 bits of fraction, and only where that is allowed: precision='tf32' "
            "or torch.set_float32_matmul_precision('high')"
        )
    accumulator = inputs.ACCUMULATORS[a.dtype][0]
    if problem.accumulator != accumulator:
        return f"it adds up products of {a.dtype} in {short(accumulator)}, not {problem.accumulator}: leave that out"
    if problem.extents["k"] > _LONGEST:
        return f"it counts along K up to {_LONGEST}: split the product into several calls"
    if a.dtype.itemsize == 1 and (reason := _not_in_pairs(problem)) is not None:
        return reason
    if target.has_wgmma:
        asked = problem.constraints.schedule == MULTISTAGE
        return None if asked else f"{target.name} has a kernel of its own: schedule='{MULTISTAGE}' asks for this one"
    return None


def _not_in_pairs(problem: Problem) -> str | None:
    """Why numbers of 8 bits are not copied in pairs, or None."""
    if problem.extents["k"] % _PAIR:
        return f"{_PAIRS}, and K is odd: pad it with zeros to a multiple of {_WIDEST} in both A and B"
    if (reason := inputs.not_along_k(problem)) is not None:
        return reason
    for name, info, elements in zip("AB", (problem.a, problem.b), copied(problem), strict=True):
        if not info.aligned:
            return (
                f"{name} of 8 bits does not start at a multiple of {_WIDEST} bytes: pass a copy, {name}.clone(); for "
                f"a range of B's columns, pad K to a multiple of {_WIDEST}"
            )
        if elements < _PAIR:
            return f"{_PAIRS}, and a stride of {name} is odd: pass {_PACKED[name]}"
    return None


def of_graph(work: Lowered, problem: Problem) -> str | None:
    """Why this kernel does not support an epilogue that Hopper's kernel may support, or None."""
    graph = work.walked
    if problem.target.has_narrow_floats:
        return None
    dtypes = dict(problem.dtypes)
    for node in graph.nodes:
        dtype = node.attr if node.op == "cast" else None
        if isinstance(node.attr, Load) and isinstance(info := problem.by_name.get(node.attr.name), TensorInfo):
            dtype = info.dtype
        if dtype in _NARROW:
            return Reason(_no_narrow(dtype, problem), graph.loc(node))
    for output in graph.outputs:
        if dtypes[output.name] in _NARROW:
            return Reason(_no_narrow(dtypes[output.name], problem), graph.loc(output.node))
    return None


def _no_narrow(dtype: torch.dtype, problem: Problem) -> str:
    return f"{problem.target.name} has no conversions of {short(dtype)}: use bfloat16 or float16 there"


# --- how A and B are copied ------------------------------------------------------------------------------------------


def copied(problem: Problem) -> tuple[int, int]:
    """The elements that one copy moves of A and of B: a divisor of the contiguous extent and of all other strides.

    0 if no mode is contiguous. Elements are then copied one by one, with strides that are run-time values."""
    return _elements(problem.a, -1), _elements(problem.b, -2)


def _inner(info: TensorInfo) -> int | None:
    """The contiguous mode, -1 or -2; None if neither is contiguous."""
    return next((i for i in (-1, -2) if info.strides[i] == 1), None)


def _elements(info: TensorInfo, along_k: int) -> int:
    inner = _inner(info)
    if inner is None:
        return 0
    # ldmatrix transposes only elements of 16 bits. Others, such as tf32, always lie along K in shared memory.
    if not info.aligned or (inner != along_k and info.dtype.itemsize != 2):
        return 1
    places = zip(range(-len(info.shape), 0), info.strides, info.shape, strict=True)
    steps = [stride for i, stride, extent in places if i != inner and extent > 1]
    return math.gcd(_WIDEST // info.dtype.itemsize, info.shape[inner], *steps)


def _is_asynchronous(elements: int, size: int) -> bool:
    return max(elements, 1) * size >= _LEAST


def with_copies(design: Design, elements: tuple[int, int], problem: Problem) -> Design:
    """The design, completed by how A and B are copied; `elements` is what `copied` returns.

    A stage has half a span of K if shared memory does not hold three stages of a whole span. It also does if single
    elements or pairs are copied, because each copy takes registers."""
    made = replace(design, copied=elements, span=K_SPAN, promoted=inputs.promoted(problem))
    several = min(elements) > (_PAIR if problem.a.dtype.itemsize == 1 else 1)
    is_whole = several and _WHOLE_STAGES * sum(stage_bytes(made)) <= problem.target.shared_memory
    return made if is_whole else replace(made, span=K_SPAN // 2)


def _least_bytes(design: Design, problem: Problem) -> int:
    """The bytes of the narrower copy of the two for A and B."""
    return max(min(design.copied), 1) * problem.a.dtype.itemsize


def unfit(design: Design, problem: Problem) -> str | None:
    """Why a tile does not fit the problem, or None. The addresses of many copies take registers, of which up to 60
    bytes spill."""
    if design.columns < SUBTILE[1]:
        return f"its tile has {design.columns} columns of the result, and {SUBTILE[1]} leave at once"
    gated = design.parts > 1
    widest = _WIDEST if gated else _WIDEST // 2
    enough = {(256, 64): widest, (256, 128): widest, (128, 64): _LEAST if gated else 0}
    if _least_bytes(design, problem) < enough.get(design.tile, 0):
        return "its accumulator leaves too few registers for copies of A and B by so few bytes"
    return None


def spills(design: Design, work: Lowered, problem: Problem) -> bool:
    """Whether registers spill, by the compiler's reports.

    They do in three cases. 128 x 256, which no smaller tile replaces: for shared rows or narrow copies. The two largest
    tiles: for integers of 64 bits. Promoted sums: beside copies through registers, or on Hopper, whose mma.sync has no
    floats of 8 bits, so that the compiler converts them to float16.
    """
    least = _least_bytes(design, problem)
    if design.promoted and (problem.target.has_wgmma or least < _LEAST):
        return True
    if design.tile in _LARGEST and any(type_.kind == "int64" for type_ in work.walked.types.values()):
        return True
    return design.tile == (128, 256) and (work.shares_rows or least < _WIDEST)


def rate(design: Design) -> float:
    """The design's rate, as a fraction of that of Hopper's best tile."""
    return _RATES[design.tile] * _COPIES[min(design.copied)]


def notes(design: Design, problem: Problem) -> list[str]:
    """What a plan tells people of this kernel."""
    size = problem.a.dtype.itemsize
    each = [
        f"{name} is copied {max(count, 1) * size} bytes at a time"
        + ("" if _is_asynchronous(count, size) else ", through registers")
        for name, count in zip("AB", design.copied, strict=True)
    ]
    sides = zip("AB", design.copied, (problem.a, problem.b), (-1, -2), strict=True)
    slow = [_cure(name, info, k) for name, count, info, k in sides if max(count, 1) * size < _WIDEST]
    wide = f"for {_WIDEST} bytes at a time: " + "; ".join(dict.fromkeys(slow))
    never = [] if problem.target.has_wgmma else [untested.note(problem.target)]
    return [f"mma.sync; {'; '.join(each)}", *([wide] if slow else []), *never]


def _cure(name: str, info: TensorInfo, along_k: int) -> str:
    """What a user can change so that copies of A or B (`name`) have 16 bytes; see `_elements`."""
    inner, least = _inner(info), _WIDEST // info.dtype.itemsize
    if inner is None or (inner != along_k and info.dtype.itemsize != 2):
        return "pass A.contiguous()" if name == "A" else "pass B.mT.contiguous().mT, or store the weight as (N, K)"
    if info.shape[inner] % least:
        dim = "K of A and B" if inner == along_k else f"{'M' if name == 'A' else 'N'} of {name}"
        return f"pad {dim} from {info.shape[inner]} to a multiple of {least}"
    return f"address and strides of {name} in multiples of that"
