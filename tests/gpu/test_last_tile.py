"""Operands of a CTA's last tile, which wait in stages of A and B: with one tile a CTA, and with several."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, check

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS

TILES = ((128, 128), (128, 256), (256, 128), (64, 256))
PINNED = [
    design
    for design in DESIGNS
    if design.tile in TILES and (design.cluster == (2, 1) or design.tile[0] * design.tile[1] == 128 * 128)
]
OPERANDS = {
    "bfloat16": {"C": (torch.bfloat16, "rows")},
    "float32": {"C": (torch.float32, "padded")},
    "by columns": {"C": (torch.float16, "columns")},
    "of two widths": {"C": (torch.uint8, "rows"), "E": (torch.bfloat16, "rows")},
}
K = 1032  # so long that ping-pong has spare stages too; its last block of K is ragged
SHAPES = ((80, 144), (1296, 3600))  # the larger one gives CTAs more tiles than one, of 128 x 256 too


def source_of(operands: Any) -> str:
    return f"def epi(accum, {', '.join(operands)}): D = accum - {' * '.join(operands)}; return D\n"


@pytest.mark.parametrize("design", PINNED, ids=str)
@pytest.mark.parametrize("case", OPERANDS)
def test_operands_of_the_last_tile(case: str, design, machine: Machine) -> None:
    for m, n in SHAPES if machine.gpu else SHAPES[:1]:  # 8 s a case on a CPU, where tiles are the CPU's
        a, b = machine.whole(m, K, most=1), machine.whole(K, n, most=1)
        operands = {
            name: machine.laid_out(torch.randint(0, 100, (m, n)).to(dtype), layout)
            for name, (dtype, layout) in OPERANDS[case].items()
        }
        pinned = ef.Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule, split=1)
        options = {"constraints": pinned if machine.gpu else None, "layouts": ("rows",)}
        check(machine, source_of(operands), a, b, operands, out_dtypes=torch.bfloat16, **options)


@pytest.mark.parametrize("names", ["C", "CE", "CEF"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operands_that_are_read_when_they_are_computed(names: str, dtype: torch.dtype, machine: Machine) -> None:
    """Beside 192 accumulators a thread there are registers for one operand of 16 bits a subtile ahead."""
    m, n = SHAPES[machine.gpu]
    a, b = machine.whole(m, K, most=1), machine.whole(K, n, most=1)
    operands = {name: machine.laid_out(torch.randint(0, 9, (m, n)).to(dtype), "rows") for name in names}
    fits = len(names) * dtype.itemsize <= 4
    pinned = ef.Constraints((128, 192), (2, 1), "pingpong", split=1) if machine.gpu and fits else None
    options = {"constraints": pinned, "layouts": ("rows",)}
    check(machine, source_of(operands), a, b, operands, out_dtypes=torch.bfloat16, **options)


@pytest.mark.parametrize("batches", [2, 133])
def test_of_several_batches(batches: int, machine: Machine) -> None:
    """One operand for all batches, and one of each; on a CPU, whose kernel has no waves of tiles, few."""
    batches = batches if machine.gpu else min(batches, 5)
    a, b = machine.whole(batches, 136, K, most=1), machine.whole(batches, K, 264, most=1)
    operands = {
        "C": machine.laid_out(torch.randint(0, 100, (batches, 136, 264)).bfloat16(), "rows"),
        "E": machine.laid_out(torch.randint(0, 100, (136, 264)).bfloat16(), "rows"),
    }
    check(machine, source_of(operands), a, b, operands, out_dtypes=torch.bfloat16, layouts=("rows",))


def test_beside_a_long_main_loop(machine: Machine) -> None:
    """K of many blocks: all stages are used again and again before the last tile's operands come."""
    m, n, k = (1296, 1808, 2568) if machine.gpu else (136, 264, 2568)
    a, b = machine.whole(m, k, most=1), machine.whole(k, n, most=1)
    C = machine.laid_out(torch.randint(0, 100, (m, n)).bfloat16(), "rows")
    source = "def epi(accum, C): D = accum - C; rows = sum_of_squares(D, dim=-1); return D, rows\n"
    pinned = ef.Constraints((128, 128), (2, 1), "pingpong", split=1) if machine.gpu else None
    check(machine, source, a, b, {"C": C}, out_dtypes=torch.bfloat16, constraints=pinned, layouts=("rows",))
