"""Operands and outputs in other shapes than the product's: heads, batches within M, gates; addressed in place."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, check

M, N, K = 96, 144, 64
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "the same memory": ("D = accum.reshape(96, 9, 16)", {}),
    "heads first": ("D = accum.reshape(96, 9, 16).permute(1, 0, 2)", {}),
    "heads first, odd heads": ("D = accum.reshape(96, 16, 9).permute(1, 0, 2)", {}),
    "heads last": ("D = accum.reshape(96, 9, 16).permute(0, 2, 1)", {}),
    "batch within M": ("D = accum.reshape(4, 24, 9, 16).permute(0, 2, 1, 3)", {}),
    "transposed": ("D = accum.reshape(4, 24, 144).permute(2, 1, 0)", {}),
    "one dim": ("D = accum.reshape(13824)", {}),
    "halves": ("D = accum.reshape(96, 2, 72).permute(1, 0, 2)", {}),
    "thrice cut": ("D = accum.reshape(96, 3, 4, 12).permute(2, 0, 3, 1)", {}),
    "a number a head": ("D = accum.reshape(96, 9, 16) + C", {"C": (9, 1)}),
    "the same for all heads": ("D = accum.reshape(96, 9, 16) * C", {"C": (16,)}),
    "a number a row and head": ("D = accum.reshape(96, 9, 16) * C", {"C": (96, 9, 1)}),
    "a number a row and wide head": ("D = accum.reshape(96, 3, 48) + C", {"C": (96, 3, 1)}),
    "a number a row and odd head": ("D = accum.reshape(96, 16, 9) * C", {"C": (96, 16, 1)}),
    "a number for two columns": ("D = accum.reshape(96, 72, 2) * C", {"C": (96, 72, 1)}),
    "a number for four columns": ("D = accum.reshape(96, 36, 4) * C", {"C": (96, 36, 1)}),
    "the same pairs for all heads": ("D = accum.reshape(96, 9, 8, 2) * C", {"C": (96, 1, 8, 1)}),
    "a number for each half of a head": ("D = accum.reshape(96, 9, 2, 8) * C", {"C": (96, 9, 2, 1)}),
    "a column for each batch": ("D = (accum.reshape(4, 24, 144) + C).reshape(96, 144)", {"C": (24, 1)}),
    "a number a batch": ("D = accum.reshape(4, 24, 144) * C", {"C": (4, 1, 1)}),
    "by heads": (
        "D = (accum.reshape(96, 9, 16).permute(1, 0, 2) + C).permute(1, 0, 2).reshape(96, 144)",
        {"C": (9, 96, 16)},
    ),
    "by heads, in and out": ("D = accum.reshape(96, 9, 16).permute(1, 0, 2) + C", {"C": (9, 96, 16)}),
    "the same for a batch": (
        "D = (accum.reshape(4, 24, 9, 16) + C).permute(0, 2, 1, 3)",
        {"C": (4, 1, 9, 16)},
    ),
    "reshaped operand": ("D = accum.reshape(96, 9, 16) + C.reshape(1, 9, 16)", {"C": (144,)}),
    "permuted operand": ("D = accum.reshape(96, 9, 16) + C.permute(1, 0, 2)", {"C": (9, 96, 16)}),
    "coordinates": ("x = accum.reshape(4, 24, 9, 16); D = x + index_n(x) * 32 + index_m(x)", {}),
    "merged again": ("x = accum.reshape(4, 24, 9, 16).reshape(96, 144); D = x + index_n(x) + C", {"C": (144,)}),
    "two ways": (
        "x = accum.reshape(96, 9, 16); D = x.permute(1, 0, 2); E = (x * C).reshape(96, 144)",
        {"C": (1, 16)},
    ),
    "sums by whole axes": (
        "x = accum.reshape(96, 9, 16); D = sum(x, dim=0) + C; E = amax(x, dim=(1, 2))",
        {"C": (9, 16)},
    ),
    "sums over everything": ("x = accum.reshape(4, 24, 144) * C; D = sum(x)", {"C": (4, 1, 1)}),
}
SHARED = [name for name in CASES if "a number for" in name or "a row and" in name or "pairs" in name]
"""Neighbouring columns have the same element of an operand."""
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64)


@pytest.mark.sweep
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", CASES)
def test_what_a_reshape_cut_is_addressed_in_place(name: str, turn: int, machine: Machine) -> None:
    """Exact data, in layouts that TMA can address, and that it cannot."""
    judge_reshape(name, turn, machine)


def judge_reshape(name: str, turn: int, machine: Machine, **options: Any) -> None:
    body, shapes = CASES[name]
    layout = ("rows", "odd", "even")[turn]
    number = turn + list(CASES).index(name)
    a, b = machine.whole(M, K, most=1), machine.whole(K, N, most=1)
    operands: dict[str, Any] = {
        key: machine.laid_out(torch.randint(-4, 5, shape).to(DTYPES[number % 2]), layout)
        for key, shape in shapes.items()
    }
    dtype = DTYPES[number % len(DTYPES)] if "sum" not in body else torch.float32
    returned = ", ".join(key for key in ("D", "E") if f"{key} =" in body)
    source = f"def epi({', '.join(('accum', *shapes))}): {body}; return {returned}"
    check(machine, source, a, b, operands, out_dtypes=dtype, layouts=[layout], **options)


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_are_cut_too(batch: int, machine: Machine) -> None:
    a, b = machine.whole(batch, M, K, most=1), machine.whole(batch, K, N, most=1)
    C = machine.whole(9, 1, dtype=torch.float32)
    source = f"def epi(accum, C): D = (accum.reshape({batch}, 96, 9, 16) + C).permute(2, 0, 1, 3); return D"
    check(machine, source, a, b, {"C": C}, out_dtypes=torch.float32, layouts=["rows"])
