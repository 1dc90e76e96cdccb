"""The kernel for mma.sync, executed on the CPU from its PTX: its copies, its main loop, and what it stores."""

import functools
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu.harness import Machine
from gpu.test_mma_sync import BF16, EPILOGUES, LAYOUT_PAIRS, NARROW_EPILOGUES, PLAIN
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
ALIGNMENT = 256
WAITS = 3  # before the main loop, in it and behind it


LAYOUTS = ("rows", "rows"), ("rows", "columns"), ("columns", "rows")
SINGLE = "odd", "rows"
"""Copies of single elements, for which an accumulator of 256 rows leaves too few registers."""
TALL = [design for design in MULTISTAGE_DESIGNS if design.tile[0] == 256]
CASES = [(design, layouts) for design in MULTISTAGE_DESIGNS for layouts in LAYOUTS]
CASES += [(design, SINGLE) for design in MULTISTAGE_DESIGNS if design not in TALL]


@pytest.mark.parametrize("design", TALL, ids=str)
def test_tall_tiles_refuse_copies_of_single_elements(design: Design, never_run: None) -> None:
    found = ef.explain(_arguments(*_matrices(*SINGLE)), cc=80).refusals
    name = f"sm80_gemm_{design.tile[0]}x{design.tile[1]}_"
    (reason,) = {refusal.reason for refusal in found if refusal.kernel.startswith(name)}
    assert "too few registers for copies of A and B by so few bytes" in reason


@pytest.mark.sweep("design", "layouts")
@pytest.mark.parametrize(("design", "layouts"), CASES, ids=str)
def test_products(design: Design, layouts: tuple[str, str], tmp_path: Path, never_run: None) -> None:
    a, b = _matrices(*layouts)
    kernels = {kernel.spec.design: kernel for kernel in ef.get_kernels(_arguments(a, b), cc=80)}
    ptx, step = _compiled(kernels[design], tmp_path)
    (found,) = _executed(ptx, step, a, b)
    assert torch.equal(found, _product(a, b))


@pytest.mark.parametrize(("what", "count"), [("cp.async.wait_group", WAITS), ("bar.sync", WAITS - 1)])
def test_without_one_of_its_waits_the_product_is_wrong(what: str, count: int, tmp_path: Path, never_run: None) -> None:
    """That what is executed would show that a wait is missing. Nothing uses what is read behind the last barrier but
    one, so that the last one changes no result."""
    a, b = _matrices("rows", "rows")
    (kernel,) = (one for one in ef.get_kernels(_arguments(a, b), cc=80) if one.spec.design.tile == (128, 64))
    ptx, step = _compiled(kernel, tmp_path)
    lines = ptx.splitlines()
    waits = [i for i, line in enumerate(lines) if line.split("//")[0].split()[:1] == [what]]
    assert len(waits) == WAITS
    for i in waits[:count]:
        with suppress(TwoCopiesError):
            (found,) = _executed("\n".join(lines[:i] + lines[i + 1 :]), step, a, b)
            assert not torch.equal(found, _product(a, b)), lines[i]


DTYPES = {torch.float16: torch.float16, torch.float32: torch.float32, torch.int8: torch.int32, torch.uint8: torch.int32}
"""Of A and B beside bfloat16, and of D."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, tmp_path: Path, never_run: None) -> None:
    a, b = (x.abs() if dtype == torch.uint8 else x for x in _matrices("rows", "rows"))
    a, b = a.to(dtype), b.to(dtype)
    (kernel,) = ef.get_kernels(_arguments(a, b), cc=80, limit=1)
    want = a.double() @ b.double().t()
    (found,) = _executed(*_compiled(kernel, tmp_path), a, b, [], [DTYPES[dtype]])
    assert torch.equal(found.double(), want)


@pytest.mark.parametrize("layout", ["rows", "odd"])
def test_operands(layout: str, tmp_path: Path, never_run: None) -> None:
    """A matrix, a vector along N, which shared memory holds, and one along M; two outputs."""
    a, b = _matrices(layout, "rows")
    drawn = torch.Generator().manual_seed(1)
    m, n = len(a), len(b)
    matrix, vector = (torch.randint(-4, 4, shape, generator=drawn).to(BF16) for shape in ((m, n), (n,)))
    column = torch.randint(-4, 4, (m, 1), generator=drawn).float()
    operands = {"C": matrix, "bias": vector, "column": column}
    (kernel,) = ef.get_kernels(_arguments(a, b, EPILOGUES["operands"], **operands), cc=80, limit=1)
    found = _executed(*_compiled(kernel, tmp_path), a, b, [*operands.values()], [BF16, BF16])
    accum = a.double() @ b.double().t()
    assert torch.equal(found[0], ((accum + matrix * vector).relu() + column).to(BF16))
    assert torch.equal(found[1], (accum - matrix).to(BF16))


def test_int8_from_int8(tmp_path: Path, never_run: None) -> None:
    """Scaled, moved by a vector along N, and rounded again."""
    cpu, (m, n, k) = Machine("cpu"), (131, 253, 78)
    a, b = cpu.whole(m, k, dtype=torch.int8), cpu.whole(n, k, dtype=torch.int8)
    bias = cpu.whole(n, dtype=torch.float32)
    (kernel,) = ef.get_kernels(_arguments(a, b, NARROW_EPILOGUES["to int8"], bias=bias), cc=80, limit=1)
    (found,) = _executed(*_compiled(kernel, tmp_path), a, b, [bias], [torch.int8])
    moved = (a.double() @ b.double().t()).float() * 0.5 + bias + 0.3
    assert torch.equal(found, moved.clamp(-128, 127).to(torch.int8))


@pytest.mark.sweep("shape", "layouts", "dtype")
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(17, 13, 7), (64, 8, 16), (129, 263, 81)], ids=str)
def test_nothing_around_matrices_is_touched(
    shape: tuple[int, int, int], layouts: tuple[str, str], dtype: torch.dtype, tmp_path: Path, never_run: None
) -> None:
    """Neither read nor written: not between rows that lie further apart than they are long, either."""
    m, n, k = shape
    if dtype == torch.int8:
        k, layouts = k + k % 2, ("rows", "columns")  # all that it takes
    cpu = Machine("cpu")
    a = cpu.laid_out(cpu.whole(m, k, dtype=dtype), layouts[0])
    b = cpu.laid_out(cpu.whole(k, n, dtype=dtype), layouts[1]).t()
    (kernel,) = ef.get_kernels(_arguments(a, b), cc=80, limit=1)
    out = DTYPES.get(dtype, BF16)
    (found,) = _executed(*_compiled(kernel, tmp_path), a, b, [], [out])
    assert torch.equal(found, (a.double() @ b.double().t()).to(out))


def _slope_of_silu(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _slope_of_gelu_erf(x: torch.Tensor) -> torch.Tensor:
    """As PyTorch has it on a GPU: on a CPU its exponential is zero where it would be subnormal."""
    return (1 + torch.erf(x * 2**-0.5)) / 2 + x * torch.exp(-x * x / 2) * (2 * torch.pi) ** -0.5


def _slope_of_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")


SLOPES = {
    "dgelu_tanh(accum, C)": ("dgelu_tanh", _slope_of_gelu_tanh),
    "dgelu_erf(accum, C)": ("dgelu_erf", _slope_of_gelu_erf),
    "accum * (sigmoid(C) * (1 + C * (1 - sigmoid(C))))": ("dsilu", _slope_of_silu),
}
"""The name of what tells the truth, and PyTorch's own float32."""


@pytest.mark.parametrize("times", [1, 64])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("body", SLOPES, ids=lambda body: SLOPES[body][0])
def test_slopes_stored_in_16_bits(body: str, dtype: torch.dtype, times: int, tmp_path: Path, never_run: None) -> None:
    """Of every number of 16 bits, as docs/accuracy.md promises, where instructions err as far as PTX allows. Slopes
    that are subnormal, where nothing is promised, are normal numbers 64 times."""
    from accuracy.cases import CASES as FUNCTIONS
    from accuracy.measure import NEIGHBOUR_ULP, kept_at_root, ulps

    name, pytorchs = SLOPES[body]
    ones = torch.zeros(256, 8, dtype=dtype)
    ones[:, 0] = 1
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    of_all = _arguments(times * ones, ones, f"def f(accum, C): D = {body}; return D", C=x)
    (kernel,) = ef.get_kernels(of_all, cc=80, limit=1)
    (found,) = _executed(*_compiled(kernel, tmp_path), times * ones, ones, [x], [dtype])
    (case,) = (case for case in FUNCTIONS if case.name == name)
    truth = case.truth(torch.tensor(times, dtype=torch.float64), x.double())
    theirs = (times * pytorchs(x.float())).to(dtype)
    both_nan = found.isnan() & theirs.isnan()
    error, other = (ulps(value, truth, dtype) for value in (found, theirs))
    at_root = kept_at_root(case, [torch.tensor(float(times)).expand_as(x), x.float()], found, theirs, truth)
    assert ((error <= NEIGHBOUR_ULP) | (error <= other) | both_nan | at_root).all()


def test_the_error_of_sigmoid_beside_one(tmp_path: Path, never_run: None) -> None:
    """The narrow form's: what is left of sigmoid(x) - 1 beside the exact value, 2^18 times, so that 16 bits show it."""
    ones = torch.zeros(256, 8, dtype=BF16)
    ones[:, 0] = 1
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    exact = torch.sigmoid(-x.double()).float()
    source = "def f(accum, C, E): D = ((sigmoid(C) - 1) + E) * 262144.0; return D"
    (kernel,) = ef.get_kernels(_arguments(ones, ones, source, C=x, E=exact), cc=80, limit=1)
    (found,) = _executed(*_compiled(kernel, tmp_path), ones, ones, [x, exact], [BF16])
    largest = found.double()[~x.isnan()].abs().max() / 2**18
    assert 2.0**-24 < largest <= 2.0**-21, "none at all would be another value's"


def _matrices(*layouts: str) -> list[torch.Tensor]:
    """(M, K) and (N, K) of small whole numbers, each along K or along its rows in memory."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    m, n, k = ODD if "odd" in layouts else ALIGNED
    drawn = torch.Generator().manual_seed(0)
    matrices = [torch.randint(-8, 8, (rows, k), generator=drawn).to(BF16) for rows in (m, n)]
    return [x if layout != "columns" else x.t().contiguous().t() for x, layout in zip(matrices, layouts, strict=True)]


def _arguments(a: torch.Tensor, b: torch.Tensor, source: str = PLAIN, **operands: torch.Tensor) -> ef.GemmArguments:
    asked = ef.Constraints(precision="tf32") if a.dtype == torch.float32 else ef.Constraints()
    return ef.GemmArguments(a, b.t(), epilogue=ef.EpilogueArguments.partial(source, operands), constraints=asked)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.t().double()).to(BF16)


def _compiled(kernel: ef.Kernel, folder: Path) -> tuple[str, tuple[int, int]]:
    """PTX, and rows and columns of the result between the tiles of a CTA."""
    program = kernel.plan.allocation.program
    return reported(program.text, folder).__ptx__, program.design.step


def _executed(
    ptx: str,
    step: tuple[int, int],
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Sequence[torch.Tensor] = (),
    outputs: Sequence[torch.dtype] = (BF16,),
) -> list[torch.Tensor]:
    """(M, N) of each dtype, by one CTA. Nothing but elements of these tensors is read or written."""
    shape, given = (len(a), len(b)), 2 + len(operands)
    tensors = [a, b, *operands, *(torch.empty(shape, dtype=dtype) for dtype in outputs)]
    bytes_ = [_bytes(x) for x in tensors]
    ends = np.cumsum([(places.max() // ALIGNMENT + 2) * ALIGNMENT for places in bytes_])
    # As far from a multiple of `ALIGNMENT` as on this machine.
    starts = [before + x.data_ptr() % ALIGNMENT for before, x in zip((0, *ends[:-1]), tensors, strict=True)]
    memory, held = np.full(ends[-1], NAN, np.uint8), np.zeros(ends[-1], bool)
    for number, (start, x, places) in enumerate(zip(starts, tensors, bytes_, strict=True)):
        held[start + places] = True
        if number < given:
            memory[start + places] = x.contiguous().view(-1).view(torch.uint8).numpy()
    parameters = [
        *(_factor(start, x) for start, x in zip(starts[:2], (a, b), strict=True)),
        *(_of_epilogue(start, x.expand(shape)) for start, x in zip(starts[2:], tensors[2:], strict=True)),
        *_raster(shape, step),
    ]
    execute(Kernel.of(ptx, "Sm80Gemm"), parameters, memory, [0], THREADS, together=THREADS // 2, held=held)
    results = zip(starts[given:], tensors[given:], strict=True)
    return [torch.from_numpy(memory[at : at + x.nbytes]).view(x.dtype).view(shape) for at, x in results]


def _bytes(x: torch.Tensor) -> np.ndarray:
    """Where they lie beside the first one, in the order of elements."""
    along = [np.arange(extent) * stride for extent, stride in zip(x.shape, x.stride(), strict=True)]
    elements = functools.reduce(np.add.outer, along).reshape(-1, 1)
    return (elements * x.itemsize + np.arange(x.itemsize)).reshape(-1)


def _factor(start: int, x: torch.Tensor) -> bytes:
    """A or B as (rows, K, 1), of whose strides one is known to be 1. Numbers of 8 bits are copied as pairs."""
    stride = max(x.stride())
    if x.itemsize == 1:
        x, stride = x[:, ::2], stride // 2
    return struct.pack("<qiiiiqq", start, *x.shape, 1, 0, stride, 0)


def _of_epilogue(start: int, x: torch.Tensor) -> bytes:
    """(M, N, 1), of any strides."""
    return struct.pack("<qiiiiqqq", start, *x.shape, 1, 0, *x.stride(), 0)


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
