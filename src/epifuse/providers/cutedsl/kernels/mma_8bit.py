"""Products of 8-bit numbers by mma.sync: CuTe DSL 4.8.1 has no such operation for integers, nor for e4m3 by e5m2.

A and B are copied and read as pairs of numbers, in the way of 16-bit numbers. A fragment of 16 x 32 bytes lies in the
same registers whether it has 16 or 32 numbers along K. The sums lie in the same registers, too (PTX ISA, "Matrix
Fragments for mma.m16n8k32").
"""

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float8E5M2, Float16, Float32, Int8, Int32, Uint8

PAIR = Float16
"""The dtype as which a pair of numbers is copied and read. No instruction computes with it."""
_NAMES = {Int8: "s8", Uint8: "u8", Float8E4M3FN: "e4m3", Float8E5M2: "e5m2"}
_SUMS = {Int32: "s32", Float32: "f32"}


def in_pairs(tensor: cute.Tensor) -> cute.Tensor:
    """Return a tensor (rows, K, L) as (rows, K / 2, L) of pairs. K is even and contiguous; other strides are even."""
    rows, k, *batches = tensor.shape
    of_rows, _, *of_batches = tensor.stride
    layout = cute.make_layout((rows, k // 2, *batches), stride=(of_rows // 2, 1, *(s // 2 for s in of_batches)))
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=PAIR), layout)


def multiply(types: tuple, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor) -> None:
    """Add the products of fragments of A, (8 pairs, M), and of B, (4 pairs, N), to `sums`, (4, M, N)."""
    accumulator = sums.element_type
    names = [_SUMS[accumulator], *(_NAMES[one] for one in types), _SUMS[accumulator]]
    registers = _listed("w", 4), _listed("r", 4), _listed("r", 2, 4), _listed("r", 4, 6)
    text = f"mma.sync.aligned.m16n8k32.row.col.{'.'.join(names)} {', '.join(registers)};"
    of_a, of_b = (cute.recast_tensor(fragment, Int32) for fragment in (a, b))
    down, across = (cute.size(sums, mode=[i]) for i in (1, 2))
    for m in range(down):
        for n in range(across):
            own = sums[None, m, n]
            read = [*(of_a[None, m][i] for i in range(4)), *(of_b[None, n][i] for i in range(2))]
            found = cute.arch.inline_ptx(
                text, write_only_types=[accumulator] * 4, read_only_args=[*read, *(own[i] for i in range(4))]
            )
            for i in range(4):
                own[i] = found[i]


def _listed(kind: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"{{${kind}{first + i}}}" for i in range(count)) + "}"
