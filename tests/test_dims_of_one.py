"""Results of which a dim of one element was dropped, by squeeze, by an index, by a reshape, down to no dims at all; and
dims without elements that are cut."""

from typing import Any

import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.harness import run

import epifuse as ef
from tests.frontend.sources import function_from

FUNCTIONS = {
    "the best column of one row": (1, 8, "D = accum.argmax(-1).squeeze(0)"),
    "by a reshape": (1, 8, "D = accum.argmax(-1).reshape(())"),
    "and one is added": (1, 8, "D = accum.logsumexp(-1).squeeze(0) + 1"),
    "the first of one": (1, 8, "D = accum.sum(-1, keepdim=True).flatten()[0]"),
    "a row by its number": (1, 8, "D = accum.amax(-1)[0]"),
    "the only row": (1, 8, "D = (accum * 2.0)[0]"),
    "one column": (5, 1, "D = accum.mean(0)[0]"),
    "one column of all": (5, 1, "D = accum.mean(0).unbind(0)[0]"),
    "one element": (1, 1, "D = accum.reshape(())"),
    "one element, twice": (1, 1, "D = accum.squeeze(0)[0]"),
}


def written(body: str) -> tuple[str, Any]:
    """The source of an epilogue, and what it is to PyTorch."""
    source = f"def f(accum): {body}; return D\n"
    return source, function_from(source)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_have_the_shape_of_pytorch_s(name: str) -> None:
    m, n, body = FUNCTIONS[name]
    a, b = torch.randn(m, 5), torch.randn(5, n)
    source, function = written(body)
    found, want = ef.gemm(a, b, epilogue=source), function(a @ b)
    assert found.shape == want.shape
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", [name for name, (m, n, _) in FUNCTIONS.items() if m == 1 and n > 1])
def test_on_hopper(name: str, emulated: Emulated) -> None:
    a, b = emulated.whole(1, 64), emulated.whole(64, 8)
    source, function = written(FUNCTIONS[name][2])
    (found,) = run(emulated, source, a, b, {}).values()
    torch.testing.assert_close(found.double(), function(a.double() @ b.double()).double(), rtol=1e-2, atol=1e-2)


EMPTY = {
    "sums of heads": (3, 0, "D = accum.unflatten(-1, (-1, 4)).sum(-1)"),
    "heads": (3, 0, "D = accum.unflatten(-1, (-1, 4)) * 2.0"),
    "softmax of heads": (3, 0, "D = accum.unflatten(-1, (-1, 4)).softmax(-1)"),
    "groups of rows": (0, 5, "D = accum.unflatten(0, (-1, 4)).amax(1)"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_is_cut(name: str) -> None:
    m, n, body = EMPTY[name]
    a, b = torch.randn(m, 5), torch.randn(5, n)
    source, function = written(body)
    assert ef.gemm(a, b, epilogue=source).shape == function(a @ b).shape
