"""Tests 31 to 38 of the operator API: what its arguments record and refuse, without a kernel."""

from typing import Any

import pytest
import torch

from epifuse.runtime.arguments import EpilogueArguments, Load, Store


def alpha_beta(accum: Any, alpha: Any, beta: Any, C: Any) -> Any:
    D = alpha * accum + beta * C
    return D


def ten() -> torch.Tensor:
    return torch.ones(10, 10)


def test_31_basic() -> None:
    args = EpilogueArguments(alpha_beta, alpha=1.0, beta=2.0, C=ten(), D=ten())
    assert args.parameter_names == ("alpha", "beta", "C", "D")


def test_32_missing_output() -> None:
    with pytest.raises(ValueError, match="Argument F is not provided"):
        EpilogueArguments("def epi(accum): F = relu(accum); D = F + 1; return D, F", D=ten())


def test_33_extra_argument() -> None:
    with pytest.raises(ValueError, match="'gamma'"):
        EpilogueArguments(alpha_beta, alpha=1.0, beta=2.0, gamma=3.0, C=ten(), D=ten())


def test_34_hints_are_recorded() -> None:
    C, D = ten(), ten()
    args = EpilogueArguments(alpha_beta, alpha=1.0, beta=2.0, C=Load(C, "tma"), D=Store(D, via="tma"))
    assert args.tensors["C"] is C
    assert args.by_tma == ("C", "D")


def test_36_bare_tensors_have_no_hints() -> None:
    assert EpilogueArguments(alpha_beta, alpha=1.0, beta=2.0, C=ten(), D=ten()).by_tma == ()


@pytest.mark.parametrize("hint", [Load, Store])
@pytest.mark.parametrize(
    "via", ["sync_gmem_load", "sync_gmem_store", "not_a_transport", 3, True, ["tma"], ten()], ids=str
)
def test_37_38_no_other_transport(hint: type, via: Any) -> None:
    with pytest.raises(ValueError, match=f"{hint.__name__} transport must be 'tma' or None, got"):
        hint(ten(), via)
