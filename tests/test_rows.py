"""Calls that differ in their number of rows alone: what serves them is what planning each anew would give."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hopper import RANKED

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.base.errors import EpifuseError
from epifuse.base.target import TARGETS
from epifuse.plan import Plan, Selection, settle
from epifuse.providers import candidates, cutedsl
from epifuse.providers.cutedsl import launch
from epifuse.request.options import USUAL, Options
from epifuse.request.signature import Call, Request, describe, with_infos
from epifuse.runtime import rows, run
from epifuse.runtime.arguments import parsed
from epifuse.runtime.background import Choice, Outcome
from epifuse.runtime.launch import Prepared
from tests.passes import test_pipeline

BF16, N, K = torch.bfloat16, 384, 64
ROWS = (1000, 129, 136, 1001, 256, 2048, 777, 1024, 128, 4096, 1, 383, 385, 64, 1008, 512)
EPILOGUES = {
    **{name: text for name, text in test_pipeline.EPILOGUES.items() if text not in test_pipeline.DESTINATIONS},
    "heads": "def epi(accum, bias): D = (accum + bias).reshape(-1, 3, 128).permute(1, 0, 2); return D",
    "halves": "def epi(accum, C2): a, b = accum.chunk(2, dim=-1); D = silu(a) * b + C2; return D",
    "turned": "def epi(accum): D = accum.permute(1, 0); return D",
    "of its rows": "def epi(accum): s = accum.shape[0]; D = accum / s; return D",
    "regrouped": "def epi(accum): D = accum.reshape(accum.shape[0] // 1, 2, -1); return D",
    "a column's numbers": "def epi(accum, long): D = accum * long; s = amax(D, dim=-1); return D, s",
    "of blocks": "def epi(accum): s = amax(abs(accum).unflatten(-1, (-1, 128)), dim=-1); D = accum; return D, s",
}
OPEN = {"linear_combination", "broadcasts", "masks", "activations", "row_stage", "casts", "fused", "shared", "halves"}
"""Some whose layouts do not depend on the number of rows."""


def operands(m: int) -> dict[str, Any]:
    """By name, as the epilogues have them."""
    matrix = torch.empty(4200, N, dtype=BF16)
    return {
        "C": matrix[:m],
        "C2": torch.empty(m, N // 2),
        "T": torch.empty(N, m),
        "bias": torch.empty(N),
        "col": torch.empty(m, 1),
        "long": torch.empty(4200)[:m, None],
        "labels": torch.empty(m, 1, dtype=torch.int64),
        "alpha": 1.5,
        "beta": 2.0,
    }


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls on the CPU are planned for Hopper, and what their kernels are handed is kept here."""
    found: list[Any] = []
    monkeypatch.setattr(settle, "target_of", lambda device: TARGETS[90])
    monkeypatch.setattr(launch, "function", lambda text, name: lambda *given: found.append((text, given)))
    monkeypatch.setattr(launch, "resident_clusters", lambda index, size: 100)
    monkeypatch.setattr(launch, "rank_table", lambda *_: RANKED)
    monkeypatch.setattr(launch, "_nothing_given", lambda: ())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(cutedsl.CuteDslProvider, "is_loaded", lambda self, text: True)
    forget()
    yield found
    forget()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the calls that were served by another one's."""
    found: list[int] = []
    like = rows.like

    def seen(call: Call) -> rows.Found | None:
        if (known := like(call)) is not None:
            found.append(call.request.a.shape[0])
        return known

    monkeypatch.setattr(run.rows, "like", seen)
    return found


def request(source: Any, m: int, n: int = N, k: int = K, options: Options = USUAL, **given: Any) -> Request:
    a, b = torch.empty(m, k, dtype=BF16), torch.empty(n, k, dtype=BF16).t()
    epilogue, known = parsed(source), operands(m)
    named = {name: known[name] for name in epilogue.parameters if name in known}
    return Request(a, b, epilogue, {**named, **given}, options)


def looks(prepared: Prepared) -> list[Any]:
    """All that a launch takes from a prepared call."""
    plan, runner = prepared.plan, vars(prepared.runner)
    told = plan.spec, plan.problem, plan.problem.extents, plan.digest, plan.binding, plan.allocation.bits
    passing = {name: value for name, value in runner.items() if name not in ("function", "clusters", "ranks")}
    return [told, passing, prepared.kinds, prepared.outputs, prepared.accumulates, prepared.is_final]


def anew(one: Request) -> Prepared:
    """Planned as if there had been no call before."""
    problem, structure = settle.settle(with_infos(describe(one)))
    (best, *_) = run.select(structure, problem, candidates()).plans
    return Prepared.of(best)


def shown(given: Any) -> Any:
    """What a kernel is handed, without addresses."""
    if isinstance(given, torch.Tensor):
        return tuple(given.shape), given.stride(), given.dtype
    return [shown(one) for one in given] if isinstance(given, (list, tuple)) else given


@pytest.mark.parametrize("name", EPILOGUES)
def test_what_serves_is_what_is_planned_anew(name, launched, taken):
    for m in ROWS:
        one = request(EPILOGUES[name], m)
        try:
            run.run(one)
        except EpifuseError:
            with pytest.raises((EpifuseError, ValueError)):
                anew(one)
            continue
        served, expected = run.find(describe(one)), anew(one)
        assert looks(served) == looks(expected)
        served.launch(describe(one))
        expected.launch(describe(one))
        (text, given), (other, wanted) = launched[-2:]
        assert text == other
        assert shown(given) == shown(wanted)
    assert not set(taken) & {1, 64, 128}
    assert taken or name not in OPEN


def test_rows_of_kernels_that_exchange_a_and_b(launched, taken):
    text, asked = (
        "def epi(accum, bias): D = gelu(accum + bias); return D",
        USUAL._replace(pinned=ef.Constraints(schedule="swapped")),
    )
    for m in (300, 290, 3000, 257, 306, 1000):
        one = request(text, m, n=6144, k=4096, options=asked, bias=torch.empty(6144))
        run.run(one)
        served, expected = run.find(describe(one)), anew(one)
        assert expected.plan.spec.design.swapped
        assert looks(served) == looks(expected)
        served.launch(describe(one))
        expected.launch(describe(one))
        (text_served, given), (text_wanted, wanted) = launched[-2:]
        assert text_served == text_wanted
        assert shown(given) == shown(wanted)
    assert taken


def test_extents_that_become_equal_are_planned(launched, taken):
    """With as many rows as columns an operand may run along either."""
    text = "def epi(accum, col): D = accum * col; return D"
    for m in (500, 600, N, 700):
        run.run(request(text, m))
    assert taken == [600, 700]


def test_steps_as_long_as_the_rows_are_planned(launched, taken):
    text = "def epi(accum, C): D = accum + C; return D"
    for m in (500, 600):
        run.run(request(text, m, C=torch.empty(m, m, dtype=BF16)[:, :N]))
    assert not taken


def test_as_many_rows_as_blocks_of_k_are_planned(launched, taken):
    """Whose scales are checked by their shape."""
    blocks, scales = 520, torch.ones(700, 700)
    b = torch.zeros(512, 128 * blocks).to(torch.float8_e4m3fn).t()

    def scaled(m: int) -> Any:
        a = torch.zeros(m, 128 * blocks).to(torch.float8_e4m3fn)
        return ef.gemm(ef.Scaled(a, scales[:m, :m]), b, out_dtypes=BF16)

    scaled(blocks)
    for m in (521, 528, 600, 640):
        with pytest.raises(EpifuseError, match="the scales of"):
            scaled(m)
    assert not taken


def test_destinations_are_planned(launched, taken):
    for m in (500, 600):
        run.run(request("def epi(accum): D = accum; return D", m, D=torch.empty(m, N, dtype=BF16)))
    assert not taken


def test_a_stand_in_serves_until_the_better_kernel_is_there(launched, taken, monkeypatch):
    text, until = "def epi(accum, bias): D = relu(accum + bias); return D", Outcome()

    def choose(best: Plan, selection: Selection) -> Choice:
        return Choice(best) if until.done() else Choice(next(selection.stand_ins()), until)

    monkeypatch.setattr(run, "choose", choose)
    for m in (1000, 1001):
        run.run(request(text, m))
    assert (taken, len({kernel for kernel, _ in launched})) == ([1001], 1)
    assert run.find(describe(request(text, 1001))) is not None
    until.set_result(None)
    assert run.find(describe(request(text, 1001))) is None
    for m in (1001, 1002):
        run.run(request(text, m))
    assert (taken, len({kernel for kernel, _ in launched})) == ([1001, 1002], 2)


def test_any_rows_serve_each_other(launched, taken):
    text = "def epi(accum, bias): D = relu(accum + bias); return D"
    for m in range(200, 3000, 7):
        run.run(request(text, m))
    assert len(taken) > 350


@pytest.mark.parametrize("text", ["def epi(accum, C, alpha): D = relu(accum * alpha) + C; return D"])
def test_values_of_other_rows(text, launched, taken, monkeypatch):
    """By the emulated kernel."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    import emulated

    monkeypatch.setattr(launch, "function", emulated.function)
    b = torch.randn(N, K).to(BF16)
    for m in (500, 333, 1000):
        a, C = torch.randn(m, K).to(BF16), torch.randn(m, N).to(BF16)
        D = ef.linear(a, b, epilogue=text, C=C, alpha=1.0 / m)
        expected = torch.relu(a.float() @ b.float().t() / m) + C.float()
        torch.testing.assert_close(D, expected.to(BF16), rtol=2e-2, atol=1e-3)
    assert taken
