"""Tensors of any rank mean what eager makes of them, whether leading dims are folded for the product or not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.api import run
from epifuse.base.errors import EpifuseError
from epifuse.frontend import parsed as parse_cached
from epifuse.plan.ranks import by_rows, fold_linear
from epifuse.request.options import Options
from epifuse.request.signature import Request

K, N = 3, 6
LEADS = {1: (), 2: (4,), 3: (2, 4), 4: (2, 3, 4)}


def integers(*shape: int) -> torch.Tensor:
    """Data whose products and sums are exact."""
    return torch.randint(-3, 4, shape).float()


def eager(source: str, accum: torch.Tensor, **operands: Any) -> Any:
    """What the function itself makes of the product."""
    function = eval(source, {"torch": torch, **vars(ef)})
    return ef.reference(function)(accum, **operands)


def same(got: Any, want: Any) -> None:
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else ((got, want),)
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.equal(one, other.to(one.dtype))


def linear(source: str, x: torch.Tensor, **operands: Any) -> None:
    weight, bias = integers(N, K), integers(N)
    want = eager(source, torch.nn.functional.linear(x, weight, bias), **operands)
    same(ef.linear(x, weight, bias, epilogue=source, **operands), want)


def broadcasting(lead: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every shape that broadcasts to (*lead, N) without adding dims, as eager has it."""
    shapes: list[tuple[int, ...]] = [()]
    for extent in (N, *reversed(lead)):
        shapes = [(e, *shape) for shape in shapes for e in dict.fromkeys((1, extent))]
        yield from shapes


@pytest.mark.parametrize("shape", list(broadcasting(LEADS[3])))
def test_operands_of_three_dims(shape: tuple[int, ...]) -> None:
    x, C = integers(*LEADS[3], K), integers(*shape)
    linear("lambda accum, C: accum * C", x, C=C)
    linear("lambda accum, C: (accum + C).sum(-1)", x, C=C)
    linear("lambda accum, C: (accum + relu(C)).amax(1)", x, C=C)
    linear("lambda accum, C: accum - (C * 2).sum(-1, keepdim=True)", x, C=C)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "any", "logsumexp"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3, (0, 1), (1, 2), (0, 2), (-1, 0, 1), None])
def test_reductions_of_three_dims(dim: Any, name: str, keepdim: bool) -> None:
    x, r = integers(*LEADS[3], K), integers(*LEADS[3], N)
    source = f"lambda accum, r: {name}(accum + r > 2 if {name == 'any'} else accum + r, dim={dim}, keepdim={keepdim})"
    weight = integers(N, K)
    got = ef.linear(x, weight, epilogue=source, r=r)
    want = eager(source, torch.nn.functional.linear(x, weight), r=r)
    assert got.shape == want.shape
    if name in ("mean", "logsumexp"):
        torch.testing.assert_close(got, want)
    else:
        same(got, want)


@pytest.mark.parametrize(
    "source",
    [
        "lambda accum: accum.sum(1) * 2",
        "lambda accum: accum - accum.amax(dim=2, keepdim=True)",
        "lambda accum: accum.reshape(2, 4, 2, 3).permute(0, 2, 1, 3)",
        "lambda accum: accum.permute(0, 2, 1)",
        "lambda accum: accum * index_m(accum) + index_n(accum)",
        "lambda accum: where(index_l(accum) == 1, accum, -accum)",
        "lambda accum: accum.sum(-1)[:, :, None] + accum",
        "lambda accum: (accum.sum(-1)[..., None] + accum).sum(0)",
        "lambda accum: accum.sum(0).sum(0)",
        "lambda accum: accum[None]",
    ],
)
def test_what_counts_three_dims(source: str) -> None:
    linear(source, integers(*LEADS[3], K))


@pytest.mark.parametrize("x", [integers(1, 4, K), integers(4, 1, K), integers(1, 1, K), integers(6, 6, K)])
def test_dims_of_one_and_dims_that_are_equal(x: torch.Tensor) -> None:
    B, S = x.shape[:2]
    for shape in ((B, S, N), (B, S, 1), (S, N), (1, S, N), (B, 1, N), (1, 1, N), (S, 1), (N,), (1,)):
        linear("lambda accum, C: accum + C", x, C=integers(*shape))
    for dim in (0, 1, 2, (0, 1)):
        linear(f"lambda accum: accum.sum({dim})", x)
        linear(f"lambda accum: accum.amax({dim}, keepdim=True)", x)
    linear("lambda accum, v: accum.sum(-1) + v", x, v=integers(S))
    linear("lambda accum, v: accum.sum(1) + v", x, v=integers(N))


@pytest.mark.parametrize(
    "shape", [(N,), (1,), (), (1, N), (4, 1), (4, N), (1, 1, 1, N), (*LEADS[4], 1), (*LEADS[4], N)]
)
def test_operands_of_four_dims(shape: tuple[int, ...]) -> None:
    x = integers(*LEADS[4], K)
    linear("lambda accum, C: accum * C", x, C=integers(*shape))
    linear("lambda accum, C: (accum + C).sum(3, keepdim=True) * accum", x, C=integers(*shape))


@pytest.mark.parametrize(
    "source",
    [
        "lambda accum: accum.sum(-1)",
        "lambda accum: accum.sum(3)",
        "lambda accum: accum.amax((0, 1, 2))",
        "lambda accum: accum.amax((0, 1, 2), keepdim=True)",
        "lambda accum: accum.sum(2)",
        "lambda accum: accum.sum((-2, -1))",
        "lambda accum: accum.sum((0, 1), keepdim=True)",
        "lambda accum: accum.sum()",
        "lambda accum: sum(accum, keepdim=True)",
        "lambda accum: accum.permute(0, 1, 3, 2)",
        "lambda accum: accum * index_m(accum)",
        "lambda accum: accum.sum(3)[..., None] - accum",
        "lambda accum: accum.sum(-1) * 2 - accum.sum()",
    ],
)
def test_what_counts_four_dims(source: str) -> None:
    linear(source, integers(*LEADS[4], K))
    linear(source, integers(3, 2, 4, K).transpose(0, 1))


@pytest.mark.parametrize(
    "source",
    [
        "lambda accum: accum.sum(0)",
        "lambda accum: accum.sum(-1, keepdim=True) - accum",
        "lambda accum: accum / (accum.amax(-1) + 100)",
        "lambda accum: sum(accum, keepdim=True)",
        "lambda accum: accum * index_n(accum)",
        "lambda accum: accum[:, None]",
    ],
)
def test_a_single_row(source: str) -> None:
    x, weight = integers(K), integers(N, K)
    torch.testing.assert_close(
        ef.linear(x, weight, epilogue=source), eager(source, torch.nn.functional.linear(x, weight)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("source", ["lambda accum, C: accum + C", "lambda accum, C: accum.sum(-1) - C"])
@pytest.mark.parametrize("rank", LEADS)
def test_a_tensor_of_one_number(rank: int, source: str) -> None:
    linear(source, integers(*LEADS[rank], K), C=integers(1))


def test_a_single_row_gets_no_dims_from_an_operand() -> None:
    with pytest.raises(EpifuseError, match="leading dims stand at different places"):
        ef.linear(integers(K), integers(N, K), epilogue="lambda accum, C: C[..., None] + accum", C=integers(1))


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("lambda accum: accum + 1", (2, 4, N)),
        ("lambda accum: accum.sum(-1)", (2, 4)),
        ("lambda accum: accum.sum(-1)", (2, 4, 1)),
        ("lambda accum: accum.sum(1)", (2, N)),
        ("lambda accum: accum.sum(1)", (2, 1, N)),
        ("lambda accum: accum.sum((0, 1))", (N,)),
        ("lambda accum: accum.sum((0, 1))", (1, 1, N)),
        ("lambda accum: accum.sum()", (1, 1, 1)),
        ("lambda accum: accum.permute(0, 2, 1)", (2, N, 4)),
    ],
)
def test_destinations_are_written_in_place(source: str, shape: tuple[int, ...]) -> None:
    x, weight = integers(2, 4, K), integers(N, K)
    want = eager(source, torch.nn.functional.linear(x, weight)).reshape(shape)
    for whole in (
        torch.zeros(shape),
        torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2],
        torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1]),
    ):
        assert ef.linear(x, weight, epilogue=source, out=whole) is whole
        assert torch.equal(whole, want)
    ef.linear(x, weight, epilogue=source, out=whole, accumulate="D")
    assert torch.equal(whole, 2 * want)


def test_what_does_not_fold_is_taken_as_it_lies() -> None:
    """No copy of x, nor of an operand: three dims are a batch."""
    x, r = integers(4, 2, K).transpose(0, 1), integers(4, 2, N).transpose(0, 1)
    linear("lambda accum, r: accum + r", x, r=r)
    linear("lambda accum, r: accum + r", x.contiguous(), r=r)


def test_equal_epilogues_of_different_ranks() -> None:
    """What was found for one rank is not taken for another."""
    source = "lambda accum: accum.sum(1, keepdim=True)"
    for _ in range(2):
        for rank in (2, 3, 2):
            linear(source, integers(*LEADS[rank], K))


def test_unused_values_count_the_same_dims() -> None:
    linear("lambda accum, r: accum + r", integers(2, 4, K), r=integers(4, N))
    source = "def epi(accum):\n    t = accum.sum(2)\n    u = accum.sum(0)\n    return accum"
    x, weight = integers(2, 4, K), integers(N, K)
    assert torch.equal(ef.linear(x, weight, epilogue=source), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("lambda accum: accum.sum(0)", "sum over some of its leading dims"),
        ("lambda accum: accum.permute(1, 0, 2, 3)", "another order of its leading dims"),
        ("lambda accum: accum.reshape(6, 4, 6)", "a reshape of its leading dims"),
        ("lambda accum: accum[None]", "a new dim among its leading dims"),
        ("lambda accum: accum * index_l(accum)", "a coordinate along its leading dims"),
        ("lambda accum: accum.sum(4)", "dim 4 is out of range, which is -4 to 3"),
        ("lambda accum: accum.sum(-1) + accum", "leading dims stand at different places"),
    ],
)
def test_what_four_dims_cannot_have(source: str, said: str) -> None:
    with pytest.raises(EpifuseError, match=said):
        ef.linear(integers(*LEADS[4], K), integers(N, K), epilogue=source)


# --- gemm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4, K), (2, 3, K, N)),
        ((2, 3, 4, K), (K, N)),
        ((2, 3, 4, K), (1, K, N)),
        ((4, K), (2, 3, K, N)),
        ((1, 1, 4, K), (2, 3, K, N)),
        ((1, 1, 4, K), (K, N)),
        ((2, 1, 3, 4, K), (2, 1, 3, K, N)),
        ((0, 3, 4, K), (K, N)),
        ((1, 3, 4, K), (3, K, N)),
    ],
)
def test_batches_as_matmul_has_them(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    A, B = integers(*a), integers(*b)
    accum = torch.matmul(A, B)
    same(ef.gemm(A, B), accum)
    for shape in ((N,), (4, 1), accum.shape, (*accum.shape[:-1], 1)):
        source, C = "lambda accum, C: accum * C", integers(*shape)
        same(ef.gemm(A, B, epilogue=source, C=C), eager(source, accum, C=C))
    for source in ("lambda accum: accum.sum(-2)", "lambda accum: accum.sum((-1, -2), keepdim=True)"):
        out = torch.empty_like(eager(source, accum))
        assert ef.gemm(A, B, epilogue=source, out=out) is out
        same(out, eager(source, accum))


def test_batches_that_no_view_has() -> None:
    A, B = integers(2, 3, 4, K), integers(2, 3, K, N)
    for a, b in ((A.transpose(0, 1), B.transpose(0, 1)), (A, B[:, :1]), (A, B[0])):
        with pytest.raises(EpifuseError, match="cannot be merged into one"):
            ef.gemm(a, b)
    with pytest.raises(EpifuseError, match="batch extents differ"):
        ef.gemm(A, integers(2, 2, K, N))
    with pytest.raises(EpifuseError, match="inner extents"):
        ef.gemm(A, integers(2, 3, N, N))
    for a, b in ((A, B[0, 0, :, 0]), (A[0, 0, 0], B), (A[0, 0], B[0, 0, :, 0])):
        with pytest.raises(EpifuseError, match="must have 2 dims at least"):
            ef.gemm(a, b)


# --- Hopper ----------------------------------------------------------------------------------------------------------


def planned(source: str, *shapes: tuple[int, ...]) -> list[ef.Kernel]:
    """Kernels for x (4, 512, 256) as `ef.linear` asks for it on a GPU; operands C, E of these shapes."""
    x, weight, *operands = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in (X, (128, 256), *shapes))
    parsed, given = parse_cached(source), dict(zip("CE", operands, strict=False))
    request, _ = fold_linear(Request(x, weight.t(), parsed, given, Options(None)))
    epilogue = ef.EpilogueArguments.partial(request.parsed, dict(request.given))
    return ef.get_kernels(ef.GemmArguments(request.a, request.b, epilogue=epilogue), cc=90, limit=1)


X = (4, 512, 256)


@pytest.mark.parametrize("dim", [0, 1, 2, -3, (0, 1), (1, 2), None])
@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
def test_reductions_that_hopper_plans(name: str, dim: Any) -> None:
    assert planned(f"lambda accum, C: {name}(accum + C, dim={dim})", (512, 128))


@pytest.mark.parametrize("shape", [(1, 1, 128), (4, 1, 128), (4, 512, 1), (512, 128), (1, 512, 128), (4, 512, 128)])
def test_operands_that_hopper_plans(shape: tuple[int, ...]) -> None:
    assert planned("lambda accum, C: accum + C", shape)
    assert planned("lambda accum, C: (accum + C * 2).sum(0)", shape)


@pytest.mark.parametrize("shape", list(broadcasting(LEADS[3])))
def test_batches_and_rows_change_places(shape: tuple[int, ...]) -> None:
    """The same result, computed here though only a GPU needs it."""
    x, weight, C = integers(*LEADS[3], K), integers(N, K), integers(*shape)
    for source in (
        "lambda accum, C: (accum + C * 2).sum(0)",
        "lambda accum, C: accum - (accum + C).amax(-3, keepdim=True)",
    ):
        for out in ({}, {"D": torch.empty_like(eager(source, x @ weight.t(), C=C))}):
            asked = Request(x, weight.t(), parse_cached(source), {"C": C, **out}, Options(None))
            swapped = by_rows(asked)
            assert swapped.a.shape == (4, 2, K)
            same(run(swapped)["D"], eager(source, x @ weight.t(), C=C))


# --- errors speak of the tensors as they were handed over -------------------------------------------------------------


def refused(call: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(EpifuseError) as caught:
        call(*args, **named)
    return str(caught.value)


@pytest.mark.parametrize("lead", [(3, 17), (2, 3, 17)])
def test_what_does_not_broadcast_is_told_beside_the_result(lead: tuple[int, ...]) -> None:
    x, weight = integers(*lead, K), integers(50, K)
    text = refused(ef.linear, x, weight, epilogue="lambda accum, s: accum * s", s=integers(17))
    assert f"operand 's' of shape (17,) does not broadcast to accum's {(*lead, 50)}" in text
    assert "write s[:, None]" in text
    text = refused(ef.linear, x, weight, epilogue="lambda accum, s: accum * s", s=integers(51))
    assert "write s[:, None]" not in text  # 51 are the rows of the product, and of no tensor
    text = refused(ef.linear, x, weight, epilogue="lambda accum, s: accum * s", s=integers(50, 1))
    assert "one value a column has the shape (N,): write s[:, 0]" in text


@pytest.mark.parametrize("lead", [(3, 17), (2, 3, 17)])
def test_a_destination_of_another_shape_is_told_as_it_was_given(lead: tuple[int, ...]) -> None:
    x, weight, out = integers(*lead, K), integers(50, K), torch.empty(*lead, 51)
    text = refused(ef.linear, x, weight, out=out)
    assert f"must have the shape {(*lead, 50)}; the tensor given has {(*lead, 51)}" in text
    sums = "def epi(accum): s = sum(accum, dim=-1); return s"
    text = refused(ef.linear, x, weight, epilogue=sums, out=torch.empty(*lead, 2))
    assert (
        f"over an accum of shape {(*lead, 50)}, must have the shape {lead}; the tensor given has {(*lead, 2)}" in text
    )
    columns = "def epi(accum): s = accum[..., :1] * 0 + accum; D = sum(s); return D"
    text = refused(ef.linear, x, weight, epilogue=columns, out=torch.empty(51))
    assert "must have the shape (); the tensor given has (51,)" in text


def test_the_hint_for_some_of_the_leading_dims_works() -> None:
    x, weight, s = integers(2, 3, 17, K), integers(N, K), integers(2, 1, 1, N)
    text = refused(ef.linear, x, weight, epilogue="lambda accum, s: accum * s", s=s)
    assert "pass s.expand(2, 3, 1, 6).contiguous()" in text
    got = ef.linear(x, weight, epilogue="lambda accum, s: accum * s", s=s.expand(2, 3, 1, 6).contiguous())
    assert torch.equal(got, x @ weight.t() * s)
    text = refused(ef.linear, x, weight, epilogue="lambda accum, s: accum * s", s=integers(2, 2, 1, N))
    assert "those of 's' do not broadcast to them" in text


def of_heads(accum: Any, weight: Any) -> Any:
    return (accum.unflatten(-1, (-1, 4)) * weight).flatten(-2)


def test_a_vector_whose_product_is_cut_is_a_row() -> None:
    x, w, weight = torch.randn(8), torch.randn(16, 8), torch.randn(1, 4)
    with pytest.raises(EpifuseError, match=r"pass the vector as a row, x\[None\]"):
        ef.linear(x, w, epilogue=of_heads, operands={"weight": weight})
    assert ef.linear(x[None], w, epilogue=of_heads, operands={"weight": weight}).shape == (1, 16)
