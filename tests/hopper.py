"""Epilogues and problems for tests of the Hopper kernel, and their plans. Imports no cutlass."""

from typing import Any

import torch

import epifuse as ef
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import DESIGNS
from epifuse.providers.cutedsl.clusters import RankTable
from epifuse.providers.cutedsl.family import family_of
from epifuse.providers.cutedsl.lowering import lower

BF16 = torch.bfloat16


def bias_gelu(accum, bias):
    D = ef.gelu(accum + bias, approximate="tanh")
    return D


def bias_relu(accum, bias):
    D = ef.relu(accum + bias)
    return D


def residual_and_mask(accum, C, column, alpha):
    t = alpha * accum + C * column
    D = ef.silu(t)
    Aux = ef.where(ef.index_n(accum) <= ef.index_m(accum), t, 0.0)
    return D, Aux


def arguments(epilogue, m=512, n=512, k=256, dtype=BF16, b_transposed=True, allowed=False, **operands):
    a = torch.empty(m, k, dtype=dtype)
    b = torch.empty(n, k, dtype=dtype).t() if b_transposed else torch.empty(k, n, dtype=dtype)
    constraints = ef.Constraints(allow_recompute=allowed)
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, operands), constraints=constraints)


def hopper_kernel(args):
    kernels = ef.get_kernels(args, cc=90)
    assert kernels, ef.explain(args, cc=90)
    return kernels[0]


def reasons(args):
    """The reasons why no design of the Hopper kernel carries the problem, without the ways out that follow each."""
    assert ef.get_kernels(args, cc=90) == []
    return {r.reason.partition("; ")[0] for r in ef.explain(args, cc=90).refusals if r.kernel.startswith("sm90")}


CASES = {
    "plain": arguments(lambda accum: accum),
    "b by columns": arguments(lambda accum: accum, b_transposed=False),
    "bias gelu": arguments(bias_gelu, bias=torch.empty(512, dtype=BF16)),
    "residual": arguments(residual_and_mask, C=torch.empty(512, 512), column=torch.empty(512, 1), alpha=0.5),
}


SCHEDULES = {design.tile: design for design in reversed(DESIGNS) if design.cluster == (2, 1)}


def layer_norm(accum, C, weight, bias):
    x = accum + C
    mean = ef.mean(x, dim=-1, keepdim=True)
    centred = x - mean
    D = centred * ef.rsqrt(ef.mean(centred * centred, dim=-1, keepdim=True) + 1e-5) * weight + bias
    return D, mean


def many(operands, outputs, dtype=BF16, k=256, size=512):
    """Arguments whose outputs are each the sum of the scaled product and of a product of two operands, all of one
    dtype."""
    names = [f"C{i}" for i in range(operands)]
    terms = [f"{names[i % operands]} * {names[(i + 1) % operands]}" for i in range(outputs)]
    sums = "".join(f"    D{i} = accum * {i + 1.5} + {terms[i]}\n" for i in range(outputs))
    source = (
        f"def epilogue(accum, {', '.join(names)}):\n{sums}    return {', '.join(f'D{i}' for i in range(outputs))}\n"
    )
    names += [f"D{i}" for i in range(outputs)]
    tensors = {name: torch.empty(size, size, dtype=dtype) for name in names}
    return arguments(source, m=size, n=size, k=k, **tensors)


def arranged(args, design):
    """The program, and the design with its stages."""
    family = family_of(lower(args.graph, args.problem), args.problem._replace(target=TARGETS[90]))
    found = family.fitted(design)
    assert found is not None
    return found


def residual(accum, C):
    D = accum + C
    return D


SPILLING = "registers spill: this tile's accumulator leaves too few for so many operands and outputs"


PLACED = "def epi(accum, C): D = accum + C; return D"


def storing(source: str, dtypes: dict[str, torch.dtype], **operands: Any) -> ef.GemmArguments:
    made = arguments(source, **operands)
    return ef.GemmArguments(made.A, made.B, epilogue=made.epilogue, out_dtypes=dtypes)


RANKED = RankTable([0], 1), True
"""A table of ranks that replaces a GPU's in tests without a GPU."""
