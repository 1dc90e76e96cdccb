"""No second stall: a call runs on a compiled kernel that gives the same bits while a worker compiles a better one."""

import threading
import warnings
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper import arguments

import epifuse as ef
from epifuse import providers
from epifuse.base.cache import forget
from epifuse.base.errors import fail
from epifuse.plan import Answers, KernelSpec, Plan
from epifuse.providers.base import Runner
from epifuse.providers.cpu import CpuProvider
from epifuse.runtime import background
from epifuse.runtime.launch import Prepared
from tests.test_sm90_compile import column_sums, softmax

BEST, GOOD, POOR = "best", "good", "poor"


class Compiling(CpuProvider):
    """Three kernels of the CPU that have to be compiled, as far as anybody can see; and the workers that would."""

    def __init__(self) -> None:
        self.bits: dict[str, Hashable] = dict.fromkeys((BEST, GOOD, POOR), "same")
        self.with_other_rows: tuple[str, ...] = ()
        self.compiled: list[str] = []
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        self.submitted: list[str] = []
        self.futures: dict[str, Future[None]] = {}
        self.ran: list[str] = []
        self.capturing = False

    def specs(self) -> tuple[KernelSpec, ...]:
        panel = super().specs()[1]
        return tuple(replace(panel, name=name) for name in (POOR, GOOD, BEST))

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Any) -> Answers:
        own = super().supports(super().specs()[1:], work, problem).allocation(0)
        cost = {BEST: 1.0, GOOD: 2.0, POOR: 3.0}
        own = replace(own, with_other_rows=lambda: self.with_other_rows)
        return Answers.of([(spec, replace(own, cost=cost[spec.name], bits=self.bits[spec.name])) for spec in specs])

    def build(self, plan: Plan) -> Runner:
        name = plan.spec.name
        self.loaded.add(name)
        runner = super().build(plan)

        def bind(*handed: Any) -> Any:
            self.ran.append(name)
            return runner(*handed)

        return bind

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        return (plan.spec.name,)

    def compile(self, text: str) -> None:
        self.compiled.append(text)
        if text == "first":
            raise ValueError

    def is_loaded(self, text: str) -> bool:
        return text in self.loaded

    def is_stored(self, text: str) -> bool:
        return text in self.stored

    def submit(self, provider: str, text: str) -> Future[None]:
        assert provider == "cpu"
        self.submitted.append(text)
        return self.futures.setdefault(text, Future())

    def finish(self, text: str) -> None:
        """The worker has stored the kernel."""
        self.stored.add(text)
        self.futures[text].set_result(None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    made = Compiling()
    monkeypatch.setattr(providers, "NAMES", ("cpu",))
    monkeypatch.setattr(providers, "load", lambda name: made)
    monkeypatch.setattr(background, "WORKERS", made)
    monkeypatch.setattr(background, "is_capturing", lambda plan: made.capturing)
    forget()
    yield made
    forget()


def call(m: int = 4) -> None:
    a, b = torch.randn(m, 3), torch.randn(3, 5)
    found = ef.gemm(a, b, epilogue="lambda accum: relu(accum)")
    torch.testing.assert_close(found, torch.relu(a @ b))


def explained(m: int = 4) -> str:
    epilogue = ef.EpilogueArguments.partial("lambda accum: relu(accum)", {})
    return str(ef.explain(ef.GemmArguments(torch.empty(m, 3), torch.empty(3, 5), epilogue=epilogue)))


def test_the_first_call_of_all_waits(kernels: Compiling) -> None:
    call()
    assert kernels.ran == [BEST]
    assert kernels.submitted == []


def test_the_first_call_compiles_kernels_with_other_bits_too(kernels: Compiling) -> None:
    """Those are for calls with another M. One that cannot be compiled, as the first, is not this call's concern."""
    kernels.with_other_rows = "stored", "first", "second"
    kernels.stored.add("stored")
    call()
    assert kernels.ran == [BEST]
    assert kernels.compiled == ["first", "second"]
    call(6)
    assert kernels.compiled == ["first", "second"]
    assert kernels.submitted == []


def best_plan() -> Plan:
    a, b = torch.empty(4, 3), torch.empty(3, 5)
    epilogue = ef.EpilogueArguments.partial("lambda accum: relu(accum)", {})
    plan = ef.explain(ef.GemmArguments(a, b, epilogue=epilogue)).selection.best
    assert plan is not None
    return plan


def test_what_is_submitted_ahead_is_awaited(kernels: Compiling) -> None:
    """As by the pass over a compiled model: no call of it runs on a stand-in, and no kernel is compiled twice."""
    kernels.loaded.add(GOOD)
    background.submit(best_plan())
    background.submit(best_plan())
    assert kernels.submitted == [BEST]
    threading.Timer(0.05, kernels.finish, [BEST]).start()
    call()
    assert kernels.ran == [BEST]


@pytest.mark.parametrize("option", [{"background": False}, {"no_compile": True}])
def test_nothing_is_submitted_ahead_where_that_is_forbidden(
    kernels: Compiling, option: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONFIG", replace(background.CONFIG, **option))
    background.submit(best_plan())
    assert kernels.submitted == []


@pytest.mark.parametrize("place", ["loaded", "stored"])
def test_a_stand_in_serves_until_the_better_kernel_is_there(kernels: Compiling, place: str) -> None:
    getattr(kernels, place).update({GOOD, POOR})
    call()
    call()
    call(7)
    assert kernels.ran == [GOOD] * 3
    assert kernels.submitted == [BEST]
    kernels.finish(BEST)
    call()
    call()
    call(7)
    call(8)
    assert kernels.ran[3:] == [BEST] * 4
    assert kernels.submitted == [BEST]


def test_a_stand_in_is_found_again_without_a_search(kernels: Compiling) -> None:
    """Unless it gives other bits than the best plan of another call, or is no longer loaded."""
    kernels.loaded.add(POOR)
    call(4)
    kernels.loaded.add(GOOD)
    call(5)
    assert f"runs on {POOR} until" in explained(6)
    assert kernels.ran == [POOR] * 2
    kernels.loaded.remove(POOR)
    call(6)
    kernels.loaded.add(POOR)
    kernels.bits[GOOD] = "other"
    call(7)
    assert kernels.ran[2:] == [GOOD, POOR]


def test_a_kernel_that_comes_meanwhile_is_used(kernels: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes between the choice and the end of the call."""
    kernels.loaded.add(GOOD)
    original = Prepared.launch

    def launch(prepared: Any, described: Any) -> Any:
        kernels.finish(BEST)
        return original(prepared, described)

    with monkeypatch.context() as patch:
        patch.setattr(Prepared, "launch", launch)
        call()
    call()
    assert kernels.ran == [GOOD, BEST]


def test_overlapping_memory_is_found_again_and_replaced(kernels: Compiling) -> None:
    """A prepared call whose tensors lie near each other is kept under a second key."""
    kernels.loaded.add(GOOD)
    buffer = torch.randn(4, 10)
    a, b = torch.randn(4, 3), torch.randn(3, 5)

    def near() -> None:
        ef.gemm(a, b, epilogue="lambda accum, C: accum + C", C=buffer[:, 5:], out=buffer[:, :5])

    near()
    near()
    kernels.finish(BEST)
    near()
    near()
    assert kernels.ran == [GOOD, GOOD, BEST, BEST]


@pytest.mark.parametrize("bits", [None, "others"])
def test_a_kernel_with_other_bits_never_stands_in(kernels: Compiling, bits: Hashable) -> None:
    kernels.loaded.update({GOOD, POOR})
    kernels.bits.update({GOOD: bits, POOR: bits} if bits else dict.fromkeys(kernels.bits))
    call()
    assert kernels.ran == [BEST]
    kernels.bits[POOR] = kernels.bits[BEST] = "same"
    kernels.loaded.remove(BEST)
    call(7)
    assert kernels.ran == [BEST, POOR]


def test_a_worker_that_fails_is_told_once_and_the_call_compiles(kernels: Compiling) -> None:
    kernels.loaded.add(GOOD)
    call()
    kernels.futures[BEST].set_exception(fail("worker", None, detail="no memory"))
    with pytest.warns(UserWarning, match="best was not compiled in the background.*no memory") as told:
        call()
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        call(7)
    assert kernels.ran == [GOOD, BEST, BEST, BEST]
    assert kernels.submitted == [BEST]


@pytest.mark.parametrize(
    "error", [OSError("no process"), OSError(), fail("worker", None, detail="no answer")], ids=repr
)
def test_nothing_is_tried_for_ever(kernels: Compiling, error: Exception) -> None:
    """Not even where the call cannot compile it either: then that is an error."""
    kernels.loaded.add(GOOD)
    call()
    kernels.futures[BEST].set_exception(error)
    kernels.build = None  # type: ignore[assignment,method-assign]  # what calls it raises
    for _ in range(3):
        with pytest.warns(UserWarning, match=str(error)), pytest.raises(TypeError):
            call()
    assert kernels.submitted == [BEST]


def test_where_no_thread_can_be_started_the_call_compiles(kernels: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(provider: str, text: str) -> Future[None]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kernels, "submit", submit)
    kernels.loaded.add(GOOD)
    with pytest.warns(UserWarning, match="can't start new thread"):
        call()
    assert kernels.ran == [BEST]


def test_where_the_workers_have_ended_the_call_compiles(kernels: Compiling) -> None:
    kernels.loaded.add(GOOD)
    call()
    kernels.futures[BEST].cancel()
    with pytest.warns(UserWarning, match="this process ends"):
        call()
    assert kernels.ran == [GOOD, BEST]


def test_what_a_worker_could_not_keep_is_compiled_here(kernels: Compiling) -> None:
    """Its store was a temporary folder, of which it has warned."""
    kernels.loaded.add(GOOD)
    call()
    kernels.futures[BEST].set_result(None)
    call()
    assert kernels.ran == [GOOD, BEST]


def test_while_a_graph_is_captured_nothing_is_loaded_or_swapped(kernels: Compiling) -> None:
    kernels.loaded.add(GOOD)
    kernels.stored.add(POOR)
    call()
    kernels.finish(BEST)
    kernels.capturing = True
    call()
    call(7)
    assert kernels.ran == [GOOD] * 3
    kernels.capturing = False
    call()
    call(7)
    assert kernels.ran[3:] == [BEST] * 2
    kernels.capturing = True
    call()
    assert kernels.ran[5:] == [BEST]


def test_what_is_captured_runs_on_what_is_loaded(kernels: Compiling) -> None:
    """Though a better one is stored, and the call was not seen before."""
    kernels.loaded.add(POOR)
    kernels.stored.update({BEST, GOOD})
    kernels.capturing = True
    call()
    kernels.capturing = False
    kernels.finish(BEST)
    call()
    assert kernels.ran == [POOR, BEST]


@pytest.mark.parametrize("option", [{"background": False}, {"no_compile": True}], ids=str)
def test_switched_off_the_call_waits(
    kernels: Compiling, option: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONFIG", replace(background.CONFIG, **option))
    kernels.loaded.add(GOOD)
    call()
    assert kernels.ran == [BEST]
    assert kernels.submitted == []


def test_many_calls_at_once_submit_a_kernel_once(kernels: Compiling) -> None:
    kernels.loaded.add(GOOD)
    begin = threading.Barrier(8)

    def several(thread: int) -> None:
        begin.wait()
        for turn in range(50):
            call(1 + (8 * turn + thread) % 400)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(several, range(8)))
    assert kernels.submitted == [BEST]
    assert set(kernels.ran) == {GOOD}
    assert len(kernels.ran) == 400


def test_explain_says_what_runs_meanwhile(kernels: Compiling) -> None:
    note = "runs on good until best is compiled in the background"
    kernels.loaded.add(GOOD)
    assert note not in explained()
    call()
    assert f"note     {note}" in explained()
    assert f"note     {note}" in explained(7)
    kernels.finish(BEST)
    assert note not in explained()


@pytest.mark.parametrize("missing", ["missing_package", "no_compile"])
def test_what_cannot_be_built_falls_back_where_that_is_allowed(
    kernels: Compiling, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(plan: Plan) -> Runner:
        raise fail(missing, None, what="a kernel for GPUs", package="it", extra="cuda", kernel="best")

    monkeypatch.setattr(kernels, "build", build)
    with pytest.raises(ef.errors.UnsupportedError, match=r"needs the package it|ef\.precompile"):
        call()
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    with pytest.warns(UserWarning, match=r"(?s)PyTorch runs it unfused.*(needs the package it|ef\.precompile)"):
        found = ef.gemm(a, b, epilogue="lambda accum: relu(accum)", fallback="torch")
    torch.testing.assert_close(found, torch.relu(a @ b))


# --- which kernels give the same bits --------------------------------------------------------------------------------


def bits(args: ef.GemmArguments) -> set[Hashable]:
    return {kernel.plan.allocation.bits for kernel in ef.get_kernels(args, cc=90)}


def gelu(accum: Any, bias: Any, C: Any) -> Any:
    D = ef.gelu(accum + bias) + C
    return D


def test_designs_of_an_elementwise_epilogue_give_the_same_bits() -> None:
    args = arguments(gelu, bias=torch.empty(512), C=torch.empty(512, 512))
    (same,) = bits(args)
    assert same is not None
    programs = [kernel.plan.allocation.program.program for kernel in ef.get_kernels(args, cc=90)]
    assert len(programs) > 20
    first, *others = programs
    for other in others:
        assert other.graph is first.graph
        assert other.accuracies == first.accuracies


def kind_of_epilogue(epilogue: Any) -> str:
    return getattr(epilogue, "__name__", "text")


@pytest.mark.parametrize(
    "epilogue", [softmax, column_sums, "lambda accum, bias: (accum + bias).amax()"], ids=kind_of_epilogue
)
def test_designs_of_an_epilogue_that_reduces_do_not(epilogue: Any) -> None:
    operands = {} if epilogue is softmax else {"bias": torch.empty(512)}
    assert bits(arguments(epilogue, **operands)) == {None}


def test_nothing_is_promised_across_launches() -> None:
    args = arguments("lambda accum: accum - accum.mean(0, keepdim=True)", allowed=True)
    assert bits(args) == {None}
