"""Inputs of 8 bits: what Hopper plans and refuses, what it compiles to, and what the CPU computes."""

import re

import pytest
import torch
from hopper import reasons
from machine_code import reported

import epifuse as ef
from epifuse.base.errors import ArgumentError
from epifuse.providers.cutedsl import DESIGNS
from epifuse.providers.cutedsl.designs import HOPPER_SPECS
from epifuse.tools.testing import FP8_FAST_SUM_EPS, bounded, compare_bounded, gpu_room

E4M3, E5M2, INT8, UINT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
FLOATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]
INTEGERS = [(INT8, INT8), (UINT8, INT8), (INT8, UINT8), (UINT8, UINT8)]
FAST = ef.Constraints(fast_accum=True)
BF16 = torch.bfloat16


def plain(accum):
    D = accum
    return D


def scaled(accum, row, column, bias):
    D = ef.gelu(accum * row * column + bias, approximate="tanh")
    return D


def requantised(accum, sums, zero_a, zero_d, scale):
    D = ef.round((accum - zero_a * sums) * scale) + zero_d
    return D


def softmax(accum, row):
    D = ef.softmax(accum * row, dim=-1)
    return D


def gated(accum, row):
    gate, up = (accum * row).chunk(2, dim=-1)
    D = ef.silu(gate) * up
    return D


def totals(accum, row):
    D = accum * row
    sums, largest = ef.sum(accum, dim=-1), ef.amax(D, dim=0)
    return D, sums, largest


def matrices(dtypes, m, n, k):
    """A and B without data, K contiguous in both."""
    return torch.empty(m, k, dtype=dtypes[0]), torch.empty(n, k, dtype=dtypes[1]).t()


def arguments(epilogue=plain, dtypes=(E4M3, E4M3), m=512, n=512, k=1024, out=None, asked=None, **operands):
    given = ef.EpilogueArguments.partial(epilogue, operands)
    asked = asked or ef.Constraints()
    return ef.GemmArguments(*matrices(dtypes, m, n, k), epilogue=given, out_dtypes=out, constraints=asked)


def scales(m=512, n=512):
    return {"row": torch.rand(n), "column": torch.rand(m, 1), "bias": torch.randn(n)}


def zero_points(n=512):
    sums = torch.randint(-1000, 1000, (n,), dtype=torch.int32)
    return {"sums": sums, "zero_a": 3, "zero_d": -5, "scale": torch.rand(n) * 0.01}


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", FLOATS + INTEGERS, ids=str)
def test_hopper_takes_both_kinds_in_all_mixtures(dtypes):
    for m in (512, 16):
        kernels = ef.get_kernels(arguments(dtypes=dtypes, m=m), cc=90)
        assert {k.spec.design.swapped for k in kernels} == ({True, False} if m == 16 else {False})
        assert any(k.spec.design.split > 1 for k in ef.get_kernels(arguments(dtypes=dtypes, m=m, k=4096), cc=90))


def test_accurate_sums_are_other_bits_than_fast_ones():
    accurate, fast = (ef.get_kernels(arguments(asked=asked), cc=90) for asked in (None, FAST))
    bits = [{k.plan.allocation.bits for k in kernels if k.spec.design.split == 1} for kernels in (accurate, fast)]
    assert len(bits[0]) == len(bits[1]) == 1
    assert bits[0] != bits[1]
    designs = [{k.plan.allocation.program.design.promoted for k in kernels} for kernels in (accurate, fast)]
    assert designs == [{128}, {0}]


@pytest.mark.parametrize("k", [4096, 131072])
def test_integer_sums_that_int32_holds_share_bits(k):
    """So every kernel may stand in for every other, and a first call waits for none but its own."""
    args = arguments(dtypes=(INT8, INT8), m=64, n=1024, k=k)
    plans = [kernel.plan for kernel in ef.get_kernels(args, cc=90)]
    assert {plan.spec.design.split for plan in plans} == {spec.design.split for spec in HOPPER_SPECS}
    is_exact = k * 128 * 128 < 2**31
    assert (len({plan.allocation.bits for plan in plans}) == 1) == is_exact
    unsplit = next(p for p in plans if p.spec.design.split == 1 and not p.spec.design.swapped)
    assert (unsplit.allocation.with_other_rows() == ()) == is_exact


def test_what_promotes_its_sums_needs_registers_for_it():
    args = arguments()
    refused = {r.kernel: r.reason for r in ef.explain(args, cc=90).refusals}
    want = "its accumulator leaves too few registers for sums of 128 products beside it: fast_accum=True has none"
    assert refused["sm90_gemm_128x192_pingpong_2x1"] == want
    assert (128, 192) in {k.metadata.tile_shape for k in ef.get_kernels(arguments(asked=FAST), cc=90)}


@pytest.mark.parametrize(
    ("dtypes", "k", "asked", "note"),
    [
        (
            (E4M3, E5M2),
            1024,
            None,
            "the tensor cores add up 128 products at a time with 14 bits, and float32 adds up these sums",
        ),
        ((E4M3, E5M2), 1024, FAST, "fast_accum: the tensor cores add up all products, with 14 bits"),
        ((INT8, INT8), 1024, None, "a sum is at most 1024 * 128 * 128 = 16777216 in size, which int32 holds"),
        ((INT8, INT8), 131072, None, "a sum is at most 131072 * 128 * 128 = 2147483648 in size, and int32 ends at"),
        ((UINT8, INT8), 65808, None, "a sum is at most 65808 * 255 * 128 = 2147973120 in size, and int32 ends at"),
    ],
)
def test_a_plan_says_how_it_adds_up(dtypes, k, asked, note):
    assert note in str(ef.explain(arguments(dtypes=dtypes, k=k, asked=asked), cc=90))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (INT8, INT8)], ids=str)
def test_8_bits_count_as_half_of_16(dtypes):
    best = [ef.get_kernels(args, cc=90)[0] for args in (
        arguments(dtypes=dtypes, m=4096, n=4096, k=8192, asked=FAST),
        arguments(dtypes=(BF16, BF16), m=4096, n=4096, k=4096),
    )]  # fmt: skip
    assert best[0].plan.allocation.cost == best[1].plan.allocation.cost


# --- refusals --------------------------------------------------------------------------------------------------------


def with_layouts(a, b):
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(plain, {}))


@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=str)
def test_both_need_k_contiguous(dtype):
    a, b = matrices((dtype, dtype), 256, 256, 256)
    way_out = "store the weight as (N, K) and pass weight.T, or B.mT.contiguous().mT"
    by_rows = with_layouts(a, torch.empty(256, 256, dtype=dtype))
    assert reasons(by_rows) == {f"a product of 8-bit numbers needs B by columns (K contiguous): {way_out}"}
    by_columns = with_layouts(torch.empty(256, 256, dtype=dtype).t(), b)
    assert reasons(by_columns) == {"a product of 8-bit numbers needs A by rows (K contiguous): pass A.contiguous()"}


def test_no_copy_gives_one_element_along_k_another_stride():
    a, b = torch.empty(1, 128, dtype=E4M3).t(), torch.empty(1, 256, dtype=E4M3)
    cure = "pad K with zeros to 16 elements in both A and B"
    assert reasons(with_layouts(a, b)) == {f"a product of 8-bit numbers needs A by rows (K contiguous): {cure}"}
    wide = torch.empty(128, 16, dtype=E4M3), torch.empty(256, 16, dtype=E4M3).t()
    assert ef.get_kernels(with_layouts(*wide), cc=90)


def test_the_cure_for_an_expanded_matrix_cures():
    a, b = matrices((E4M3, E4M3), 256, 256, 256)
    one = torch.empty(1, 256, dtype=E4M3).expand(256, 256)
    assert reasons(with_layouts(one, b)) == {"A is expanded, and TMA takes no stride of 0: pass A.contiguous()"}
    assert reasons(with_layouts(a, one.t())) == {
        "B is expanded, and TMA takes no stride of 0: pass B.mT.contiguous().mT"
    }
    assert ef.get_kernels(with_layouts(one.contiguous(), one.t().mT.contiguous().mT), cc=90)


@pytest.mark.parametrize("dtype", [E4M3, UINT8], ids=str)
def test_rows_are_multiples_of_16_bytes(dtype):
    cure = "pad K with zeros to a multiple of 16 elements in both A and B"
    assert reasons(arguments(dtypes=(dtype, dtype), k=1000)) == {
        f"A has a stride of 1000 bytes, and TMA needs a multiple of 16: {cure}"
    }
    wide = torch.empty(512, 1008, dtype=dtype)[:, :1000]
    assert ef.get_kernels(with_layouts(wide, wide.t()), cc=90), "K itself need not be one"


@pytest.mark.parametrize("dtype", [E4M3, INT8, torch.float32], ids=str)
def test_a_single_column_lies_along_k(dtype):
    """A vector as a column, whose strides are both 1."""
    asked = ef.Constraints(precision="tf32") if dtype == torch.float32 else None
    for m in (16, 512):
        vector = torch.empty(64, 1, dtype=dtype)
        assert ef.get_kernels(ef.GemmArguments(torch.empty(m, 64, dtype=dtype), vector, constraints=asked), cc=90)


def test_sums_of_fp8_are_float32():
    args = ef.GemmArguments(*matrices((E4M3, E4M3), 64, 64, 64), accumulator_type=torch.float16)
    assert reasons(args) == {"it adds up products of torch.float8_e4m3fn in f32, not torch.float16"}


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_truth_value(value):
    with pytest.raises(ArgumentError, match="fast_accum"):
        ef.gemm(*matrices((E4M3, E4M3), 16, 16, 16), fast_accum=value)


def test_the_option_reaches_the_plan_from_each_call():
    a, b = matrices((E4M3, E4M3), 16, 16, 16)
    assert torch.equal(ef.gemm(a.zero_(), b.zero_(), fast_accum=True), torch.zeros(16, 16))
    assert torch.equal(ef.linear(a, b.t(), fast_accum=True), torch.zeros(16, 16))


def test_a_compiled_call_refuses_a_gradient_of_8_bits():
    a, b = torch.randn(16, 32).to(E4M3).requires_grad_(), torch.randn(32, 16).to(E4M3)

    def call(a, scale):
        return ef.gemm(a, b, epilogue="lambda accum, scale: accum * scale", scale=scale)

    compiled, scale = torch.compile(call, backend="aot_eager"), torch.ones(16, requires_grad=True)
    for function, error in ((call, ArgumentError), (compiled, torch._dynamo.exc.TorchRuntimeError)):
        with pytest.raises(error, match=r"A requires grad and is torch\.float8_e4m3fn, which has no gradient"):
            function(a, scale)
        with torch.no_grad():
            assert not function(a, scale).requires_grad
        function(a.detach(), scale).sum().backward()
    torch.testing.assert_close(scale.grad, 2 * (a.detach().float() @ b.float()).sum(0))


def test_a_parameter_of_8_bits_is_exported():
    """It requires grad unless it says otherwise, and no program that is exported is recorded."""
    layer = torch.nn.Linear(32, 16, bias=False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(E4M3))
    layer.forward = lambda x: ef.linear(x, layer.weight)
    x = torch.randn(8, 32).to(E4M3)
    with torch.no_grad():
        want = layer(x)
        assert torch.equal(torch.export.export(layer, (x,)).module()(x), want)
    assert torch.export.export(layer, (x,), strict=False)


def test_the_option_travels_with_a_compiled_call():
    """As a part of the operator that PyTorch's compiler sees."""
    from epifuse.pytorch.spec import decoded

    seen = []

    def backend(module, inputs):
        seen.extend(node.args for node in module.graph.nodes if "epifuse" in str(node.target))
        return module.forward

    call = torch.compile(lambda a, b: ef.gemm(a, b, fast_accum=True), backend=backend, fullgraph=True)
    a, b = torch.randn(16, 32).to(E4M3), torch.randn(32, 16).to(E4M3)
    assert torch.equal(call(a, b), ef.gemm(a, b))
    specs = [decoded(arg) for args in seen for arg in args if isinstance(arg, str)]
    assert [spec.options.fast_accum for spec in specs] == [True]


# --- what is compiled ------------------------------------------------------------------------------------------------


def compiled(args, design, folder, capfd):
    """PTX of a design's kernel, whose multiplications overlap, and which spills nothing: where K is in parts, what adds
    them up may spill 16 bytes."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    plan = next(k.plan for k in ef.get_kernels(args, cc=90) if k.spec.design == design)
    function = reported(plan.allocation.program.text, folder)
    report = " ".join(capfd.readouterr().err.split())
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
    assert spilled
    assert max(spilled) <= (16 if design.split > 1 else 0)
    assert "serialized" not in report
    assert "injected" not in report
    return function.__ptx__


def offered(args, name, whole_sweeps):
    """One of each tile, with K whole and in parts; of most cases those alone whose threads hold most sums. Without
    `--whole-sweeps` of these one, and of each schedule one with K whole and one with K in parts; for few rows of those
    alone that exchange A and B."""
    found = [k.spec.design for k in ef.get_kernels(args, cc=90)]
    tiles = list({(d.tile, d.swapped, d.split > 1): d for d in found}.values())
    widest = sorted(tiles, key=lambda d: -d.rows * d.tile[1])
    if whole_sweeps:
        return tiles if name in IN_EVERY_TILE else widest[:4]
    widest = [d for d in widest if d.swapped] or widest
    of_each = {(d.schedule, d.split > 1): d for d in reversed(widest)}
    return list(of_each.values()) if name in IN_EVERY_SCHEDULE else widest[:1]


def instructions(ptx):
    return {line.split()[0] for line in ptx.splitlines() if line.startswith("wgmma.mma_async")}


MEANT = {
    "e4m3": (arguments(scaled, k=4096, out={"D": BF16}, **scales()), "f32.e4m3.e4m3"),
    "e5m2 x e4m3 to e4m3": (arguments(scaled, (E5M2, E4M3), k=4096, out={"D": E4M3}, **scales()), "f32.e5m2.e4m3"),
    "fast": (arguments(scaled, k=4096, asked=FAST, out={"D": BF16}, **scales()), "f32.e4m3.e4m3"),
    "few rows": (arguments(scaled, (E5M2, E4M3), m=16, k=4096, **scales(16)), ("f32.e4m3.e5m2", "f32.e5m2.e4m3")),
    "int8": (arguments(plain, (INT8, INT8), k=4096), "satfinite.s32.s8.s8"),
    "uint8 x int8 to int8": (
        arguments(requantised, (UINT8, INT8), k=4096, out={"D": INT8}, **zero_points()),
        "satfinite.s32.u8.s8",
    ),
    "int8, few rows": (
        arguments(scaled, (INT8, INT8), m=16, k=4096, out={"D": BF16}, **scales(16)),
        "satfinite.s32.s8.s8",
    ),
    "gated": (arguments(gated, k=4096, out={"D": BF16}, row=torch.rand(512)), "f32.e4m3.e4m3"),
    "int8, whole rows": (arguments(softmax, (INT8, INT8), k=4096, row=torch.rand(512)), "satfinite.s32.s8.s8"),
    "whole rows": (arguments(softmax, k=4096, row=torch.rand(512)), "f32.e4m3.e4m3"),
    "reductions": (arguments(totals, k=4096, row=torch.rand(512)), "f32.e4m3.e4m3"),
}


IN_EVERY_TILE = ("e4m3", "reductions")
IN_EVERY_SCHEDULE = ("e4m3", "few rows")


KINDS = {
    "e4m3": ("promoted", "e4m3", "in every schedule"),
    "e5m2 x e4m3 to e4m3": ("promoted", "e5m2", "elementwise"),
    "fast": ("fast", "e4m3", "elementwise"),
    "few rows": ("promoted", "e5m2", "exchanged, in every schedule"),
    "int8": ("integers", "int8", "elementwise"),
    "uint8 x int8 to int8": ("integers", "uint8", "elementwise"),
    "int8, few rows": ("integers", "int8", "exchanged"),
    "gated": ("promoted", "e4m3", "gated"),
    "int8, whole rows": ("integers", "int8", "whole rows"),
    "whole rows": ("promoted", "e4m3", "whole rows"),
    "reductions": ("promoted", "e4m3", "reductions"),
}
"""How each of MEANT adds up, what A is, and what its epilogue or its designs are."""


@pytest.mark.sweep("sums", "dtype", "kind")
@pytest.mark.parametrize(("name", "sums", "dtype", "kind"), [(name, *KINDS[name]) for name in MEANT])
def test_every_design_has_its_instruction_and_no_spill(name, sums, dtype, kind, capfd, tmp_path, whole_sweeps):
    args, types = MEANT[name]
    for design in offered(args, name, whole_sweeps):
        found = {one.split("k32.")[1] for one in instructions(compiled(args, design, tmp_path, capfd))}
        assert len(found) == 1
        assert found <= {types} if isinstance(types, str) else found <= {*types}


PROMOTING = [
    one
    for one in DESIGNS
    if one.cluster == (2, 1) and one.rows * one.tile[1] <= 128**2 and one.tile[1] not in (192, 224)
]


@pytest.mark.sweep("rows", "columns", "spans")
@pytest.mark.parametrize(
    ("design", "rows", "columns", "spans"),
    [(one, one.rows, min(one.tile[1], 128), one.spans) for one in PROMOTING],
    ids=str,
)
def test_sums_are_promoted_before_the_next_ones_are_there(design, rows, columns, spans, capfd, tmp_path):
    """128 products of each of a thread's sums, and before the next ones are waited for as many additions as sums."""
    ptx = compiled(arguments(asked=None), design, tmp_path, capfd)
    main_loops = [lines for lines in _groups(ptx) if lines[0] == 4]
    pieces = design.rows // 64 * max(design.tile[1] // 128, 1) * design.spans
    assert len(main_loops) == pieces
    assert {adds for _, adds in main_loops} == {min(design.tile[1], 128) // 2}


def _groups(ptx):
    """Of each group of multiplications: how many there are, and how many additions lie between its wait and the next
    one's."""
    found, count, waited = [], 0, False
    for line in map(str.strip, ptx.splitlines()):
        if line.startswith("wgmma.mma_async"):
            count, waited = (1 if waited else count + 1), False
        elif line.startswith("wgmma.wait_group") and count and not waited:
            found.append([count, 0])
            waited = True
        elif line.startswith("add.rn.f32") and found:
            found[-1][1] += 1
    return [tuple(group) for group in found]


# --- values on the CPU -----------------------------------------------------------------------------------------------


def integers(dtype, *shape):
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


@pytest.mark.parametrize("dtypes", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 65, 1000), (128, 96, 4096)], ids=str)
def test_integer_products_are_exact(dtypes, shape):
    m, n, k = shape
    a, b = integers(dtypes[0], m, k), integers(dtypes[1], k, n)
    D = ef.gemm(a, b)
    assert D.dtype == torch.int32
    assert torch.equal(D.long(), a.long() @ b.long())


def test_requantisation_with_zero_points():
    a, weight = integers(UINT8, 70, 300), integers(INT8, 90, 300)
    given = {**zero_points(90), "sums": weight.long().sum(1).int()}
    D = ef.linear(a, weight, epilogue=requantised, out_dtypes=INT8, **given)
    accum = (a.long() - 3) @ weight.long().t()
    want = ((accum.float() * given["scale"]).round() - 5).clamp(-128, 127)
    assert D.dtype == INT8
    assert torch.equal(D.long(), want.long())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtypes", FLOATS, ids=str)
def test_products_of_fp8_are_those_of_their_values(dtypes, fast):
    a, b = torch.randn(65, 500).to(dtypes[0]), torch.randn(500, 40).to(dtypes[1])
    given = scales(65, 40)
    wide = a.double() @ b.double()
    error = 500 * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
    accum = bounded(wide, torch.finfo(torch.float32).eps, error)
    want = ef.reference(scaled)(accum, **{k: bounded(v, accum.eps) for k, v in given.items()})
    for out in (torch.float32, BF16, E4M3, E5M2):
        D = ef.gemm(a, b, epilogue=scaled, out_dtypes=out, fast_accum=fast, **given)
        assert D.dtype == out
        verdict = compare_bounded(D, want, gpu_room(out))
        assert verdict.wrong == 0
        assert verdict.judged > 0.5 * verdict.total


def test_the_defaults_of_d():
    a, b = torch.randn(16, 32).to(E4M3), torch.randn(32, 16).to(E5M2)
    assert ef.gemm(a, b).dtype == torch.float32
    assert ef.gemm(integers(INT8, 16, 32), integers(UINT8, 32, 16)).dtype == torch.int32


def test_the_bound_of_fast_sums_holds_in_a_simulation() -> None:
    """Of 32 products and the sum so far, tensor cores cut each 13 bits below the leading one of the largest."""
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40_000, 528, generator=made) for _ in range(2))
    products = a.to(torch.float8_e4m3fn).double() * b.to(torch.float8_e5m2).double()
    total = torch.zeros(len(products), 1, dtype=torch.float64)
    for step in products.split(32, dim=1):
        values = torch.cat([step, total], dim=1)
        unit = torch.exp2(values.abs().amax(1, keepdim=True).log2().floor() - 13)
        total = (torch.trunc(values / unit) * unit).sum(1, keepdim=True)
    off = (total[:, 0] - products.sum(1)).abs() / products.abs().sum(1)
    assert FP8_FAST_SUM_EPS / 4 < off.max() < FP8_FAST_SUM_EPS
