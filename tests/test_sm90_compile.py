"""The Hopper kernel without a GPU: planned, cross-compiled for sm_90a, free of spills, refused with reasons."""

import re
from dataclasses import replace

import pytest
import torch
from hopper import (
    BF16,
    CASES,
    SCHEDULES,
    SPILLING,
    arguments,
    bias_gelu,
    bias_relu,
    hopper_kernel,
    layer_norm,
    many,
)
from machine_code import REMARKS, disassembled, no_locations, reported, spills

import epifuse as ef
from epifuse.base import store
from epifuse.base.cache import forget
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import DESIGNS, ROW_DESIGNS, budget, costs, load, rows
from epifuse.request.problem import Constraints

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")


def built(args, folder, design=None):
    """Program, design with its stages, and compiled function of one design's kernel, or of the best; with a report."""
    plans = [kernel.plan for kernel in ef.get_kernels(args, cc=90)]
    plan = next(plan for plan in plans if design in (None, plan.spec.design))
    found = plan.allocation.program
    return found.program, found.design, reported(found.text, folder)


SPILL_CASES = [
    (case, SCHEDULES[tile].schedule, tile)
    for case, tiles in (("plain", SCHEDULES), ("residual", ((128, 256), (256, 128), (128, 128))))
    for tile in tiles
]
"""Every tile is compiled for a sum and gelu above, which take more registers than the product alone."""
INSTRUCTIONS = {
    "multiplication by a warp group": "wgmma.mma_async",
    "TMA load": ".global.tile.mbarrier::complete_tx::bytes",
    "TMA store": "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group",
    "registers handed over": "setmaxnreg.inc",
    "matrices stored": "stmatrix.sync",
}


BY_NAME = {tuple(str(design).split(", ")): design for design in DESIGNS}


@pytest.mark.sweep
@pytest.mark.parametrize(("tile", "cluster"), BY_NAME)
def test_every_design_is_the_machine_code_it_is_meant_to_be(tile, cluster, capfd, tmp_path):
    design = BY_NAME[tile, cluster]
    ptx = built(CASES["bias gelu"], tmp_path, design)[2].__ptx__
    missing = [name for name, instruction in INSTRUCTIONS.items() if instruction not in ptx]
    assert missing == []
    assert (".multicast::cluster" in ptx) == (design.cluster != (1, 1))
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


INPUTS = {
    "tf32": (torch.float32, torch.float32, "wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32"),
    "float16 sums": (torch.float16, torch.float16, "wgmma.mma_async.sync.aligned.m64n{n}k16.f16.f16.f16"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("tile", [(128, 256), (256, 128), (128, 192)], ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_each_product_is_the_instruction_it_is_meant_to_be(name, tile, capfd, tmp_path):
    dtype, accumulator, instruction = INPUTS[name]
    a, b = torch.empty(512, 256, dtype=dtype), torch.empty(512, 256, dtype=dtype).t()
    epilogue = ef.EpilogueArguments.partial(bias_relu, {"bias": torch.empty(512, dtype=dtype)})
    tf32 = Constraints(precision="tf32", tile=tile)
    args = ef.GemmArguments(a, b, None, accumulator, epilogue, constraints=tf32)
    _, design, function = built(args, tmp_path)
    ptx = function.__ptx__
    lines = [line.split()[0] for line in ptx.splitlines() if line.startswith("wgmma.mma_async")]
    assert set(lines) == {instruction.format(n=tile[1])}
    # K of a stage is 128 bytes for every dtype, 32 for one instruction, for each 64 of a warp group's rows.
    assert len(lines) == 4 * tile[0] // (64 if design.pingpong else 128)
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    # Either would say that multiplications do not overlap.
    assert "serialized" not in report
    assert "injected" not in report


@pytest.mark.sweep("kind")
@pytest.mark.parametrize(
    ("kind", "epilogue"),
    [
        ("one of 32 bits", "def epi(accum, wide): D = accum + wide; return D"),
        ("one of 32 bits", "def epi(accum, bias, wide): D = gelu(accum + bias) + wide; return D"),
        ("one of 32 bits", "def epi(accum, wide): D = dgelu(accum, wide); return D"),
        ("two of 16 bits", "def epi(accum, C, E): D = silu(accum * C) + E; return D"),
        ("beside a reduction", "def epi(accum, wide): D = accum + wide; t = absmax(D); return D, t"),
    ],
)
def test_six_fragments_fit_beside_160_accumulators(kind, epilogue, capfd, tmp_path):
    """As a gradient that is added onto one of float32."""
    m, n, k = 640, 4096, 2048
    given = {"wide": torch.empty(m, n), "bias": torch.empty(n, dtype=BF16)}
    given |= dict.fromkeys("CE", torch.empty(m, n, dtype=BF16))
    used = {name: tensor for name, tensor in given.items() if name in epilogue.partition(")")[0]}
    made = ef.EpilogueArguments.partial(epilogue, used)
    a, b = torch.empty(k, m, dtype=BF16).t(), torch.empty(k, n, dtype=BF16)
    args = ef.GemmArguments(a, b, epilogue=made, out_dtypes={"D": torch.float32})
    design = next(design for design in DESIGNS if (design.tile, design.cluster) == ((128, 160), (2, 1)))
    program, _, _ = built(args, tmp_path, design)
    assert sum(access.dtype.itemsize for access in (*program.coming, *program.stores) if access.travels.staged) >= 6
    assert set(spills(capfd.readouterr().err)) == {0}


@pytest.fixture
def reporting(monkeypatch, tmp_path, capfd):
    """Kernels are compiled anew, and the compiler reports on them; `capfd` has what it said."""
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=tmp_path))
    monkeypatch.setattr(load, "OPTIONS", load.OPTIONS + REMARKS)
    no_locations(monkeypatch)
    forget()
    return capfd


@pytest.mark.sweep("case", "schedule")
@pytest.mark.parametrize(("case", "schedule", "tile"), SPILL_CASES, ids=str)
def test_cross_compiles_without_spills(case, schedule, tile, reporting):
    args = CASES[case]
    kernel = next(k for k in ef.get_kernels(args, cc=90) if k.metadata.tile_shape == tile)
    kernel.compile(args)
    report = reporting.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


def scalar_loss(accum, C):
    loss = -ef.sum(ef.softplus(accum) - accum * C) / 512
    return loss


def column_sums(accum, bias):
    D = ef.gelu(accum + bias, approximate="tanh")
    gradient = ef.sum(D, dim=0)
    return D, gradient


def row_statistics(accum):
    lse = ef.logsumexp(accum, dim=-1)
    scale = ef.rsqrt(ef.mean(accum * accum, dim=-1) + 1e-5)
    largest = ef.absmax(accum)
    penalty = ef.mean(lse * lse) / largest
    return lse, scale, largest, penalty


@pytest.mark.sweep("tile")
@pytest.mark.parametrize("tile", [(128, 256), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "args",
    [
        arguments(scalar_loss, C=torch.empty(512, 512, dtype=BF16)),
        arguments(column_sums, bias=torch.empty(512)),
        arguments(row_statistics, m=500),
    ],
    ids=["scalar", "columns", "rows"],
)
def test_reductions_cross_compile_without_spills(args, tile, reporting):
    kernel = next(k for k in ef.get_kernels(args, cc=90) if k.metadata.tile_shape == tile)
    assert kernel.get_workspace_size(args) > 0
    assert reporting.readouterr().err == "", "nothing is compiled to say so"
    kernel.compile(args)
    report = reporting.readouterr().err
    assert len(spills(report)) >= 2
    assert not any(spills(report))


def row_squares(accum, C):
    D = accum + C
    squares = ef.sum_of_squares(D, dim=-1)
    return D, squares


@pytest.mark.parametrize(
    "args",
    [
        arguments(column_sums, k=1024, bias=torch.empty(512)),
        arguments(row_squares, k=1024, C=torch.empty(512, 512, dtype=BF16)),
        arguments(lambda accum: ef.absmax(accum), k=512),
    ],
    ids=["columns", "rows", "scalar"],
)
def test_reductions_fit_beside_the_widest_accumulator(args, capfd, tmp_path):
    """N = 512 ends within a tile of 192 columns."""
    wide = next(design for design in DESIGNS if design.tile == (128, 192) and design.cluster == (2, 1))
    program, _, _ = built(args, tmp_path, wide)
    assert program.edges == ("nothing", "subtiles")
    report = capfd.readouterr().err
    assert len(spills(report)) >= 2
    assert not any(spills(report))


def normalised(accum, row):
    c = accum - ef.mean(accum, dim=-1, keepdim=True)
    D = c * ef.rsqrt(ef.mean(c * c, dim=-1, keepdim=True) + 1e-5) * row
    return D


@pytest.mark.sweep("launches")
@pytest.mark.parametrize(
    ("epilogue", "launches", "operands"),
    [
        (lambda accum: accum / ef.norm(accum), 2, {}),
        (lambda accum: ef.softmax(accum), 2, {}),
        (normalised, 3, {"row": torch.empty(50264)}),
    ],
    ids=["norm of the whole", "softmax", "layer norm"],
)
def test_several_launches_cross_compile_without_spills(epilogue, launches, operands, reporting):
    """Of rows that no cluster holds."""
    args = arguments(epilogue, n=50264, allowed=True, **operands)
    kernel = hopper_kernel(args)
    assert len(kernel.plan.allocation.launches) == launches
    kernel.compile(args)
    report = reporting.readouterr().err
    assert len(spills(report)) >= launches
    assert not any(spills(report))


def test_what_only_finished_values_read_is_not_loaded_in_tiles():
    """Such as the vector that a bias gradient is added onto: no register, no shared memory of the main kernel."""
    gradient = torch.empty(512)
    given = {"bias": torch.empty(512), "gradient": ef.Store(gradient, accumulate=True)}
    plain, added = (arguments(column_sums, **{**given, "gradient": out}) for out in (gradient, given["gradient"]))
    ways = [dict(hopper_kernel(args).plan.allocation.transports) for args in (plain, added)]
    assert ways[1] == ways[0] | {"old gradient": "once, after all tiles"}
    assert hopper_kernel(added).plan.allocation.notes == hopper_kernel(plain).plan.allocation.notes
    hopper_kernel(added).compile(added)


@pytest.mark.parametrize("batches", [(), (2,)])
def test_printed_values_need_no_destination(batches):
    """A view costs the host a microsecond. Batches come first in PyTorch, and last in the kernel."""
    from epifuse.providers.cutedsl import launch

    def printed(accum, C, bias):
        ef.debug_print("product {}", accum)
        D = accum + C + bias
        return D

    a, b, C = (torch.empty(*batches, 64, 64, dtype=BF16) for _ in range(3))
    args = ef.GemmArguments(
        a, b, epilogue=ef.EpilogueArguments(printed, C=C, bias=torch.empty(64), D=torch.empty_like(C))
    )
    plan = hopper_kernel(args).plan
    a, b, operands, outputs, _ = launch._views(plan, plan.allocation.program)
    made = [a.make, b.make, *(make for name, make in (*operands, *outputs) if name in ("C", "D"))]
    assert [make is None for make in made] == 4 * [not batches]
    assert dict(operands)["bias"] is not None


def softmax(accum):
    D = ef.softmax(accum, dim=-1)
    return D


ROW_CASES = {
    tuple(str(design).split(", ")): design
    for design in (*ROW_DESIGNS, *(d for d in DESIGNS if d.cluster[0] == 1 and d.tile in ((128, 256), (128, 128))))
}


@pytest.mark.sweep
@pytest.mark.parametrize("epilogue", [softmax, layer_norm])
@pytest.mark.parametrize(("tile", "cluster"), ROW_CASES)
def test_whole_rows_cross_compile_without_spills(tile, cluster, epilogue, capfd, tmp_path):
    """Ragged rows, which take a comparison an element. The CTAs of a cluster tell each other by asynchronous stores."""
    design = ROW_CASES[tile, cluster]
    n = rows.columns(design) - 8
    vectors = dict.fromkeys(("weight", "bias"), torch.empty(n)) | {"C": torch.empty(500, n, dtype=BF16)}
    args = arguments(epilogue, m=500, n=n, **(vectors if epilogue is layer_norm else {}))
    program, staged, function = built(args, tmp_path, design)
    assert budget.shared_bytes(staged, [a for _, a in program.loads], program.stores) <= TARGETS[90].shared_memory
    assert ("st.async" in function.__ptx__) == (design.cluster != (1, 1))
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


@pytest.mark.parametrize("extents", [{"m": 0}, {"n": 0}])
def test_a_result_without_elements_needs_no_compilation(extents, monkeypatch):
    from epifuse.providers.cutedsl import launch

    monkeypatch.setattr(launch, "function", None)
    args = arguments(lambda accum: ef.relu(accum), **extents)
    hopper_kernel(args).compile(args)


def cross_entropy(accum, bias, C):
    x = accum + bias
    return ef.sum(ef.softplus(x) - x * C)


def gradient_and_sums(accum, C):
    D = ef.gelu(accum) * C
    sums = ef.sum(D, dim=0)
    return D, sums


def row_losses(accum):
    return ef.sum(ef.softplus(accum), dim=1)


def three_logarithms(accum):
    one, two, three = ef.logsumexp(accum, dim=1), ef.logsumexp(2.0 * accum, dim=1), ef.logsumexp(3.0 * accum, dim=1)
    return one, two, three


VECTOR = {"bias": torch.empty(512)}
MATRIX = {"C": torch.empty(512, 512, dtype=BF16)}
SQUARE = next(design for design in DESIGNS if design.tile == (128, 128) and design.cluster == (2, 1))
REGISTERS = {
    "cross entropy": (arguments(cross_entropy, k=1024, **VECTOR, **MATRIX), 176),
    "where its epilogue is waited for": (arguments(cross_entropy, k=1016, **VECTOR, **MATRIX), 232),
    "where it ends within a subtile": (arguments(lambda accum: ef.sum(ef.exp(accum)), n=520, k=1024), 240),
    "softplus": (arguments(lambda accum: ef.softplus(accum), k=1024), 176),
    "logsumexp": (arguments(lambda accum: ef.logsumexp(accum, dim=1), k=1024), 184),
    "a gradient and its sums": (arguments(gradient_and_sums, k=1024, **MATRIX), 192),
    "little to compute": (arguments(bias_gelu, k=1024, **VECTOR), 240),
    "an exact sine": (arguments(lambda accum: ef.sin(accum), k=1024), 240),
    "what goes direct": (arguments(lambda accum: ef.gelu(accum), m=500, n=511, k=1024), 240),
    "a power": (arguments(lambda accum: accum**3, k=1024), 240),
    "an operand of 32 bits": (arguments(lambda accum, C: ef.dgelu(accum, C), k=1024, C=torch.empty(512, 512)), 200),
    "three logarithms": (arguments(three_logarithms, k=1024), 240),
}


def planned(case):
    """In tiles of 128 x 128."""
    return next(k.plan for k in ef.get_kernels(REGISTERS[case][0], cc=90) if k.plan.spec.design == SQUARE)


@pytest.mark.parametrize("case", REGISTERS)
def test_a_long_epilogue_gets_few_registers(case):
    assert planned(case).allocation.program.design.registers == REGISTERS[case][1]


@pytest.mark.sweep("registers")
@pytest.mark.parametrize(("case", "registers"), [(case, count) for case, (_, count) in REGISTERS.items()])
def test_with_its_registers_an_epilogue_does_not_spill(case, registers, capfd, tmp_path):
    reported(planned(case).allocation.program.text, tmp_path)
    report = spills(capfd.readouterr().err)
    assert report
    assert "sine" in case or set(report) == {0}


def test_what_planning_knows_of_the_tables_has_their_rows():
    from epifuse.providers.cutedsl.kernels.reduce import RULES
    from epifuse.providers.cutedsl.primitives import FAST, PRIMITIVE_ROWS

    assert costs.FAST.keys() == FAST.keys()
    assert costs.PRIMITIVES.keys() == PRIMITIVE_ROWS.keys()
    assert costs.REDUCTIONS.keys() == RULES.keys()


def test_every_primitive_has_a_row():
    from epifuse.fusion.primitives import PRIMITIVES
    from epifuse.providers.cutedsl.primitives import PRIMITIVE_ROWS

    assert frozenset(PRIMITIVES) == frozenset(PRIMITIVE_ROWS)


def test_several_operands_are_not_read_early(capfd, tmp_path):
    """Registers for a second subtile of each are not there: 320 bytes of this spilled."""

    def gated(accum, C, E, F, G):
        D = ef.gelu(accum * C + E) * ef.tanh(F) + G
        return D

    operands = {name: torch.empty(512, 512, dtype=BF16) for name in "CEFG"}
    built(arguments(gated, k=4096, **operands), tmp_path, SCHEDULES[128, 128])
    assert max(spills(capfd.readouterr().err)) <= 100


LOGARITHMS = {"a number": (lambda accum: ef.sum(ef.softplus(accum)), 2), "rows": (row_losses, 4)}


@pytest.mark.parametrize("case", LOGARITHMS)
def test_a_sum_of_logarithms_takes_one_for_64_values(case, tmp_path):
    """A thread has 128 values, or 32 of each of four rows; `log1p` itself is a polynomial."""
    epilogue, products = LOGARITHMS[case]
    args = arguments(epilogue, m=2048, n=2048, k=4096)
    _, _, function = built(args, tmp_path, SCHEDULES[128, 128])
    assert len(re.findall(r"lg2\.approx", function.__ptx__)) == products


MANY = [(8, BF16, 4096), (3, torch.float32, 4096), (5, BF16, 1024)]


@pytest.mark.parametrize(("operands", "dtype", "k"), MANY)
def test_many_operands_and_outputs_take_a_smaller_tile(operands, dtype, k):
    """Eight and eight spill 5 KB a thread in 128 x 128, and take twice as long."""
    args = many(operands, operands, dtype, k, 4096)
    noted = {
        kernel.metadata.kernel_name: SPILLING in kernel.plan.allocation.notes for kernel in ef.get_kernels(args, cc=90)
    }
    assert next(iter(noted)) == "sm90_gemm_64x128_pingpong_2x1"
    for name in ("128x96_pingpong_2x1", "128x128_pingpong_2x1", "128x256_cooperative_2x1", "64x256_pingpong_2x1"):
        assert noted[f"sm90_gemm_{name}"]


@pytest.mark.sweep("dtype")
@pytest.mark.parametrize(("operands", "dtype", "k"), MANY)
def test_the_smaller_tile_spills_little(operands, dtype, k, capfd, tmp_path):
    built(many(operands, operands, dtype, k, 4096), tmp_path, SCHEDULES[64, 128])
    assert max(spills(capfd.readouterr().err)) <= 132


def test_int64_labels_are_computed_in_int64():
    def nll(accum, labels):
        D = ef.where(labels == ef.index_n(accum), accum, 0.0)
        return D

    def shifted(accum, labels):
        D = ef.where(labels + 1 == ef.index_n(accum), accum, 0.0)
        return D

    labels = torch.empty(512, 1, dtype=torch.int64)
    args = arguments(nll, labels=labels)
    hopper_kernel(args).compile(args)
    args = arguments(shifted, labels=labels)
    hopper_kernel(args).compile(args)


def test_a_maximum_is_one_instruction_for_each_value(tmp_path):
    """CuTe DSL's maximum of fragments is a comparison and a choice: relu beside a residual took a quarter more code."""
    from accuracy.probe import WIDTH, compiled

    options = f" --keep-ptx --dump-dir={tmp_path}"
    lines = compiled("clip(x, 0.5, 6.0)", (torch.float32,), torch.float32, options=options).__ptx__.splitlines()
    assert sum("max.NaN.f32" in line for line in lines) == WIDTH
    assert sum("min.NaN.f32" in line for line in lines) == WIDTH
    assert not any("selp.f32" in line for line in lines)


def logsumexp(accum):
    lse = torch.logsumexp(accum, dim=-1)
    return lse


def scaled_blocks(accum):
    blocks = torch.nn.functional.gelu(accum, approximate="tanh").unflatten(-1, (-1, 128))
    scale = ef.block_scale(ef.absmax(blocks, dim=-1, keepdim=True))
    D = (blocks / scale).flatten(-2, -1).to(torch.float8_e4m3fn)
    return D, scale


@pytest.mark.parametrize("epilogue", [logsumexp, scaled_blocks])
def test_loads_do_not_wait_for_what_the_epilogue_computes(epilogue, tmp_path):
    """ptxas moved half of it before the last stage was given back: logsumexp of 16384 x 8192 x 1024 took 1.4 times as
    long (release_h100.json)."""
    args = arguments(epilogue, 16384, 8192, 1024)
    (plan,) = (kernel.plan for kernel in ef.get_kernels(args, cc=90) if kernel.plan.spec.design == SCHEDULES[128, 128])
    code = disassembled(plan.allocation.program.text, tmp_path)
    behind = code[code.rindex("HGMMA") :]
    assert "SYNCS.ARRIVE" in behind
    assert "SYNCS.ARRIVE" not in behind[behind.index("MUFU.EX2") :]


@pytest.mark.parametrize("by_rows", [True, False])
def test_only_column_major_outputs_make_warps_wait(by_rows, tmp_path):
    """A barrier for each subtile then; else a warp sends its own rows, and the only barrier is the turn to multiply."""
    accum = torch.empty(512, 512, dtype=BF16)
    args = arguments(lambda accum: accum, accum=accum if by_rows else accum.t())
    _, design, function = built(args, tmp_path, SCHEDULES[128, 128])
    waits = len(re.findall(r"\bbar(?:rier)?(?:\.cta)?\.sync", function.__ptx__))
    assert waits == 1 + (0 if by_rows else design.subtiles)


@pytest.mark.parametrize("shapes", [((128, 64), (64, 1)), ((128, 1), (1, 64))], ids=str)
def test_one_contiguous_column_is_addressable(shapes):
    args = ef.GemmArguments(*(torch.empty(shape, dtype=BF16) for shape in shapes))
    hopper_kernel(args).compile(args)
