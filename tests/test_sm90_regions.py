"""Regions of N on Hopper without a GPU: what is planned, what is refused, what each launch is handed."""

import itertools

import pytest
import torch
from emulated import Emulated, emulated, on_hopper  # noqa: F401  # fixtures
from gpu import test_regions as on_gpu
from hopper import BF16, SCHEDULES, arguments, reasons
from machine_code import spills
from test_sm90_compile import built

import epifuse as ef
from epifuse.providers.cutedsl.designs import HEAD_DESIGNS

M, N = 1024, 1536


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["rows", "columns", "odd"])
@pytest.mark.parametrize("name", on_gpu.CASES)
def test_each_region_is_handed_over_where_it_lies(name, layout, emulated: Emulated):  # noqa: F811
    on_gpu.test_each_region_has_its_own(name, layout, emulated)


def test_batches_and_sequences_are_handed_over(emulated: Emulated):  # noqa: F811
    for name in ("elementwise", "heads first", "normed and rotated", "reduced"):
        on_gpu.test_of_batches(name, emulated)
    for m in (1, 129):
        for name in ("normed and rotated", "beside heads of all columns"):
            on_gpu.test_of_every_number_of_rows(name, m, emulated)
    on_gpu.test_of_no_rows(emulated)
    on_gpu.test_what_attention_takes(emulated)


def heads_in_place(accum, C):
    D = accum.unflatten(-1, (-1, 32)).transpose(0, 1) + C
    return D


def gate_beside_heads(accum):
    a, b = accum.chunk(2, dim=-1)
    D, P = ef.silu(a) * b, accum.unflatten(-1, (-1, 64)).transpose(0, 1)
    return D, P


@pytest.mark.parametrize("m", [1, 2])
def test_one_row_is_as_many_are(m, on_hopper):  # noqa: F811
    a, b, C = on_hopper.whole(m, 64), on_hopper.whole(256, 64).t(), torch.ones(8, m, 32)
    accum = a.float() @ b.float()
    found = ef.gemm(a, b, epilogue=heads_in_place, C=C, out=C)
    assert torch.equal(found, accum.unflatten(-1, (-1, 32)).transpose(0, 1) + 1)
    for got, want in zip(ef.gemm(a, b, epilogue=gate_beside_heads), gate_beside_heads(accum), strict=True):
        torch.testing.assert_close(got, want.bfloat16())


@pytest.mark.parametrize("accumulates", [False, True])
def test_what_is_there_is_handed_over(accumulates, emulated: Emulated):  # noqa: F811
    for m in (1, 200):
        on_gpu.test_onto_what_is_there(m, emulated, accumulates=accumulates)


def normed_latents(accum):
    """Of DeepSeek-V3: the query's and the key's latents, and the key's rotary columns."""
    q, kv, pe = accum.split([1536, 512, 64], dim=-1)
    D = q * ef.rsqrt(ef.mean(q * q, dim=-1, keepdim=True) + 1e-6)
    P = kv * ef.rsqrt(ef.mean(kv * kv, dim=-1, keepdim=True) + 1e-6)
    R = pe * 1
    return D, P, R


@pytest.mark.parametrize("m", [1, 128, 4096])
def test_regions_that_no_kernel_takes_together_have_one_each(m):
    """Whole rows of 1536 columns need a cluster of eight CTAs, and those of 512 no more than one of four."""
    (kernel,) = ef.get_kernels(arguments(normed_latents, m=m, n=2112, k=7168), cc=90)
    designs = [launch.allocation.program.design for launch in kernel.plan.allocation.launches]
    assert [design.exchanged > 0 for design in designs] == [True, True, False]
    assert len({launch.spec for launch in kernel.plan.allocation.launches}) == 3
    assert "because no kernel takes all of them" in str(kernel.plan)


def overlapping(accum):
    q, _k = accum.split([1024, 512], dim=-1)
    D = accum[:, 512:]
    return q, D


def of_whole_rows(accum):
    q, k = (accum / ef.norm(accum, dim=-1, keepdim=True)).split([1024, 512], dim=-1)
    D, P = q * 2, k + 1
    return D, P


def of_whole_rows_that_nest(accum):
    D, P, R = (accum / ef.norm(accum, dim=-1, keepdim=True)).split([768, 384, 384], dim=-1)
    return D, P, R


def of_each_other(accum):
    q, k = accum.split([1024, 512], dim=-1)
    D = q / ef.amax(k, dim=-1, keepdim=True)
    return D


def of_other_heads(accum, scales):
    x = (accum.unflatten(-1, (-1, 768)) * scales).flatten(-2, -1)
    q, k = x.split([896, 640], dim=-1)
    D, P = q * 2, k + 1
    return D, P


def normed(x, weight):
    return x * ef.rsqrt(ef.mean(x * x, dim=-1, keepdim=True) + 1e-6) * weight


def rotated(x, cosines, sines):
    a, b = x.chunk(2, dim=-1)
    return ef.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)


OUT = "store the product, and combine its parts in PyTorch"
REFUSED = {
    "columns twice": (
        arguments(overlapping, n=N),
        (
            "it computes columns 0:1024 and 512:1536 in a launch each, and these overlap: store the product, and "
            "combine its parts in PyTorch, or pass allow_recompute=True"
        ),
    ),
    "whole rows": (
        arguments(of_whole_rows, n=N),
        f"it needs norm over whole rows for a part of their columns: {OUT}",
    ),
    "whole rows, and parts that nest": (
        arguments(of_whole_rows_that_nest, n=N),
        f"it needs norm over whole rows for a part of their columns: {OUT}",
    ),
    "columns of another region": (
        arguments(of_each_other, n=N),
        f"it computes with columns 0:1024 and 1024:1536 of a row at once: {OUT}",
    ),
    "a dim that is cut": (
        arguments(of_other_heads, n=N, scales=torch.empty(2, 1)),
        f"it cuts a dim in columns 0:896: {OUT}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_with_a_way_out(name):
    args, reason = REFUSED[name]
    assert reason in reasons(args)


def one_range(accum):
    q, _k = accum.split([512, 1024], dim=-1)
    return q


def one_softmax(accum):
    D = accum[:, 512:768].softmax(-1)
    return D


def test_columns_that_no_output_needs_are_not_computed():
    """Where a design carries one of several equal parts alone, it does so as another range."""
    for function, columns in ((one_range, (0, 512)), (one_softmax, (512, 768))):
        args = arguments(function, n=N)
        assert ef.get_kernels(args, cc=90)[0].plan.allocation.columns == (columns,)
        assert f"1 launch: columns {columns[0]}:{columns[1]} of the product" in str(ef.explain(args, cc=90))


def test_columns_are_computed_twice_where_that_is_allowed():
    args = arguments(overlapping, n=N, allowed=True)
    plan = ef.get_kernels(args, cc=90)[0].plan
    assert plan.allocation.columns == ((0, 1024), (512, N))


def all_and_a_range(accum, row):
    """What is common leaves too, and more columns than the range."""
    x = accum + row
    k = x[:, 256:768] * 2
    return x, k


def all_and_equal_parts(accum, row):
    x = accum + row
    q, k, v = x.chunk(3, dim=-1)
    D, E, F = ef.relu(q), k * 2, v + 1
    return D, x, E, F


def all_in_heads_and_a_range(accum, row):
    x = (accum + row).unflatten(-1, (-1, 128)).transpose(0, 1)
    k = (accum + row)[:, 256:768] * 2
    return x, k


def rows_alone_and_all_and_a_range(accum, column):
    """What has no columns leaves with the first range."""
    x, k = accum + column, accum[:, 256:768] * 2
    D = column * 2
    return D, x, k


@pytest.mark.parametrize(
    "function", [all_and_a_range, all_and_equal_parts, all_in_heads_and_a_range, rows_alone_and_all_and_a_range]
)
def test_a_range_writes_its_part_of_what_is_of_all_columns(function):
    """So that no column is computed twice. Ranges between take the rest."""
    operands = {"row": torch.empty(N)} if "row" in function.__code__.co_varnames else {"column": torch.empty(512, 1)}
    plan = ef.get_kernels(arguments(function, n=N, **operands), cc=90)[0].plan
    assert len(plan.allocation.columns) == len(plan.allocation.launches) == 0
    ranges = [program.columns for program in plan.allocation.program.source.programs]
    ends = [0, 512, 1024, N] if function is all_and_equal_parts else [0, 256, 768, N]
    assert ranges == list(itertools.pairwise(ends))


def of_whole_rows_and_a_range(accum):
    """No range has a part of what needs whole rows."""
    x, k = ef.softmax(accum, dim=-1), accum[:, 256:768] * 2
    return x, k


def test_what_needs_whole_rows_is_not_shared():
    args = arguments(of_whole_rows_and_a_range, n=N)
    told = "these overlap, because it needs amax over whole rows for a part of their columns"
    assert any(told in reason for reason in reasons(args))
    assert ef.get_kernels(arguments(of_whole_rows_and_a_range, n=N, allowed=True), cc=90)


def normed_and_doubled(accum):
    q, k = accum.split([4096, 64], dim=-1)
    D, E = q * torch.rsqrt((q * q).mean(-1, keepdim=True) + 1e-6), k * 2
    return D, E


def test_a_region_that_takes_two_launches_says_so():
    plan = ef.get_kernels(arguments(normed_and_doubled, n=4160, allowed=True), cc=90)[0].plan
    assert "2 launches: columns 0:4096, 4096:4160 of the product" in str(plan)
    assert "    2 launches: the product is computed twice, 2.0 x the FLOPs" in str(plan)


def softmax_and_a_quarter(accum):
    _, k = accum.split([1152, 384], dim=-1)
    D = ef.softmax(accum, dim=-1)
    return D, k


def test_a_range_that_overlaps_says_what_allows_it():
    """Also where it is one of several equal parts."""
    assert any("these overlap" in reason for reason in reasons(arguments(softmax_and_a_quarter, n=N)))
    assert ef.get_kernels(arguments(softmax_and_a_quarter, n=N, allowed=True), cc=90)


def a_gate_that_no_equal_part_holds(accum):
    a, b, c, _d = accum.chunk(4, dim=-1)
    D, E = b * c, a.relu()
    return D, E


def test_a_range_that_overlaps_names_only_what_helps():
    """Computing columns twice does not plan, as each launch is refused by itself."""
    reason = next(told for told in reasons(arguments(a_gate_that_no_equal_part_holds, n=N)) if "overlap" in told)
    assert reason.endswith("store the product, and combine its parts in PyTorch")
    assert not ef.get_kernels(arguments(a_gate_that_no_equal_part_holds, n=N, allowed=True), cc=90)


def projection(accum, of_q, of_k, cosines, sines):
    """q, k and v of one product, as attention takes them."""
    q, k, v = accum.split([1024, 256, 256], dim=-1)
    Q = rotated(normed(q.unflatten(-1, (-1, 128)), of_q), cosines, sines).transpose(0, 1)
    K = rotated(normed(k.unflatten(-1, (-1, 128)), of_k), cosines, sines).transpose(0, 1)
    V = v.unflatten(-1, (-1, 128)).transpose(0, 1)
    return Q, K, V


def biased(accum, row):
    q, k, v = (accum + row).split([1024, 256, 256], dim=-1)
    D, E, F = ef.relu(q), ef.gelu(k), v * 2
    return D, E, F


def whole(accum, row):
    D = ef.gelu(accum + row)
    return D


def with_a_residual(accum, C):
    q, k, v = (accum + C).split([1024, 256, 256], dim=-1)
    return q, k, v


OPERANDS = {
    **{name: torch.empty(128, dtype=BF16) for name in ("of_q", "of_k")},
    **{name: torch.empty(M, 1, 64, dtype=BF16) for name in ("cosines", "sines")},
}
CASES = {
    "projection": arguments(projection, m=M, n=N, k=2048, **OPERANDS),
    "biased": arguments(biased, m=M, n=N, k=2048, row=torch.empty(N, dtype=BF16)),
    "with a residual": arguments(with_a_residual, m=M, n=N, k=2048, C=torch.empty(M, N, dtype=BF16)),
}
WHOLE = arguments(whole, m=M, n=N, k=2048, row=torch.empty(N, dtype=BF16))


def test_one_launch_has_an_epilogue_for_each_region():
    plan = ef.get_kernels(CASES["projection"], cc=90)[0].plan
    assert plan.allocation.launches == ()
    told = [program.columns for program in plan.allocation.program.source.programs]
    assert told == [(0, 1024), (1024, 1280), (1280, N)]
    assert "columns 0:1024, 1024:1280, 1280:1536 in one launch" in str(plan)


def of_two_parts(accum, cosines):
    q, k, v = accum.split([512, 256, 768], dim=-1)
    q2, k2 = q.unflatten(-1, (8, 64)) * cosines, k.unflatten(-1, (4, 64)) * cosines
    return q2, k2, v


def test_an_operand_of_two_regions_says_which():
    args = arguments(of_two_parts, m=M, n=N, k=2048, cosines=OPERANDS["cosines"])
    plan = ef.get_kernels(args, cc=90)[0].plan
    loads = [line for line in str(plan).splitlines() if line.startswith("  load     cosines")]
    assert [line.rpartition(", for ")[2] for line in loads] == ["columns 0:512", "columns 512:768"]


def heads_first(accum):
    D = accum.unflatten(-1, (-1, 64)).transpose(0, 1)
    return D


def test_heads_leave_by_tma(tmp_path):
    """Which counts them by a dim of its own: pieces of whole subtiles, whose strides are multiples of 16 bytes."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    args = arguments(heads_first, m=M, n=N)
    assert dict(ef.get_kernels(args, cc=90)[0].plan.allocation.transports) == {"D": "TMA through shared memory"}
    ptx = built(args, tmp_path, SCHEDULES[128, 128])[2].__ptx__
    assert "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group" in ptx
    assert "st.global" not in ptx


DIRECT = {
    "narrower than a subtile": ("D = accum.unflatten(-1, (-1, 16)).transpose(0, 1)", N, {}),
    "no whole subtiles": ("D = accum.unflatten(-1, (-1, 48)).transpose(0, 1)", N, {}),
    "columns of heads apart": ("D = accum.unflatten(-1, (-1, 64)).permute(2, 1, 0)", N, {}),
    "rows that TMA cannot address": (
        "D = accum.unflatten(-1, (-1, 64)).transpose(0, 1)",
        N,
        {"D": torch.empty(24, M, 65, dtype=BF16)[..., :64]},
    ),
}


@pytest.mark.parametrize("name", DIRECT)
def test_heads_go_direct_where_tma_cannot(name):
    body, n, out = DIRECT[name]
    a, b = torch.empty(M, 256, dtype=BF16), torch.empty(n, 256, dtype=BF16).t()
    made = ef.EpilogueArguments.partial(f"def epi(accum): {body}; return D", out)
    (told,) = dict(ef.get_kernels(ef.GemmArguments(a, b, epilogue=made), cc=90)[0].plan.allocation.transports).values()
    assert told.startswith("direct")


def kernels_of(args):
    return {kernel.plan.spec.design: kernel.plan for kernel in ef.get_kernels(args, cc=90)}


def test_a_tile_is_of_one_region():
    """Those whose columns do not divide a bound take a launch for each region, and say so; so do those that split K or
    exchange A and B."""
    for design, plan in kernels_of(CASES["biased"]).items():
        divided = 1024 % design.tile[1] == 0 == 1280 % design.tile[1]
        assert bool(plan.allocation.launches) == (design.split > 1 or design.swapped or not divided), design
        if not divided and design.split == 1:
            why = f"a region begins at column 1024, which is no multiple of the tile's {design.tile[1]} columns"
            assert f"each region of columns takes a launch of its own, because {why}" in str(plan)


def twelfths(accum):
    a, b, c, d, e, f, g, h, i, j, k, l = accum.chunk(12, dim=-1)
    return a, b, c, d, e, f, g, h, i, j, k, l


def test_many_regions_take_a_launch_each():
    plan = ef.get_kernels(arguments(twelfths, m=M, n=N), cc=90)[0].plan
    assert len(plan.allocation.launches) == 12
    assert "because a kernel has up to 8 regions, and there are 12" in str(plan)


def test_regions_share_memory_for_what_they_store():
    """So that A and B have as many stages as beside an epilogue of all columns."""
    one, several = kernels_of(WHOLE), kernels_of(CASES["biased"])
    for design in SCHEDULES.values():
        if not several[design].allocation.launches:
            stages = [plans[design].allocation.program.design.stages for plans in (one, several)]
            assert stages[0] == stages[1], design


DIVIDING = [*(design for design in SCHEDULES.values() if 256 % design.tile[1] == 0), *HEAD_DESIGNS]


@pytest.mark.sweep("rows", "schedule", "cluster")
@pytest.mark.parametrize(
    ("design", "rows", "schedule", "cluster"),
    [(one, one.tile[0], one.schedule, one.cluster) for one in DIVIDING],
    ids=str,
)
def test_every_design_that_divides_the_bounds_carries_them(
    design, rows, schedule, cluster, capfd, tmp_path, whole_sweeps
):
    """Accumulators stay in registers through the branch. Cases take turns unless sweeps are whole."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    plans = {name: kernels_of(args) for name, args in CASES.items()}
    names = [name for name, found in plans.items() if design in found]
    turn = DIVIDING.index(design) % len(names)
    for name in names if whole_sweeps else names[turn : turn + 1]:
        assert plans[name][design].allocation.launches == ()
        built(CASES[name], tmp_path, design)
        report = capfd.readouterr().err
        assert max(spills(report)) == 0
        assert "serialized" not in report


def told_of(args):
    """How each operand travels."""
    return {name: told for name, told in ef.get_kernels(args, cc=90)[0].plan.allocation.transports if name in OPERANDS}


def test_angles_of_every_head_come_by_tma():
    """The columns of one head, again and again. Columns that are no whole subtiles do not, nor rows that are cut."""
    assert {told_of(CASES["projection"])[name] for name in ("cosines", "sines")} == {"TMA through shared memory"}
    narrow = {name: torch.empty(M, 1, 80, dtype=BF16)[..., :64] for name in ("cosines", "sines")}
    assert told_of(arguments(projection, m=M, n=N, k=2048, **{**OPERANDS, **narrow}))["sines"].startswith("TMA")
    odd = {name: torch.empty(M, 1, 65, dtype=BF16)[..., :64] for name in ("cosines", "sines")}
    told = told_of(arguments(projection, m=M, n=N, k=2048, **{**OPERANDS, **odd}))["sines"]
    assert told.endswith("as a stride of 130 bytes is no multiple of 16")
    angles = torch.empty(M, 1, 48, dtype=BF16)
    thirds = arguments(
        "def epi(accum, sines): D = accum.unflatten(-1, (-1, 48)) * sines; return D", m=M, n=N, sines=angles
    )
    assert told_of(thirds)["sines"].endswith("as its pieces of 48 columns are no multiple of 32")


def test_regions_share_memory_for_what_they_read():
    """Operands that lie alike take the stages of one."""
    plans = kernels_of(CASES["with a residual"])
    one = kernels_of(arguments(with_one_residual, m=M, n=N, k=2048, C=torch.empty(M, N, dtype=BF16)))
    for design in (SCHEDULES[128, 128], SCHEDULES[128, 256]):
        stages = [
            (found.stages, found.load_stages) for found in (p[design].allocation.program.design for p in (one, plans))
        ]
        assert stages[0] == stages[1], design


def test_heads_take_tiles_of_their_own():
    """Other epilogues do not."""
    assert HEAD_DESIGNS[0] in kernels_of(CASES["projection"])
    assert HEAD_DESIGNS[0] not in kernels_of(WHOLE)


def with_one_residual(accum, C):
    D = accum + C
    return D


def with_a_residual_of_thirds(accum, C):
    q, k, v = (accum + C).chunk(3, dim=-1)
    return q, k, v


def test_operands_of_regions_do_not_fit_beside_192_sums():
    """What is read where it lies would spill 696 bytes: a launch for each region runs instead."""
    odd = torch.empty(M, 3 * 960 + 1, dtype=BF16)[:, 1:]
    args = arguments(with_a_residual_of_thirds, m=M, n=3 * 960, k=2048, C=odd)
    told = str(kernels_of(args)[SCHEDULES[128, 192]])
    assert "because its accumulator leaves too few registers for operands of a region" in told


def test_one_main_loop_has_stores_for_each_region(tmp_path):
    """Behind the branch, as many as one epilogue of all columns has."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    one, several = (built(args, tmp_path, SCHEDULES[128, 128])[2].__ptx__ for args in (WHOLE, CASES["biased"]))
    assert several.count("wgmma.mma_async") == one.count("wgmma.mma_async")
    assert several.count("stmatrix") == 3 * one.count("stmatrix")


def of_64_columns_and_the_rest(accum):
    q, k = accum.split([64, 192], dim=-1)
    D, E = q * 2, k + 1
    return D, E


@pytest.mark.parametrize("m", [0, 1, 16])
def test_ranges_that_begin_within_a_block_need_no_rows(m):
    a, b = torch.empty(m, 256, dtype=torch.float8_e4m3fn), torch.empty(256, 256, dtype=torch.float8_e4m3fn).t()
    a, b = ef.Scaled(a, torch.empty(m, 2)), ef.Scaled(b, torch.empty(2, 2))
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(of_64_columns_and_the_rest, {}))
    assert ef.get_kernels(args, cc=90, limit=1)
