"""The gate for kernels that are compiled and not run: faults that are planted are found."""

from dataclasses import replace

import pytest
import torch
from gpu.test_mma_sync import never_run as never_run  # a fixture
from machine_code import Compiled, faults, shared_memory, spills
from machine_code import compiled as compiled  # a fixture

import epifuse as ef
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import multistage
from epifuse.providers.cutedsl.kernel_text import written

HMMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
UMMA = "tcgen05.mma.cta_group::1.kind::f16.collector::a::discard"
SOUND = Compiled(f"  {HMMA} {{%r1}};\n  @%p1 {HMMA} {{%r2}};\n", [0, 0], 99 << 10)


def test_nothing_is_found_in_sound_code():
    assert faults(SOUND, HMMA, 99 << 10) == []


PLANTED = {
    "a spill": (SOUND._replace(spilled=[0, 8]), "spilled: [0, 8] bytes"),
    "no report": (SOUND._replace(spilled=[]), "spilled: [] bytes"),
    "another instruction": (
        SOUND._replace(ptx=SOUND.ptx.replace("bf16", "f16")),
        "products: ['mma.sync.aligned.m16n8k16",
    ),
    "one of another dtype": (SOUND._replace(ptx=SOUND.ptx + HMMA.replace("bf16", "f16")), "products: ['mma.sync"),
    "no product": (SOUND._replace(ptx="fma.rn.f32 %f1;"), "products: []"),
    "a byte too much": (SOUND._replace(shared=(99 << 10) + 1), "shared memory: 101377 of 101376 bytes"),
    "no size": (SOUND._replace(shared=0), "shared memory: 0 of"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    made, told = PLANTED[name]
    (found,) = faults(made, HMMA, 99 << 10)
    assert found.startswith(told)


def test_a_report_is_read_wherever_its_lines_wrap():
    report = (
        "info: Function properties for kernel\n 16 bytes stack frame, 24 bytes\n spill stores, 8 bytes spill loads\n"
    )
    assert spills(report * 2) == [24, 24]


def test_a_launch_says_its_shared_memory():
    config = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr)>"
    launch = """llvm.func @launch() {{
      %1 = llvm.mlir.constant({size} : i64) : i64
      %3 = llvm.getelementptr %2[0, 2] : (!llvm.ptr) -> !llvm.ptr, {config}
      llvm.store %1, %3 : i64, !llvm.ptr
    }}"""
    descriptor = """llvm.func @descriptor() {
      %1 = llvm.mlir.constant(999999 : i64) : i64
      %3 = llvm.getelementptr %2[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.array<16 x i64>
      llvm.store %1, %3 : i64, !llvm.ptr
    }"""
    assert (
        shared_memory(launch.format(size=4096, config=config) + descriptor + launch.format(size=512, config=config))
        == 4096
    )


# --- planted in kernels ----------------------------------------------------------------------------------------------


def kernels(k, cc, dtype=torch.bfloat16):
    a, b = torch.empty(500, k, dtype=dtype), torch.empty(504, k, dtype=dtype).t()
    epilogue = ef.EpilogueArguments.partial("def epi(accum): D = accum; return D\n", {})
    asked = ef.Constraints(precision="tf32") if dtype == torch.float32 else ef.Constraints()
    return ef.get_kernels(ef.GemmArguments(a, b, epilogue=epilogue, constraints=asked), cc=cc)


def room(cc):
    return TARGETS[cc].shared_memory


def test_a_tile_that_is_refused_as_it_spills_is_found(compiled, never_run, monkeypatch):
    monkeypatch.setattr(multistage, "unfit", lambda *_: None)
    kernel = next(one for one in kernels(257, 80) if one.spec.design.tile == (256, 128))
    (found,) = faults(compiled(kernel), HMMA, room(80))
    assert found.startswith("spilled")


@pytest.mark.parametrize(("cc", "product"), [(86, HMMA), (100, UMMA)])
def test_a_stage_too_many_is_found(cc, product, compiled, never_run):
    """CuTe DSL compiles it."""
    kernel = kernels(256, cc)[-1]
    source = kernel.plan.allocation.program.source
    more = source._replace(design=replace(source.design, stages=source.design.stages + 4))
    assert [one.split(":")[0] for one in faults(compiled(kernel, written(more)), product, room(cc))] == [
        "shared memory"
    ]


def test_a_product_of_another_dtype_is_found(compiled, never_run):
    (found,) = faults(compiled(kernels(256, 86, torch.float32)[0]), HMMA, room(86))
    assert found == "products: ['mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32']"
