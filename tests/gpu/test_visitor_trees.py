"""Every built-in fusion of CUTLASS on the GPU, beside its formula in PyTorch in float64."""

from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.testing import assert_close_to_reference
from tests.evt.helpers import product
from tests.evt.test_fusion import CASES, K, M, N, operands

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CASES)
def test_a_fusion_is_its_formula(name: str) -> None:
    """bfloat16 inputs, whose products float64 holds exactly; outputs in float32 unless the fusion quantises."""
    case = CASES[name]
    a, b = (torch.randn(shape).bfloat16() for shape in ((M, K), (K, N)))
    named = operands(case)
    given = {key: moved(value, DEVICE) for key, value in named.items()}
    outputs = [output.name for output in case.tree.__epifuse__().graph.outputs]
    dtypes = dict.fromkeys(outputs, torch.float32) | case.dtypes
    epilogue = ef.EpilogueArguments.partial(case.tree, given)
    args = ef.GemmArguments(moved(a, DEVICE), moved(b, DEVICE), epilogue=epilogue, out_dtypes=dtypes)
    kernels = ef.get_kernels(args)
    if not kernels:
        pytest.skip(str(ef.explain(args).refusals[0]))
    got = {key: value.cpu() for key, value in kernels[0].run(args).items()}
    assert_close_to_reference(got, case.formula, product(a.float(), b.float()), **named)
