"""A Python integer is exact beside integers and a float beside floats; no value of it plans anything anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import epifuse as ef
from epifuse import passes
from epifuse.base.config import Config
from epifuse.base.errors import ArgumentError, EpifuseError, EpilogueTypeError
from epifuse.providers.cpu import native

A, B = torch.randn(6, 5), torch.randn(5, 8)
WIDE = 2_000_000_011  # float32 holds neither it nor its neighbours


def masked(accum: Any, labels: Any, pad: Any) -> Any:
    return ef.where(labels == pad, 0.0, accum)


def captured(pad: Any) -> Callable[..., Any]:
    return lambda accum, labels: ef.where(labels == pad, 0.0, accum)


def computed(pad: Any) -> Callable[..., Any]:
    return lambda accum, labels: ef.where(labels == pad * 2 - pad, 0.0, accum)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("number", [WIDE, np.int64(WIDE), torch.tensor(WIDE)], ids=["int", "NumPy", "tensor"])
def test_an_integer_is_exact_beside_integers(dtype: torch.dtype, number: Any) -> None:
    labels = torch.tensor([WIDE - 1, WIDE, WIDE + 1, 0, 1, WIDE], dtype=dtype)[:, None]
    want = torch.where(labels == WIDE, torch.zeros(()), A @ B)
    found = [ef.gemm(A, B, epilogue=masked, labels=labels, pad=number)]
    if not isinstance(number, torch.Tensor):
        found += [ef.gemm(A, B, epilogue=make(number), labels=labels) for make in (captured, computed)]
    for result in found:
        torch.testing.assert_close(result, want)


def test_an_integer_beside_a_coordinate_is_exact_beyond_floats() -> None:
    a, b = torch.ones((1 << 24) + 4, 1), torch.ones(1, 1)
    row = (1 << 24) + 1
    result = ef.gemm(a, b, epilogue=lambda accum, k: ef.where(ef.index_m(accum) == k, 5.0, accum), k=row)
    assert torch.nonzero(result == 5.0).tolist() == [[row, 0]]


def test_one_integer_is_an_integer_and_a_float_in_one_epilogue() -> None:
    labels = torch.tensor([7, 8, 7, 9, 7, 7], dtype=torch.int32)[:, None]

    def both(accum, labels, n):
        return ef.where(labels == n, accum * n, accum / n)

    for n in (7, 9):
        result = ef.gemm(A, B, epilogue=both, labels=labels, n=n)
        torch.testing.assert_close(result, torch.where(labels == n, A @ B * n, A @ B / n))
    huge = 1 << 40  # too large for an int32, and nothing to a float
    torch.testing.assert_close(ef.gemm(A, B, epilogue=lambda accum, n: accum * n, n=huge), A @ B * huge)


def test_another_value_plans_nothing_and_another_type_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(accum: Any, labels: Any, pad: Any) -> Any:  # one that no other test has planned
        return ef.where(labels == pad, 1.0, accum)

    typed: list[Any] = []
    run = passes.typed
    monkeypatch.setattr(passes, "typed", lambda *given: typed.append(given) or run(*given))
    labels = torch.arange(6, dtype=torch.int64)[:, None]
    for number in (1, -1, 3, WIDE, 1 << 40, np.int32(4), torch.tensor(5)):
        ef.gemm(A, B, epilogue=masked, labels=labels, pad=number)
    assert len(typed) == 1
    for number in (1, 1 << 40):
        ef.gemm(A, B, epilogue=lambda accum, labels: ef.where(labels == number, 1.0, accum), labels=labels)  # noqa: B023 - called at once
    assert len(typed) == 2
    ef.gemm(A, B, epilogue=masked, labels=labels, pad=1.5)
    assert len(typed) == 3


@pytest.mark.parametrize(("epilogue", "given"), [(masked, {"pad": 1 << 32}), (captured(1 << 32), {})])
def test_what_an_int32_cannot_hold_is_refused_by_name(epilogue: Callable[..., Any], given: dict[str, Any]) -> None:
    labels, out = torch.zeros(6, 1, dtype=torch.int32), torch.full((6, 8), torch.nan)
    with pytest.raises(ArgumentError, match=r"the number 'pad' does not fit the int32 .*: 4294967296(.|\n)*int64"):
        ef.gemm(A, B, epilogue=epilogue, labels=labels, out=out, **given)
    assert out.isnan().all()
    with pytest.raises(EpilogueTypeError, match="does not fit the int32"):
        ef.gemm(A, B, epilogue=computed(1 << 32), labels=labels)
    wide = labels.to(torch.int64)
    torch.testing.assert_close(ef.gemm(A, B, epilogue=masked, labels=wide, pad=1 << 32), A @ B)


EIGHT = torch.ones(4, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
OVER = 1 << 31


def add(accum: Any, m: Any) -> Any:
    return accum + m


def add_twice(accum: Any, m: Any) -> Any:
    return accum + m * 2


def add_captured(accum: Any) -> Any:
    return accum + OVER


BEYOND: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "handed over": (add, {"m": -OVER - 1}),
    "captured": (add_captured, {}),
    "computed": (add_twice, {"m": OVER // 2}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_refuses_it_in_the_same_words(name: str, backend: str) -> None:
    epilogue, given = BEYOND[name]

    def call(a: torch.Tensor, **given: Any) -> Any:
        return ef.gemm(a, EIGHT[1], epilogue=epilogue, **given)

    with pytest.raises(EpifuseError) as eager:
        call(EIGHT[0], **given)
    said = str(eager.value).splitlines()[0]
    with pytest.raises(RuntimeError, match=said):
        torch.compile(call, backend=backend)(EIGHT[0], **given)


def test_what_changes_is_refused_when_it_does_not_fit() -> None:
    """A symbol has a guard, and what no example is known of an assertion."""
    known = torch.compile(lambda a, m: ef.gemm(a, EIGHT[1], epilogue=add, m=m), backend="aot_eager", dynamic=True)
    unknown = torch.compile(
        lambda a, m: ef.gemm(a, EIGHT[1], epilogue=add, m=m.sum().item()), backend="aot_eager", fullgraph=True
    )
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for number in (5, OVER - 1, OVER, -OVER, -OVER - 1, 7):
            for compiled, given in ((known, number), (unknown, torch.tensor([number]))):
                if number in range(-OVER, OVER):
                    accum = EIGHT[0].int() @ EIGHT[1].int()
                    assert torch.equal(compiled(EIGHT[0], given), accum + number)
                else:
                    with pytest.raises((RuntimeError, ArgumentError), match=r"does not fit the int32|assertion failed"):
                        compiled(EIGHT[0], given)


def test_a_size_that_changes_is_refused_when_it_does_not_fit() -> None:
    def call(a: torch.Tensor) -> Any:
        return ef.gemm(a, EIGHT[1], epilogue=lambda accum: accum + accum.shape[0] * (1 << 29))

    compiled = torch.compile(call, backend="aot_eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(EIGHT[0][:2]), call(EIGHT[0][:2]))
    assert torch.equal(compiled(EIGHT[0][:3]), call(EIGHT[0][:3]))
    with pytest.raises(RuntimeError, match="does not fit the int32"):
        compiled(EIGHT[0])


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (3, torch.int32),
        (np.int8(3), torch.int32),
        (True, torch.bool),
        (np.bool_(1), torch.bool),
        (3.0, torch.float32),
        (np.float16(3), torch.float32),
        (torch.tensor(3, dtype=torch.uint8), torch.int32),
        (torch.tensor(True), torch.bool),
        (torch.tensor(3.0, dtype=torch.float64), torch.float32),
    ],
    ids=str,
)
def test_the_type_of_a_number_is_the_kind_of_what_it_fills(number: Any, dtype: torch.dtype) -> None:
    result = ef.gemm(A, B, epilogue=lambda accum, n: ef.where(accum > 0, n, n), n=number)
    assert result.dtype == dtype
    assert (result == number).all()


@pytest.mark.parametrize("number", [1e300, -1e300])
@pytest.mark.parametrize("native_elements", [0, 1 << 22], ids=["loop", "panels"])
def test_a_number_beyond_float32_is_infinite_as_a_literal_is(
    number: Any, native_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CONFIG", Config(native_elements=native_elements))
    a = torch.randn(33, 4, requires_grad=True)
    got = ef.gemm(a, B[:4], epilogue=lambda accum, alpha: accum * alpha, alpha=number, save="preactivation")
    assert torch.equal(got, (a @ B[:4]) * number)
    got.sum().backward()  # which computes with the number too
    wide = ef.gemm(A.double(), B.double(), epilogue=lambda accum, alpha: accum * alpha, alpha=number)
    assert torch.equal(wide, (A.double() @ B.double()) * number)


GATED: dict[str, Callable[..., Any]] = {
    "tanh": lambda accum, gate: torch.tanh(gate) * accum,
    "an expression": lambda accum, gate: torch.exp(gate * 2 + 1) * accum,
    "maximum": lambda accum, gate: torch.maximum(accum, gate),
    "where": lambda accum, gate: torch.where(gate > 0, accum * gate, -accum),
    "arithmetic": lambda accum, gate: accum * gate + gate * gate,
}
WAYS: dict[str, Callable[..., Any]] = {
    "with grad": lambda call, x: call(x),
    "without grad": torch.no_grad()(lambda call, x: call(x)),
    "inference": torch.inference_mode()(lambda call, x: call(x)),
    "checkpoint": lambda call, x: checkpoint(call, x.clone().requires_grad_(), use_reentrant=True),
    "compile": lambda call, x: torch.compile(call, backend="aot_eager", fullgraph=True)(x),
    "vmap": lambda call, x: torch.vmap(call)(x[None])[0],
    "forward mode": lambda call, x: torch.func.jvp(call, (x,), (torch.zeros_like(x),))[0],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GATED)
def test_a_tensor_of_no_dims_is_taken_in_each_mode(name: str, way: str) -> None:
    gate, function = torch.nn.Parameter(torch.tensor(0.3)), GATED[name]

    def call(x: torch.Tensor) -> Any:
        return ef.gemm(x, B, epilogue=function, gate=gate)

    for value in (0.3, -0.4, 0.8):  # none plans anew, and each is read
        with torch.no_grad():
            gate.fill_(value)
        torch.testing.assert_close(WAYS[way](call, A), function(A @ B, gate))


def test_a_number_is_no_tensor_to_torch_s_functions() -> None:
    with pytest.raises(EpilogueTypeError, match=r"torch.tanh takes a tensor"):
        ef.gemm(A, B, epilogue=GATED["tanh"], gate=0.3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("name", GATED)
def test_the_tangent_of_a_tensor_of_no_dims(name: str) -> None:
    with forward_ad.dual_level():
        gate = forward_ad.make_dual(torch.tensor(0.3), torch.tensor(1.0))
        found, want = (
            forward_ad.unpack_dual(value).tangent
            for value in (ef.gemm(A, B, epilogue=GATED[name], gate=gate), GATED[name](A @ B, gate))
        )
    torch.testing.assert_close(found, want)
