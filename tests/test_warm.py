"""Calls seen before: they neither check nor plan again, and still nothing that changed goes unnoticed."""

import gc
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import epifuse as ef
from epifuse.base.errors import ArgumentError, EpifuseError
from epifuse.frontend import parsed
from epifuse.kernel import Kernel
from epifuse.plan.destinations import reach
from epifuse.request.options import USUAL, Options
from epifuse.request.problem import info
from epifuse.request.signature import Request, describe, with_care, with_infos
from epifuse.runtime import launch, run


def epi(accum: Any, C: Any, alpha: Any = 2.0) -> Any:
    D = ef.relu(accum * alpha) + C
    return D


def expected(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float = 2.0) -> torch.Tensor:
    return torch.relu(a @ b * alpha) + c


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape).float()


A, B, C = integers(6, 4), integers(4, 8), integers(6, 8)


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    launch._PREPARED.clear()


@pytest.fixture
def nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, whoever makes arguments fails."""

    def refuse(*args: Any, **named: Any) -> Any:
        raise AssertionError("planned again")

    return lambda: monkeypatch.setattr(run, "settle", refuse)


def test_new_data_numbers_and_addresses_plan_nothing(nothing_is_planned: Callable[[], None]) -> None:
    ef.gemm(A, B, epilogue=epi, C=C, alpha=1.0)
    ef.gemm(A, B, epilogue=epi, C=C)
    ef.gemm(A, B, epilogue=epi, C=C, out=torch.empty(6, 8))
    nothing_is_planned()
    a, b, c, out = integers(6, 4), integers(4, 8), integers(6, 8), torch.full((6, 8), torch.nan)
    for alpha in (3.0, np.float32(3), torch.tensor(3.0)):
        assert torch.equal(ef.gemm(a, b, epilogue=epi, C=c, alpha=alpha), expected(a, b, c, 3.0))
    assert torch.equal(ef.gemm(a, b, epilogue=epi, C=c), expected(a, b, c)), "the default"
    assert ef.gemm(a, b, epilogue=epi, C=c, out=out) is out
    assert torch.equal(out, expected(a, b, c))
    assert torch.equal(ef.gemm(a, b, epilogue=epi, operands={"C": c}), expected(a, b, c))
    assert torch.equal(ef.gemm(a, b, epilogue=epi, C=torch.nn.Parameter(c, False)), expected(a, b, c))


def inline(a: torch.Tensor, c: float) -> Any:
    return ef.gemm(a, B, epilogue=lambda accum, c: ef.relu(accum) - c, c=c)


act = ef.relu


def activated(accum: Any) -> Any:
    return act(accum)


def defaulted(scale: float) -> Any:
    return ef.gemm(A, B, epilogue=lambda accum, s=scale: accum * s)


def test_a_lambda_written_in_the_call_is_found_again(nothing_is_planned: Callable[[], None]) -> None:
    inline(A, 0.0)
    nothing_is_planned()
    assert torch.equal(inline(A + 1, 3.0), torch.relu((A + 1) @ B) - 3.0)


def test_other_defaults_or_globals_make_another_epilogue() -> None:
    assert torch.equal(defaulted(2.0), A @ B * 2)
    assert torch.equal(defaulted(3.0), A @ B * 3)
    other = FunctionType(activated.__code__, {"act": ef.sigmoid})
    assert [str(parsed(function).graph).count("sigmoid") for function in (activated, other, activated)] == [0, 1, 0]


def test_linear_is_found_again(nothing_is_planned: Callable[[], None]) -> None:
    x, weight, bias = integers(2, 3, 4), integers(8, 4), integers(8)
    ef.linear(x, weight, bias)
    nothing_is_planned()
    assert torch.equal(ef.linear(x + 1, weight, bias), torch.nn.functional.linear(x + 1, weight, bias))


def test_captured_numbers_are_those_of_the_call(nothing_is_planned: Callable[[], None]) -> None:
    scale = 1.0

    def scaled(accum: Any) -> Any:
        D = accum * scale
        return D

    ef.gemm(A, B, epilogue=scaled)
    nothing_is_planned()
    scale = 3.0
    assert torch.equal(ef.gemm(A, B, epilogue=scaled), A @ B * 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c: (a.bfloat16(), b.bfloat16(), c),
        lambda a, b, c: (a.mT.contiguous().mT, b, c),
        lambda a, b, c: (a, b, c[0].clone()),
        lambda a, b, c: (a, b, c[:, :1]),
        lambda a, b, c: (a, b, c.int()),
        lambda a, b, c: (a[:5], b, c[:5]),
        lambda a, b, c: (a.expand(3, 6, 4), b, c),
        lambda a, b, c: (a, b, 7.0),
    ],
    ids=["dtype", "strides", "row", "column", "integers", "extent", "batches", "number"],
)
def test_another_geometry_is_another_call(change: Callable[..., Any]) -> None:
    ef.gemm(A, B, epilogue=epi, C=C)
    a, b, c = change(A, B, C)
    wide = expected(a.float(), b.float(), c)
    assert torch.equal(ef.gemm(a, b, epilogue=epi, C=c).float(), wide.to(a.dtype).float())


def test_options_are_part_of_the_call() -> None:
    assert ef.gemm(A, B, epilogue=epi, C=C).dtype == torch.float32
    assert ef.gemm(A, B, epilogue=epi, C=C, out_dtypes=torch.float16).dtype == torch.float16
    assert ef.gemm(A, B, epilogue=epi, C=C, out_dtypes={"D": torch.int32}).dtype == torch.int32
    with pytest.raises(ArgumentError, match="accumulator_type"):
        ef.gemm(A, B, epilogue=epi, C=C, accumulator_type=torch.float64)


def two_outputs(accum: Any) -> Any:
    D = accum + 1
    E = accum * 2
    return D, E


@pytest.mark.parametrize("name", ["fast_math", "allow_recompute", "fast_accum"])
def test_an_option_equal_to_the_default_is_still_checked(name: str) -> None:
    ef.gemm(A, B)
    with pytest.raises(ArgumentError, match=f"{name} must be True or False, got 0"):
        ef.gemm(A, B, **{name: 0})


def test_which_output_is_none_is_part_of_the_call() -> None:
    half = torch.empty(6, 8, dtype=torch.float16)
    first = ef.gemm(A, B, epilogue=two_outputs, out={"D": half, "E": None})
    assert [one.dtype for one in first] == [torch.float16, torch.float32]
    second = ef.gemm(A, B, epilogue=two_outputs, out={"D": None, "E": half})
    assert [one.dtype for one in second] == [torch.float32, torch.float16]
    assert torch.equal(second[0], A @ B + 1)
    assert torch.equal(half.float(), A @ B * 2)


def test_what_is_added_onto_is_given_each_time() -> None:
    given = torch.zeros(6, 8)
    ef.gemm(A, B, epilogue=two_outputs, accumulate="D", out={"D": given, "E": None})
    with pytest.raises(ArgumentError, match="no destination is given"):
        ef.gemm(A, B, epilogue=two_outputs, accumulate="D", out={"D": None, "E": given})


def test_a_helper_that_was_replaced_is_read_again() -> None:
    def helper(x: Any, factor: Any = 2) -> Any:
        return x * factor

    def reloaded(x: Any, factor: Any = 2) -> Any:
        return x - factor

    def through(accum: Any) -> Any:
        D = helper(accum)
        return D

    whole, other = A.to(torch.int8), B.to(torch.int8)
    product = whole.int() @ other.int()
    for defaults, dtype in (((2,), torch.int32), ((2.0,), torch.float32), ((3.0,), torch.float32)):
        helper.__defaults__ = defaults
        found = ef.gemm(whole, other, epilogue=through)
        assert found.dtype == dtype
        assert torch.equal(found, product * defaults[0])
    helper.__code__ = reloaded.__code__
    assert torch.equal(ef.gemm(whole, other, epilogue=through), product - 3.0)


def test_a_name_that_is_used_twice_is_looked_at_once() -> None:
    places = [guard.reader.place for guard in parsed(lambda accum: ef.relu(accum) + ef.relu(-accum)).guards]
    assert sorted(map(str, places)) == sorted(set(map(str, places)))


def test_a_trees_function_with_new_defaults_is_read_again() -> None:
    def shifted(x: Any, by: Any = 1.0) -> Any:
        return x + by

    tree = ef.evt.EVT(ef.evt.Compute(shifted), ef.evt.AccFetch())
    assert torch.equal(ef.gemm(A, B, epilogue=tree), A @ B + 1)
    shifted.__defaults__ = (2.0,)
    assert torch.equal(ef.gemm(A, B, epilogue=tree), A @ B + 2)


REFUSED: dict[str, Callable[[], Any]] = {
    "grad": lambda: ef.gemm(A.clone().requires_grad_(), B, epilogue=epi, C=C, out=torch.empty(6, 8)),
    "sparse": lambda: ef.gemm(A.to_sparse(), B, epilogue=epi, C=C),
    "a list": lambda: ef.gemm(A, B, epilogue=epi, C=C.tolist()),
    "None": lambda: ef.gemm(A, B, epilogue=epi, C=None),
    "numbers for matrices": lambda: ef.gemm(torch.tensor(1.0), torch.tensor(2.0), epilogue=epi, C=C),
    "another device": lambda: ef.gemm(A, B, epilogue=epi, C=C.to("meta")),
    "no data": lambda: ef.gemm(A.to("meta"), B.to("meta"), epilogue=epi, C=C.to("meta")),
    "a name too many": lambda: ef.gemm(A, B, epilogue=epi, C=C, beta=1.0),
    "given twice": lambda: ef.gemm(A, B, epilogue=epi, C=C, operands={"C": C}),
    "a wrong option": lambda: ef.gemm(A, B, epilogue=epi, C=C, fallback="numpy"),
    "an option of no type": lambda: ef.gemm(A, B, epilogue=epi, C=C, out_dtypes=[torch.float32]),
    "a huge number": lambda: ef.gemm(A, B, epilogue=epi, C=C, alpha=10**400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_first_call_refuses_a_later_one_refuses(name: str) -> None:
    with pytest.raises(EpifuseError) as first:
        REFUSED[name]()
    ef.gemm(A, B, epilogue=epi, C=C)
    ef.gemm(A, B, epilogue=epi, C=C, alpha=1.0)
    for _ in range(2):
        with pytest.raises(EpifuseError) as later:
            REFUSED[name]()
        assert str(later.value) == str(first.value)


def test_a_fake_mode_gets_no_memory_to_write() -> None:
    ef.gemm(A, B)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(ef.gemm(A, B), FakeTensor)
    assert torch.equal(ef.gemm(A, B), A @ B)


# --- memory that is shared ---------------------------------------------------------------------------------------


def test_an_output_in_place_of_an_operand_is_found_again(nothing_is_planned: Callable[[], None]) -> None:
    ef.gemm(A, B, epilogue=epi, C=C, out=torch.empty(6, 8))
    first = C.clone()
    ef.gemm(A, B, epilogue=epi, C=first, out=first)
    nothing_is_planned()
    second = integers(6, 8)
    want = expected(A, B, second)
    ef.gemm(A, B, epilogue=epi, C=second, out=second)
    assert torch.equal(second, want)


@pytest.mark.parametrize("shift", [1, 8, 47])
def test_an_overlap_is_refused_whatever_was_right_before(shift: int) -> None:
    memory = torch.zeros(200)
    apart = memory[:48].view(6, 8), memory[100:148].view(6, 8)
    near = memory[:48].view(6, 8), memory[shift : shift + 48].view(6, 8)
    for _ in range(2):
        ef.gemm(A, B, epilogue=epi, C=apart[0], out=apart[1])
        for c, out in (near, near[::-1]):
            with pytest.raises(ArgumentError, match="overlap"):
                ef.gemm(A, B, epilogue=epi, C=c, out=out)


def test_columns_of_one_buffer_are_found_again(nothing_is_planned: Callable[[], None]) -> None:
    memory = torch.zeros(6, 24)
    left, middle, right = memory[:, :8], memory[:, 8:16], memory[:, 16:]
    ef.gemm(A, B, epilogue=epi, C=left, out=middle)
    ef.gemm(A, B, epilogue=epi, C=left, out=right)
    nothing_is_planned()
    for out in (middle, right, middle):
        ef.gemm(A, B, epilogue=epi, C=left, out=out)
        assert torch.equal(out, expected(A, B, left))


def test_reach_is_from_the_first_byte_to_the_last() -> None:
    tensors = (torch.empty(6, 24)[:, :8], torch.empty(0, 3), torch.empty(5, 1).expand(5, 9))
    assert [reach(info(tensor)) for tensor in tensors] == [(5 * 24 + 8) * 4, 0, 20]


def test_no_more_is_remembered_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch._PREPARED, "bound", 3)
    for n in range(1, 8):
        assert torch.equal(ef.gemm(A, integers(4, n).fill_(n)), A @ torch.full((4, n), float(n)))
        assert len(launch._PREPARED) <= 3


def test_a_parameter_may_have_any_name() -> None:
    source = "def epi(accum, A, a, key): D = accum * A + a - key; return D"
    for shift in (0.0, 1.0):
        got = ef.gemm(A, B, epilogue=source, operands={"A": C, "a": C[0] + shift, "key": 2.0})
        assert torch.equal(got, A @ B * C + C[0] + shift - 2.0)


# --- kernel.run --------------------------------------------------------------------------------------------------


def bound() -> tuple[ef.GemmArguments, Kernel]:
    made = ef.EpilogueArguments(epi, C=C.clone(), alpha=2.0, D=torch.empty(6, 8))
    args = ef.GemmArguments(A.clone(), B.clone(), epilogue=made)
    return args, ef.get_kernels(args)[0]


def test_arguments_run_again_read_their_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kernel = bound()
    artifact = kernel.compile(args)
    kernel.run(args, compiled_artifact=artifact)
    monkeypatch.setattr(Kernel, "plan_for", None)
    args.A.add_(1)
    outputs = kernel.run(args, compiled_artifact=artifact)
    assert torch.equal(outputs["D"], expected(A + 1, B, C))
    outputs.clear()
    assert list(kernel.run(args, compiled_artifact=artifact)) == ["D"], "what is returned is the caller's"


def test_new_arguments_with_an_artifact_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kernel = bound()
    artifact = kernel.compile(args)
    other, _ = bound()
    other.A.add_(1)
    monkeypatch.setattr(Kernel, "plan_for", None)
    assert torch.equal(kernel.run(other, compiled_artifact=artifact)["D"], expected(A + 1, B, C))


def test_memory_that_moved_is_bound_anew() -> None:
    args, kernel = bound()
    kernel.run(args)
    args.A.data = A + 2
    assert torch.equal(kernel.run(args)["D"], expected(A + 2, B, C))


def test_another_artifact_is_checked_though_the_arguments_ran() -> None:
    args, kernel = bound()
    kernel.run(args)
    other = ef.GemmArguments(A[:3], B)
    with pytest.raises(ArgumentError, match="was built for other arguments"):
        kernel.run(args, compiled_artifact=ef.get_kernels(other)[0].compile(other))


def test_outputs_without_a_destination_are_new_each_time() -> None:
    args = ef.GemmArguments(A, B)
    kernel = ef.get_kernels(args)[0]
    first, second = (kernel.run(args)["D"] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


@pytest.mark.parametrize("stream", [7, "default", object()])
def test_the_cpu_has_no_streams(stream: Any) -> None:
    args, kernel = bound()
    with pytest.raises(ArgumentError, match="stream must be None on cpu"):
        kernel.run(args, stream=stream)


def test_arguments_do_not_outlive_their_last_use() -> None:
    args, kernel = bound()
    kernel.run(args)
    gone = weakref.ref(args)
    del args
    gc.collect()
    assert gone() is None


def test_a_number_on_the_cpu_is_written_where_it_lies() -> None:
    """As an operand it is read as a number; as a destination it is memory, in the second call too."""
    total = torch.zeros(())
    for scale in (1.0, 2.0):
        a, b = torch.full((4, 3), scale), torch.ones(3, 5)
        found = ef.gemm(a, b, epilogue="def epi(accum): total = sum(accum); return total", out=total)
        assert found is total
        assert total == 4 * 3 * 5 * scale


def test_which_operand_is_the_number_is_part_of_the_call() -> None:
    source = "def epi(accum, x, y): D = accum * x - y; return D"
    for x, y in ((C, 2.0), (2.0, C), (C, 3.0), (3.0, C)):
        assert torch.equal(ef.gemm(A, B, epilogue=source, x=x, y=y), A @ B * x - y)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_call_looks_the_same_however_it_is_looked_at(kind: torch.dtype) -> None:
    """What was described is not described again; the signature, which finds the call later, is the same."""
    whole = torch.zeros(40, 9).to(kind)
    a, b, c = whole[:6, :4], whole.t()[1:5, :8], whole[6:12, 1:]
    given = {"C": c, "alpha": 2, "D": torch.empty(9, 6).t()[:, :8]}
    request = Request(a, b, parsed(epi), given, Options(None))
    described = describe(request)
    assert not described.infos
    assert with_infos(described) == with_care(request)
    assert with_infos(with_care(request)) == with_care(request)


def test_the_collector_need_not_visit_a_signature() -> None:
    signature = describe(Request(A, B, parsed(epi), {"C": C, "alpha": 2.0}, USUAL)).signature
    gc.collect()
    assert not gc.is_tracked(signature)
