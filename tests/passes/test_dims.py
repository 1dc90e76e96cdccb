"""How dims combine: what stands beside a value in eager, and is a value of one tile or refused."""

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import EpilogueTypeError

A, B, ROW = torch.randint(-3, 4, (2, 3)).float(), torch.randint(-3, 4, (3, 8)).float(), torch.arange(8.0)


@pytest.mark.parametrize(
    "body",
    [
        "c - accum.unsqueeze(-1)",
        "c - accum.reshape(2, 2, 4).unsqueeze(-1)",
        "c.reshape(2, 4) * accum.unsqueeze(-1).unsqueeze(-1)",
        "accum.reshape(2, 2, 4, 1) * c",
    ],
)
def test_pairs_of_elements_of_one_row_are_refused(body: str) -> None:
    """A part of an axis beside the whole axis was taken for another axis, and gave other numbers than PyTorch."""
    with pytest.raises((EpilogueTypeError, ValueError), match=r"along different axes|does not broadcast"):
        ef.gemm(A, B, epilogue=f"lambda accum, c: {body}", c=ROW)


def test_shapes_that_eager_broadcasts_are_not_said_not_to() -> None:
    with pytest.raises(EpilogueTypeError, match=r"run along different axes, \(1, 8\) and \(8, 1\)"):
        ef.gemm(A[:1], B, epilogue="lambda accum: accum - accum.permute(1, 0)")
    with pytest.raises(EpilogueTypeError, match=r"run along different axes, \(2, 1\) and \(2,\)"):
        ef.gemm(A, B[:, :1], epilogue="lambda accum: accum - accum.sum(1)")


@pytest.mark.parametrize(
    "body",
    ["accum.reshape(2, 2, 4) * c.reshape(2, 4)", "accum.reshape(2, 4, 2).permute(1, 0, 2) - c.reshape(4, 1, 2)"],
)
def test_equal_parts_of_an_axis_are_values_of_a_tile(body: str) -> None:
    accum, c = A @ B, ROW
    assert torch.equal(ef.gemm(A, B, epilogue=f"lambda accum, c: {body}", c=ROW), eval(body, {"accum": accum, "c": c}))
