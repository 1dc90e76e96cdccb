"""A kernel that does what the Hopper kernel does with a stage of a weight of 8 bits: rows into shared memory, swizzled
as TMA leaves them, and from there into the registers that wgmma takes A from, which it writes down."""

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.utils import hopper_helpers as sm90

from epifuse.providers.cutedsl.device_types import DTYPES
from epifuse.providers.cutedsl.kernels.converted import Converted
from epifuse.providers.cutedsl.kernels.multiply import tiled_multiplication
from epifuse.providers.cutedsl.kernels.sm90_gemm import LayoutEnum, SmemAllocator

ROWS, STAGES = 64, 2
COUNT = 32
"""Registers of a thread."""


class Stage:
    """The second of two stages."""

    def __init__(self, narrow: Any, wide: Any) -> None:
        self.narrow, self.wide, self.converted = narrow, wide, Converted(narrow, wide)

    @cute.jit
    def __call__(self, weight: cute.Tensor, found: cute.Tensor, stream: Any):
        majors, types = (OperandMajorMode.K, OperandMajorMode.K), (self.wide, self.wide)
        mma = tiled_multiplication(types, majors, cutlass.Float32, 1, 16, registers=True)
        layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, 16, 128), self.narrow, STAGES)
        self.stage(weight, found, mma, layout).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def stage(self, weight: cute.Tensor, found: cute.Tensor, mma: cute.TiledMma, layout: cute.ComposedLayout):
        buffer = SmemAllocator().allocate_tensor(self.narrow, layout.outer, 1024, layout.inner)
        thread, _, _ = cute.arch.thread_idx()
        raw = cute.make_tensor(cute.recast_ptr(buffer.iterator, layout.inner, dtype=Uint8), buffer.layout)
        for i in cutlass.range(STAGES * ROWS, unroll=1):
            raw[i % ROWS, thread, i // ROWS] = weight[i * 128 + thread]
        cute.arch.sync_threads()
        fragment = self.converted.fragment(mma, buffer)
        self.converted.fetch(self.converted.start(mma, buffer, thread), buffer, Int32(1), fragment)
        words = cute.recast_tensor(fragment, Uint32)
        for i in cutlass.range_constexpr(COUNT):
            found[thread * COUNT + i] = words[i]


def compiled(wide: torch.dtype, narrow: torch.dtype, folder: Path) -> str:
    """Its PTX."""
    stage = Stage(DTYPES[narrow], DTYPES[wide])
    weight, found = (make_fake_tensor(type_, (cute.sym_int(),), (1,)) for type_ in (Uint8, Uint32))
    options = f"--enable-tvm-ffi --gpu-arch=sm_90a --keep-ptx --dump-dir={folder}"
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(stage, weight, found, stream, options=options, no_jit_engine=True).__ptx__
