"""Reductions that wait for the largest value of their row, and are found in one pass with it on Hopper."""

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from emulated import Emulated, emulated  # noqa: F401  # a fixture
from fuzzing.check import function_of
from gpu.harness import run
from hopper import BF16, arguments, hopper_kernel, reasons

import epifuse as ef
from epifuse.providers.cutedsl.online import EXPONENTIALS, MOST_PLACES, PLACE

BODIES = {
    "r = log_softmax(x, dim=-1).gather(-1, labels); return r": ["logsumexp"],
    "r = log(softmax(x, dim=-1).gather(-1, labels)); return r": [EXPONENTIALS],
    "r = softmax(x, dim=-1).gather(-1, labels); s = r.mean(); return r, s": [EXPONENTIALS],
    "r = argmax(x, -1); s = amax(x, -1); return r, s": [PLACE],
    "r = argmin(x, -1, keepdim=True); s = argmax(x * x, 1); return r, s": [PLACE, PLACE],
    "r = -(q * log_softmax(x, -1)).sum(-1); s = (q * (log(q) - log_softmax(x * 0.5, -1))).sum(-1); return r, s": [
        *("logsumexp", "logsumexp")
    ],
    "y = log_softmax(x, -1); r = 0.9 * y.gather(-1, labels) + 0.1 * y.mean(-1, True); return r": ["logsumexp"],
    "y = log_softmax(x, -1); r = y.sum(-1); s = where(q > 0.001, -y / 3.0, 0.0).sum(-1); return r, s": ["logsumexp"],
    "r = (q * (x - x.mean(-1, True)) / x.amax(-1, True)).sum(-1); return r": [],
    "r = where(argmax(x, -1, True) == labels, 1.0, 0.0).mean(); return r": [PLACE],
}
"""What is found in one pass."""


def reductions(kernel: ef.Kernel) -> list[str]:
    nodes = kernel.plan.allocation.program.source.programs[0].graph.nodes
    return [node.attr[0] for node in nodes if node.op == "reduce"]


@pytest.mark.parametrize("m", [3, 150])
@pytest.mark.parametrize("body", BODIES)
def test_what_is_found_in_one_pass(body: str, m: int, emulated: Emulated) -> None:  # noqa: F811
    a, b = emulated.whole(m, 64), emulated.whole(64, 2056)
    every = {"labels": torch.arange(m)[:, None] % 2056, "q": torch.rand(m, 2056) + 1e-4}
    used = {name: value for name, value in every.items() if re.search(rf"\b{name}\b", body)}
    source = f"def epi({', '.join(('accum', *used))}): x = accum * 0.25; {body}"
    found = run(emulated, source, a, b, used)
    want = ef.reference(function_of(source, {}))(a.double() @ b.double(), **used)
    for got, one in zip(found.values(), want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(got.double(), one.double(), rtol=1e-5, atol=1e-5)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(source, used))
    assert [name for name in reductions(hopper_kernel(args)) if name in ("logsumexp", EXPONENTIALS, PLACE)] == BODIES[
        body
    ]


def test_logarithms_of_what_is_not_finite(emulated: Emulated) -> None:  # noqa: F811
    a, b, C = emulated.whole(6, 64), emulated.whole(64, 2056), torch.zeros(6, 2056)
    C[0], C[1, 3], C[2, 9], C[3, 8], C[4, 7] = -torch.inf, torch.inf, torch.nan, -torch.inf, -torch.inf
    labels = torch.tensor([[0], [5], [5], [8], [5], [-1]])
    source = "def epi(accum, C, labels): r = log_softmax(accum + C, -1).gather(-1, labels); return r"
    found = run(emulated, source, a, b, {"C": C, "labels": labels})["r"]
    want = torch.log_softmax(a.float() @ b.float() + C, -1).gather(-1, labels.clamp(0))
    want[5] = 0.0
    torch.testing.assert_close(found, want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_places_of_what_is_not_finite(emulated: Emulated) -> None:  # noqa: F811
    a, b, C = emulated.whole(5, 64), emulated.whole(64, 2056), torch.zeros(5, 2056)
    C[0], C[1, 3], C[2, [4, 9]] = -torch.inf, torch.inf, torch.nan
    found = run(emulated, "def epi(accum, C): r = argmax(accum + C, -1); return r", a, b, {"C": C})
    assert torch.equal(found["r"], (a.float() @ b.float() + C).argmax(-1))


@pytest.mark.parametrize("m", [3, 150])
def test_only_wide_rows_lose_what_is_one_value_a_row(m: int) -> None:
    def soft(accum, q):
        loss = -(q * torch.log_softmax(accum, dim=-1)).sum(-1)
        return loss

    for n, is_wide in ((2048, False), (2056, True)):
        kernel = hopper_kernel(arguments(soft, m=m, n=n, q=torch.empty(m, n)))
        assert ("logsumexp" in reductions(kernel)) == is_wide
        assert ("is computed as sum(q * x) - c * sum(q)" in str(kernel.plan)) == is_wide


def test_a_value_of_a_tile_that_reads_them_still_needs_its_row() -> None:
    def both(accum):
        D = torch.softmax(accum, dim=-1)
        r = accum.argmax(-1)
        return D, r

    assert not {EXPONENTIALS, PLACE} & set(reductions(hopper_kernel(arguments(both, n=1024))))
    assert any("softmax over N = 4096 does not fit" in one for one in reasons(arguments(both, n=4096)))


def test_integers_are_compared_as_they_are() -> None:
    """A sum of 8-bit products may be beyond what a float32 tells apart."""
    a, b = torch.empty(256, 2048, dtype=torch.int8), torch.empty(1024, 2048, dtype=torch.int8).t()
    places = ef.EpilogueArguments.partial("lambda accum: accum.argmax(-1)", {})
    assert PLACE not in reductions(hopper_kernel(ef.GemmArguments(a, b, epilogue=places)))


@pytest.mark.parametrize("written", ["accum.bfloat16().argmax(-1)", "accum.half().argmin(-1, keepdim=True)"])
def test_places_of_what_is_rounded_to_16_bits(written: str, emulated: Emulated) -> None:  # noqa: F811
    """Many are equal then: the first one counts."""
    a, b = emulated.normal(5, 64), emulated.normal(64, 2056)
    found = run(emulated, f"def epi(accum): r = {written}; return r", a, b, {})["r"]
    assert torch.equal(found, eval(written, {"accum": (a.double() @ b.double()).float()}))


def test_more_places_than_a_float_tells_apart() -> None:
    args = arguments(lambda accum: accum.argmax(-1), m=256, n=MOST_PLACES + 8, k=8, dtype=BF16)
    assert any(f"a place is exact to {MOST_PLACES} elements" in one for one in reasons(args))
