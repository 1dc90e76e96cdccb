"""Every built-in fusion of CUTLASS on the GPU, beside its formula in PyTorch in float64."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine

import epifuse as ef
from epifuse.tools.testing import assert_close_to_reference
from tests.evt.helpers import product
from tests.evt.test_fusion import CASES, K, M, N, operands

REFUSED: dict[str, str] = {}
"""What the Hopper kernel does not carry yet, and why."""


def moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def arguments(name: str, device: str) -> tuple[ef.GemmArguments, dict[str, Any]]:
    """bfloat16 inputs, whose products float64 holds exactly; outputs in float32 unless the fusion quantises."""
    case = CASES[name]
    a, b = (torch.randn(shape).bfloat16() for shape in ((M, K), (K, N)))
    named = operands(case)
    given = {key: moved(value, device) for key, value in named.items()}
    outputs = [output.name for output in case.tree.__epifuse__().graph.outputs]
    dtypes = dict.fromkeys(outputs, torch.float32) | case.dtypes
    epilogue = ef.EpilogueArguments.partial(case.tree, given)
    return ef.GemmArguments(moved(a, device), moved(b, device), epilogue=epilogue, out_dtypes=dtypes), named


@pytest.mark.parametrize("name", CASES)
def test_what_hopper_refuses_is_listed(name: str) -> None:
    args, _ = arguments(name, "cpu")
    reasons = {r.reason for r in ef.explain(args, cc=90).refusals if r.kernel.startswith("sm90_gemm")}
    assert (not ef.get_kernels(args, cc=90)) == (name in REFUSED), reasons
    assert name not in REFUSED or all(REFUSED[name] in reason for reason in reasons)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_fusion_is_its_formula(machine: Machine, name: str) -> None:
    args, named = arguments(name, machine.device)
    got = machine.kernel(args).run(args)
    assert_close_to_reference(got, CASES[name].formula, product(args.A.cpu().float(), args.B.cpu().float()), **named)
