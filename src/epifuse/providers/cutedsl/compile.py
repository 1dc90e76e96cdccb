"""From a kernel's text to a compiled function, by `cute.compile` with fake tensors. Needs no GPU."""

import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor

from epifuse.providers.cutedsl.design import MMA_SYNC, TCGEN05, WGMMA
from epifuse.providers.cutedsl.device_types import DTYPES, HELD
from epifuse.providers.cutedsl.kernel_text import KernelSource, read
from epifuse.providers.cutedsl.kernels.sm80_gemm import Sm80Gemm
from epifuse.providers.cutedsl.kernels.sm90_gemm import Sm90Gemm
from epifuse.providers.cutedsl.kernels.sm100_gemm import Sm100Gemm
from epifuse.providers.cutedsl.partials import reductions_of
from epifuse.providers.cutedsl.ways import Access

# Two compilations at once abort the process (CuTe DSL 4.8.1).
_one_at_a_time = threading.Lock()


def export(text: str, options: str, name: str, path: Path) -> None:
    """Compile the kernel of this text into an object file, whose only symbol is the tvm-ffi function `name`."""
    with _one_at_a_time:
        _compile(read(text), options).export_to_c(str(path), function_name=name, export_only_tvm_ffi_symbols=True)


def warm(options: str) -> None:
    """Compile a kernel that does nothing. Forked children then have what the compiler loads for its first kernel."""
    with _one_at_a_time, tempfile.TemporaryDirectory() as folder:
        tensor = make_fake_tensor(Float32, (cute.sym_int(),), (1,))  # the stream is that of its device
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        flags = {"options": _for("sm_90a", options), "no_jit_engine": True}
        compiled = cute.compile(_launched, tensor, stream, **flags)
        compiled.export_to_c(f"{folder}/warm.o", function_name="warm", export_only_tvm_ffi_symbols=True)


def _for(arch: str, options: str) -> str:
    return f"{options} --gpu-arch={arch}"


@cute.kernel
def _idle() -> None:
    pass


@cute.jit
def _launched(tensor: Any, stream: Any) -> None:
    _idle().launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_text(text: str, options: str) -> Any:
    """Return the compiled kernel of this text. It can be exported, but not called.

    Extents, strides, numbers and the height of raster bands are run-time arguments.
    """
    with _one_at_a_time:
        return _compile(read(text), options)


def load_object(path: Path, name: str) -> Any:
    """Return the raw function in an object file, for systems that have no linker to make a library of the file."""
    with _one_at_a_time:
        return getattr(load_module(str(path), enable_tvm_ffi=True), name)


def _compile(source: KernelSource, options: str) -> Any:
    program, programs = source.program, source.programs
    extents = {name: cute.sym_int(symbol=name.upper()) for name in "mnkl"}
    batches = (extents["l"],) if source.batched else ()
    of_product = cute.sym_int(symbol="PARTS") if program.order else extents["n"]
    swapped, majors, dtypes, at_once = source.design.swapped, source.by_rows, source.dtypes, _elements_per_copy(source)
    shapes = (extents["m"], extents["k"]), (extents["k"], of_product)
    if swapped:  # A and B are handed over as the caller has them, and exchanged in the kernel
        shapes, majors = (shapes[1][::-1], shapes[0][::-1]), (not majors[1], not majors[0])
        dtypes, at_once = dtypes[::-1], at_once[::-1]
    if (how := source.design.rewritten) is not None and how.narrow is not None:
        dtypes = dtypes[0], how.narrow
    sides = zip(dtypes, majors, shapes, at_once, strict=True)
    a, b = (_matrix(dtype, by_rows, (*shape, *batches), elements) for dtype, by_rows, shape, elements in sides)
    modes = len(a.shape)
    tensors, numbers, outputs = (), (), ()
    for region, one in enumerate(programs):
        columns = extents["n"] if one.columns is None else cute.sym_int(symbol=f"N{region}")
        shape = (extents["m"], columns, extents["l"])
        tensors += tuple(_tensor(access, shape, modes, swapped) for _, access in one.tensors)
        kinds = [one.graph.types[node].kind for node in one.numbers]
        numbers += tuple(Float32(0.0) if kind in ("float", "mask") else HELD[kind](0) for kind in kinds)
        outputs += tuple(_tensor(access, shape, modes, swapped) for access in one.stores)
    tensors += tuple(_scales() for own in source.design.scaled if own)
    # One workspace for rewritten A and B, partial results of reductions, and sums of parts of K.
    workspaces = (
        (make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16),)
        if reductions_of(program.graph) or source.design.split > 1 or source.design.rewritten
        else ()
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with warnings.catch_warnings():
        # An empty tuple carries nothing to the kernel; CuTe DSL 4.8.1 warns that it cannot be converted.
        warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument")
        kernel = _KERNELS[source.design.instruction](source)
        # An engine to call the kernel would take another 0.2 s. Launches call the stored file instead.
        flags = {"options": _for(source.arch, options), "no_jit_engine": True}
        return cute.compile(
            kernel, a, b, tensors, numbers, outputs, workspaces, Int32(1), Int32(1), Int64(1), stream, **flags
        )


def _by_warps(source: KernelSource) -> Sm80Gemm:
    along_k = source.by_rows[0], not source.by_rows[1]
    return Sm80Gemm(source.design, source.program, *_multiplied(source), along_k)


def _multiplied(source: KernelSource) -> tuple[Any, Any]:
    """The device types of A and B, and that of the accumulator."""
    return tuple(DTYPES[dtype] for dtype in source.dtypes), DTYPES[source.accumulator]


_KERNELS: Mapping[str, Callable[[KernelSource], Any]] = {
    WGMMA: lambda source: Sm90Gemm(source.design, source.programs, *_multiplied(source)),
    MMA_SYNC: _by_warps,
    TCGEN05: lambda source: Sm100Gemm(source.design, source.program, *_multiplied(source)),
}
_BYTES = 16  # TMA needs strides and start addresses that are multiples of it


def _elements_per_copy(source: KernelSource) -> tuple[int, int]:
    """How many elements of A and of B one copy brings. Each line starts at a multiple of this number. It is 0 for a
    matrix that a first kernel rewrites, because its strides may have any values."""
    first, second = (_BYTES // dtype.itemsize for dtype in source.dtypes)
    if (how := source.design.rewritten) is not None:
        return 0 if how.of_a else first, 0 if how.of_b else second
    return source.design.copied if source.design.by_warps else (first, second)


def _matrix(element: torch.dtype, by_rows: bool, shape: tuple[Any, ...], elements: int) -> Any:
    """A fake tensor for A or B. One copy brings `elements` elements; 0 means that no mode is known to be contiguous.
    The contiguous mode is part of the type, and all else is known at run time only."""
    dtype = DTYPES[element]
    strides = (
        _one_contiguous(int(by_rows), len(shape), elements) if elements else tuple(cute.sym_int64() for _ in shape)
    )
    return make_fake_tensor(dtype, shape, strides, assumed_align=max(elements, 1) * dtype.width // 8)


def _scales() -> Any:
    """A fake tensor for block scales of A or B, with any strides."""
    extents = cute.sym_int(), cute.sym_int()
    return make_fake_tensor(Float32, extents, (cute.sym_int64(), cute.sym_int64()), assumed_align=4)


def _one_contiguous(contiguous: int, modes: int, elements: int) -> tuple[Any, ...]:
    """Strides: 1 for the mode `contiguous`, and run-time multiples of `elements` for all others."""
    return tuple(1 if i == contiguous else cute.sym_int64(divisibility=elements) for i in range(modes))


def _tensor(access: Access, shape: tuple[Any, ...], tile_modes: int, swapped: bool) -> Any:
    """A fake tensor for an operand or output as (M,N,L): with TMA's alignment for a tile, else with any strides.

    An axis that a reshape cut has several modes, the fastest first, in the kernel's order of axes. `modes.whole` joins
    them. If A and B are `swapped`, all other tensors are handed over with M and N as the caller has them.
    """
    dtype, as_it_lies = DTYPES[access.dtype], swapped and not any(access.pieces)
    if access.period:
        shape = shape[0], access.period, shape[2]
    if as_it_lies:
        shape = shape[1], shape[0], shape[2]
    if not access.travels.staged:
        extents = [e for own, extent in zip(access.inner, shape, strict=True) for e in (*own, _outer(own, extent))]
        strides = tuple(cute.sym_int64() for _ in extents)
        return make_fake_tensor(dtype, tuple(extents), strides, assumed_align=access.bytes_at_once)
    if any(access.pieces):  # N is cut into heads, and there is always a mode of batches
        heads = shape[0], *access.inner[1], cute.sym_int(), shape[2] if "l" in access.axes else 1
        strides = _one_contiguous(1, len(heads), 8 * _BYTES // dtype.width)
        return make_fake_tensor(dtype, heads, strides, assumed_align=_BYTES)
    contiguous = 1 if access.by_rows != as_it_lies else 0
    tile = shape if "l" in access.axes else (*shape[:2], 1)
    strides = _one_contiguous(contiguous, tile_modes, 8 * _BYTES // dtype.width)
    return make_fake_tensor(dtype, tile[:tile_modes], strides, assumed_align=_BYTES)


def _outer(inner: tuple[int, ...], extent: Any) -> Any:
    return cute.sym_int() if inner else extent
