"""Epilogues that come as torch.fx graphs of ATen operations: every row against PyTorch, what is refused, and where."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.inductor_prims  # registers prims.fma
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.errors import EpilogueSyntaxError
from epifuse.frontend import parsed as parsed_epilogue
from epifuse.frontend.fx import Cone, read, why_not
from epifuse.frontend.fx.rows import ROWS

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.epifuse
M, K, N = 24, 16, 32


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def traced(function: Callable[..., Any], *operands: Tensor, table: Any = None, rows: int = M) -> GraphModule:
    return make_fx(function, decomposition_table=table, tracing_mode="fake")(random(rows, N), *operands)


def names_of(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "placeholder"][1:]


def check(module: GraphModule, function: Callable[..., Any], *operands: Tensor) -> None:
    """The fused product against PyTorch on the same accumulator."""
    a, b = random(M, K), random(K, N)
    got = ef.gemm(a, b, epilogue=module, operands=dict(zip(names_of(module), operands, strict=True)))
    want = function((a.double() @ b.double()).float(), *operands)
    for one, other in zip(_listed(got), _listed(want), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), atol=2e-4, rtol=2e-4)


def _listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


class Case(NamedTuple):
    """An operation of ATen on the product and operands."""

    function: Callable[..., Any]
    operands: tuple[Tensor, ...] = ()


SEED = torch.tensor(0x7123456789ABCDEF)
INTEGERS = torch.arange(-4, M - 4, dtype=torch.int32)[:, None]
MASK, OTHER_MASK, RESIDUAL, ROW = random(M, N) > 0, random(M, N) > 0.5, random(M, N), random(N)


def each(names: str, make: Callable[[Any], Callable[..., Any]], *operands: Tensor) -> dict[str, Case]:
    """A case for each of these operations."""
    return {name: Case(make(getattr(aten, name)), operands) for name in names.split()}


CASES: dict[str, Case] = {
    **each("neg abs exp exp2 sin cos tan tanh erf floor ceil sign sgn round reciprocal", lambda op: lambda x: op(x)),
    **each("sigmoid silu relu mish hardswish hardsigmoid expm1 isnan gelu", lambda op: lambda x: op(x)),
    **each("alias detach clone", lambda op: lambda x: op(x)),
    **each("log log2 log1p sqrt rsqrt", lambda op: lambda x: op(aten.add(aten.abs(x), 0.5))),
    **each("eq ne lt le gt ge mul maximum minimum div atan2", lambda op: lambda x, y: op(x, y), RESIDUAL),
    **each("add sub rsub", lambda op: lambda x, y: op(x, y, alpha=2), ROW),
    **each(
        "bitwise_and bitwise_or bitwise_xor logical_and logical_or",
        lambda op: lambda x, p, q: aten.where(op(p, q), x, 0.0),
        MASK,
        OTHER_MASK,
    ),
    **each(
        "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__",
        lambda op: lambda x, n: aten.where(aten.gt(op(aten.bitwise_xor(n, aten.bitwise_not(n)), n), 5), x, 1.0),
        INTEGERS,
    ),
    **each("bitwise_not logical_not", lambda op: lambda x, p: aten.where(op(p), x, 1.0), MASK),
    **each("sum mean amax amin logsumexp var var_mean", lambda op: lambda x: op(x, [-1])),
    **each("zeros ones", lambda op: lambda x: aten.add(x, op([1, N]))),
    **each("zeros_like ones_like", lambda op: lambda x: aten.sum(aten.add(x, op(x)), [1])),
    **each("new_zeros new_ones", lambda op: lambda x: aten.mul(x, op(x, [N]))),
    "slice": Case(lambda x, y: aten.mul(aten.slice(x, 1, 0, N // 2), aten.slice(y, 1, N // 2, N)), (RESIDUAL,)),
    "select": Case(lambda x: aten.sub(aten.select(aten.view(x, [M, 2, N // 2]), 1, 1), 3.0)),
    "split": Case(lambda x: operator.sub(*aten.split(x, N // 2, 1))),
    "split_with_sizes": Case(lambda x: operator.mul(*aten.split_with_sizes(x, [N // 2, N // 2], -1))),
    "unbind": Case(lambda x: operator.mul(*aten.unbind(aten.view(x, [M, 2, N // 2]), 1))),
    "cat": Case(lambda x: aten.cat([aten.slice(x, 1, N // 2, N), aten.neg(aten.slice(x, 1, 0, N // 2))], -1)),
    "stack": Case(lambda x: aten.stack([aten.slice(x, 1, 0, N, 2), aten.slice(x, 1, 1, N, 2)], -2)),
    "slice_scatter": Case(
        lambda x, y: aten.add(
            aten.slice_scatter(x, aten.slice(y, 1, N // 2, N), 1, 0, N // 2),
            aten.slice_scatter(aten.full([M, N], 0.0), aten.slice(x, 1, 0, N // 2), 1, N // 2, N),
        ),
        (RESIDUAL,),
    ),
    "prod": Case(lambda x: aten.prod(x, -1)),
    "any": Case(lambda x: aten.any(aten.gt(x, 8.0), -1)),
    "all": Case(lambda x: aten.all(aten.gt(x, -8.0), 0)),
    "pow": Case(lambda x: aten.pow(x, 3)),
    "leaky_relu": Case(lambda x: aten.leaky_relu(x, 0.2)),
    "elu": Case(lambda x: aten.elu(x, 0.5)),
    "softplus": Case(lambda x: aten.softplus(x, 2.0, 3.0)),
    "hardtanh": Case(lambda x: aten.hardtanh(x, -0.5, 0.7)),
    "clamp": Case(lambda x: aten.clamp(x, -1.0, 0.5)),
    "clamp_min": Case(lambda x: aten.clamp_min(x, 0.25)),
    "clamp_max": Case(lambda x: aten.clamp_max(x, 0.25)),
    "where": Case(lambda x, p, y: aten.where(p, x, y), (MASK, RESIDUAL)),
    "masked_fill": Case(lambda x, p: aten.masked_fill(x, p, -3.0), (MASK,)),
    "threshold_backward": Case(lambda x, y: aten.threshold_backward(x, y, 0), (RESIDUAL,)),
    "fma": Case(lambda x, y, z: prims.fma(x, y, z), (RESIDUAL, random(M, 1).expand(M, N).contiguous())),
    "convert_element_type": Case(lambda x: prims.convert_element_type(x, torch.bfloat16)),
    "_to_copy": Case(lambda x: aten._to_copy(x, dtype=torch.int32)),
    "getitem": Case(lambda x: aten.var_mean(x, [0], correction=0, keepdim=True)[1]),
    "_softmax": Case(lambda x: aten._softmax(x, -1, False)),
    "_log_softmax": Case(lambda x: aten._log_softmax(x, 1, False)),
    "lift_fresh_copy": Case(lambda x: aten.lift_fresh_copy(x)),
    "expand": Case(lambda x: aten.expand(aten.sum(x, [1], True), [M, N])),
    "view": Case(lambda x: aten.view(x, [4, 6, N])),
    "_unsafe_view": Case(lambda x: aten._unsafe_view(x, [M, 4, 8])),
    "_reshape_alias": Case(lambda x: aten._reshape_alias(x, [2, 12, N], [12 * N, N, 1])),
    "squeeze": Case(lambda x: aten.squeeze(aten.sum(x, [1], True), 1)),
    "unsqueeze": Case(lambda x: aten.div(x, aten.unsqueeze(aten.amax(x, [-1]), -1))),
    "permute": Case(lambda x: aten.permute(x, [1, 0])),
    "transpose": Case(lambda x: aten.transpose(aten.view(x, [4, 6, N]), 0, 1)),
    "t": Case(lambda x: aten.t(x)),
    "full": Case(lambda x, p: aten.where(p, x, aten.full([], 2.0)), (MASK,)),
    "full_like": Case(lambda x: aten.sub(x, aten.full_like(x, 3))),
    "new_full": Case(lambda x: aten.maximum(x, aten.new_full(x, [], 0.5))),
    "scalar_tensor": Case(lambda x, p: aten.where(p, x, aten.scalar_tensor(-1.0)), (MASK,)),
    "philox_rand": Case(lambda x, seed: aten.mul(x, ours.philox_rand(seed, ours.positions([M, N]))), (SEED,)),
    "philox_rand_cpp": Case(lambda x, seed: aten.mul(x, ours.philox_rand_cpp(seed, ours.positions([M, N]))), (SEED,)),
    "positions": Case(
        lambda x, s: aten.add(x, aten.view(ours.philox_rand(s, ours.positions([4, 6, N])), [M, N])), (SEED,)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_row(name: str) -> None:
    function, operands = CASES[name]
    module = traced(function, *operands)
    called = {str(node.target).split(".")[-2:][0] for node in module.graph.nodes} | {
        getattr(node.target, "__name__", "") for node in module.graph.nodes
    }
    assert name in called, "the case does not hold what it is named after"
    check(module, function, *operands)


def test_every_row_has_a_case() -> None:
    assert {name.split("::")[-1] for name in ROWS} == CASES.keys() | {"reshape", "inductor_random"}


def test_reshape_of_post_grad_graphs() -> None:
    """make_fx writes `view`; the passes of Inductor make `reshape` of it."""

    def function(accum: Tensor, operand: Tensor) -> Tensor:
        return aten.view(aten.add(aten.view(accum, [4, 6, N]), operand), [M, N])

    operand = random(4, 1, N)
    module = traced(function, operand)
    for node in module.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
    check(module, function, operand)


def norm(accum: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(torch.nn.functional.gelu(accum + bias), (N,), weight)


def loss(accum: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(accum, target)


def several(accum: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    hidden = torch.nn.functional.silu(accum) * residual
    return hidden, hidden.sum(0), accum.var(dim=1)


@pytest.mark.parametrize(
    ("function", "operands"), [(norm, (ROW, random(N))), (loss, (random(M, N).abs(),)), (several, (RESIDUAL,))]
)
def test_functions_decomposed_by_pytorch(function: Callable[..., Any], operands: tuple[Tensor, ...]) -> None:
    check(traced(function, *operands, table=select_decomp_table()), function, *operands)


def test_a_node_outside_the_language_is_named_with_its_line() -> None:
    module = traced(lambda accum: torch.cumsum(accum, -1) + 1)
    with pytest.raises(EpilogueSyntaxError, match=r"aten::cumsum is not in the epilogue language") as caught:
        ef.gemm(random(M, K), random(K, N), epilogue=module)
    assert "cumsum" in str(caught.value).split("\n")[2]


def test_a_graph_of_python_functions_is_refused() -> None:
    module = symbolic_trace(lambda accum: torch.relu(accum))
    with pytest.raises(EpilogueSyntaxError, match="make_fx"):
        ef.gemm(random(M, K), random(K, N), epilogue=module)


def test_a_module_that_is_changed_is_read_again() -> None:
    module = traced(lambda accum: aten.mul(accum, 2.0))
    a, b = random(M, K), random(K, N)
    before = ef.gemm(a, b, epilogue=module)
    (node,) = (node for node in module.graph.nodes if node.op == "call_function")
    node.args = (node.args[0], 3.0)
    module.recompile()
    torch.testing.assert_close(ef.gemm(a, b, epilogue=module), before * 1.5)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.float64])
def test_dtypes_that_no_value_has_are_boundaries(dtype: torch.dtype) -> None:
    module = traced(lambda accum: prims.convert_element_type(accum, dtype))
    accum, node = (node for node in module.graph.nodes if node.op != "output")
    assert str(dtype).removeprefix("torch.") in str(why_not(node, accum))


def test_integers_are_compared_and_not_computed() -> None:
    labels = torch.randint(0, 9, (M, 1))
    module = traced(lambda accum, labels: aten.where(aten.eq(labels, 3), accum, aten.mul(labels, 2)), labels)
    accum = next(iter(module.graph.nodes))
    refused = {str(node.target): why_not(node, accum) for node in module.graph.nodes if node.op == "call_function"}
    assert refused["aten.eq.Scalar"] is None
    assert "int64" in str(refused["aten.mul.Tensor"])


@pytest.mark.parametrize("numerics", ["float32", "torch"])
def test_rounding_between_operations(numerics: Any) -> None:
    """`float32` keeps every value wide; `torch` rounds where ATen does, bit by bit."""

    def function(accum: Tensor, bias: Tensor) -> Tensor:
        return aten.mul(aten.add(accum, bias), 1.1)

    a, b, bias = random(M, K).bfloat16(), random(K, N).bfloat16(), ROW.bfloat16()
    module = make_fx(function, tracing_mode="fake")(a @ b, bias)
    accum, operand, *body, output = module.graph.nodes
    graph = read(Cone(accum, tuple(body), {operand: "bias"}, {"D": output.args[0]}), numerics)
    casts = [node for node in graph.nodes if node.op == "cast"]
    assert bool(casts) == (numerics == "torch")
    want = Interpreter(module).run((a.double() @ b.double()).bfloat16(), bias)
    assert why_not(body[0], accum) is None
    if numerics == "torch":
        parsed = replace(parsed_epilogue("def f(accum, bias): return accum + bias"), graph=graph)
        assert torch.equal(ef.gemm(a, b, epilogue=parsed, bias=bias), want)


@pytest.mark.parametrize("rows", [4, 6])
def test_the_sum_of_an_expanded_value_counts_its_own_rows(rows: int) -> None:
    def function(accum: Tensor, bias: Tensor) -> Tensor:
        return aten.add(aten.sum(aten.expand(bias, [rows, N]), [0]), aten.sum(accum, [0]))

    bias, a, b = random(N), random(rows, K), random(K, N)
    got = ef.gemm(a, b, epilogue=traced(function, bias, rows=rows), bias_1=bias)
    torch.testing.assert_close(got, function(a @ b, bias), atol=1e-4, rtol=1e-4)
