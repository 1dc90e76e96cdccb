"""Derivatives of what is joined, as Hopper's kernels are to compute them: rotary embedding, pairs, norms of heads."""

import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.harness import run

from epifuse.pytorch.autograd import ACCUM
from tests.test_autograd import JOINED, derived

M, N, K, WIDTH = 512, 512, 256, 128
NORMED = "h = accum.unflatten(-1, (4, 128)); q = h * rsqrt((h * h).mean(-1, True) + 1.0)"
ROTATED = "x, y = q.chunk(2, -1); D = (q * c + cat((-y, x), -1) * s).flatten(-2); return D"
EPILOGUES = {
    "halves of heads": JOINED["halves of heads"],
    "pairs": JOINED["pairs"],
    "rotary": f"def epi(accum, c, s): q = accum.unflatten(-1, (4, 128)); {ROTATED}",
    "norms and rotary": f"def epi(accum, c, s): {NORMED}; {ROTATED}",
}


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("name", EPILOGUES)
def test_beside_the_same_operations_by_pytorch(name: str, emulated: Emulated) -> None:
    torch.manual_seed(0)
    angles = {key: bfloat16(M, 1, WIDTH) for key in ("c", "s")} if "rotary" in name else {}
    made, given = derived(EPILOGUES[name], M, N, K, of_operands=False, **angles)
    assert made.without_product is not None, made.refused
    known = {"gradient of D": bfloat16(*given["gradient of D"].shape), **angles}
    assert given.keys() <= known.keys()  # no place along a joined dim is read
    a, b = bfloat16(M, K), (bfloat16(N, K) / 16).t()
    accum = (a.float() @ b.float()).bfloat16()
    handed = {key: known[key] for key in given}
    stored = {**handed, ACCUM: accum} if made.needs_product else handed
    values = {**known, ACCUM: accum.float(), "m": M, "n": N}
    (want,) = made.module(*(values[key] for key in (*made.inputs, *made.axes)))
    found = [run(emulated, made.without_product, a[:, :8], b[:8], stored)]
    found += [run(emulated, made.with_product, a, b, handed)] if made.with_product is not None else []
    for outputs in found:
        (got,) = outputs.values()
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=3e-2)
