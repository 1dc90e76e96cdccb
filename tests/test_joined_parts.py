"""Parts that are taken of parts, and joined: the row that they make is the one that they were taken of."""

import itertools

import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.harness import run

import epifuse as ef
from tests.frontend.sources import function_from

TAKEN = {
    "all": "accum",
    "every second column": "accum[..., 0::2]",
    "by unbind": "accum.unflatten(-1, (-1, 2)).unbind(-1)[0]",
    "an interleaved gate": "F.silu(accum[..., 0::2]) * accum[..., 1::2]",
    "a half": "accum.chunk(2, dim=-1)[1]",
}
ROTATED = "torch.stack((-v[..., 1::2], v[..., 0::2]), -1).flatten(-2)"


def called(source: str, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What epifuse and PyTorch make of an epilogue."""
    a, b = torch.randn(m, 5), torch.randn(5, n)
    return ef.gemm(a, b, epilogue=source), function_from(source)(a @ b)


@pytest.mark.parametrize("taken", TAKEN)
def test_interleaved_pairs_are_rotated_beside_what_they_were(taken: str) -> None:
    found, want = called(f"def f(accum):\n    v = {TAKEN[taken]}\n    D = v + {ROTATED}\n    return D\n", 3, 48)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [4, 8])
def test_halves_of_what_was_joined_are_exchanged(width: int) -> None:
    half = width // 2
    source = (
        f"def f(accum):\n    v = accum[..., 0::2].unflatten(-1, (-1, {width}))\n    r = {ROTATED}\n"
        f"    D = r + torch.cat((r[..., {half}:], r[..., :{half}]), -1)\n    return D\n"
    )
    found, want = called(source, 3, 6 * width)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("step", "width", "count"),
    [one for one in itertools.product((2, 3, 4), (4, 6, 9, 12), (2, 3, 4)) if one[1] % one[2] == 0],
)
def test_heads_of_every_so_many_columns(step: int, width: int, count: int) -> None:
    parts = ", ".join(f"v[..., {i}::{count}]" for i in reversed(range(count)))
    source = (
        f"def f(accum):\n    v = accum[..., 0::{step}].unflatten(-1, (-1, {width}))\n"
        f"    D = torch.stack([{parts}], -1).flatten(-2) * v\n    return D\n"
    )
    found, want = called(source, 3, 3 * step * width)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", ["accum * 2", "accum ** 2", "F.leaky_relu(accum, 2)"])
def test_a_number_of_a_value_divides_its_shape(value: str) -> None:
    """The same number, which is one node of the graph."""
    rotated = "torch.cat((-q[..., q.shape[-1] // 2 :], q[..., : q.shape[-1] // 2]), -1)"
    found, want = called(f"def f(accum):\n    q = {value}\n    D = {rotated}\n    return D\n", 3, 48)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_on_hopper(emulated: Emulated) -> None:
    source = f"def f(accum):\n    v = accum.chunk(2, dim=-1)[0]\n    D = v + {ROTATED}\n    return D\n"
    a, b = emulated.whole(64, 64), emulated.whole(64, 128)
    (found,) = run(emulated, source, a, b, {}).values()
    want = function_from(source)(a.double() @ b.double())
    torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)
