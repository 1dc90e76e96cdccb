"""Outputs added onto old content, and destinations that reductions do not fit: what is meant, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError, EpilogueTypeError

M, N, K = 6, 10, 4


def epi(accum: Any) -> Any:
    D = ef.relu(accum)
    dbias = ef.sum(D, dim=0)
    total = ef.sum(D)
    return D, dbias, total


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def destinations() -> dict[str, torch.Tensor]:
    return {"D": whole(M, N), "dbias": whole(N), "total": whole()}


@pytest.mark.parametrize("fallback", [None, "torch"])
def test_each_call_adds(fallback: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch runs it unfused, and where the call is known from before."""
    if fallback:
        monkeypatch.setattr("epifuse.providers.NAMES", ())
    out = destinations()
    want = {name: tensor.clone() for name, tensor in out.items()}
    for _ in range(4):
        a, b = whole(M, K), whole(K, N)
        if fallback:
            with pytest.warns(UserWarning, match="unfused"):
                ef.gemm(a, b, epilogue=epi, out=out, accumulate=("D", "dbias", "total"), fallback="torch")
        else:
            ef.gemm(a, b, epilogue=epi, out=out, accumulate=["D", "dbias", "total"])
        D = (a @ b).relu()
        want = {"D": want["D"] + D, "dbias": want["dbias"] + D.sum(0), "total": want["total"] + D.sum()}
    assert all(torch.equal(out[name], tensor) for name, tensor in want.items())


def test_what_is_said_once_is_no_habit() -> None:
    """The same call without `accumulate` overwrites."""
    a, b, out = whole(M, K), whole(K, N), whole(M, N)
    for _ in range(2):
        start = out.clone()
        ef.gemm(a, b, out=out, accumulate="D")
        assert torch.equal(out, start + a @ b)
        ef.gemm(a, b, out=out)
        assert torch.equal(out, a @ b)


def test_rounded_once() -> None:
    """256 + 1 + 0.5 in bfloat16: rounding the value first would make it 258 or 256."""
    a, b = torch.full((1, 1), 1.5), torch.ones(1, 8)
    out = torch.full((1, 8), 256.0, dtype=torch.bfloat16)
    ef.gemm(a, b, out=out, accumulate="D")
    assert torch.equal(out, torch.full((1, 8), 257.5).bfloat16())


@pytest.mark.parametrize("held", [torch.int32, torch.int64], ids=str)
def test_sums_of_integers(held: torch.dtype) -> None:
    """In int64: beyond 2 ** 53 not a bit is lost; an int32 destination saturates."""
    big = (1 << 62) + 1 if held == torch.int64 else (1 << 31) - 2
    a, b = whole(M, K, dtype=torch.int8), whole(K, N, dtype=torch.int8)
    a[0], b[:, 0] = 3, 3
    out = {"s": torch.full((N,), big, dtype=held)}
    ef.gemm(a, b, epilogue="def epi(accum): s = sum(abs(accum), dim=0); return s", out=out, accumulate="s")
    product = (a.double() @ b.double()).long()
    assert torch.equal(out["s"], (product.abs().sum(0) + big).clamp(max=torch.iinfo(held).max).to(held))


def test_an_exact_int32_result() -> None:
    a, b, out = whole(M, K, dtype=torch.int8), whole(K, N, dtype=torch.int8), whole(M, N, dtype=torch.int32)
    want = out + (a.double() @ b.double()).int()
    ef.gemm(a, b, out=out, accumulate="D")
    assert torch.equal(out, want)


def test_through_linear() -> None:
    x, weight, out = whole(2, 3, K), whole(N, K), whole(2, 3, N)
    want = out + x @ weight.t()
    ef.linear(x, weight, out=out, accumulate="D")
    assert torch.equal(out, want)


def test_in_the_class_form() -> None:
    class Squared(ef.DenseGemm):
        def epilogue_operation(self, accumulator: Any) -> Any:
            d = accumulator * accumulator
            return d

    a, b, d = whole(1, M, K), whole(1, K, N), whole(1, M, N)
    want = d + (a @ b) ** 2
    verdict = Squared(device="cpu").verify(a, b, d=ef.Store(d, accumulate=True))["d"]
    assert verdict.judged == verdict.total
    assert torch.equal(d, want)


def test_the_plan_says_what_is_read() -> None:
    args = ef.GemmArguments(
        whole(M, K), whole(K, N), epilogue=ef.EpilogueArguments.partial(epi, {"dbias": whole(N)}, ("dbias",))
    )
    assert "load     old dbias: row, f32[10]" in str(ef.explain(args))


def test_a_vector_may_be_its_own_operand() -> None:
    """As long as only its own output reads it."""
    a, b, momentum = whole(M, K), whole(K, N), whole(N)
    want = momentum * 0.5 + (a @ b).sum(0)
    source = "def epi(accum, v): D = accum; new = v * 0.5 + sum(accum, dim=0); return D, new"
    ef.gemm(a, b, epilogue=source, v=momentum, out={"new": momentum})
    assert torch.equal(momentum, want)
    before = momentum.clone()
    read_twice = "def epi(accum, v): D = accum + v; new = v * 0.5 + sum(accum, dim=0); return D, new"
    with pytest.raises(ArgumentError, match="'new' and 'v' overlap in memory"):
        ef.gemm(a, b, epilogue=read_twice, v=momentum, out={"new": momentum})
    assert torch.equal(momentum, before)


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no destination": (lambda out: call({"D": out["D"]}, accumulate="dbias"), "no destination is given"),
    "no output": (lambda out: call(out, accumulate="bias"), "accumulate names 'bias', but the outputs are D, dbias"),
    "no name": (lambda out: call(out, accumulate=3), "accumulate must be names of outputs, got 3"),
    "a mapping": (lambda out: call(out, accumulate={"dbias": False}), "must be names of outputs, got .*dict"),
    "float64": (lambda out: call({**out, "dbias": out["dbias"].double()}, accumulate="dbias"), "does not support that"),
    "another device": (lambda out: call({**out, "dbias": out["dbias"].to("meta")}, accumulate="dbias"), "on meta"),
    "one address": (lambda out: call({**out, "dbias": torch.ones(1).expand(N)}, accumulate="dbias"), "share one a"),
    "no flag": (lambda out: ef.Store(out["D"], accumulate=1), "accumulate must be True or False"),
    "a mask": (
        lambda out: ef.gemm(
            whole(M, K), whole(K, N), epilogue="def epi(accum): D = accum > 0; return D", out=out["D"], accumulate="D"
        ),
        "to which accumulate= cannot add",
    ),
    "an operand as well": (
        lambda out: ef.gemm(
            whole(M, K), whole(K, N), epilogue="lambda accum, C: accum * C", C=out["D"], out=out["D"], accumulate="D"
        ),
        "'D' and 'C' overlap in memory",
    ),
    "rows for columns": (
        lambda out: call({**out, "dbias": torch.ones(M)}),
        r"output 'dbias', of sum\(x, dim=-2\) over an accum of shape \(6, 10\), must have the shape \(10,\)",
    ),
    "a vector for a number": (
        lambda out: call({**out, "total": torch.ones(N)}),
        r"output 'total', of sum\(x\) over an accum of shape \(6, 10\), must have the shape \(\); .* has \(10,\)",
    ),
    "added onto the wrong extent": (
        lambda out: call({**out, "dbias": torch.ones(N + 1)}, accumulate="dbias"),
        r"of sum\(x, dim=-2\)",
    ),
    "dim out of range": (
        lambda out: ef.gemm(whole(M, K), whole(K, N), epilogue="lambda accum: accum.sum(dim=2)", out=out["D"]),
        "dim 2 is out of range, which is -2 to 1",
    ),
}  # fmt: skip


def call(out: dict[str, torch.Tensor], **options: Any) -> Any:
    return ef.gemm(whole(M, K), whole(K, N), epilogue=epi, out=out, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name: str) -> None:
    run, message = REFUSED[name]
    out = destinations()
    before = {key: tensor.clone() for key, tensor in out.items()}
    with pytest.raises((ArgumentError, EpilogueTypeError), match=message):
        run(out)
    assert all(torch.equal(out[key], tensor) for key, tensor in before.items())


def test_sums_of_integers_say_what_they_are_computed_in() -> None:
    """int64 holds every sum of int32 values; what is stored narrower saturates."""
    a, b = torch.full((M, K), 127, dtype=torch.int8), torch.full((K, N), 127, dtype=torch.int8)
    source = "def epi(accum): s = sum(accum * 3300); return s"
    out = {"s": torch.zeros((), dtype=torch.int32)}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(source, **out))
    assert "s: scalar, s32[], computed in int64" in str(ef.explain(args).plan)
    ef.get_kernels(args)[0].run(args)
    assert out["s"] == torch.iinfo(torch.int32).max
    assert ef.gemm(a, b, epilogue=source) == M * N * K * 127 * 127 * 3300


AGAIN = {
    "over the batches": ("def f(accum): D = accum.sum(dim=0); return D", lambda a, b, row, C: (a @ b).sum(0)),
    "a row": ("def f(accum, row): D = row * 2; s = accum.sum(); return D, s", lambda a, b, row, C: row * 2),
    "the same in every batch": ("def f(accum, C): D = C * 2; s = accum.sum(); return D, s", lambda a, b, row, C: C * 2),
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_several_tiles_write_is_added_once(name: str) -> None:
    """Each batch, or each row of tiles, computes it anew: they must not read what the one before wrote."""
    epilogue, meaning = AGAIN[name]
    a, b, row, C = whole(2, 300, K), whole(2, K, N), whole(N), whole(300, N)
    want = meaning(a, b, row, C)
    given = {"row": row} if name == "a row" else {"C": C} if "C" in epilogue else {}
    out = torch.ones_like(want)
    for _ in range(3):
        ef.gemm(a, b, epilogue=epilogue, operands=given, out={"D": out}, accumulate="D")
    assert torch.equal(out, 1 + 3 * want)
    tensors = {**given, "D": ef.Store(out, accumulate=True)}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, tensors))
    launch = ef.get_kernels(args)[0].bind(args)
    launch()
    launch()
    assert torch.equal(out, 1 + 5 * want)


def test_a_dim_of_one_element_may_be_kept() -> None:
    """A reduction along one element is none by the time destinations are looked at."""
    C, s = whole(M, 1), torch.empty(M, 1)
    source = "def f(accum, C): D = accum; s = C.sum(dim=-1); return D, s"
    ef.gemm(whole(M, K), whole(K, 1), epilogue=source, C=C, out={"s": s})
    assert torch.equal(s, C)


def test_the_absolute_value_of_the_least_integer_is_torchs() -> None:
    x = torch.full((M, N), torch.iinfo(torch.int32).min, dtype=torch.int32)
    source = "def f(accum, x): s = ef.absmax(x); return s"
    assert ef.gemm(whole(M, K), whole(K, N), epilogue=source, x=x) == x.abs().max()


@pytest.mark.parametrize(
    ("held", "dtype", "want"), [(2**31 - 5, torch.int32, -(2**31) + 16124), (120, torch.int8, 127)], ids=str
)
def test_integers_wrap_in_int32_and_saturate_where_narrower(held, dtype, want):
    a = torch.full((1, 1), 127, dtype=torch.int8)
    D = torch.full((1, 1), held, dtype=dtype)
    ef.gemm(a, a, out=D, epilogue="def f(accum): D = accum; return D", accumulate="D")
    assert D.item() == want
