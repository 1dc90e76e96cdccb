"""Designs that are chosen where rows are to have the same bits whatever M is."""

import os

import pytest
import torch
from hopper import BF16, hopper_kernel, layer_norm
from processes import run_python

import epifuse as ef

ROWS = (1, 2, 3, 8, 16, 33, 64, 100, 128, 256, 512, 1000, 4096, 8192)
K = 512


def plain(accum):
    return accum


def residual(accum, C):
    D = ef.gelu(accum) + C
    return D


def norms(accum, C):
    x = accum + C
    squares, largest = ef.sum_of_squares(x, dim=-1), ef.absmax(x, dim=-1)
    return x, squares, largest


def logsumexp(accum):
    rows = ef.logsumexp(accum, dim=-1)
    return rows


def softmax(accum):
    D = torch.softmax(accum, dim=-1)
    return D


def largest(accum):
    place, value = accum.argmax(-1), ef.amax(accum, dim=-1)
    return place, value


def swiglu(accum):
    gate, up = accum.chunk(2, dim=-1)
    D = ef.silu(gate) * up
    return D


def swiglu_norms(accum):
    gate, up = accum.chunk(2, dim=-1)
    D = ef.silu(gate) * up
    squares = ef.sum_of_squares(D, dim=-1)
    return D, squares


def head_norms(accum):
    heads = accum.unflatten(-1, (-1, 64))
    normed = heads * torch.rsqrt(ef.mean(heads * heads, dim=-1, keepdim=True) + 1e-6)
    squares = ef.sum_of_squares(accum, dim=-1)
    D = normed.flatten(-2)
    return D, squares


def normalised(accum, C, weight, bias):
    D, Aux = layer_norm(accum, C, weight, bias)
    return D, Aux


CASES = {
    "plain": (plain, (4096,)),
    "residual": (residual, (4096,)),
    "norms": (norms, (1000, 4096)),
    "logsumexp": (logsumexp, (4096, 32000)),
    "largest": (largest, (1000, 32000)),
    "softmax": (softmax, (100, 256, 512, 1000, 2048)),
    "layer norm": (normalised, (128, 384, 512, 1024, 1536)),
    "swiglu": (swiglu, (4096,)),
    "swiglu and norms": (swiglu_norms, (4096,)),
    "head norms": (head_norms, (4096,)),
}


def operands_of(function, m, n):
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    return {name: torch.empty((m, n) if name == "C" else (n,), dtype=BF16, device="meta") for name in names}


def problem(function, m, n, asked):
    a, b = torch.empty(m, K, dtype=BF16, device="meta"), torch.empty(n, K, dtype=BF16, device="meta").t()
    operands = ef.EpilogueArguments.partial(function, operands_of(function, m, n))
    return ef.GemmArguments(a, b, epilogue=operands, constraints=asked)


def chosen(function, m, n, asked):
    return hopper_kernel(problem(function, m, n, asked)).plan


IN_ANY_ORDER = ("plain", "residual", "largest", "swiglu")
REDUCING = [(name, n) for name, (_, extents) in CASES.items() for n in extents if name not in IN_ANY_ORDER]


@pytest.mark.parametrize(("name", "n"), REDUCING)
def test_every_number_of_rows_is_merged_alike(name, n):
    asked = ef.Constraints(batch_invariant=True)
    plans = [chosen(CASES[name][0], m, n, asked) for m in ROWS]
    designs = [plan.allocation.program.design for plan in plans]
    assert len({(design.tile[1], design.exchanged and design.cluster[1]) for design in designs}) == 1


@pytest.mark.parametrize("name", ["norms", "softmax"])
def test_designs_with_other_bits_are_refused_by_name(name):
    function, (n, *_) = CASES[name]
    args = problem(function, 512, n, ef.Constraints(batch_invariant=True))
    said = [one.reason for one in ef.explain(args, cc=90).refusals if "batch_invariant" in one.reason]
    assert said
    known = ("asks for tiles of", "asks for K in one part", "asks for reductions without an exchange")
    assert all(any(words in reason for words in known) for reason in said)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn])
def test_segments_beside_rows_have_a_width_that_runs(dtype):
    """Sums that float32 adds up have no tiles of 192 columns."""
    source = "def f(accum): h = accum.unflatten(-1, (-1, 96)); s = sum(h, -1); t = sum(accum, -1); return s, t"
    for m in (1, 100, 4096):
        a, w = (torch.empty(rows, K, dtype=torch.float32).to(dtype) for rows in (m, 1536))
        args = ef.GemmArguments(
            a,
            w.t(),
            epilogue=ef.EpilogueArguments.partial(source, {}),
            constraints=ef.Constraints(batch_invariant=True),
        )
        widths = {kernel.spec.design.tile[1] for kernel in ef.get_kernels(args, cc=90)}
        assert widths == ({192} if dtype == BF16 else {96})


@pytest.mark.parametrize(
    "written", ["absmax(accum, -1)", "argmax(accum, -1)", "any(accum > 0, -1)", "sum(accum > 0, -1)", "amin(accum, 0)"]
)
def test_what_any_order_gives_has_all_designs(written):
    """As elementwise epilogues have: those that exchange A and B, and tiles of every width."""
    source = f"def f(accum): D = {written}; return D"
    for m in (1, 4096):
        a, b = torch.empty(m, K, dtype=BF16), torch.empty(1024, K, dtype=BF16).t()
        made = ef.EpilogueArguments.partial(source, {})
        each = [
            {kernel.spec for kernel in ef.get_kernels(ef.GemmArguments(a, b, epilogue=made, constraints=asked), cc=90)}
            for asked in (ef.Constraints(split=1), ef.Constraints(split=1, batch_invariant=True))
        ]
        assert each[0] == each[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_cpu_refuses_by_name(dtype):
    """With reasons that hold for sums of integers, which are exact, and no way out that gives up what was asked for."""
    a, b = torch.ones(4, 8, dtype=dtype), torch.ones(8, 4, dtype=dtype)
    args = ef.GemmArguments(
        a,
        b,
        epilogue=ef.EpilogueArguments.partial(plain, {}),
        constraints=ef.Constraints(batch_invariant=True),
    )
    assert not ef.get_kernels(args)
    said = str(ef.explain(args))
    assert "its float products and functions such as silu, whose bits depend on M" in said
    assert "fallback" not in said


def test_the_environment_asks_for_every_call():
    program = "import epifuse as ef, torch; ef.gemm(torch.ones(4, 8), torch.ones(8, 4))"
    environment = {**os.environ, "EPIFUSE_BATCH_INVARIANT": "1"}
    said = run_python("-c", program, env=environment).stderr
    assert "batch_invariant is for GPUs" in said
    assert "hint:" not in said


@pytest.mark.parametrize("n", [1040, 2048])
def test_few_rows_keep_one_launch_instead_of_several(n):
    """Which of both were cheaper follows from M, and they merge rows differently."""
    asked = ef.Constraints(batch_invariant=True, allow_recompute=True)
    plans = set()
    for m in ROWS:
        a, b = torch.empty(m, 4096, dtype=BF16, device="meta"), torch.empty(n, 4096, dtype=BF16, device="meta").t()
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(softmax, {}), constraints=asked)
        plan = ef.explain(args, cc=90).plan
        plans.add((len(plan.allocation.launches), plan.spec.design.tile[1], plan.spec.design.cluster[1]))
    assert len(plans) == 1
