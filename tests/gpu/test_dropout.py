"""Dropout on a GPU: the kernel draws the numbers that PyTorch's operations draw, and its backward draws them again."""

import pytest
import torch

import epifuse as ef

pytestmark = pytest.mark.gpu
M, N, K = 200, 512, 64


def dropped(accum, seed):
    return ef.dropout(accum, 0.3, seed)


@pytest.mark.parametrize("seed", [0, 2_000_000_011, -5, (1 << 62) + 3])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_mask_is_that_of_the_reference(seed, tensor):
    a, b = torch.ones(M, K, device="cuda").bfloat16(), torch.ones(N, K, device="cuda").bfloat16().t()
    given = torch.tensor([seed], device="cuda") if tensor else seed
    found = ef.gemm(a, b, epilogue=dropped, seed=given, out_dtypes=torch.float32)
    whole = torch.full((M, N), float(K))
    want = ef.reference(dropped)(whole, torch.tensor([seed]) if tensor else seed)
    torch.testing.assert_close(found.cpu(), want)
    assert 0.25 < (found == 0).float().mean().item() < 0.35


def test_the_backward_draws_the_same_mask():
    a = torch.ones(M, K, device="cuda").bfloat16().requires_grad_()
    b = torch.ones(N, K, device="cuda").bfloat16().t()
    found = ef.gemm(a, b, epilogue=dropped, seed=7)
    found.float().sum().backward()
    kept = (found != 0).float().sum(1)
    torch.testing.assert_close(a.grad.float(), (kept / 0.7)[:, None].expand(M, K), rtol=1e-2, atol=0)
