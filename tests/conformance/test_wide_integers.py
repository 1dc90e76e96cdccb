"""Sums of integers are int64, and so are reductions of these sums."""

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


def test_the_square_of_one_integer_is_wide() -> None:
    ids = torch.tensor([[70000], [5]], dtype=torch.int32)
    source = "def epi(accum, ids): s = sum_of_squares(ids, dim=-1); return s"
    got = ef.gemm(torch.ones(2, 4), torch.ones(4, 8), epilogue=source, ids=ids)
    assert torch.equal(got, ef.sum_of_squares(ids, dim=-1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_extent_beside_floats_and_integers(dtype: torch.dtype) -> None:
    source = (
        "def epi(accum, ids): n = accum.unflatten(-1, (2, 4)).shape[-1]; D = ids + 4; E = accum * n; F = ids * n; "
        "return D, E, F"
    )
    ids = torch.full((3, 8), 7, dtype=dtype)
    D, E, F = ef.gemm(torch.ones(3, 4), torch.ones(4, 8), epilogue=source, ids=ids)
    assert torch.equal(D, ids + 4)
    assert torch.equal(F, ids * 4)
    assert torch.equal(E, torch.full((3, 8), 16.0))
