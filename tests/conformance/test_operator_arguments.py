"""Lines 31 to 41 of the operator API's tests: what its arguments record and refuse, without a kernel."""

from typing import Any

import pytest
import torch

from epifuse.arguments import EpilogueArguments, Load, Store, Transport


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
    load, store = Load(C, Transport.ASYNC_GMEM_LOAD, 128), Store(D, Transport.SYNC_GMEM_STORE)
    args = EpilogueArguments(alpha_beta, alpha=1.0, beta=2.0, C=load, D=store)
    assert args.tensors["C"] is C
    assert args.transports["C"].via is Transport.ASYNC_GMEM_LOAD
    assert args.transports["D"].via is Transport.SYNC_GMEM_STORE
    assert args.transports["C"].num_bits_per_copy == 128


@pytest.mark.parametrize("via", [Transport.SYNC_GMEM_LOAD, "sync_gmem_load"])
def test_35_via_becomes_the_enum(via: Any) -> None:
    assert Load(ten(), via).via is Transport.SYNC_GMEM_LOAD


def test_36_bare_tensors_have_no_hints() -> None:
    assert EpilogueArguments(alpha_beta, alpha=1.0, beta=2.0, C=ten(), D=ten()).transports == {}


@pytest.mark.parametrize(
    ("hint", "via"),
    [
        (Load, "sync_gmem_store"),
        (Load, Transport.SYNC_GMEM_STORE),
        (Load, "not_a_transport"),
        (Store, "sync_gmem_load"),
        (Store, "async_gmem_load"),
    ],
)
def test_37_38_wrong_side(hint: type, via: Any) -> None:
    with pytest.raises(ValueError, match=f"{hint.__name__} transport must be one of"):
        hint(ten(), via)


@pytest.mark.parametrize("hint", [Load, Store])
@pytest.mark.parametrize("named", [{"via": "tma"}, {}])
def test_39_width_with_tma(hint: type, named: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="num_bits_per_copy"):
        hint(ten(), num_bits_per_copy=128, **named)


@pytest.mark.parametrize(("hint", "via", "width"), [(Load, "sync_gmem_load", 64), (Store, "sync_gmem_store", 128)])
def test_40_width_without_tma(hint: type, via: str, width: int) -> None:
    assert hint(ten(), via, width).num_bits_per_copy == width


@pytest.mark.parametrize("width", [64.0, "64", True])
def test_41_width_type(width: Any) -> None:
    with pytest.raises(TypeError, match="num_bits_per_copy must be an int"):
        Load(ten(), "sync_gmem_load", width)
