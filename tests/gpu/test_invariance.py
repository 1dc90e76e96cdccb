"""Rows have the same bits whatever M is and wherever they stand, where that was asked for."""

import random

import pytest
import torch
from gpu.harness import Machine

import epifuse as ef
from tests.test_invariance import CASES, K, operands_of

MOST = 8192
ROWS = sorted(
    {1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, MOST}
    | {random.Random(seed).randrange(1, MOST) for seed in range(19)}
)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "n"), [(name, n) for name, (_, extents) in CASES.items() for n in extents])
def test_rows_have_the_same_bits_among_any_others(name: str, n: int, hopper: Machine) -> None:
    function = CASES[name][0]
    a, b = hopper.normal(MOST, K, dtype=torch.bfloat16), hopper.normal(n, K, dtype=torch.bfloat16).t()
    operands = {
        key: hopper.normal(*info.shape, dtype=info.dtype) for key, info in operands_of(function, MOST, n).items()
    }
    asked = ef.Constraints(batch_invariant=True)

    def results(first: int, m: int) -> dict[str, torch.Tensor]:
        own = {key: value[first : first + m] if value.dim() == 2 else value for key, value in operands.items()}
        epilogue = ef.EpilogueArguments.partial(function, own)
        args = ef.GemmArguments(a[first : first + m], b, epilogue=epilogue, constraints=asked)
        outputs = args.allocate()
        args = ef.GemmArguments(
            a[first : first + m], b, epilogue=ef.EpilogueArguments(function, **own, **outputs), constraints=asked
        )
        ef.get_kernels(args)[0].run(args)
        return outputs

    whole = results(0, MOST)
    for m in ROWS:
        first = random.Random(m).randrange(0, MOST - m + 1)
        for key, found in results(first, m).items():
            wanted = whole[key][first : first + m]
            assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8)), (key, m, first)
