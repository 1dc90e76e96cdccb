"""Sums of softplus and logsigmoid on Hopper: which have their logarithms summed apart, and that they mean the same."""

import sys

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.providers.cutedsl.log_sums import LOGARITHM_SUMS
from epifuse.providers.cutedsl.lowering import lower

M, N = 64, 32


def graph_of(body, outputs="loss"):
    source = f"def epilogue(accum, C, row, beta, I):\n    {body}\n    return {outputs}\n"
    operands = {"C": torch.empty(M, N), "row": torch.empty(N), "beta": 1.0, "I": torch.empty(M, N, dtype=torch.int32)}
    a = torch.empty(M, 64, dtype=torch.bfloat16)
    b = torch.empty(64, N, dtype=torch.bfloat16)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(source, operands))
    return lower(args.graph, args.problem).walked


def reduced(graph):
    return sorted(node.attr[0] for node in graph.nodes if node.op == "reduce")


def softplus(x, *_):
    """PyTorch's is x itself above 20, where the logarithm still counts in float64."""
    return -F.logsigmoid(-x)


def meaning(graph, leaves):
    """The first output in float64."""
    calls = {"softplus": softplus, "logsigmoid": F.logsigmoid}
    values = {}
    for node in graph.nodes:
        below = [values[arg] for arg in node.args]
        if node.op == "const":
            values[node] = torch.tensor(node.attr, dtype=torch.float64)
        elif not below:
            values[node] = leaves[getattr(node.attr, "name", "accum")]
        elif node.op == "reduce":
            name, gone = node.attr
            whole = below[0].exp().log1p() if name in LOGARITHM_SUMS.values() else below[0]
            dims = ["mn".index(factor.axis) for factor in gone]
            values[node] = whole.mean(dims) if name.startswith("mean") else whole.sum(dims)
        else:
            values[node] = (calls[node.attr] if node.op == "call" else PRIMITIVES[node.op].meaning)(*below)
    return values[graph.outputs[0].node]


SPLIT = {
    "loss = sum(softplus(accum))": 1,
    "loss = mean(softplus(accum))": 1,
    "loss = sum(softplus(accum), dim=0)": 1,
    "loss = mean(softplus(accum), dim=-1)": 1,
    "loss = sum(logsigmoid(accum))": 1,
    "loss = -sum(logsigmoid(accum)) / 8": 1,
    "loss = sum(softplus(accum) - accum * C)": 1,
    "loss = sum(where(accum * 0.1 > 20.0, accum * 0.1, log1p(exp(accum * 0.1))) - accum * C)": 1,
    "loss = sum(accum * C - softplus(accum))": 1,
    "loss = sum(-(C - softplus(accum + row)))": 1,
    "loss = mean(C - (accum + (1.0 - -logsigmoid(accum))))": 1,
    "loss = sum(-logsigmoid(accum) + softplus(C + accum))": 1,
    "loss = sum(softplus(accum)) + sum(softplus(C))": 2,
    "loss = sum(maximum(accum, 0) + log1p(exp(-abs(accum))) - accum * C)": 1,
    "loss = sum(log1p(exp(-abs(accum))))": 1,
    "loss = sum(-log1p(exp(-abs(accum))))": 1,
    "loss = sum(log1p(exp(-abs(accum))) - C)": 1,
    "loss = mean(C - log1p(exp(-abs(accum))))": 1,
    "loss = sum(C + (row - log1p(exp(-abs(accum)))))": 0,
    "loss = sum(softplus(accum) + row)": 1,
}


@pytest.mark.parametrize("body", SPLIT)
def test_a_logarithm_that_only_a_sum_reads_is_summed_apart(body):
    torch.manual_seed(0)
    graph = graph_of(body)
    names = reduced(graph)
    assert sum(name in LOGARITHM_SUMS.values() for name in names) == SPLIT[body]
    leaves = {"accum": 9 * torch.randn(M, N).double(), "C": torch.randn(M, N).double(), "row": torch.randn(N).double()}
    written = body.split("= ", 1)[1]
    torch_names = {"softplus": softplus, "logsigmoid": F.logsigmoid, "mean": torch.mean, "sum": torch.sum}
    helpers = {"maximum": lambda x, y: x.clamp_min(y), "where": torch.where, "abs": torch.abs}
    helpers |= {"log1p": torch.log1p, "exp": torch.exp}
    want = eval(written, {**torch_names, **helpers, **leaves})
    torch.testing.assert_close(meaning(graph, leaves), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "body",
    [
        "loss = sum(accum)",
        "loss = sum(softplus(accum) * C)",
        "loss = sum(softplus(accum, 2.0))",
        "loss = sum(softplus(accum, beta))",
        "loss = sum(softplus(accum, 1.0, 5.0))",
        "loss = sum(accum + softplus(row))",
        "loss = amax(softplus(accum))",
        "loss = sum_of_squares(softplus(accum))",
        "t = softplus(accum); loss = sum(t) + amax(t)",
        "loss = sum(mish(accum))",
        "loss = sum(log1p(exp(accum)))",
        "loss = sum(log1p(exp(-abs(accum))) + row)",
        "loss = sum(log1p(exp(-abs(accum))) + 1.0)",
        "loss = mean(beta - log1p(exp(-abs(accum))))",
        "loss = sum(log1p(exp(-abs(accum))) + I + I)",
        "loss = sum(I - log1p(exp(-abs(accum))))",
        "loss = sum(log1p(exp(-abs(accum))) + (C > 0) + (accum > 0))",
        "loss = sum(-(log1p(exp(-abs(accum))) + (C > 0)))",
        "loss = sum(logsigmoid(I))",
        "loss = sum(log1p(exp(abs(accum))))",
    ],
)
def test_others_are_not(body):
    assert not set(LOGARITHM_SUMS.values()) & set(reduced(graph_of(body)))


def test_a_value_that_is_stored_too_is_summed_as_it_is_stored():
    graph = graph_of("D = softplus(accum) - C; loss = sum(D)", "D, loss")
    assert reduced(graph) == ["sum"]


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize(
    "body", ["loss = sum({L} + row, dim=0) * row", "loss = sum({L} + beta)", "loss = sum({L} - C)"]
)
def test_what_lies_beside_a_lone_logarithm_costs_no_kernel(body, m):
    """It would be the source of a reduction: of one that is not full-size, or that the finish reads too."""
    source = f"def epilogue(accum, C, row, beta):\n    {body.format(L='log1p(exp(-abs(accum)))')}\n    return loss\n"
    operands = {"C": torch.empty(m, N), "row": torch.empty(N), "beta": 1.0}
    used = {name: operands[name] for name in operands if name in body}
    source = source.replace("accum, C, row, beta", ", ".join(["accum", *used]))
    a, b = torch.empty(m, 64, dtype=torch.bfloat16), torch.empty(64, N, dtype=torch.bfloat16)
    assert ef.get_kernels(ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(source, used)), cc=90)


def test_a_long_chain_does_not_exceed_the_stack(whole_sweeps):
    """Of more terms than Python's stack has frames, or of ten times as many."""
    count = sys.getrecursionlimit() * (100 if whole_sweeps else 12) // 10
    terms = "\n".join(f"    t{i + 1} = t{i} + accum" for i in range(count))
    graph = graph_of(f"t0 = softplus(accum)\n{terms}\n    loss = sum(t{count})")
    assert reduced(graph) == ["sum", "sum_log1p_exp"]
