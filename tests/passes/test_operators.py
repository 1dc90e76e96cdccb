"""Operator fusion and fission: what is recognised, what is opened, and when neither happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse import passes
from epifuse.fusion import vocabulary
from epifuse.fusion.primitives import Value
from epifuse.fusion.vocabulary import VOCABULARY, Entry
from epifuse.ir import Graph
from epifuse.passes.lower import lower
from epifuse.passes.split_operators import has_costly_body, split_operators
from tests.passes.test_pipeline import problem_for

ACTIVATIONS = [name for name, entry in VOCABULARY.items() if entry.group == "activation"]
COSTLY = [name for name in ACTIVATIONS if has_costly_body(name)]


def calls(graph: Graph) -> list[str]:
    return sorted(node.attr for node in graph.nodes if node.op == "call")


def typed(source: str) -> Graph:
    """The graph after all passes."""
    graph, problem = problem_for(source)
    return passes.run(graph, problem)


def opened(source: str) -> Graph:
    """... and as a kernel has it that gains by sharing."""
    graph, problem = problem_for(source)
    before = passes.run(graph, problem)
    after = split_operators(before, problem)
    passes.verify("split_operators", before, after)
    assert passes.identity(after, problem).digest == passes.identity(before, problem).digest
    return after


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_body_is_recognised_as_its_activation(name: str) -> None:
    """Lowered to primitives and raised again; an activation of cheap operations alone stays as it is."""
    others = [f"x{i}" for i in range(1, len(VOCABULARY[name].signature.parameters))]
    source = f"def epi({', '.join(['accum', *others])}): D = {name}({', '.join(['accum', *others])}); return D"
    graph, problem = problem_for(source, dict.fromkeys(others, torch.empty(8, 12)))
    plain = passes.canonicalise(lower(passes.infer_types(graph, problem), frozenset()), problem)
    raised = passes.fuse_operators(plain, problem)
    passes.verify("fuse_operators", plain, raised)
    assert calls(raised) == ([name] if name in COSTLY else [])
    assert passes.identity(raised, problem).digest == passes.identity(plain, problem).digest


def squared_softplus(x: Value) -> Value:
    """softplus(x)^2."""
    positive = ef.softplus(x)
    return positive * positive


def squared_sine(x: Value) -> Value:
    """sin(x)^2."""
    return ef.sin(x) ** 2 * 1.0


@pytest.mark.parametrize("function", [squared_softplus, squared_sine])
def test_a_new_body_is_recognised_in_any_spelling(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with default arguments holds `x * 1.0`, which the graph that is searched does not."""
    name = function.__name__
    monkeypatch.setitem(VOCABULARY, name, Entry(name, "activation", function))
    monkeypatch.setitem(vocabulary._OUR_OBJECTS, id(function), name)

    def epi(accum: Any) -> Any:
        D = function(accum)
        return D

    graph, problem = problem_for(epi)
    plain = passes.canonicalise(lower(passes.infer_types(graph, problem), frozenset()), problem)
    assert calls(passes.fuse_operators(plain, problem)) == [name]


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("accum * sigmoid(accum)", ["silu"]),
        ("torch.sigmoid(accum) * accum", ["silu"]),
        ("accum * (1 / (exp(-accum) + 1.0))", ["silu"]),
        ("accum * (1 + erf(accum * 0.7071067811865476)) * 0.5", []),  # in another order, with other bits
        ("(1 + erf(0.7071067811865476 * accum)) * (accum * 0.5)", ["gelu_erf"]),
        ("C * sigmoid(accum)", ["sigmoid"]),
        ("1 / (2 + exp(-accum))", []),
        ("-1 / (1 + exp(-accum))", []),
        ("1 / (1 + exp(accum))", []),
        ("(accum + C) * sigmoid(accum + C)", ["silu"]),
        ("maximum(accum, 0)", []),
        ("where(accum > 20.0, accum, log1p(exp(accum)))", ["softplus"]),  # as PyTorch's compiler writes it
        ("where(accum * 1 > 20, accum, torch.log1p(torch.exp(accum)))", ["softplus"]),
        ("where(accum > 100.0, accum, log1p(exp(accum)))", []),  # infinite from 89 to 100, as written
        ("where(accum > 20.0, C, log1p(exp(accum)))", []),
        ("where(accum < 20.0, accum, log1p(exp(accum)))", []),
    ],
)
def test_what_is_recognised(expression: str, found: list[str]) -> None:
    assert calls(typed(f"def epi(accum, C): D = {expression} + C; return D")) == found


@pytest.mark.parametrize(
    "source",
    [
        "def epi(accum): s = 1 / (1 + exp(-accum)); D = accum * s; return D, s",
        "def epi(accum): s = 1 / (1 + exp(-accum)); D = accum * s - s; return D",
        "def epi(accum): s = 1 / (1 + exp(-accum)); debug_print('{}', s); D = accum * s; return D",
    ],
)
def test_a_value_that_is_needed_is_not_hidden(source: str) -> None:
    assert calls(typed(source)) == ["sigmoid"]


def test_a_value_inside_that_is_needed_stops_it() -> None:
    assert calls(typed("def epi(accum): e = exp(-accum); D = 1 / (1 + e); return D, e")) == []


def test_integers_are_not_activations() -> None:
    assert calls(typed("def epi(accum, labels): D = accum + 1 / (1 + exp(-labels)); return D")) == []


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ("def epi(accum): D = silu(accum); s = sigmoid(accum); return D, s", ["sigmoid"]),
        ("def epi(accum): D = silu(accum) + accum * sigmoid(accum); return D", ["silu"]),
        ("def epi(accum): D = gelu(accum); E = dgelu(D, accum); return D, E", ["dgelu_erf", "gelu_erf"]),
        ("def epi(accum, C): D = silu(C); E = dsilu(accum, C); return D, E", ["sigmoid"]),
        ("def epi(accum, C): D = silu(accum); E = sigmoid(C); return D, E", ["sigmoid", "silu"]),
        ("def epi(accum): D = hardswish(accum); E = hardsigmoid(accum); return D, E", ["hardsigmoid", "hardswish"]),
        ("def epi(accum): D = sigmoid(accum); E = exp(-accum); return D, E", ["sigmoid"]),
        ("def epi(accum, C): D = elu(accum); E = elu(accum, C); return D, E", ["expm1"]),
        ("def epi(accum): D = relu(accum); E = relu(-accum); return D, E", ["relu", "relu"]),
    ],
)
def test_what_is_opened(source: str, left: list[str]) -> None:
    assert calls(opened(source)) == left


def test_a_native_form_is_computed_once() -> None:
    graph, problem = problem_for("def epi(accum, C): D = silu(C); E = dsilu(accum, C); s = sigmoid(C); return D, E, s")
    shared = lower(split_operators(passes.run(graph, problem), problem), frozenset({"sigmoid", "silu", "dsilu"}))
    assert calls(shared) == ["sigmoid"]


def test_the_numbers_stay() -> None:
    a, b, c = torch.randn(40, 8), torch.randn(8, 30), torch.randn(40, 30)
    D, E = ef.gemm(a, b, epilogue="def epi(accum, C): D = silu(C); E = dsilu(accum, C); return D, E", C=c)
    torch.testing.assert_close(D, torch.nn.functional.silu(c))
    torch.testing.assert_close(E, ef.dsilu(a @ b, c))


# --- known reductions --------------------------------------------------------------------------------------------


def reductions(graph: Graph) -> list[str]:
    return [f"{node.attr[0]} {''.join(f.axis for f in node.attr[1])}" for node in graph.nodes if node.op == "reduce"]


@pytest.mark.parametrize("rows", [4, 6])
def test_a_count_is_that_of_the_size(rows: int) -> None:
    given = torch.eye(12)[:rows]
    got = ef.gemm(torch.zeros(rows, 3), torch.zeros(3, 12), epilogue=ONE_HOT_SUM, C=given)
    assert got == rows


ONE_HOT_SUM = "def epi(accum, C): s = sum(assume_one_hot(C)); return s"


@pytest.mark.parametrize(
    ("expression", "left"),
    [
        ("sum(h, dim=-1)", []),
        ("sum(h)", []),
        ("sum(h, dim=0)", ["sum m"]),  # the ones lie along the other axis
        ("amax(h, dim=-1)", []),
        ("norm(h)", []),
        ("mean(h, dim=-1)", ["mean n"]),
        ("amin(h, dim=-1)", ["amin n"]),
        ("sum(h * col, dim=-1)", []),
        ("sum(col * h)", ["sum m"]),
        ("sum(h * alpha, dim=-1)", []),
        ("sum(h * bias, dim=-1)", ["sum n"]),
        ("sum(h * accum, dim=-1)", ["sum n"]),
        ("sum(h + col, dim=-1)", ["sum n"]),
        ("sum(h * h, dim=-1)", ["sum n"]),
    ],
)
def test_reductions_of_a_one_hot_operand(expression: str, left: list[str]) -> None:
    source = f"def epi(accum, C, bias, col, alpha): h = assume_one_hot(C); s = {expression}; return s"
    graph = typed(source)
    assert reductions(graph) == left
    given = {
        "C": torch.eye(12)[torch.randint(12, (8,))],
        "bias": torch.randn(12),
        "col": torch.randn(8, 1),
        "alpha": 2.0,
    }
    a, b = torch.randn(8, 4), torch.randn(4, 12)
    names = {**{name: getattr(torch, name) for name in ("sum", "amax", "amin", "mean", "norm")}, **given}
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in names.items()}
    want = eval(expression, {**wide, "h": wide["C"], "accum": a.double() @ b.double()})
    torch.testing.assert_close(ef.gemm(a, b, epilogue=source, **given), want.float())


def test_a_claim_is_no_operation() -> None:
    assert [node.op for node in typed("def epi(accum, C): D = accum * assume_one_hot(C, dim=0); return D").nodes] == [
        "accum",
        "load",
        "mul",
    ]


def test_integers_are_counted() -> None:
    """Their sums are wide; the claim is not used."""
    source = "def epi(accum, labels): h = assume_one_hot(labels, dim=0); s = sum(h, dim=0); return s"
    assert reductions(typed(source)) == ["sum m"]
