"""Functions of the vocabulary on tensors, where they are PyTorch's, and as whole epilogues."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef

BOUNDS = {
    "relu": (0.0,),
    "relu6": (0.0, 6.0),
    "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, 3.0),
    "logsigmoid": (0.0, -100.0),
    "softplus": (0.0, 20.0),
    "mish": (0.0,),
    "elu": (0.0, 100.0),
    "selu": (0.0, 100.0),
    "expm1": (60.0,),
    "sigmoid": (-100.0,),
    "silu": (-100.0,),
}
"""Where a formula of maxima has another derivative than the function, or one of an exponential none."""


def slope(function: Callable[[torch.Tensor], torch.Tensor], place: float) -> float:
    x = torch.full((1, 1), place, requires_grad=True)
    function(x).sum().backward()
    return x.grad.item()


@pytest.mark.parametrize("name", BOUNDS)
def test_derivatives_at_bounds_are_pytorch_s(name: str) -> None:
    ours, one = getattr(ef, name), torch.ones(1, 1)
    for place in BOUNDS[name]:
        want = slope(getattr(F, name, getattr(torch, name, None)), place)
        assert slope(ours, place) == slope(ef.reference(ours), place) == want
        assert slope(lambda x: ef.gemm(x, one, epilogue=ours), place) == want


def test_integers_and_tensors_as_parameters_are_ours_alone() -> None:
    assert ef.relu6(torch.tensor([-1, 3, 9])).tolist() == [0, 3, 6]
    beta = torch.tensor([1.0, 2.0])
    x = torch.randn(2)
    want = torch.stack([F.softplus(x[i], beta=beta[i].item()) for i in range(2)])
    torch.testing.assert_close(ef.softplus(x, beta), want)


def test_each_is_its_own_epilogue() -> None:
    """Some are wrapped by one function, which has one code object."""
    a, b = torch.randn(5, 7), torch.randn(7, 6)
    for name in ("gelu", "block_scale", "relu", "hardtanh", "softplus", "logsigmoid", "gelu"):
        function = getattr(ef, name)
        torch.testing.assert_close(ef.gemm(a, b, epilogue=function), function(a @ b))
