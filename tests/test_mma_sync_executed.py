"""The kernel for mma.sync, executed on the CPU from its PTX: its copies, its main loop, and what it stores."""

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu.test_mma_sync import BF16, PLAIN
from gpu.test_mma_sync import never_run as never_run  # a fixture
from machine_code import reported
from ptx_machine import Kernel, TwoCopiesError, execute

import epifuse as ef
from epifuse.providers.cutedsl import MULTISTAGE_DESIGNS
from epifuse.providers.cutedsl.design import Design

THREADS = 256
ALIGNED, ODD = (264, 136, 264), (259, 131, 141)
"""(M, N, K): several tiles each, in one block, with more blocks of K than stages, and a rest along each."""
BAND = 2  # tiles along m
NAN = 0xFF
WAITS = 3  # before the main loop, in it and behind it


@pytest.mark.sweep("design", "layouts")
@pytest.mark.parametrize("layouts", [("rows", "rows"), ("rows", "columns"), ("columns", "rows"), ("odd", "rows")])
@pytest.mark.parametrize("design", MULTISTAGE_DESIGNS, ids=str)
def test_products(design: Design, layouts: tuple[str, str], tmp_path: Path, never_run: None) -> None:
    a, b = _matrices(*layouts)
    kernels = {kernel.spec.design: kernel for kernel in ef.get_kernels(_arguments(a, b), cc=80)}
    if design not in kernels:
        assert "odd" in layouts
        pytest.skip("its accumulator leaves no registers for copies of single elements")
    ptx, step = _compiled(kernels[design], tmp_path)
    assert torch.equal(_executed(ptx, step, a, b), _product(a, b))


@pytest.mark.parametrize(("what", "count"), [("cp.async.wait_group", WAITS), ("bar.sync", WAITS - 1)])
def test_without_one_of_its_waits_the_product_is_wrong(what: str, count: int, tmp_path: Path, never_run: None) -> None:
    """That what is executed would show that a wait is missing. Nothing uses what is read behind the last barrier but
    one, so that the last one changes no result."""
    a, b = _matrices("rows", "rows")
    (kernel,) = (one for one in ef.get_kernels(_arguments(a, b), cc=80) if one.spec.design.tile == (128, 64))
    ptx, step = _compiled(kernel, tmp_path)
    lines = ptx.splitlines()
    found = [i for i, line in enumerate(lines) if line.split("//")[0].split()[:1] == [what]]
    assert len(found) == WAITS
    for i in found[:count]:
        with suppress(TwoCopiesError):
            result = _executed("\n".join(lines[:i] + lines[i + 1 :]), step, a, b)
            assert not torch.equal(result, _product(a, b)), lines[i]


def _matrices(*layouts: str) -> list[torch.Tensor]:
    """(M, K) and (N, K) of small whole numbers, each along K or along its rows in memory."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    m, n, k = ODD if "odd" in layouts else ALIGNED
    drawn = torch.Generator().manual_seed(0)
    matrices = [torch.randint(-8, 8, (rows, k), generator=drawn).to(BF16) for rows in (m, n)]
    return [x if layout != "columns" else x.t().contiguous().t() for x, layout in zip(matrices, layouts, strict=True)]


def _arguments(a: torch.Tensor, b: torch.Tensor) -> ef.GemmArguments:
    return ef.GemmArguments(a, b.t(), epilogue=ef.EpilogueArguments.partial(PLAIN, {}))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.t().double()).to(BF16)


def _compiled(kernel: ef.Kernel, folder: Path) -> tuple[str, tuple[int, int]]:
    """PTX, and rows and columns of the result between the tiles of a CTA."""
    program = kernel.plan.allocation.program
    return reported(program.text, folder).__ptx__, program.design.step


def _executed(ptx: str, step: tuple[int, int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """D, by one CTA."""
    starts = np.cumsum([0, *(-(-2 * x.numel() // 16) * 16 for x in (a, b))])
    shape = len(a), len(b)
    memory = np.full(starts[-1] + 2 * math.prod(shape), NAN, np.uint8)
    for start, x in zip(starts, (a, b), strict=False):
        memory[start : start + 2 * x.numel()] = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
    parameters = [
        *(_factor(start, x) for start, x in zip(starts, (a, b), strict=False)),
        struct.pack("<qiiiiqqq", starts[-1], *shape, 1, 0, shape[1], 1, 0),
        *_raster(shape, step),
    ]
    execute(Kernel.of(ptx, "Sm80Gemm"), parameters, memory, [0], THREADS, together=THREADS // 2)
    return torch.from_numpy(memory[starts[-1] :].view(np.int16)).view(BF16).view(shape)


def _factor(start: int, x: torch.Tensor) -> bytes:
    """A or B as (rows, K, 1), of whose strides one is known to be 1."""
    stride = max(x.stride())
    return struct.pack("<qiiiiqq", start, *x.shape, 1, 0, stride, 0)


def _raster(shape: Sequence[int], step: Sequence[int]) -> list[bytes]:
    """The shape and the order of tiles, as `raster.raster` computes them on the host."""
    down, across = (-(-extent // size) for extent, size in zip(shape, step, strict=True))
    counts = [*shape, 1, down * across, down]
    divisors = [down * across, across * BAND, BAND, down % BAND or BAND]
    packed = [struct.pack("<i", count) for count in counts]
    for value in divisors:
        reciprocal = -(-(1 << 62) // value)
        packed += [
            struct.pack("<i", value),
            *(struct.pack("<q", x) for x in (reciprocal >> 31, reciprocal % (1 << 31))),
        ]
    return packed
