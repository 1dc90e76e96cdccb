"""What leaves the Hopper kernel otherwise than as a 16-bit or float32 tile, compiled for sm_90a: no spills."""

import re
from pathlib import Path

import pytest
import torch
from hopper import PLACED, hopper_kernel, storing
from machine_code import reported, spills

import epifuse as ef
from epifuse.base.dtypes import short

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

F8, MASK = torch.float8_e4m3fn, torch.bool
QUANTISED = "def epi(accum, scale): D = relu(accum) * scale; top = absmax(accum); return D, top"
MASKED = "def epi(accum, bias): x = accum + bias; Aux = x > 0; D = where(Aux, x, 0.0); return D, Aux"
COUNTS = torch.empty(512, 512, dtype=torch.int32)
HEADS = "def epi(accum, bias): D = (accum + bias).reshape(512, 8, 64).permute(1, 0, 2); return D"


CASES = {
    "fp8": storing(QUANTISED, {"D": F8}, scale=torch.empty(1)),
    "int8": storing(QUANTISED, {"D": torch.int8}, scale=torch.empty(512, 1)),
    "a mask beside D": storing(MASKED, {}, bias=torch.empty(512)),
    "heads": storing(HEADS, {}, bias=torch.empty(512)),
    "fp8 operand": storing(PLACED, {}, C=torch.empty(512, 512).to(F8)),
    "int64": storing("def epi(accum): D = accum; return D", {"D": torch.int64}),
    "integers to fp8": storing("def epi(accum, C): D = C.to(torch.float8_e4m3fn); return D, accum", {}, C=COUNTS),
    "integers stored as fp8": storing("def epi(accum): D = accum.to(torch.int32).float(); return D", {"D": F8}),
    "counts": storing("def epi(accum): D = sum(accum > 0, dim=1); return D", {}),
}


def compiled(args: ef.GemmArguments, tile: tuple[int, int], folder: Path) -> str:
    """PTX of the kernel in this tile."""
    kernel = next(k for k in ef.get_kernels(args, cc=90) if k.metadata.tile_shape == tile)
    ptx: str = reported(kernel.plan.allocation.program.text, folder).__ptx__
    return ptx


@pytest.mark.sweep
@pytest.mark.parametrize("tile", [(128, 256), (128, 128)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(case, tile, capfd, tmp_path):
    compiled(CASES[case], tile, tmp_path)
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}


PLACES = {
    "pairs of 16 bits": (512, 514, torch.bfloat16, "direct, 4 bytes at a time", 64),
    "pairs of 32 bits": (512, 514, torch.float32, "direct, 8 bytes at a time", 64),
    "single bytes": (512, 513, torch.int8, "direct, 1 byte at a time", 128),
    "rows of TMA": (512, 528, torch.int8, "TMA through shared memory", 0),
}


@pytest.mark.parametrize("place", PLACES)
def test_neighbouring_columns_are_loaded_at_once(place, tmp_path):
    """The plan says how, and a thread's 128 values of a tile are so many loads."""
    rows, span, dtype, way, loads = PLACES[place]
    args = storing(PLACED, {}, C=torch.empty(rows, span, dtype=dtype)[:, :512])
    assert f"C: tile, {short(dtype)}[512, 512], {way}" in str(hopper_kernel(args).plan)
    ptx = compiled(args, (128, 256), tmp_path)
    assert len(re.findall(r"\bld\.global", ptx)) == loads


def test_integers_reach_a_narrow_float_by_way_of_float32(tmp_path):
    """As torch's do: two roundings. LLVM makes one conversion of two that it sees."""
    source = "def epi(accum, C): D = C.to(torch.bfloat16); return D"
    text = compiled(storing(source, {"D": torch.float32}, C=COUNTS), (128, 128), tmp_path)
    assert "cvt.rn.f32.s32" in text
    assert "cvt.rn.bf16.s32" not in text
