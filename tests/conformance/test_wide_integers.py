"""Sums of integers are int64, and so is what is reduced from them."""

import pytest
import torch

import epifuse as ef


@pytest.mark.parametrize("name", ["amax", "amin", "absmax", "sum", "sum_of_squares"])
@pytest.mark.parametrize("tile", [(2, 3), (64, 64)])
def test_reductions_of_a_sum_of_integers(name: str, tile: tuple[int, int]) -> None:
    a = torch.full((6, 500), 127, dtype=torch.int8)
    b = torch.randint(-128, 128, (500, 9), dtype=torch.int8)
    source = f"def epi(accum): wide = accum.sum(dim=0, keepdim=True) + accum; s = {name}(wide); return s"
    accum = (a.to(torch.float64) @ b.to(torch.float64)).to(torch.int32)
    want = getattr(ef, name)(accum.sum(dim=0, keepdim=True) + accum)
    args = ef.GemmArguments(
        a, b, epilogue=ef.EpilogueArguments.partial(source, {}), constraints=ef.Constraints(tile=tile)
    )
    got = ef.get_kernels(args)[0].run(args)["s"]
    assert got.dtype == torch.int64
    assert torch.equal(got, want)
