"""What leaves the Hopper kernel otherwise than as a 16-bit or float32 tile, compiled for sm_90a: no spills."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.dtypes import short
from epifuse.providers.cutedsl import inputs, load
from epifuse.providers.cutedsl.accesses import arrange
from epifuse.providers.cutedsl.kernel_text import KernelSource, written
from epifuse.providers.cutedsl.lowering import lower
from tests.test_sm90_compile import arguments, hopper_kernel, spills

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

F8, MASK = torch.float8_e4m3fn, torch.bool
QUANTISED = "def epi(accum, scale): D = relu(accum) * scale; top = absmax(accum); return D, top"
MASKED = "def epi(accum, bias): x = accum + bias; Aux = x > 0; D = where(Aux, x, 0.0); return D, Aux"
COUNTS = torch.empty(512, 512, dtype=torch.int32)
HEADS = "def epi(accum, bias): D = (accum + bias).reshape(512, 8, 64).permute(1, 0, 2); return D"
PLACED = "def epi(accum, C): D = accum + C; return D"


def storing(source: str, dtypes: dict[str, torch.dtype], **operands: Any) -> ef.GemmArguments:
    made = arguments(source, **operands)
    return ef.GemmArguments(made.A, made.B, epilogue=made.epilogue, out_dtypes=dtypes)


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
    from epifuse.providers.cutedsl.compile import compile_text

    plan = kernel.plan
    found = arrange(lower(plan.graph, plan.problem).walked, plan.problem, dict(plan.spec.design)["design"])
    assert found is not None
    options = f" remarks{{ptx}} --keep-ptx --dump-dir={folder}"
    text = written(KernelSource.of(inputs.filled(plan.problem), *found))
    ptx: str = compile_text(text, load.OPTIONS + options).__ptx__
    return ptx


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


def test_a_column_apart_the_load_is_another_kernel():
    """Which places are aligned is known while planning, and a part of what is compiled."""
    keys = set()
    for span in (513, 514, 516):
        args = storing(PLACED, {}, C=torch.empty(512, span)[:, :512])
        keys.add(dict(hopper_kernel(args).plan.allocation.transports)["C"])
    why = ", as a stride of {} bytes is no multiple of 16"
    single, pairs = f"direct, 4 bytes at a time{why.format(2052)}", f"direct, 8 bytes at a time{why.format(2056)}"
    assert keys == {single, pairs, "TMA through shared memory"}


DIRECT = {
    "a stride of 2052 bytes is no multiple of 16": torch.empty(512, 513)[:, :512],
    "it does not start at a multiple of 16 bytes": torch.empty(512, 516)[:, 1:513],
    "its values have 64 bits": torch.empty(512, 512, dtype=torch.int64),
    "neither its rows nor its columns are contiguous": torch.empty(512, 512, 4)[..., 0],
    "it is expanded: hand in what it was expanded from": torch.empty(1, 512).expand(512, 512),
}


@pytest.mark.parametrize("why", DIRECT)
def test_a_plan_says_why_an_operand_goes_direct(why):
    assert f", as {why}\n" in str(hopper_kernel(storing(PLACED, {}, C=DIRECT[why])).plan)


OUTPUTS = {
    "allocated": {},
    "padded": {"D": torch.empty(512, 264, dtype=torch.bfloat16)[:, :260]},
    "by columns": {"D": torch.empty(260, 520, dtype=torch.bfloat16)[:, :516].t()},
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_a_plan_says_why_an_output_goes_direct(case):
    """Padding does not help where the last granule of a line would be written too."""
    given = OUTPUTS[case]
    m, line = (516, 1032) if case == "by columns" else (512, 520)
    plan = str(hopper_kernel(storing("def epi(accum): D = accum; return D", {}, m=m, n=260, **given)).plan)
    assert f" at a time, as its contiguous lines of {line} bytes are no multiple of 16\n" in plan


def test_views_of_one_operand_are_said_to_travel_each_in_its_own_way():
    heads = "(accum + C).reshape(512, 8, 64) + C.reshape(512, 64, 8).permute(0, 2, 1)"
    source = f"def epi(accum, C): D = ({heads}).reshape(512, 512); return D"
    lines = str(hopper_kernel(storing(source, {}, C=torch.empty(512, 512))).plan).splitlines()
    first, second = (line for line in lines if line.startswith("  load     C: "))
    assert first.endswith("TMA through shared memory")
    assert second.endswith("as no single stride steps along M, N or the batches")


def test_a_plan_says_which_operands_made_room():
    names = [f"C{i}" for i in range(5)]
    source = f"def epi(accum, {', '.join(names)}): D = accum + {' + '.join(names)}; return D"
    args = storing(source, {}, k=4096, **{name: torch.empty(512, 512) for name in names})
    plan = str(hopper_kernel(args).plan)
    assert "direct, 8 bytes at a time, as A and B have more stages so" in plan
    assert "direct, 8 bytes at a time, as shared memory has no room for all of them" in plan


def test_integers_reach_a_narrow_float_by_way_of_float32(tmp_path):
    """As torch's do: two roundings. LLVM makes one conversion of two that it sees."""
    source = "def epi(accum, C): D = C.to(torch.bfloat16); return D"
    text = compiled(storing(source, {"D": torch.float32}, C=COUNTS), (128, 128), tmp_path)
    assert "cvt.rn.f32.s32" in text
    assert "cvt.rn.bf16.s32" not in text
