"""The kernel for tcgen05.mma, which has never run: which problems it takes and refuses, what it compiles to, where a
thread's values lie in tensor memory, and what its text and its epilogue compute on the CPU."""

from typing import Any

import pytest
import torch
from emulated import Emulated, Launched
from emulated import emulated as emulated  # a fixture
from gpu.harness import check
from gpu.test_mma_sync import BF16, EPILOGUES, PARTS, PLAIN, operands_of
from gpu.test_mma_sync import never_run as never_run  # a fixture
from machine_code import compiled as compiled  # a fixture
from machine_code import faults, instructions

import epifuse as ef
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import TENSOR_MEMORY_DESIGNS, budget
from epifuse.providers.cutedsl.design import TCGEN05

ARCHITECTURES = (100, 103)
F16, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
BIAS_GELU = EPILOGUES["bias gelu"]
SEGMENTS = {
    "norm of heads": "def epi(accum): x = accum.view(500, 4, 64); "
    "D = (x * rsqrt(mean(x * x, dim=-1, keepdim=True))).view(500, 256); return D\n",
    "scales": "def epi(accum): D = accum; s = amax(abs(accum.view(500, 8, 32)), dim=-1); return D, s\n",
    "heads first": "def epi(accum): D = accum.view(500, 4, 64).permute(1, 0, 2); return D\n",
    "rotated": "def epi(accum): x = accum.view(500, 2, 128); p, q = x.chunk(2, dim=-1); "
    "D = cat((p - q, q + p), dim=-1).view(500, 256); return D\n",
}


def matrices(m=500, n=504, k=256, dtype=BF16, other=None):
    return torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=other or dtype).t()


def arguments(a, b, source=PLAIN, out=BF16, asked=None, **operands):
    given = ef.EpilogueArguments.partial(source, operands)
    return ef.GemmArguments(a, b, epilogue=given, out_dtypes=out, constraints=asked or ef.Constraints())


def with_operands(source, m, n):
    made = {"C": torch.empty(m, n), "bias": torch.empty(n), "column": torch.empty(m, 1)}
    given = {name: value for name, value in made.items() if name in source.partition(":")[0]}
    return arguments(*matrices(m, n), source, None, **given)


def refusals(args, cc=100):
    """Why it does not take the problem."""
    assert ef.get_kernels(args, cc=cc, providers=["cutedsl"]) == []
    return {one.reason for one in ef.explain(args, cc=cc).refusals if one.kernel.startswith("sm100")}


def product_of(design, kind="f16"):
    pair = 2 if design.in_pairs else 1
    return f"tcgen05.mma.cta_group::{pair}.kind::{kind}.collector::a::discard"


# --- where it is taken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_without_being_asked_for_it_is_refused(cc):
    (reason,) = refusals(arguments(*matrices()), cc)
    assert reason == f"it has never run on a GPU of sm_{cc}a: EPIFUSE_UNTESTED=1, set before Python starts, takes it"


@pytest.mark.parametrize(
    ("cc", "given", "why"),
    [
        (80, {"out": E4M3}, "sm_80 has no conversions of e4m3"),
        (100, {"k": 255}, "has a stride of 510 bytes"),
        (100, {"source": PARTS["halves"]}, "it does not combine parts of a row"),
    ],
    ids=str,
)
def test_what_it_would_refuse_anyway_is_told_instead(cc, given, why):
    """Who set the variable would not get the kernel."""
    args = arguments(*matrices(k=given.get("k", 256)), given.get("source", PLAIN), given.get("out", BF16))
    assert ef.get_kernels(args, cc=cc) == []
    (reason,) = {one.reason for one in ef.explain(args, cc=cc).refusals if one.kernel.startswith(f"sm{cc}_")}
    assert why in reason
    assert "EPIFUSE_UNTESTED" not in reason


@pytest.mark.parametrize("cc", [80, 90, 100])
@pytest.mark.parametrize("extents", [(1, 4096), (4096, 1)], ids=str)
def test_one_row_or_column_costs_no_more_than_two(extents, cc, never_run):
    """It has no stride, by which rows could begin within a line."""
    more = [2 * x if x == 1 else x for x in extents]
    one, two = (
        ef.get_kernels(arguments(*matrices(*of, k=4096)), cc=cc, limit=1)[0].plan.allocation.cost
        for of in (extents, more)
    )
    assert one <= 1.01 * two


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_such_gpus_have_it_and_nothing_else(cc, never_run):
    args = arguments(*matrices())
    found = [kernel.spec.design for kernel in ef.get_kernels(args, cc=cc)]
    assert sorted(map(str, found)) == sorted(map(str, TENSOR_MEMORY_DESIGNS))
    told = str(ef.explain(args, cc=cc))
    assert f"compiled, never run on a GPU of sm_{cc}a" in told
    assert "tcgen05's kernel has TMA for A and B alone" in told


@pytest.mark.parametrize("cc", [80, 90, 120])
def test_other_gpus_do_not_have_it(cc, never_run):
    found = ef.get_kernels(arguments(*matrices()), cc=cc)
    assert found
    assert not any(kernel.spec.design.in_tensor_memory for kernel in found)


def test_it_may_be_asked_for(never_run):
    asked = ef.Constraints(schedule=TCGEN05, tile=(128, 128), cluster=(2, 1))
    (kernel,) = ef.get_kernels(arguments(*matrices(), asked=asked), cc=100)
    assert kernel.spec.name == "sm100_gemm_128x128_tcgen05_2x1"


def test_its_bits_are_no_other_kernel_s(never_run):
    args = arguments(*matrices())
    own, hopper = ({kernel.plan.allocation.bits for kernel in ef.get_kernels(args, cc=cc)} for cc in (100, 90))
    assert len(own) == 1
    assert own.isdisjoint(hopper)


REFUSED = {
    "float32": (
        lambda: arguments(*matrices(dtype=torch.float32)),
        "it multiplies float16, bfloat16, and floats of 8 bits",
    ),
    "integers": (lambda: arguments(*(x.to(torch.int8) for x in matrices()), out=None), "and A is torch.int8"),
    "a weight of 8 bits": (
        lambda: arguments(*matrices(other=E4M3)),
        "A is torch.bfloat16 and B torch.float8_e4m3fn: convert B to A's dtype first",
    ),
    "a float16 accumulator": (
        lambda: ef.GemmArguments(*matrices(dtype=F16), None, F16, ef.EpilogueArguments.partial(PLAIN, {})),
        "adds up products of torch.float16 in f32",
    ),
    "rows that TMA cannot address": (
        lambda: arguments(*matrices(k=257)),
        "pad K with zeros to a multiple of 8 elements in",
    ),
    "columns that TMA cannot address": (
        lambda: arguments(torch.empty(64, 100, dtype=BF16).t(), matrices(k=64)[1]),
        "pad M with zeros to a multiple of 8 elements",
    ),
    "a view that TMA cannot address": (
        lambda: arguments(matrices(k=64)[0], torch.empty(64, 164, dtype=BF16)[:, :128]),
        "B has a stride of 328 bytes, and TMA needs a multiple of 16: pass a copy, B.clone()",
    ),
    "8 bits across K": (lambda: arguments(torch.empty(256, 512, dtype=E4M3).t(), matrices(dtype=E4M3)[1]), "A by rows"),
    "rows wider than a tile": (
        lambda: arguments(*matrices(), "def epi(accum): D = softmax(accum, dim=-1); return D"),
        "N = 504 does not fit",
    ),
    "parts of rows": (
        lambda: arguments(*matrices(n=512), PARTS["halves"]),
        "does not combine parts of a row, such as the two halves",
    ),
    "parts of rows that are odd besides": (
        lambda: arguments(*matrices(n=514), PARTS["halves"]),
        "does not combine parts",
    ),
    "another split": (lambda: arguments(*matrices(), asked=ef.Constraints(split=2)), "its split is 1"),
    "few rows exchanged": (
        lambda: arguments(*matrices(), asked=ef.Constraints(schedule="swapped")),
        "schedule is tcgen05",
    ),
    "block scales": (
        lambda: arguments(
            ef.Scaled(matrices(k=512, dtype=E4M3)[0], torch.empty(500, 4)),
            ef.Scaled(matrices(n=512, k=512, dtype=E4M3)[1], torch.empty(4, 4)),
        ),
        "it applies no block scales",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(name, never_run):
    made, reason = REFUSED[name]
    assert any(reason in one for one in refusals(made()))


def test_stages_fit_in_shared_memory(never_run):
    for name, source in EPILOGUES.items():
        for kernel in ef.get_kernels(with_operands(source, 500, 256), cc=100):
            found = kernel.plan.allocation.program
            loads = [access for _, access in found.program.loads]
            assert budget.shared_bytes(found.design, loads, found.program.stores) <= TARGETS[100].shared_memory, name
            assert found.design.stages >= budget.fewest(found.design)
            assert not any(access.travels.staged for access in (*loads, *found.program.stores))


def test_each_cta_of_a_pair_has_half_of_b():
    for design in TENSOR_MEMORY_DESIGNS:
        m, n = design.tile
        assert budget.stage_bytes(design) == (128 * m, 128 * n // design.ctas)


# --- what it compiles to ---------------------------------------------------------------------------------------------


def check_code(kernel, made, kind="f16", cc=100):
    """No spill, all products by one instruction, as much shared memory as planned; sums read from tensor memory."""
    found, ptx = kernel.plan.allocation.program, made.ptx
    design, program = found.design, found.program
    assert f".target sm_{cc}a" in ptx
    assert faults(made, product_of(design, kind), TARGETS[cc].shared_memory, may_spill=found.spills) == []
    loads = [access for _, access in program.loads]
    assert made.shared == budget.shared_bytes(design, loads, program.stores)
    assert len(instructions(ptx, "tcgen05.mma")) == design.k_bytes // 32
    assert {line.split()[0] for line in instructions(ptx, "tcgen05.ld.")} == {"tcgen05.ld.sync.aligned.16x256b.x4.b32"}
    columns = instructions(ptx, "tcgen05.alloc.")
    assert len(columns) == len(instructions(ptx, "tcgen05.dealloc.")) == 1
    assert all("cp.async.bulk.tensor.3d" in line for line in instructions(ptx, "cp.async.bulk"))
    assert instructions(ptx, "griddepcontrol.wait")


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_every_tile_is_the_machine_code_it_is_meant_to_be(cc, compiled, never_run, whole_sweeps):
    """For sm_103a the best one, whose code is that for sm_100a, and all with --whole-sweeps."""
    args = arguments(*matrices(), BIAS_GELU, bias=torch.empty(504))
    kernels = ef.get_kernels(args, cc=cc)
    assert len(kernels) == len(TENSOR_MEMORY_DESIGNS)
    for kernel in kernels if whole_sweeps or cc == 100 else kernels[:1]:
        made = compiled(kernel)
        check_code(kernel, made, cc=cc)
        assert not kernel.plan.allocation.program.spills
        assert len(instructions(made.ptx, "tcgen05.ld.")) == 2, "one code for all columns"
        assert "st.global.v4" in made.ptx, "whole sectors leave"


INPUTS = {
    "float16": (lambda: matrices(dtype=F16), "f16"),
    "A by columns, B by rows": (
        lambda: (torch.empty(512, 504, dtype=BF16).t(), torch.empty(512, 504, dtype=BF16)),
        "f16",
    ),
    "batches": (lambda: (torch.empty(5, 504, 512, dtype=BF16), torch.empty(5, 512, 504, dtype=BF16)), "f16"),
    "one B for all": (lambda: (torch.empty(5, 504, 512, dtype=BF16), matrices(k=512)[1]), "f16"),
    "e4m3": (lambda: matrices(dtype=E4M3), "f8f6f4"),
    "e5m2": (lambda: matrices(dtype=E5M2), "f8f6f4"),
    "e4m3 by e5m2": (lambda: matrices(dtype=E4M3, other=E5M2), "f8f6f4"),
    "nothing along K": (lambda: matrices(k=0), "f16"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_layout_compiles(name, compiled, never_run, whole_sweeps):
    """In pairs of CTAs, and alone where sweeps are whole."""
    made, kind = INPUTS[name]
    kernels = ef.get_kernels(arguments(*made()), cc=100)
    assert len(kernels) == len(TENSOR_MEMORY_DESIGNS)
    for kernel in (kernels[0], kernels[-1]) if whole_sweeps else kernels[:1]:
        check_code(kernel, compiled(kernel), kind)


KINDS = {
    "a value": ("bias gelu", "operands", "places"),
    "merged": ("reductions", "a number"),
    "rows": ("whole rows", "norm of rows"),
    "segments": ("norm of heads", "scales"),
    "other places": ("heads first", "rotated"),
}


def test_each_epilogue_is_of_a_kind():
    assert sorted(name for names in KINDS.values() for name in names) == sorted({**EPILOGUES, **SEGMENTS})


@pytest.mark.sweep("kind")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_every_kind_of_epilogue_compiles(kind, name, compiled, never_run):
    args = with_operands({**EPILOGUES, **SEGMENTS}[name], 500, 256 if name in SEGMENTS else 250)
    kernel = ef.get_kernels(args, cc=100)[0]
    made = compiled(kernel)
    check_code(kernel, made)
    assert max(made.spilled) <= 64, "of whole rows, which no smaller tile holds"


FURTHER: dict[str, Any] = {
    "a number in memory": (
        "def epi(accum, s, t): D = accum * s + t; return D\n",
        BF16,
        {"s": torch.empty(1), "t": 2.0},
    ),
    "dropout": ("def epi(accum, seed): D = dropout(accum, 0.1, seed); return D\n", E4M3, {"seed": 1234}),
    "by columns": ("def epi(accum, C): D = accum > C; return D\n", None, {"C": torch.empty(504, 500).t()}),
}


@pytest.mark.parametrize("name", FURTHER)
def test_other_operands_and_outputs_compile(name, compiled, never_run):
    source, out, operands = FURTHER[name]
    kernel = ef.get_kernels(arguments(*matrices(), source, out, **operands), cc=100)[0]
    check_code(kernel, compiled(kernel))


def test_values_that_later_walks_need_stay_in_tensor_memory(compiled, never_run):
    kernel = ef.get_kernels(with_operands(EPILOGUES["norm of rows"], 500, 256), cc=100)[0]
    assert instructions(compiled(kernel).ptx, "tcgen05.st.sync.aligned.16x256b")


@pytest.mark.parametrize("columns", sorted({design.columns for design in TENSOR_MEMORY_DESIGNS}))
def test_a_thread_has_the_values_of_its_places(columns, whole_sweeps):
    """Lane and column of each register of a thread, by the load's own partition; a warp has 32 lanes of its own. Of
    threads of the first warp and of one of each other: which lanes a warp has is independent of its threads. Without
    --whole-sweeps of those of its lanes whose numbers differ in one bit."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    from cutlass import Float32, Int32, cute

    from epifuse.providers.cutedsl.kernels import tensor_memory
    from epifuse.providers.cutedsl.kernels.fragment import listed
    from epifuse.providers.cutedsl.kernels.place import Division, Place

    design = next(one for one in TENSOR_MEMORY_DESIGNS if one.columns == columns)
    threads = (*(range(32) if whole_sweeps else (0, 1, 2, 4, 8, 16)), *range(32, 128, 32))
    found: dict[Any, Any] = {}

    @cute.jit
    def trace(unused: Int32):
        collect()

    def collect():
        start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        subtiles = tensor_memory._subtiles(start, columns)
        copy = tensor_memory._copied(tensor_memory._loading(), subtiles)
        places = cute.flat_divide(cute.make_identity_tensor((128, columns)), (128, 32))
        found["fragment"] = tensor_memory.Slabs().fragment()
        for thread in threads:
            found[thread] = copy.get_slice(thread).partition_D(places)
            found[thread] = {
                (down, right): listed(found[thread][None, down, None, 0, right])
                for down in range(2)
                for right in range(columns // 32)
            }
            found["own", thread] = tensor_memory.Slabs().get_slice(thread).places

    cute.compile(trace, Int32(0), options="--gpu-arch=sm_100a")
    division, seen = Division(design), set()
    assert (division.down, division.across) == (2, columns // 32)
    for thread in threads:
        for (down, right), lanes in found[thread].items():
            at = Place(0, 0, 0, 0)
            own = [
                (division.row(down, row, at), division.column(right, column, at))
                for row, column in found["own", thread]
            ]
            assert own == lanes
            assert {lane // 32 for lane, _ in lanes} == {thread // 32}
            seen.update(lanes)
    assert len(seen) == len(threads) * columns
    assert found["fragment"].registers == tuple(found["own", 0])
    assert found["fragment"].along_row == (1, 2), "four threads that write whole sectors together"


# --- what it computes, by its text and by the views it is handed -----------------------------------------------------


class Blackwell(Emulated):
    """Plans for sm_100a, and launches that PyTorch computes."""

    def kernel(self, args: ef.GemmArguments) -> Any:
        (kernel,) = ef.get_kernels(args, cc=100, providers=["cutedsl"], limit=1)
        return Launched(kernel)


@pytest.mark.parametrize("layouts", [("rows", "columns"), ("columns", "rows"), ("padded", "padded")], ids=str)
def test_its_views_are_those_of_a_and_b(layouts, emulated, never_run):
    machine = Blackwell("cpu")
    for m, n, k in ((1, 8, 8), (64, 8, 16), (136, 264, 80)):
        a, b = machine.whole(m, k), machine.whole(k, n)
        check(machine, PLAIN, machine.laid_out(a, layouts[0]), machine.laid_out(b, layouts[1]), {})
    check(machine, PLAIN, machine.whole(5, 64, 96), machine.whole(5, 96, 72), {})
    check(machine, PLAIN, machine.whole(40, 0), machine.whole(0, 48), {})


@pytest.mark.parametrize("name", EPILOGUES)
def test_its_text_says_what_the_epilogue_is(name, emulated, never_run):
    machine, source = Blackwell("cpu"), EPILOGUES[name]
    a, b = machine.laid_out(machine.whole(131, 80), "rows"), machine.laid_out(machine.whole(80, 253), "columns")
    check(machine, source, a, b, operands_of(machine, source, 131, 253), out_dtypes=torch.float32)
