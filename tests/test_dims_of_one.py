"""Results of which a dim of one element was dropped, by squeeze, by an index, by a reshape, down to no dims at all; and
dims without elements that are cut."""

import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.harness import run

import epifuse as ef

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


def source_of(name: str) -> str:
    return f"def f(accum): {FUNCTIONS[name][2]}; return D\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_have_the_shape_of_pytorch_s(name: str) -> None:
    m, n, _ = FUNCTIONS[name]
    a, b = torch.randn(m, 5), torch.randn(5, n)
    namespace: dict = {"torch": torch}
    exec(source_of(name), namespace)
    found, want = ef.gemm(a, b, epilogue=source_of(name)), namespace["f"](a @ b)
    assert found.shape == want.shape
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", [name for name, (m, n, _) in FUNCTIONS.items() if m == 1 and n > 1])
def test_on_hopper(name: str, emulated: Emulated) -> None:
    a, b = emulated.whole(1, 64), emulated.whole(64, 8)
    namespace: dict = {"torch": torch}
    exec(source_of(name), namespace)
    (found,) = run(emulated, source_of(name), a, b, {}).values()
    torch.testing.assert_close(found.double(), namespace["f"](a.double() @ b.double()).double(), rtol=1e-2, atol=1e-2)


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
    namespace: dict = {"torch": torch}
    source = f"def f(accum): {body}; return D\n"
    exec(source, namespace)
    assert ef.gemm(a, b, epilogue=source).shape == namespace["f"](a @ b).shape
