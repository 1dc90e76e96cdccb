"""Tuning: kernels are timed where that is asked for, the fastest is kept, and what holds elsewhere is ignored."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse import __main__, providers
from epifuse.base import store
from epifuse.base.cache import forget
from epifuse.base.errors import ArgumentError, fail
from epifuse.plan import Answers, KernelSpec, Plan
from epifuse.providers.base import Runner
from epifuse.providers.cpu import CpuProvider
from epifuse.runtime import tuned, tuning

ESTIMATED, FASTEST, BROKEN = "estimated", "fastest", "broken"
A, B = torch.randn(48, 16), torch.randn(16, 24)
ADDED = "def epi(accum): D = 2 * accum; return D"
TUNED = ef.Constraints(tune=True)


class Several(CpuProvider):
    """Kernels of one speed in truth: how long each takes is told by the test."""

    def __init__(self) -> None:
        self.names = [ESTIMATED, FASTEST]
        self.built: list[str] = []

    def specs(self) -> tuple[KernelSpec, ...]:
        panel = super().specs()[1]
        return tuple(replace(panel, name=name) for name in self.names)

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Any) -> Answers:
        own = super().supports(super().specs()[1:], work, problem).allocation(0)
        return Answers.of([(spec, replace(own, cost=float(place))) for place, spec in enumerate(specs)])

    def build(self, plan: Plan) -> Runner:
        self.built.append(plan.spec.name)
        if plan.spec.name == BROKEN:
            raise fail("no_compile", None, kernel=BROKEN)
        return super().build(plan)


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Several:
    """The only provider, with an empty store and nothing prepared."""
    made = Several()
    monkeypatch.setattr(providers, "candidates", lambda names=None: [(made, made.specs())])
    monkeypatch.setattr(providers, "load", lambda name: made)
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=tmp_path / "store", cache_readonly=None))
    forget()
    speeds = {ESTIMATED: 3e-6, FASTEST: 2e-6}
    monkeypatch.setattr(tuning, "in_turn", lambda variants, device: [[t] for t in [*speeds.values()][: len(variants)]])
    return made


def arguments(constraints: ef.Constraints | None = TUNED, m: int = 48) -> ef.GemmArguments:
    return ef.GemmArguments(torch.randn(m, 16), B, constraints=constraints)


def path_of(args: ef.GemmArguments) -> Path:
    (path,) = store.notes("tuned", args.structure.digest)
    return path


def test_a_tuned_call_runs_the_fastest_kernel_from_then_on(several: Several) -> None:
    got = ef.gemm(A, B, tune=True)
    torch.testing.assert_close(got, A @ B)
    assert several.built == [ESTIMATED, FASTEST, FASTEST]
    forget()  # as in another process
    ef.gemm(A, B, tune=True)
    ef.linear(A, B.t().contiguous(), tune=True)  # another layout: another class
    assert several.built[3:] == [FASTEST, ESTIMATED, FASTEST, FASTEST]


def test_without_it_the_choice_is_the_estimate(several: Several) -> None:
    ef.tune(arguments())
    ef.gemm(A, B)
    assert several.built[-1] == ESTIMATED
    assert ef.get_kernels(arguments(None))[0].spec.name == ESTIMATED
    assert [kernel.spec.name for kernel in ef.get_kernels(arguments())] == [FASTEST, ESTIMATED]


def test_a_result_serves_its_class_of_shapes(several: Several) -> None:
    done = ef.tune([arguments(m=33), arguments(m=40), arguments(m=65)])
    assert [each.found for each in done.results] == [False, False, False], "each was asked for at once"
    again = ef.tune([arguments(m=m) for m in (34, 65, 129)])
    assert [each.found for each in again.results] == [True, True, False]
    assert not ef.tune(arguments(m=33), anew=True).results[0].found
    assert str(again).startswith("M=34 N=24 K=16")
    assert again.results[0].microseconds == {ESTIMATED: 3.0, FASTEST: 2.0}


def test_what_was_tuned_with_a_destination_serves_a_call(several: Several) -> None:
    destination = ef.EpilogueArguments(ADDED, D=torch.empty(48, 24))
    ef.tune(ef.GemmArguments(A, B, epilogue=destination))
    ef.gemm(A, B, epilogue=ADDED, tune=True)
    assert several.built == [ESTIMATED, FASTEST, FASTEST]
    ef.gemm(A, B, epilogue=ADDED, tune=True, out=torch.empty(24, 48).t())  # another layout: another class
    assert several.built[3:] == [ESTIMATED, FASTEST, FASTEST]


def test_a_result_under_a_constraint_holds_under_it_alone(several: Several) -> None:
    constrained = ef.Constraints(fast_math=True)
    ef.tune(arguments(constrained))
    assert ef.get_kernels(arguments())[0].spec.name == ESTIMATED
    assert ef.get_kernels(arguments(replace(constrained, tune=True)))[0].spec.name == FASTEST


def test_nothing_that_is_handed_over_is_written(several: Several) -> None:
    a, out = A.clone(), torch.ones(48, 24)
    before = torch.get_rng_state()
    ef.tune(ef.GemmArguments(a, B, epilogue=ef.EpilogueArguments(ADDED, D=ef.Store(out, accumulate=True))))
    assert torch.equal(a, A)
    assert torch.equal(out, torch.ones(48, 24))
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_of_a_tuned_call_are_tuned(several: Several) -> None:
    x = A.clone().requires_grad_()
    ef.gemm(x, B, epilogue=ef.silu, tune=True).sum().backward()
    want = A.clone().requires_grad_()
    torch.nn.functional.silu(want @ B).sum().backward()
    torch.testing.assert_close(x.grad, want.grad)
    assert several.built.count(FASTEST) > 2, "once to be timed and once to run, for each product"


def test_a_kernel_that_fails_is_left_out(several: Several) -> None:
    several.names = [BROKEN, ESTIMATED, FASTEST]
    done = ef.tune(arguments())
    assert (done.results[0].kernel, bool(done)) == (FASTEST, False)
    assert f"  {BROKEN}, M=48" in str(done)


def test_what_prints_is_not_timed(several: Several, capfd: pytest.CaptureFixture[str]) -> None:
    ef.gemm(A, B, epilogue='def epi(accum): debug_print("{}", accum); return accum', tune=True)
    assert several.built == [ESTIMATED]


def test_no_request_waits_where_nothing_may_be_compiled(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CONFIG", replace(tuning.CONFIG, no_compile=True))
    ef.gemm(A, B, tune=True)
    assert several.built == [ESTIMATED]
    assert ef.tune(arguments()).results[0].kernel == FASTEST, "what is asked for is measured"


def test_nothing_is_timed_while_a_graph_is_captured(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "is_capturing", lambda plan: True)
    with pytest.warns(UserWarning, match="make this call once before") as warned:
        ef.gemm(A, B, tune=True)
    assert warned[0].filename == __file__
    assert several.built == [ESTIMATED]


def test_whole_numbers_that_divide_are_drawn(several: Several, capsys: pytest.CaptureFixture[str]) -> None:
    source = "lambda accum, p: accum.to(torch.int32) // p"
    words = ["--dtype", "float32", "--device", "cpu", "--epilogue", source, "--arg", "p=N:int32"]
    assert __main__.main(["tune", "48x24x16", *words]) == 0
    assert FASTEST in capsys.readouterr().out


def test_a_call_warns_where_nothing_could_be_timed(several: Several) -> None:
    source, p = "def epi(accum, p): D = accum.to(torch.int32) // (p - 1); return D", torch.full((24,), 3)
    with pytest.warns(UserWarning, match="kernels are not tuned.*an integer was divided by zero") as warned:
        ef.gemm(A, B, epilogue=source, p=p, tune=True)
    assert warned[0].filename == __file__


def test_two_threads_measure_once(several: Several) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ef.gemm(A, B, tune=True), range(4)))
    assert len({each.sum().item() for each in found}) == 1
    assert several.built.count(ESTIMATED) == 1


# --- results on disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": "NVIDIA Z9"}, "note     a result that was measured on NVIDIA Z9 is ignored"),
        ({"version": "0"}, "note     a result that was measured by another version of epifuse is ignored"),
        ({"kernel": "gone", "microseconds": {"gone": 1.0}}, "for gone, which cannot run this, is ignored"),
        ({"microseconds": {}}, "its results are not of the right types"),
        ({"microseconds": []}, "its results are not of the right types"),
        ({"further": 1}, "it cannot be read (TypeError"),
        (None, "it cannot be read (JSONDecodeError"),
    ],
    ids=str,
)
def test_what_does_not_hold_here_is_ignored_with_a_line(
    several: Several, change: dict[str, Any] | None, told: str
) -> None:
    args = arguments()
    ef.tune(args)
    path = path_of(args)
    (row,) = json.loads(path.read_text())["results"]
    path.write_text("{" if change is None else json.dumps({"results": [row | change]}))
    lines = [line for line in str(ef.explain(args)).splitlines() if "ignored" in line or "measured for it yet" in line]
    assert len(lines) == 2
    assert told in lines[0]
    assert ef.get_kernels(args)[0].spec.name == ESTIMATED
    ef.tune(args)
    assert f"{FASTEST} is the fastest of 2 that were measured, with 2 us" in str(ef.explain(args))
    assert ("Z9" in path.read_text()) is (change is not None and "gpu" in change), "another GPU's results stay"


def test_what_could_not_be_compiled_is_measured_later(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    several.names = [ESTIMATED, BROKEN]
    with monkeypatch.context() as now:
        now.setattr(tuning, "CONFIG", replace(tuning.CONFIG, no_compile=True))
        assert len(ef.tune(arguments()).failed) == 1
    assert not list(store.notes("tuned", arguments().structure.digest))
    assert len(ef.tune(arguments()).failed) == 1
    assert list(store.notes("tuned", arguments().structure.digest))


def test_explain_says_nothing_where_it_is_not_asked_for(several: Several) -> None:
    args = arguments(None)
    ef.tune(args)
    assert "measured" not in str(ef.explain(args))


def test_results_are_merged(several: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ef.tune([arguments(m=8), arguments(m=80)])
    brought = path_of(arguments())
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=tmp_path / "other"))
    ef.tune([arguments(m=8), arguments(m=140)])
    assert tuned.merge(brought.parent) == 2
    assert tuned.merge(brought) == 2
    slow = json.loads(brought.read_text())
    for row in slow["results"]:
        row["microseconds"] = dict.fromkeys(row["microseconds"], 1e6)
    brought.write_text(json.dumps(slow))
    tuned.merge(brought)
    assert f"{FASTEST} is the fastest of 2 that were measured, with 2 us" in str(ef.explain(arguments(m=8)))
    assert len(json.loads(path_of(arguments()).read_text())["results"]) == 3
    with pytest.raises(ArgumentError, match=r"holds no results of ef\.tune"):
        tuned.merge(Path(__file__))
    with pytest.raises(ArgumentError, match=r"has no file \*\.json"):
        tuned.merge(Path(__file__).parent)
    renamed = shutil.copy(brought, tmp_path / "renamed.json")
    with pytest.raises(ArgumentError, match=r"its name is not that of a structure"):
        tuned.merge(Path(renamed))
    assert tuned.merge(brought.parent.parent) == 2, "the folder above `tuned` will do"


def test_nor_by_tune(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(accum: Any) -> Any:
        ef.debug_print("x {}", accum)
        D = accum
        return D

    args = ef.GemmArguments(torch.ones(4, 8), torch.ones(8, 4), epilogue=ef.EpilogueArguments.partial(prints, {}))
    assert "it would print each time" in str(ef.tune(args))
    assert not capsys.readouterr().out


def test_an_image_brings_results_and_the_users_go_first(
    several: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    ef.tune(args)
    image, own = tmp_path / "store", tmp_path / "own"
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=own, cache_readonly=image))
    assert ef.get_kernels(args)[0].spec.name == FASTEST
    path = path_of(args)
    (row,) = json.loads(path.read_text())["results"]
    mine = own / path.relative_to(image)
    mine.parent.mkdir(parents=True)
    mine.write_text(json.dumps({"results": [row | {"kernel": ESTIMATED}]}))
    assert ef.get_kernels(args)[0].spec.name == ESTIMATED


def test_a_file_is_bounded(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_MOST", 2)
    ef.tune([arguments(m=m) for m in (64, 128, 192)])
    classes = [row["shape"].split()[1] for row in json.loads(path_of(arguments()).read_text())["results"]]
    assert classes == ["M<=128", "M<=192"]


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command(several: Several, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "48x24x16", "8x24x16", "--dtype", "float32", "--device", "cpu"]
    source = "lambda accum, bias, C: relu(accum + bias) + C"
    assert __main__.main([*words, "--epilogue", source, "--operand", "bias=N", "--operand", "C=Mx1"]) == 0
    assert capsys.readouterr().out.count(f"{FASTEST}, 2 us, the fastest of 2") == 2
    with pytest.raises(SystemExit):
        __main__.main([*words, "--epilogue", "no.such:function"])
    assert "module:function" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        __main__.main(["tune"])


# --- timing -------------------------------------------------------------------------------------------------------


def test_what_is_far_from_the_fastest_has_few_rounds() -> None:
    from epifuse.runtime.timing import in_turn

    small, large = torch.ones(8, 8), torch.ones(256, 256)
    quick, slow = in_turn([[lambda: small @ small], [lambda: large @ large] * 2], torch.device("cpu"), rounds=6)
    assert (len(quick), len(slow)) == (6, 3)
    assert min(quick) < min(slow)
