"""A and B: which ones the kernel multiplies, and how they must lie. Imports no cutlass, so that planning needs none."""

from __future__ import annotations

import torch

from epifuse.base.dtypes import largest, short
from epifuse.providers.cutedsl import swap
from epifuse.providers.cutedsl.design import Rewriting
from epifuse.request.problem import Problem, TensorInfo
from epifuse.request.scaled import BLOCK, SCALES

ACCUMULATORS = {
    torch.float16: (torch.float32, torch.float16),
    torch.bfloat16: (torch.float32,),
    torch.float32: (torch.float32,),
    torch.float8_e4m3fn: (torch.float32,),
    torch.float8_e5m2: (torch.float32,),
    torch.int8: (torch.int32,),
    torch.uint8: (torch.int32,),
}
"""The dtypes that the Hopper kernel multiplies, and for each the dtypes in which it adds up products."""
PROMOTED = 128
"""How many products of 8-bit floats the tensor cores add up before float32 takes over. They keep 13 bits below the
leading bit of a sum: with normal data at K = 4096 the mean error is 1.1e-3 if they add up all of K, and 1.2e-4 so."""
PROMOTED_PARTS = 32
"""The same for the parts of float32. Tensor cores cut off what lies below the last bit of a sum, which is a bias for
numbers of one sign. Simulated at K = 4096 (`tests/test_full.py`), the errors are 0.2 of those of a chain of float32
additions if float32 adds up every 32 products, 0.7 for every 128, and 32 times them if tensor cores add up all."""
PARTS = 3
"""How many products of tf32 parts one product of float32 in full takes."""
LINE = 128
"""Bytes of a line of L2. Each row of a rewritten matrix begins at one."""
_ALIGNMENT = 16  # bytes: TMA's rule for strides
_SOME_K = 16  # elements along K where K = 0: 16 bytes of the narrowest input


def filled(problem: Problem) -> Problem:
    """Return the problem as the kernel sees it. If K = 0, A and B have no element to address, so zeros replace them.

    A matrix of a single column counts as contiguous along that column.
    """
    if problem.extents["k"]:
        # K runs along B's columns and along A's rows, which must be contiguous for other dtypes than those of 16 bits.
        a = problem.a if _needs_k(problem.a.dtype) else _along_its_length(problem.a)
        b = _along_its_length(problem.b)
        return problem if a is problem.a and b is problem.b else problem._replace(a=a, b=b)
    a, b, k = problem.a, problem.b, _SOME_K
    m, n = a.shape[-2], b.shape[-1]
    by_rows, by_columns = (m * k, k, 1), (n * k, 1, k)
    return problem._replace(
        a=a._replace(shape=(*a.shape[:-1], k), strides=by_rows[-len(a.shape) :], aligned=True),
        b=b._replace(shape=(*b.shape[:-2], k, n), strides=by_columns[-len(b.shape) :], aligned=True),
    )


def multiplied(problem: Problem, how: Rewriting | None) -> Problem:
    """Return the filled problem as it is multiplied: A and B rewritten as `how` says, with their parts one behind the
    other along K."""
    problem = filled(problem)
    if how is None:
        return problem
    a, b = problem.a, problem.b
    (*of_a, m, k), (*of_b, _, n) = a.shape, b.shape
    depth = _depth(problem, how.parts) if how.of_a and how.of_b else k
    row = row_bytes(problem, how.parts) // a.dtype.itemsize
    if how.of_a:
        a = a._replace(shape=(*of_a, m, depth), strides=(m * row, row, 1)[-2 - len(of_a) :], aligned=True)
    if how.of_b:
        strides = (n * row, 1, row)[-2 - len(of_b) :]
        b = b._replace(shape=(*of_b, depth, n), strides=strides, dtype=a.dtype, aligned=True)
    return problem._replace(a=a, b=b)


def is_weight_only(problem: Problem) -> bool:
    """Whether A and B have 16 and 8 bits. The one of 8 bits is then converted, and 16 bits are multiplied."""
    return problem.a.dtype.itemsize != problem.b.dtype.itemsize


def converts(problem: Problem) -> bool:
    """Whether A is converted in registers. It has the 8 bits if A and B are exchanged."""
    return problem.a.dtype.itemsize < problem.b.dtype.itemsize


def itemsize(problem: Problem) -> int:
    """Bytes of a number as it is multiplied."""
    return max(problem.a.dtype.itemsize, problem.b.dtype.itemsize)


def is_full(problem: Problem) -> bool:
    """Whether A and B are float32 that is multiplied in full, as parts of tf32."""
    return problem.a.dtype == torch.float32 and problem.constraints.precision != "tf32"


def rewritten(problem: Problem) -> Rewriting | None:
    """How a first kernel writes A and B anew before they are multiplied; None where it writes neither.

    - float32 in full: both are written in three parts.
    - B of 8 bits beside an A of 16: B is converted to A's dtype, and A is copied if TMA cannot address it. Where
      registers convert the weight, neither is written.
    - 16 bits, or tf32: what of A and B TMA cannot address is copied.
    """
    if is_full(problem):
        return Rewriting(PARTS)
    if converts(problem) or problem.a.dtype.itemsize == 1 or problem.is_empty:
        return None
    of_a, of_b = (why is not None for why in why_copied(problem))
    if is_weight_only(problem):
        return Rewriting(1, of_a, narrow=problem.b.dtype)
    return Rewriting(1, of_a, of_b) if of_a or of_b else None


def why_copied(problem: Problem) -> tuple[str | None, str | None]:
    """Why A, and why B, of 16 bits or of tf32 is copied by a first kernel; None for one that is not."""
    held = filled(problem)
    of_a, of_b = _unaddressable("A", "MK", held.a), _unaddressable("B", "KN", held.b)
    if _needs_k(held.a.dtype):
        return _a_not_along_k(held) or of_a, _b_not_along_k(held) or of_b
    return of_a, of_b


def time_of_one(problem: Problem) -> float:
    """How long tensor cores take to multiply two numbers, as a multiple of the time for two 16-bit numbers."""
    return (PARTS if is_full(problem) else 1) * problem.a.dtype.itemsize / 2


def _depth(problem: Problem, parts: int) -> int:
    """Elements along K, of all parts, in the rewritten A and B."""
    k, step = problem.extents["k"] or _SOME_K, _ALIGNMENT // problem.a.dtype.itemsize
    return parts * (-(-k // step) * step)


def row_bytes(problem: Problem, parts: int) -> int:
    """Bytes from one row of a rewritten A to the next, and from one column of a rewritten B to the next."""
    return -(-_depth(problem, parts) * problem.a.dtype.itemsize // LINE) * LINE


def rewritten_bytes(problem: Problem, how: Rewriting | None) -> int:
    """Bytes of workspace that rewritten A and B take. A matrix that is the same for every batch has one copy."""
    if how is None:
        return 0
    extents, row = problem.extents, row_bytes(problem, how.parts)
    sides = (how.of_a, problem.a, extents["m"]), (how.of_b, problem.b, extents["n"])
    return row * sum(rows * (1 if is_shared(info) else info.shape[0]) for own, info, rows in sides if own)


def is_shared(info: TensorInfo) -> bool:
    """Whether all batches use the same matrix."""
    return len(info.shape) == 2 or info.shape[0] == 1 or info.strides[0] == 0


def _along_its_length(info: TensorInfo) -> TensorInfo:
    """Return the matrix. A single column whose strides are both 1 gets a larger column stride, as TMA needs."""
    if info.shape[-1] != 1 or info.strides[-2:] != (1, 1):
        return info
    return info._replace(strides=(*info.strides[:-1], -(-info.shape[-2] // _ALIGNMENT) * _ALIGNMENT))


_MOST = (1 << 31) - 1  # the largest extent, and the largest number of tiles: both are counted in 32 bits
_LEAST_TILE, _LEAST_ROWS = 64, 16  # the second is for tiles of few rows (`swap.py`)
_STEP = 1024  # more than the clusters that run at once: a counter of tiles may pass the last tile by that many


def uncounted(problem: Problem) -> str | None:
    """Why the rows, columns or tiles of a problem cannot be counted in 32 bits, or None."""
    e = multiplied(problem, Rewriting(PARTS)).extents if is_full(problem) else problem.extents
    rows = _LEAST_ROWS if e["m"] <= swap.most_rows(problem) else _LEAST_TILE
    tiles = e["l"] * -(-e["m"] // rows) * -(-e["n"] // _LEAST_TILE)
    if max(e.values()) > _MOST or tiles > _MOST - _STEP:
        return (
            f"an extent or the number of tiles is too large: it counts them in 32 bits, up to {_MOST}; split the "
            "product into several calls"
        )
    return None


def refused(problem: Problem) -> str | None:
    """Why the filled A and B cannot be multiplied, whatever their number of rows, or None."""
    a = problem.a
    if a.dtype not in ACCUMULATORS:
        return f"it multiplies float16, bfloat16, float32 and 8 bits, and A is {a.dtype}: convert it"
    if problem.scales and itemsize(problem) > 1:
        return (
            "it applies block scales only where A and B both have 8 bits: quantise A too, or pass scales of columns, "
            "or one scale of the whole weight, as operands of the epilogue"
        )
    accumulators = ACCUMULATORS[problem.b.dtype if converts(problem) else a.dtype]
    if problem.accumulator not in accumulators:
        first = accumulators[0]
        return f"it adds up products of {a.dtype} in {short(first)}, not {problem.accumulator}"
    for name, info in problem.scales:
        if sum((extent - 1) * stride for extent, stride in zip(info.shape, info.strides, strict=True)) > _MOST:
            return f"it counts elements of the {name} up to {_MOST}"
    return None if is_full(problem) else unaddressable(problem)


def unaddressable(problem: Problem) -> str | None:
    """Why TMA cannot bring the filled A and B in the order in which Hopper multiplies them, or None."""
    if 0 in problem.extents.values():
        return None
    a, b = problem.a, problem.b
    if converts(problem):  # A and B are exchanged
        if a.strides[-1] != 1:
            return "it converts a weight in registers where K is contiguous: store it as (N, K), and pass weight.T"
        return _unaddressable("B", "NK", a) or _unaddressable("A", "KM", b)
    layout = not_along_k(problem) if _needs_k(a.dtype) and _needs_k(b.dtype) else None
    return layout or _unaddressable("A", "MK", a) or _unaddressable("B", "KN", b)


def _needs_k(dtype: torch.dtype) -> bool:
    """Whether Hopper multiplies this dtype only where K is contiguous: all dtypes but those of 16 bits."""
    return dtype.itemsize != 2


def not_along_k(problem: Problem) -> str | None:
    """Why A or B is not contiguous along K, and what to do about it; None if both are."""
    return _a_not_along_k(problem) or _b_not_along_k(problem)


def _a_not_along_k(problem: Problem) -> str | None:
    if problem.a.strides[-1] == 1:
        return None
    return f"{_of_k_alone(problem)} needs A by rows (K contiguous): {_one_of_k(problem) or 'pass A.contiguous()'}"


def _b_not_along_k(problem: Problem) -> str | None:
    if problem.b.strides[-2] == 1:
        return None
    way_out = "store the weight as (N, K) and pass weight.T, or B.mT.contiguous().mT"
    return f"{_of_k_alone(problem)} needs B by columns (K contiguous): {_one_of_k(problem) or way_out}"


def _one_of_k(problem: Problem) -> str | None:
    """The remedy if K has one element, because no copy changes the stride of that; else None."""
    least = _ALIGNMENT // problem.b.dtype.itemsize
    return f"pad K with zeros to {least} elements in both A and B" if problem.extents["k"] == 1 else None


def _of_k_alone(problem: Problem) -> str:
    return "tf32" if problem.a.dtype == torch.float32 else "a product of 8-bit numbers"


def promoted(problem: Problem) -> int:
    """After how many products a sum is added in float32; 0 if the tensor cores add up all of K."""
    dtype = problem.b.dtype
    if is_full(problem):
        return PROMOTED_PARTS
    if problem.scales:
        return BLOCK
    narrow = dtype.is_floating_point and dtype.itemsize == 1
    return PROMOTED if narrow and not problem.constraints.fast_accum else 0


def scaled(problem: Problem) -> tuple[bool, bool]:
    """Whether A, and whether B, has block scales."""
    of_a, of_b = (name in dict(problem.scales) for name in SCALES)
    return of_a, of_b


def largest_sum(problem: Problem) -> int:
    """The largest absolute value that a sum of products of integers can have."""
    return problem.extents["k"] * largest(problem.a.dtype) * largest(problem.b.dtype)


def _unaddressable(name: str, dims: str, info: TensorInfo) -> str | None:
    """Why TMA cannot address A or B, or None. It needs one contiguous mode, and a start and all other strides that are
    multiples of 16 bytes; the stride of batches may be 0. `dims` are the names of the last two dims."""
    is_expanded = len(info.shape) == 3 and info.strides[0] == 0
    copied = "copy the matrix, and expand the copy" if is_expanded else f"pass a copy, {name}.clone()"
    if not info.aligned:
        cure = copied
        if name == "B":
            cure += "; where B is a range of columns, store the weight as (N, K), and pass rows of it, transposed"
        return f"{name} does not start at a multiple of {_ALIGNMENT} bytes, as TMA needs: {cure}"
    inner = [i for i in (-1, -2) if info.strides[i] == 1]
    if not inner:
        cure = copied if is_expanded else f"pass {name}.contiguous()"
        return f"{name} has neither contiguous rows nor contiguous columns, and TMA requires one: {cure}"
    for i in range(-len(info.shape), 0):
        size, extent = info.strides[i] * info.dtype.itemsize, info.shape[i]
        if i == -3 and is_expanded:
            continue  # it is read as a 2-D matrix
        if i != inner[0] and extent > 1 and (size % _ALIGNMENT or size == 0):
            found = f"{name} has a stride of {size} bytes, and TMA needs a multiple of {_ALIGNMENT}"
            found = found if size else f"{name} is expanded, and TMA takes no stride of 0"
            least, dim = _ALIGNMENT // info.dtype.itemsize, dims[inner[0]]
            if size == 0 and not is_expanded:  # clone() would order the strides by dims
                return f"{found}: pass {name}.{'contiguous()' if inner[0] == -1 else 'mT.contiguous().mT'}"
            if size == 0 or info.shape[inner[0]] % least == 0:
                return f"{found}: {copied}"
            both = " in both A and B" if dim == "K" else ""
            return f"{found}: pad {dim} with zeros to a multiple of {least} elements{both}"
    return None
