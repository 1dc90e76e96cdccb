"""A of 16 bits and B of 8: what the CPU computes, what has a gradient, what Hopper plans, and what it compiles to."""

import itertools
import json
import re
import statistics
import struct
from pathlib import Path

import gpu.test_weight_only as on_gpu
import numpy as np
import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from hopper import reasons
from machine_code import reported, spills
from ptx_machine import Kernel, execute

import epifuse as ef
from epifuse.base.dtypes import short
from epifuse.base.errors import ArgumentError
from epifuse.providers.cutedsl import SWAPPED_DESIGNS, budget, load

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, INT8, UINT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
WIDE, NARROW = (BF16, F16), (INT8, UINT8, E4M3, E5M2)
SCALED = "def epi(accum, scale): D = silu(accum * scale); return D\n"
ROOT = Path(__file__).parents[1]
COMPARED = ("int8 / mm", "e4m3 / mm", "int8 / compiled", "e4m3 / compiled")


def every(dtype, *shape):
    """Each value of a dtype in turn, but infinities and NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = values[values.float().isfinite()]
    return values.repeat(-(-torch.Size(shape).numel() // len(values)))[: torch.Size(shape).numel()].view(shape)


def layer(a, b, m=5, n=20, k=70):
    """x, a weight of 8 bits, and a scale for each of its rows."""
    return torch.randn(m, k).to(a), every(b, n, k), torch.rand(n) * 0.1


# --- values and gradients on the CPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_every_value_of_8_bits_is_exact_in_16(a, b):
    values = every(b, 256)
    assert torch.equal(values.to(a).double(), values.double())


@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_a_product_is_that_of_the_converted_weight(a, b):
    x, weight, scale = layer(a, b)
    found, want = (ef.linear(x, w, epilogue=SCALED, scale=scale) for w in (weight, weight.to(a)))
    assert found.dtype == a
    assert torch.equal(found, want)
    found, want = (ef.gemm(x.expand(3, 5, 70), w.t().expand(3, 70, 20)) for w in (weight, weight.to(a)))
    assert torch.equal(found, want)


@pytest.mark.parametrize("b", [INT8, E4M3], ids=str)
def test_gradients_are_those_of_the_converted_weight(b):
    found = []
    for convert in (False, True):
        torch.manual_seed(0)
        x, weight, scale = layer(BF16, b)
        x, scale = x.requires_grad_(), scale.requires_grad_()
        ef.linear(x, weight.to(BF16) if convert else weight, epilogue=SCALED, scale=scale).sum().backward()
        found.append((x.grad, scale.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_batches():
    x, weight = torch.randn(2, 5, 32).bfloat16().requires_grad_(), every(INT8, 2, 32, 7)
    ef.gemm(x, weight).sum().backward()
    assert torch.equal(x.grad, weight.sum(-1).bfloat16()[:, None].expand(2, 5, 32))


def test_a_weight_of_8_bits_has_no_gradient():
    x, weight, _ = layer(BF16, E4M3)
    with pytest.raises(ArgumentError, match=r"weight requires grad and is torch\.float8_e4m3fn, which has no gradient"):
        ef.linear(x, weight.requires_grad_())


def test_autocast_casts_the_input_alone():
    x, weight, _ = layer(F32, INT8)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(ef.linear(x, weight), ef.linear(x.bfloat16(), weight))


def test_a_compiled_call_is_an_operator():
    x, weight, scale = layer(BF16, INT8)
    call = torch.compile(lambda x: ef.linear(x, weight, epilogue=SCALED, scale=scale), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(call(x), ef.linear(x, weight, epilogue=SCALED, scale=scale))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (INT8, BF16, "A has fewer bits than B: torch.int8 and torch.bfloat16"),
        (F32, INT8, "needs A in bfloat16 or float16"),
        (INT8, E4M3, "the two dtypes must agree"),
        (BF16, torch.int16, "B is torch.int16, which no kernel multiplies"),
    ],
    ids=str,
)
def test_other_pairs_are_refused_by_name(a, b, message):
    with pytest.raises(ArgumentError, match=message):
        ef.gemm(torch.ones(4, 8).to(a), torch.ones(8, 4).to(b))


# --- plans -----------------------------------------------------------------------------------------------------------


def arguments(m=512, n=512, k=1024, pair=(BF16, INT8), a_transposed=False, b_transposed=True, source=SCALED, **asked):
    a = torch.empty(k, m, dtype=pair[0]).t() if a_transposed else torch.empty(m, k, dtype=pair[0])
    b = torch.empty(n, k, dtype=pair[1]).t() if b_transposed else torch.empty(k, n, dtype=pair[1])
    given = {"scale": torch.empty(n)} if "scale" in source else {}
    epilogue = ef.EpilogueArguments.partial(source, given)
    return ef.GemmArguments(a, b, epilogue=epilogue, constraints=ef.Constraints(**asked))


@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_many_rows_multiply_a_weight_that_is_converted_first(a, b):
    args = arguments(m=4096, n=4096, k=4096, pair=(a, b))
    kernel = ef.get_kernels(args, cc=90, limit=1)[0]
    note = f"B is converted first, from {short(b)} to {short(a)}"
    assert f"{note}: 33.6 MB of workspace" in str(kernel.plan).splitlines()[-1]
    assert "rewriting A and B" in str(ef.explain(args, cc=90))
    unsplit = arguments(m=4096, n=4096, k=4096, pair=(a, b), split=1)
    (kernel,) = ef.get_kernels(unsplit, cc=90, limit=1)
    assert kernel.get_workspace_size(unsplit) == 2 * 4096 * 4096, "of B alone"


def test_a_that_tma_cannot_address_is_copied_beside_it():
    args = arguments(m=512, n=512, k=257, split=1)
    (kernel,) = ef.get_kernels(args, cc=90, limit=1)
    told = str(kernel.plan)
    assert "B is converted first, from s8 to bf16, and A is copied to where TMA can address it" in told
    assert "A has a stride of 514 bytes" in told.splitlines()[-1]
    assert kernel.get_workspace_size(args) == (512 + 512) * 5 * 128


def test_a_weight_lies_in_any_way_where_it_is_converted_first():
    assert ef.get_kernels(arguments(b_transposed=False), cc=90)
    assert ef.get_kernels(arguments(k=1001), cc=90)


def test_the_bits_are_those_of_the_converted_weight():
    """One kernel multiplies both."""
    kernels = [ef.get_kernels(arguments(pair=pair, split=1), cc=90) for pair in ((BF16, INT8), (BF16, BF16))]
    assert len({kernel.plan.allocation.bits for own in kernels for kernel in own}) == 1


def test_block_scales_are_refused():
    weight = ef.Scaled(torch.empty(256, 256, dtype=E4M3), torch.empty(2, 2))
    args = ef.GemmArguments(torch.empty(256, 256, dtype=BF16), weight)
    (reason,) = reasons(args)
    assert reason.startswith("it applies block scales only where A and B both have 8 bits: quantise A too")


@pytest.mark.parametrize("layout", on_gpu.LAYOUTS)
def test_a_launch_is_handed_a_and_b_as_they_lie(layout, emulated: Emulated):
    on_gpu.test_weights_lie_in_any_way(260, layout, emulated)
    on_gpu.test_weights_lie_in_any_way(5, layout, emulated)


def test_every_tile_of_few_rows_is_planned_and_handed_its_views(emulated: Emulated):
    for tile, pair in zip(on_gpu.TILES, itertools.cycle(on_gpu.USUAL), strict=False):
        for m, n, k in ((1, 1000, 80), (17, 259, 144), (256, 64, 16)):
            a, b = emulated.whole(m, k, dtype=pair[0]), on_gpu.small(emulated, pair[1], n, k).t()
            on_gpu.check(emulated, on_gpu.PLAIN, a, b, {}, out_dtypes=F32, constraints=on_gpu.swapped(tile))
    on_gpu.test_sums_in_float16(emulated)


def test_bits_of_every_design_are_those_of_the_converted_weight():
    for m, n, k in ((1, 1032, 4096), (256, 520, 1024), (300, 1290, 528)):
        found = [ef.get_kernels(arguments(m, n, k, pair), cc=90) for pair in ((BF16, INT8), (BF16, BF16))]
        bits = [{kernel.plan.allocation.bits for kernel in own} for own in found]
        assert bits[0] <= bits[1]


def test_epilogues_and_batches_are_handed_over(emulated: Emulated):
    for m in (5, 257):
        on_gpu.test_batches(m, emulated)
    for m in (17, 300):
        on_gpu.test_reductions_of_rows_and_columns(m, (BF16, INT8), emulated)
    on_gpu.test_whole_rows_and_gated_products((F16, E4M3), 300, on_gpu.GATED, emulated)
    on_gpu.test_regions_of_n(emulated)


def best(**shape):
    return ef.get_kernels(arguments(**shape), cc=90, limit=1)[0]


@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_few_rows_convert_the_weight_in_registers(a, b):
    for m in (1, 16, 64):
        args = arguments(m=m, n=4096, k=4096, pair=(a, b))
        kernel = ef.get_kernels(args, cc=90, limit=1)[0]
        assert kernel.spec.design.swapped
        assert f"registers convert B from {short(b)} to {short(a)} as it is multiplied" in str(kernel.plan)
        unsplit = arguments(m=m, n=4096, k=4096, pair=(a, b), split=1, schedule="swapped")
        assert ef.get_kernels(unsplit, cc=90, limit=1)[0].get_workspace_size(unsplit) == 0


def test_the_model_counts_the_bytes_of_a_weight_as_it_lies():
    """Of few rows, where memory decides, 8 bits take half of the time of 16."""
    narrow, wide = (
        best(m=16, n=16384, k=8192, pair=pair).plan.allocation.cost for pair in ((BF16, INT8), (BF16, BF16))
    )
    assert narrow < 0.6 * wide


def test_more_rows_read_a_weight_of_8_bits_again():
    """A first kernel would read it once and write twice its bytes."""
    assert best(m=192, n=4096, k=4096).spec.design.swapped
    refused = {r.kernel: r.reason for r in ef.explain(arguments(m=257), cc=90).refusals}
    assert refused["sm90_gemm_16x64_swapped_1x1"] == "it is for up to 256 rows, with A and B exchanged, and M is 257"


def test_a_stage_of_converted_rows_takes_half_of_the_memory():
    kernels = [best(m=16, n=4096, k=4096, pair=pair, tile=(64, 64), schedule="swapped", split=1) for pair in (
        (BF16, INT8), (BF16, BF16)
    )]  # fmt: skip
    narrow, wide = (budget.stage_bytes(kernel.plan.allocation.program.design) for kernel in kernels)
    assert (narrow, wide) == ((64 * 128, 64 * 256), (64 * 256, 64 * 256))


def test_registers_convert_a_weight_of_n_and_k_alone():
    refused = {r.kernel: r.reason for r in ef.explain(arguments(m=16, b_transposed=False), cc=90).refusals}
    want = "it converts a weight in registers where K is contiguous: store it as (N, K), and pass weight.T"
    assert refused["sm90_gemm_16x64_swapped_1x1"] == want
    assert "B has a stride" not in str(ef.explain(arguments(m=16, k=1001), cc=90).plan), "a first kernel converts it"


def test_other_kernels_refuse_the_pair(monkeypatch):
    refused = {r.kernel: r.reason for r in ef.explain(arguments(schedule="multistage"), cc=90).refusals}
    want = "it multiplies numbers of one size, and B is torch.int8: convert it to A's dtype first"
    assert refused["sm80_gemm_128x128_multistage"] == want


# --- what is compiled ------------------------------------------------------------------------------------------------

cutlass_is_there = pytest.mark.skipif(load.lacking() is not None, reason="CuTe DSL is an optional dependency")


def compiled_swapped(design, pair, folder, capfd, **asked):
    """PTX of a design's kernel, which spills nothing and whose multiplications overlap."""
    kernels = ef.get_kernels(arguments(m=16, n=4096, k=4096, pair=pair, **asked), cc=90)
    plan = next(kernel.plan for kernel in kernels if kernel.spec.design == design)
    function = reported(plan.allocation.program.text, folder)
    report = " ".join(capfd.readouterr().err.split())
    assert set(spills(report)) == {0}
    assert "serialized" not in report
    assert "injected" not in report
    return function.__ptx__


def check_products(ptx, rows, dtype):
    """Eight products a stage, each of which takes four registers in place of a descriptor of A."""
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) \{[^}]*\}, \{([^}]*)\}, %rd\d+", ptx)
    assert {types for types, _ in found} == {f"m64n{rows}k16.f32.{dtype}.{dtype}"}
    assert {len(registers.split(",")) for _, registers in found} == {4}
    assert len(found) % 8 == 0
    assert ptx.count("wgmma.mma_async.sync") == len(found)
    multiplied = {register.strip() for _, registers in found for register in registers.split(",")}
    under_way = ptx[ptx.index("wgmma.commit_group") : ptx.index("wgmma.wait_group")]
    assert under_way.count("ld.shared") == 4 * 8, "the next stage is fetched meanwhile"
    assert multiplied.isdisjoint(re.findall(r"%r\d+", under_way)), "and into other registers"


@cutlass_is_there
@pytest.mark.sweep("tile", "split")
@pytest.mark.parametrize(("design", "tile", "split"), [(one, one.tile, one.split) for one in on_gpu.DESIGNS], ids=str)
def test_every_design_multiplies_registers_without_spills(design, tile, split, tmp_path, capfd):
    check_products(compiled_swapped(design, (BF16, INT8), tmp_path, capfd), design.tile[0], "bf16")


@cutlass_is_there
@pytest.mark.sweep
@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_every_pair_is_converted_without_spills(a, b, tmp_path, capfd):
    design = SWAPPED_DESIGNS[2]
    check_products(compiled_swapped(design, (a, b), tmp_path, capfd), design.tile[0], short(a))


@cutlass_is_there
def test_activations_lie_along_rows_or_columns(tmp_path, capfd):
    ptx = compiled_swapped(SWAPPED_DESIGNS[1], (BF16, E4M3), tmp_path, capfd, a_transposed=True)
    check_products(ptx, 32, "bf16")


@cutlass_is_there
def test_reductions_of_converted_rows_spill_nothing(tmp_path, capfd):
    source = "def epi(accum, scale): t = accum * scale; s = sum(t, dim=0); r = logsumexp(t, dim=-1); return t, s, r"
    check_products(compiled_swapped(SWAPPED_DESIGNS[0], (F16, E4M3), tmp_path, capfd, source=source), 16, "f16")


@cutlass_is_there
@pytest.mark.parametrize("b", NARROW, ids=str)
@pytest.mark.parametrize("a", WIDE, ids=str)
def test_registers_hold_what_wgmma_takes_as_a(a, b, tmp_path):
    """PTX executed on the CPU: thread by thread the pairs of a stage's rows, as PTX's manual has them."""
    from converted_stage import COUNT, ROWS, STAGES, compiled

    kernel = Kernel.of(compiled(a, b, tmp_path), "stage")
    weight = torch.arange(STAGES * ROWS * 128).mul(37).div(3, rounding_mode="floor").to(torch.uint8)
    memory = np.zeros(weight.numel() + 4 * 128 * COUNT, np.uint8)
    memory[: weight.numel()] = weight.numpy()
    pointers = [struct.pack("<qi", place, size) for place, size in ((0, weight.numel()), (weight.numel(), 128 * COUNT))]
    execute(kernel, pointers, memory, [0], 128)
    found = torch.from_numpy(memory[weight.numel() :].copy()).view(a).view(128, 8, 4, 2)
    stage = weight.view(b).view(STAGES, ROWS, 128)[1].to(a)
    thread, block, pair, k = torch.meshgrid(*map(torch.arange, found.shape), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (pair % 2)
    want = stage[row, 16 * block + 8 * (pair // 2) + thread % 4 * 2 + k]
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(), want.nan_to_num())


def test_the_page_says_what_was_measured() -> None:
    found: dict[str, list[str]] = {}
    for card in ("h100", "h200"):
        rows = json.loads((ROOT / f"benchmarks/results/weight_only_{card}.json").read_text())["rows"]
        for tokens in {row["shape"][0]: None for row in rows}:
            each = [row["ratios"] for row in rows if row["shape"][0] == tokens]
            means = {name: statistics.geometric_mean(ratios[name][0] for ratios in each) for name in COMPARED}
            found.setdefault(str(tokens), []).append(f"{means['int8 / mm']:.2f}, {means['e4m3 / mm']:.2f}")
            assert max(means["int8 / compiled"], means["e4m3 / compiled"]) < 1.0
    section = (ROOT / "docs/performance.md").read_text().split("A weight of 8 bits beside")[1].split("\n## ")[0]
    shown = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert shown
    assert {tokens: cards for tokens, *cards in shown}.items() <= found.items()
