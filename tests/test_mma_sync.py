"""The kernel for mma.sync without its GPU: which problems it takes and refuses, how it copies A and B, where a thread's
values lie, what it compiles to for each architecture, and what its text and its epilogue compute on the CPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import gpu.test_mma_sync as on_gpu
import numpy as np
import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.test_mma_sync import BF16, EPILOGUES, F32, PARTS, PLAIN, SHAPES
from gpu.test_mma_sync import never_run as never_run  # a fixture
from machine_code import compiled as compiled  # a fixture
from machine_code import faults, instructions

import epifuse as ef
from epifuse.base.dtypes import short
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import MULTISTAGE_DESIGNS, budget, launch
from epifuse.providers.cutedsl.design import MULTISTAGE, Rewriting
from epifuse.providers.cutedsl.kernel_text import read

ARCHITECTURES = (80, 86, 89, 120)
"""Those that have no other kernel."""
BIAS_GELU = EPILOGUES["bias gelu"]
TF32 = ef.Constraints(precision="tf32")
BF16_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def matrices(m=500, n=504, k=256, dtype=BF16):
    return torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype).t()


def arguments(a, b, source=PLAIN, asked=None, **operands):
    given = ef.EpilogueArguments.partial(source, operands)
    return ef.GemmArguments(a, b, epilogue=given, constraints=asked or ef.Constraints())


def designs(args, cc=80):
    return [kernel.plan.allocation.program.design for kernel in ef.get_kernels(args, cc=cc)]


def refusals(args, cc=80):
    """Why it does not take the problem."""
    assert not any(kernel.spec.design.by_warps for kernel in ef.get_kernels(args, cc=cc, providers=["cutedsl"]))
    return {one.reason for one in ef.explain(args, cc=cc).refusals if one.kernel.startswith("sm80")}


# --- where it is taken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", [*ARCHITECTURES, 90])
def test_without_being_asked_for_it_is_refused(cc):
    a, b = torch.empty(64, 65, dtype=BF16), torch.empty(65, 64, dtype=BF16)
    (reason,) = refusals(arguments(a, b), cc)
    assert (f"schedule='{MULTISTAGE}'" if cc == 90 else "EPIFUSE_UNTESTED=1") in reason


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_where_another_schedule_is_asked_for_nothing_takes_it(cc):
    (reason,) = refusals(arguments(*matrices(), asked=ef.Constraints(schedule="tcgen05")), cc)
    assert reason == f"its schedule is {MULTISTAGE}, not the one asked for; there are {MULTISTAGE}"


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_other_gpus_have_it_and_nothing_else(cc, never_run):
    found = designs(arguments(*matrices()), cc)
    assert found
    assert all(design.by_warps for design in found)
    assert "compiled, never run on a GPU of sm_" in str(ef.explain(arguments(*matrices()), cc=cc))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_hopper_s_own_kernel_copies_what_tma_cannot_address(dtype, never_run):
    a, b = matrices(dtype=dtype)
    (reason,) = refusals(arguments(a, b, asked=TF32), 90)
    assert "a kernel of its own" in reason
    for other in (torch.empty(500, 257, dtype=dtype)[:, :256], torch.empty(500, 512, dtype=dtype)[:, ::2]):
        found = designs(arguments(other, b, asked=TF32), 90)
        assert found
        of_a = Rewriting(1, of_b=False)
        assert {(design.by_warps, design.rewritten_as_given) for design in found} == {(False, of_a)}


def test_it_is_taken_where_it_is_asked_for(never_run):
    found = designs(arguments(*matrices(), asked=ef.Constraints(schedule=MULTISTAGE)), 90)
    assert {design.tile for design in found} == {design.tile for design in MULTISTAGE_DESIGNS}


def test_its_bits_are_no_other_kernel_s(never_run):
    a, b = matrices()
    hopper = {kernel.plan.allocation.bits for kernel in ef.get_kernels(arguments(a, b), cc=90)}
    asked = ef.Constraints(schedule=MULTISTAGE)
    own = {kernel.plan.allocation.bits for kernel in ef.get_kernels(arguments(a, b, asked=asked), cc=90)}
    assert len(own) == 1
    assert own.isdisjoint(hopper)


FULL, INT8, E4M3, LONG = torch.float32, torch.int8, torch.float8_e4m3fn, 2**31 - 1
REFUSED = {
    "8 bits of which K is odd": (
        lambda: arguments(*matrices(k=255, dtype=INT8)),
        "pad it with zeros to a multiple of 16",
    ),
    "8 bits by columns": (
        lambda: arguments(matrices(dtype=INT8)[0].t().contiguous().t(), matrices(dtype=INT8)[1]),
        "needs A by rows (K contiguous)",
    ),
    "8 bits of an odd base": (
        lambda: arguments(torch.empty(500 * 256 + 1, dtype=INT8)[1:].view(500, 256), matrices(dtype=INT8)[1]),
        "A of 8 bits does not start at a multiple of 16 bytes",
    ),
    "8 bits of an odd stride": (
        lambda: arguments(torch.empty(500, 257, dtype=INT8)[:, :256], matrices(dtype=INT8)[1]),
        "a stride of A is odd: pass A.contiguous()",
    ),
    "8 bits of K = 1": (
        lambda: arguments(torch.empty(500, 1, dtype=INT8), torch.empty(1, 504, dtype=INT8)),
        "K is odd: pad it",
    ),
    "a weight of 8 bits": (lambda: arguments(matrices()[0], matrices(dtype=E4M3)[1]), "convert it to A's dtype first"),
    "a longer K than it counts": (
        lambda: arguments(*(torch.empty(shape, dtype=BF16, device="meta") for shape in ((2, LONG), (LONG, 2)))),
        "split the product into several calls",
    ),
    "8-bit floats": (lambda: arguments(*matrices(dtype=E4M3)), "sm_80 does not multiply floats of 8 bits"),
    "float64": (lambda: arguments(*matrices(dtype=torch.float64)), "it multiplies float16, bfloat16"),
    "float32 in full": (lambda: arguments(*matrices(dtype=FULL)), "precision='tf32'"),
    "a float16 accumulator": (
        lambda: ef.GemmArguments(
            *matrices(dtype=torch.float16), None, torch.float16, ef.EpilogueArguments.partial(PLAIN, {})
        ),
        "adds up products of torch.float16 in f32",
    ),
    "segments that no tile has whole": (
        lambda: arguments(*matrices(n=480), "def epi(accum): D = amax(accum.unflatten(-1, (-1, 96)), -1); return D"),
        "multiple of 96 columns, and there are 32, 64, 128, 256: store its argument, and reduce that in PyTorch",
    ),
    "rows wider than a tile": (
        lambda: arguments(*matrices(), "def epi(accum): D = softmax(accum); return D"),
        "N = 504",
    ),
}


@pytest.mark.parametrize("columns", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("cc", [80, 100])
def test_segments_that_tiles_have_whole_are_taken(cc, columns, never_run):
    source = f"def epi(accum): D = amax(accum.unflatten(-1, (-1, {columns})), dim=-1); return D"
    assert designs(arguments(*matrices(n=3 * columns), source), cc)


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(name, never_run):
    made, reason = REFUSED[name]
    assert any(reason in one for one in refusals(made()))


def stored_as(dtype):
    given = ef.EpilogueArguments.partial("def epi(accum): D = accum; return D", {})
    return ef.GemmArguments(*matrices(), epilogue=given, out_dtypes=dtype)


def test_floats_of_8_bits_need_a_gpu_that_converts_them(never_run):
    args = stored_as(torch.float8_e4m3fn)
    assert refusals(args, 80) == {"sm_80 has no conversions of e4m3: use bfloat16 or float16 there"}
    assert designs(args, 89)


def test_products_of_8_bits_apply_no_block_scales(never_run):
    a, b = matrices(m=500, dtype=E4M3)
    (reason,) = refusals(arguments(ef.Scaled(a, torch.ones(500, 2)), b), 89)
    assert "it applies no block scales" in reason


def test_sums_are_promoted_where_registers_hold_both(never_run):
    a, b = matrices(dtype=E4M3)
    assert {design.promoted for design in designs(arguments(a, b), 89)} == {128}
    fast = designs(arguments(a, b, asked=ef.Constraints(fast_accum=True)), 89)
    assert {design.promoted for design in fast} == {0}
    assert {design.tile for design in fast} > {design.tile for design in designs(arguments(a, b), 89)}


def test_integers_of_64_bits_are_said_to_spill_in_large_tiles(never_run):
    args = arguments(*matrices(), "def epi(accum, C): D = accum.to(torch.int64) * C; return D", C=torch.empty(500, 504))
    spilling = {k.spec.design.tile for k in ef.get_kernels(args, cc=80) if k.plan.allocation.program.spills}
    assert {(256, 128), (128, 256)} <= spilling
    assert (128, 128) not in spilling


def test_powers_of_two_need_no_conversion(never_run):
    assert designs(stored_as(torch.float8_e8m0fnu), 80)
    assert designs(arguments(*matrices(), "def epi(accum): D = accum.to(torch.float8_e8m0fnu).float(); return D"), 80)


# --- how A and B are copied ------------------------------------------------------------------------------------------


def odd(size, rows=64, columns=64, dtype=BF16):
    """Rows that begin at multiples of so many bytes, and of no more."""
    span = columns + size // dtype.itemsize
    return torch.empty(rows, span, dtype=dtype)[:, :columns]


COPIED = {
    "16 bytes": (odd(16), 8),
    "8 bytes": (odd(8), 4),
    "4 bytes": (odd(4), 2),
    "2 bytes": (odd(2), 1),
    "a line that ends": (torch.empty(64, 64, dtype=BF16)[:, :62], 2),
    "a base": (torch.empty(64 * 64 + 1, dtype=BF16)[1:].view(64, 64), 1),
    "by columns": (odd(8).t(), 4),
    "batches": (torch.empty(3 * 4104, dtype=BF16)[: 3 * 4100].view(3, 4100)[:, :4096].unflatten(1, (64, 64)), 4),
    "one row": (odd(2)[:1], 8),
    "an expanded row": (torch.empty(1, 64, dtype=BF16).expand(64, 64), 8),
    "tf32": (odd(4, dtype=F32), 1),
    "tf32 of 8 bytes": (odd(8, dtype=F32), 2),
    "tf32 by columns": (odd(16, dtype=F32).t(), 1),
    "no mode contiguous": (torch.empty(64, 128, dtype=BF16)[:, ::2], 0),
    "8 bits": (odd(16, dtype=INT8), 16),
    "8 bits, 4 bytes": (odd(4, dtype=INT8), 4),
    "8 bits, a pair": (odd(2, dtype=INT8), 2),
}


@pytest.mark.parametrize("name", COPIED)
def test_elements_at_once_divide_all_distances(name, never_run):
    a, elements = COPIED[name]
    k = a.shape[-1]
    b = torch.empty(64, k, dtype=INT8).t() if a.dtype == INT8 else torch.empty(k, 64, dtype=a.dtype)
    for design in designs(arguments(a, b, asked=ef.Constraints(precision="tf32"))):
        assert design.copied[0] == elements


@pytest.mark.parametrize("by_k", [True, False], ids=["along K", "along rows"])
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_each_element_of_a_tile_is_copied_once(vector, by_k):
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from cutlass import BFloat16

    from epifuse.providers.cutedsl.kernels.copies import Copies
    from epifuse.providers.cutedsl.kernels.sm80_gemm import THREADS

    for tile in {(rows, depth) for design in MULTISTAGE_DESIGNS for rows in design.brought for depth in (32, 64)}:
        copies = Copies(BFloat16, tile, vector, THREADS, by_k=by_k, line=128)
        for pieces in (1, 2, 4):
            found = [
                (row + down + (0 if by_k else i), k + right + (i if by_k else 0))
                for thread in range(THREADS)
                for row, k in [copies.place(thread)]
                for piece in range(pieces)
                for down, right in copies.steps(piece, pieces)
                for i in range(vector)
            ]
            assert sorted(found) == sorted(itertools.product(range(tile[0]), range(tile[1])))


def test_stages_fit_in_the_shared_memory_of_each_gpu(never_run):
    for cc in ARCHITECTURES:
        args = arguments(*matrices(), EPILOGUES["operands"], C=torch.empty(500, 504), bias=torch.empty(504),
                         column=torch.empty(500, 1))  # fmt: skip
        for kernel in ef.get_kernels(args, cc=cc):
            found = kernel.plan.allocation.program
            loads = [access for _, access in found.program.loads]
            assert budget.shared_bytes(found.design, loads, found.program.stores) <= TARGETS[cc].shared_memory
            assert found.design.stages >= budget.fewest(found.design)
            assert not any(access.travels.staged for access in (*loads, *found.program.stores))


# --- what it compiles to ---------------------------------------------------------------------------------------------


@pytest.mark.sweep("abreast")
@pytest.mark.parametrize(("design", "abreast"), [(one, one.abreast) for one in MULTISTAGE_DESIGNS], ids=str)
def test_a_thread_has_the_values_of_its_places(design, abreast):
    """Each register of a thread, by the partition of the tile that is multiplied: of all lanes of the first warp, and
    of one of each other warp. Where the warps lie and where their lanes do are independent of each other."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from cutlass import BFloat16, Float32, Int32, cute

    from epifuse.providers.cutedsl.kernels.fragment import listed
    from epifuse.providers.cutedsl.kernels.place import Division, Place
    from epifuse.providers.cutedsl.kernels.sm80_gemm import THREADS, Sm80Gemm

    threads = (*range(32), *range(32, THREADS, 32))
    kernel = object.__new__(Sm80Gemm)
    kernel.dtype, kernel.accumulator, kernel.is_tf32, kernel.design = BFloat16, Float32, False, design
    found: dict[str, Any] = {}

    @cute.jit
    def trace(unused: Int32):
        whole, group = kernel.multiplication(design.sharing), kernel.multiplication(1)
        registers, sums = kernel.accumulators(whole)
        found["count"] = cute.size(registers)
        layout = sums.layout
        collect(layout, whole, group)

    def collect(layout, whole, group):
        identity, subtile = cute.make_identity_tensor(design.tile), cute.make_identity_tensor(design.subtile)
        for thread in threads:
            own = listed(whole.get_slice(thread % (128 * design.sharing)).partition_C(identity))
            found[thread] = {int(layout(i)): place for i, place in enumerate(own)}
            found["of group", thread] = listed(group.get_slice(thread % 128).partition_C(subtile))

    cute.compile(trace, Int32(0), options="--gpu-arch=sm_80")
    division = Division(design)
    for thread in threads:
        place = Place(0, 0, 0, thread // 128 % design.sharing)
        wanted = [
            (division.row(down, row, place), division.column(right, column, place))
            for down in range(division.down)
            for right in range(division.across)
            for row, column in found["of group", thread]
        ]
        assert [found[thread][i] for i in range(found["count"])] == wanted


def room(cc):
    return TARGETS[cc].shared_memory


ALIGNED = {
    16: ("cp.async.cg.shared.global", lambda n, k: (n, k)),
    8: ("cp.async.ca.shared.global", lambda n, k: (n + 4, k + 4)),
    4: ("cp.async.ca.shared.global", lambda n, k: (n + 2, k + 2)),
    2: ("st.shared.b16", lambda n, k: (n + 1, k + 1)),
}


@pytest.mark.parametrize(("cc", "size"), [*((80, size) for size in ALIGNED), (90, 2)])
def test_every_tile_is_the_machine_code_it_is_meant_to_be(cc, size, compiled, never_run, whole_sweeps):
    """Copies of every size: the largest on sm_80 in every tile, the others in the best one."""
    instruction, extents = ALIGNED[size]
    n, k = extents(512, 512)
    asked = ef.Constraints(schedule=MULTISTAGE)
    args = arguments(*matrices(n=n, k=k), BIAS_GELU, asked, bias=torch.empty(n))
    kernels = ef.get_kernels(args, cc=cc)
    assert len(kernels) >= 4
    in_every_tile = whole_sweeps or (cc == 80 and size == 16)
    for kernel in kernels if in_every_tile else kernels[:1]:
        found = kernel.plan.allocation.program
        made = compiled(kernel)
        ptx = made.ptx
        assert f".target sm_{cc}" in ptx
        products = instructions(ptx, "mma.sync")
        assert faults(made, BF16_PRODUCT, room(cc), may_spill=found.spills) == []
        m, n = found.design.brought
        assert len(products) == m // 128 * n // 8 * found.design.k_bytes // 32
        copies = instructions(ptx, instruction)
        assert copies
        if size > 2:
            assert all(f", {size}, %" in line for line in copies), "zeros come in place of what lies outside"
            assert "xor.b32" in ptx, "addresses in shared memory are swizzled"
        assert {line.split()[0].split(".x4")[0] for line in instructions(ptx, "ldmatrix")} == {
            "ldmatrix.sync.aligned.m8n8"
        }
        assert "griddepcontrol" not in ptx
        assert ("st.global.v4" in ptx) == (size == 16), "whole sectors leave where lines are aligned"


def test_tf32_is_rounded_before_it_is_multiplied(compiled, never_run, whole_sweeps):
    asked = ef.Constraints(precision="tf32")
    for a, b in (matrices(dtype=F32), (torch.empty(512, 500).t(), torch.empty(512, 501))):
        kernels = ef.get_kernels(arguments(a, b, asked=asked), cc=86)
        for kernel in kernels if whole_sweeps else kernels[:1]:
            made, may_spill = compiled(kernel), kernel.plan.allocation.program.spills
            product = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
            assert faults(made, product, room(86), may_spill=may_spill) == []
            assert instructions(made.ptx, "cvt.rna.tf32.f32")


NARROW = {"s8": (INT8, 80), "e4m3": (E4M3, 89), "e4m3 on sm_120": (E4M3, 120)}


@pytest.mark.parametrize("k", [256, 250])
@pytest.mark.parametrize("name", NARROW)
def test_products_of_8_bits_compile(name, k, compiled, never_run, whole_sweeps):
    """Copied by 16 bytes, and by pairs; in the largest tile too."""
    dtype, cc = NARROW[name]
    of, sums = short(dtype), "f32" if dtype.is_floating_point else "s32"
    kernels = ef.get_kernels(arguments(*matrices(k=k, dtype=dtype), BIAS_GELU, bias=torch.empty(504)), cc=cc)
    largest = max(kernels, key=lambda one: one.spec.design.tile)
    for kernel in kernels if whole_sweeps else dict.fromkeys((kernels[0], largest) if k == 256 else kernels[:1]):
        product = f"mma.sync.aligned.m16n8k32.row.col.{sums}.{of}.{of}.{sums}"
        may_spill = kernel.plan.allocation.program.spills
        assert faults(compiled(kernel), product, room(cc), may_spill=may_spill) == []


LAYOUTS = {
    "A by columns, B by rows": lambda: (torch.empty(512, 504, dtype=BF16).t(), torch.empty(512, 504, dtype=BF16)),
    "no mode contiguous": lambda: (torch.empty(50, 1024, dtype=BF16)[:, ::2], torch.empty(512, 96, dtype=BF16)[:, ::2]),
    "batches": lambda: (torch.empty(5, 504, 512, dtype=BF16), torch.empty(5, 512, 504, dtype=BF16)),
    "float16": lambda: matrices(dtype=torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_compiles(name, compiled, never_run):
    a, b = LAYOUTS[name]()
    made = compiled(ef.get_kernels(arguments(a, b), cc=80)[0])
    assert faults(made, BF16_PRODUCT.replace("bf16", short(a.dtype)), room(80)) == []
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in made.ptx) == (name not in ("float16",))


@pytest.mark.sweep
@pytest.mark.parametrize("cc", ARCHITECTURES)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_kind_of_epilogue_compiles(name, cc, compiled, never_run):
    m, n = 500, 250
    made = {"C": torch.empty(m, n), "bias": torch.empty(n), "column": torch.empty(m, 1)}
    given = {key: value for key, value in made.items() if key in EPILOGUES[name].partition(":")[0]}
    kernel = ef.get_kernels(arguments(*matrices(m, n), EPILOGUES[name], **given), cc=cc)[0]
    made = compiled(kernel)
    assert faults(made, BF16_PRODUCT, room(cc), may_spill=kernel.plan.allocation.program.spills) == []
    assert "griddepcontrol" not in made.ptx


@pytest.mark.sweep
@pytest.mark.parametrize("k", [256, 130, 77])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_rows_compile(name, k, compiled, never_run, whole_sweeps):
    """In the best tile; where 16 bytes are copied at once in every third. In all of them with --whole-sweeps."""
    kernels = ef.get_kernels(arguments(*matrices(k=k, n=512), PARTS[name]), cc=80)
    tried = kernels[::3] if k == 256 else kernels[:1]
    for kernel in kernels if whole_sweeps else tried:
        may_spill = kernel.plan.allocation.program.spills
        assert faults(compiled(kernel), BF16_PRODUCT, room(80), may_spill=may_spill) == []


@pytest.mark.parametrize("order", ["stacked", "interleaved"])
def test_rows_of_b_are_copied_in_the_order_of_the_parts(order):
    """Eight of one part, then eight of the other: where each lies in memory."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from cutlass import BFloat16, Int32, cute

    from epifuse.providers.cutedsl.kernels.parts import woven

    rows, step, found = 64, 1000, []

    @cute.jit
    def trace(unused: Int32):
        memory = cute.make_ptr(BFloat16, 0, cute.AddressSpace.gmem)
        b = woven(cute.make_tensor(memory, cute.make_layout((rows, 10, 1), stride=(step, 1, 0))), order)
        found.extend(place(b, row) for row in range(rows))

    def place(b, row):
        return cute.crd2idx((row, 0, 0), b.layout)

    cute.compile(trace, Int32(0), options="--gpu-arch=sm_80")
    part_of, own = [row // 8 % 2 for row in range(rows)], [row // 16 * 8 + row % 8 for row in range(rows)]
    if order == "stacked":
        wanted = [part * rows // 2 + at for part, at in zip(part_of, own, strict=True)]
    else:
        wanted = [2 * at + part for part, at in zip(part_of, own, strict=True)]
    assert found == [step * at for at in wanted]


@pytest.mark.parametrize("words", [1, 2])
def test_lanes_of_a_row_exchange_their_columns(words, monkeypatch):
    """Four lanes have a pair of each of four eights; each ends with all pairs of one."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from epifuse.providers.cutedsl.kernels.accesses import wide

    lanes = np.arange(32)
    arch = SimpleNamespace(shuffle_sync_bfly=lambda word, offset: word[lanes ^ offset])
    monkeypatch.setattr(wide, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(wide, "cutlass", SimpleNamespace(select_=np.where))
    own = [[100 * lanes + 10 * eight + word for word in range(words)] for eight in range(4)]
    found = wide.exchanged(own, lanes % 4)
    for lane in lanes:
        of_row = [int(word[lane]) for pair in found for word in pair]
        first = lane // 4 * 4
        assert of_row == [100 * (first + j) + 10 * (lane % 4) + word for j in range(4) for word in range(words)]


# --- what it computes, by its text and by the epilogue's own code ----------------------------------------------------


@pytest.mark.parametrize("layouts", on_gpu.LAYOUT_PAIRS, ids=str)
def test_its_views_are_those_of_a_and_b(layouts, emulated: Emulated, never_run):
    for shape in SHAPES[:-1]:
        on_gpu.test_products_of_whole_numbers_are_exact(shape, layouts, emulated)


@pytest.mark.parametrize("rows", [1, 3])
def test_strides_are_multiples_of_what_is_copied(rows, emulated: Emulated, monkeypatch, never_run):
    """A single row too, though its stride is of no address: the compiled kernel is promised it."""

    handed = []

    def function(text, _name):
        return lambda a, b, *_: handed.append((read(text).design.copied, a.stride(), b.stride()))

    monkeypatch.setattr(launch, "function", function)
    for a, b in (
        (odd(8, 67)[:rows], odd(8)),
        (odd(8).t(), odd(8)),
        (odd(8)[:64], odd(8).t()[:, :rows]),
    ):
        args = arguments(a, b, asked=ef.Constraints(schedule=MULTISTAGE))
        emulated.kernel(args).run(args)
        copied, *strides = handed.pop()
        for elements, steps in zip(copied, strides, strict=True):
            assert elements > 1
            assert 1 in steps
            assert all(step == 1 or step % elements == 0 for step in steps)


@pytest.mark.parametrize("design", MULTISTAGE_DESIGNS, ids=str)
def test_every_tile_is_there_for_its_test_on_a_gpu(design, emulated: Emulated, never_run):
    for layouts in (("rows", "columns"), ("columns", "rows"), ("even", "padded")):
        on_gpu.test_every_tile(design, layouts, emulated)


def test_its_views_are_those_of_other_layouts(emulated: Emulated, never_run):
    on_gpu.test_no_mode_need_be_contiguous(emulated)
    on_gpu.test_rows_may_be_one(emulated)
    on_gpu.test_batches(emulated)
    on_gpu.test_nothing_along_k(emulated)


@pytest.mark.parametrize("name", EPILOGUES)
def test_its_text_says_what_the_epilogue_is(name, emulated: Emulated, never_run):
    on_gpu.test_epilogues(name, (131, 253, 77), emulated)


@pytest.mark.parametrize("name", PARTS)
def test_its_text_says_what_parts_are(name, emulated: Emulated, never_run):
    on_gpu.test_parts_of_rows(name, emulated)


def _numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


_FLOATS = {"dtype": torch.float32}
WIDE = {
    "K": (_numbers(64, 136)[:, :127], _numbers(127, 64), "pad K of A and B from 127 to a multiple of 8"),
    "M": (_numbers(128, 72)[:, :63].t(), _numbers(128, 64), "pad M of A from 63 to a multiple of 8"),
    "strided": (_numbers(512, 1024)[::8, ::8], _numbers(128, 64), "pass A.contiguous()"),
    "misaligned": (_numbers(64, 136)[:, 1:129], _numbers(128, 64), "address and strides of A in multiples of that"),
    "tf32 by rows": (_numbers(64, 128, **_FLOATS), _numbers(128, 64, **_FLOATS), "pass B.mT.contiguous().mT, or store"),
}


@pytest.mark.parametrize("name", WIDE)
def test_what_would_make_copies_wide(name, never_run):
    a, b, cure = WIDE[name]
    asked = ef.Constraints(precision="tf32" if a.dtype == torch.float32 else None)
    given = ef.EpilogueArguments.partial("def f(accum): D = accum; return D", {})
    told = str(ef.explain(ef.GemmArguments(a, b, epilogue=given, constraints=asked), cc=80))
    assert f"for 16 bytes at a time: {cure}" in told
