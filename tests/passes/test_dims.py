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


WIDE = torch.arange(1.0, 25.0)[None]
JOINED = {
    "interleaved": "torch.stack((-accum[..., 1::2], accum[..., 0::2]), -1).flatten(-2)",
    "halves": "torch.cat((-accum.chunk(2, -1)[1], accum.chunk(2, -1)[0]), -1)",
    "permuted": "accum.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)",
    "normalised": "(accum.unflatten(-1, (-1, 4)) / accum.unflatten(-1, (-1, 4)).sum(-1, keepdim=True)).flatten(-2)",
    "counted": "(accum.unflatten(-1, (-1, 4)) * ef.index_along(accum.unflatten(-1, (-1, 4)), -1)).flatten(-2)",
    "rolled": "accum.roll(2, -1)",
}


def value_or_refusal(body: str) -> torch.Tensor | None:
    try:
        return ef.gemm(torch.ones(1, 1), WIDE, epilogue=f"lambda accum: {body}")  # type: ignore[no-any-return]  # one
    except (EpilogueTypeError, ef.errors.UnsupportedError):
        return None


@pytest.mark.parametrize("form", JOINED.values(), ids=JOINED.keys())
def test_columns_of_joined_values_are_those_of_torch_or_refused(form: str) -> None:
    """A range that begins within a head or a pair counted the columns of the head from its own first one."""
    right = 0
    for start in range(0, 24, 3):
        for stop in range(start + 1, 25, 2):
            body = f"({form})[..., {start}:{stop}]"
            if (found := value_or_refusal(body)) is not None:
                assert torch.equal(found, eval(body, {"torch": torch, "ef": ef, "accum": WIDE})), body
                right += 1
    assert right
    for step, first in ((4, 1), (4, 2), (6, 5), (2, 1)):
        body = f"({form})[..., {first}::{step}]"
        if (found := value_or_refusal(body)) is not None:
            assert torch.equal(found, eval(body, {"torch": torch, "ef": ef, "accum": WIDE})), body


def test_places_along_permuted_dims() -> None:
    """The factor that has the rest of N may be the inner one."""
    shuffled = "accum.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)"
    want = WIDE.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    assert torch.equal(value_or_refusal(f"({shuffled})[..., 1::4]"), want[..., 1::4])  # type: ignore[arg-type]  # run
    assert torch.equal(value_or_refusal(f"({shuffled})[..., 3]"), want[..., 3])  # type: ignore[arg-type]  # run


def test_ranges_of_one_column() -> None:
    for sizes, at in (([17, 6, 1], 2), ([1, 5, 18], 0)):
        found = value_or_refusal(f"accum.split({sizes}, dim=-1)[{at}]")
        assert torch.equal(found, WIDE.split(sizes, dim=-1)[at])  # type: ignore[arg-type]  # it runs
