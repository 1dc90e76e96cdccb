"""Regions of N: ranges of columns that differ in what is computed of them, as q, k and v of one projection."""

from typing import Any

import pytest
import torch
from gpu.harness import LAYOUTS, Machine, check

M, K = 200, 72
Q, KV, HEAD = 512, 128, 64
N = Q + 2 * KV
"""Rows that end within a tile; regions of 8 heads and of 2 each, in whole tiles."""

OPERANDS: dict[str, tuple[int, ...]] = {
    "C": (M, N),
    "row": (N,),
    "column": (M, 1),
    "wide": (M, Q),
    "narrow": (M, KV),
    "of_q": (HEAD,),
    "of_k": (HEAD,),
    "cosines": (M, 1, HEAD // 2),
    "sines": (M, 1, HEAD // 2),
}
SPLIT = f"q, k, v = accum.split([{Q}, {KV}, {KV}], dim=-1); "
HEADS = "; ".join(f"{name} = {name[0]}.unflatten(-1, (-1, {HEAD}))" for name in ("qh", "kh", "vh")) + "; "


def normed(name: str) -> str:
    """The heads of q or k divided by their norms, times a weight."""
    x = f"{name}h"
    return f"{name}n = {x} * rsqrt(mean({x} * {x}, dim=-1, keepdim=True) + 0.001) * of_{name}; "


def rotated(name: str, x: str) -> str:
    """The halves of each head by angles."""
    a, b = f"{name}0", f"{name}1"
    turned = f"{a} * cosines - {b} * sines, {b} * cosines + {a} * sines"
    return f"{a}, {b} = {x}.chunk(2, dim=-1); {name}r = cat(({turned}), dim=-1); "


def first(q: str, k: str) -> str:
    """Heads before rows, as attention takes them."""
    return f"D = {q}.permute(1, 0, 2); P = {k}.permute(1, 0, 2); R = vh.permute(1, 0, 2)"


CASES = {
    "as they are": f"{SPLIT}D = q * 1; P = k * 1; R = v * 1",
    "elementwise": f"{SPLIT}D = relu(q + wide); P = k * narrow; R = v + column",
    "two of three": f"{SPLIT}D = v * 2; P = q - 1",
    "equal parts": "q, k, v = accum.chunk(3, dim=-1); D = relu(q); P = k * 2; R = v + column",
    "a slice": f"D = relu(accum[:, {KV}:])",
    "after what is common": (
        f"x = relu(accum + row) * column + C; q, k, v = x.split([{Q}, {KV}, {KV}], dim=-1); "
        "D = q * 1; P = k * 2; R = v * 3"
    ),
    "counted": f"x = accum + index_n(accum) * 2; q, k = x.split([{Q + KV}, {KV}], dim=-1); D = q; P = k + index_n(k)",
    "heads first": f"{SPLIT}{HEADS}{first('qh', 'kh')}",
    "normed": f"{SPLIT}{HEADS}{normed('q')}{normed('k')}{first('qn', 'kn')}",
    "rotated": f"{SPLIT}{HEADS}{rotated('q', 'qh')}{rotated('k', 'kh')}{first('qr', 'kr')}",
    "normed and rotated": (
        f"{SPLIT}{HEADS}{normed('q')}{rotated('q', 'qn')}{normed('k')}{rotated('k', 'kn')}{first('(qr * 0.125)', 'kr')}"
    ),
    "reduced": f"{SPLIT}D = q * 1; P = absmax(k.unflatten(-1, (-1, {HEAD})), dim=-1); R = v * 1",
    "summed": f"{SPLIT}D = sum(q, dim=-1); P = sum(k, dim=0); R = v * 1",
    "parted twice": (
        f"x, v = accum.split([{Q + KV}, {KV}], dim=-1); q, k = x.split([{Q}, {KV}], dim=-1); D = q * 1; P = k * 2"
    ),
}


def source(body: str) -> str:
    """The function of these lines, whose outputs are D, P and R."""
    read = [name for name in OPERANDS if name in body]
    returned = ", ".join(name for name in "DPR" if f"{name} =" in body)
    return f"def epi({', '.join(('accum', *read))}): {body}; return {returned}"


def operands_of(machine: Machine, text: str, layout: str = "rows") -> dict[str, Any]:
    names = text[text.index("(") + 1 : text.index(")")].split(", ")[1:]
    return {name: machine.laid_out(machine.whole(*OPERANDS[name]), layout) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_each_region_has_its_own(name: str, layout: str, machine: Machine) -> None:
    """With operands and outputs as TMA can address them, and as it cannot."""
    text = source(CASES[name])
    a, b = machine.whole(M, K, most=1), machine.whole(N, K, most=1).t()
    number = list(CASES).index(name) + LAYOUTS.index(layout)
    dtype = (torch.float32, torch.bfloat16)[number % 2]
    check(machine, text, a, b, operands_of(machine, text, layout), out_dtypes=dtype, layouts=[layout])
