"""A and B exchanged, without a GPU: which products are planned so, what is refused, and what the epilogue computes."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from emulated import Emulated, emulated  # noqa: F401  # a fixture
from gpu import test_swapped as on_gpu
from hopper import BF16, arguments, bias_gelu
from machine_code import spills
from simulated import registers, simulated  # noqa: F401  # fixtures
from test_sm90_compile import built

import epifuse as ef
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import SWAPPED_DESIGNS
from epifuse.providers.cutedsl.designs import NARROW_DESIGNS, WIDE_SWAPPED_DESIGNS
from epifuse.request.problem import Constraints


def best(m, n=4096, k=4096, epilogue=bias_gelu, **operands):
    operands = operands or {"bias": torch.empty(n, dtype=BF16)}
    return ef.get_kernels(arguments(epilogue, m=m, n=n, k=k, **operands), cc=90, limit=1)[0].spec.design


@pytest.mark.parametrize(("m", "rows"), [(1, 16), (16, 16), (17, 32), (33, 64), (64, 64)])
def test_few_rows_go_into_the_least_tile_that_holds_them(m, rows):
    """Then B is read once; 64 rows fill one either way."""
    for n, k in ((4096, 4096), (4096, 14336), (6144, 4096), (3584, 18944)):
        design = best(m, n, k)
        assert design.tile[0] == rows
        assert design.swapped or rows == 64


@pytest.mark.parametrize("n", [5120, 6144, 7168, 8192, 9216, 10240, 14336, 28672])
def test_tiles_of_few_rows_fill_the_multiprocessors(n):
    """Or memory has less to do at the end, where some are done and the others cannot take what it could send."""
    design = best(1, n, 5120)
    tiles, at_once = -(-n // design.tile[1]), TARGETS[90].processor.multiprocessors
    assert tiles / (-(-tiles // at_once) * at_once) > 0.85
    assert design.swapped


@pytest.mark.parametrize("n", [2560, 3584, 4096])
def test_few_tiles_leave_room_for_the_next_launch(n):
    design = best(1, n, 4096)
    assert -(-n // design.tile[1]) * design.split <= TARGETS[90].processor.multiprocessors // 2


def test_tiles_for_few_rows_are_for_few():
    assert not best(129).swapped
    assert not best(128).swapped, "the rows of B would be read twice"
    refusals = {r.kernel: r.reason for r in ef.explain(arguments(lambda accum: accum, m=129), cc=90).refusals}
    assert refusals["sm90_gemm_16x64_swapped_1x1"] == "it is for up to 128 rows, with A and B exchanged, and M is 129"


def wide(m, epilogue=bias_gelu, n=4096, k=4096, **operands):
    """The designs for many rows."""
    made = arguments(epilogue, m=m, n=n, k=k, **(operands or {"bias": torch.empty(n, dtype=BF16)}))
    designs = [kernel.spec.design for kernel in ef.get_kernels(made, cc=90)]
    return [design for design in designs if design.swapped and not design.for_few_rows]


def test_a_few_more_rows_than_two_tiles_of_128_take_two_of_160():
    design = best(290, n=8192, k=3584)
    assert design.swapped
    assert design.tile == (160, 128)


def test_many_rows_take_what_has_been_tried():
    tiles = {design.tile for design in WIDE_SWAPPED_DESIGNS}
    assert {design.tile for design in wide(257)} == tiles
    with_operand = wide(512, lambda accum, C: accum + C, C=torch.empty(512, 4096, dtype=BF16))
    assert {design.tile for design in with_operand} == tiles - {on_gpu.FULL}
    assert not wide(256)
    assert not wide(512, lambda accum, bias: (accum + bias).sum(0), bias=torch.empty(4096, dtype=BF16))
    assert not wide(512, lambda accum, C: accum + C, C=torch.empty(512, 4096))
    assert not wide(512, n=4095), "lines that TMA cannot write"
    assert not wide(512, k=1000), "a short K"
    by_columns = ef.GemmArguments(torch.empty(1024, 512, dtype=BF16).t(), torch.empty(1024, 1024, dtype=BF16))
    assert not any(kernel.spec.design.swapped for kernel in ef.get_kernels(by_columns, cc=90))


REFUSED = {
    "gate, up = accum.chunk(2, dim=-1); D = silu(gate) * up; return D": "does not support parts of a row",
    "a, b = accum.chunk(2, dim=-1); D = cat([a + b, a - b], dim=-1); return D": "does not support parts of a row",
    "D = softmax(accum, dim=-1); return D": "does not support a value that needs its whole row or a segment of it",
    "s = amax(accum.unflatten(-1, (-1, 64)), dim=-1); return s": "a segment of it",
    "D = accum; debug_print('{}', D); return D": "does not support debug_print",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_is_refused_is_computed_as_before(body):
    args = arguments(f"def f(accum): {body}", m=16, n=256)
    explained = ef.explain(args, cc=90)
    reasons = {refusal.kernel: refusal.reason for refusal in explained.refusals}
    assert REFUSED[body] in reasons["sm90_gemm_16x64_swapped_1x1"]
    assert explained.plan is not None
    assert not explained.plan.spec.design.swapped


def test_the_plan_says_so_and_can_be_asked_for():
    made = arguments(bias_gelu, m=16, bias=torch.empty(512, dtype=BF16))
    asked = Constraints(tile=(32, 64), schedule="swapped")
    (kernel,) = ef.get_kernels(ef.GemmArguments(made.A, made.B, epilogue=made.epilogue, constraints=asked), cc=90)
    assert kernel.metadata.tile_shape == (32, 64)
    assert "32x64 swapped, cluster 1x1" in str(kernel.plan)
    assert "A and B are exchanged" in str(kernel.plan)
    assert "bias: row" in str(kernel.plan), "of the result"


def test_swapped_designs_claim_the_bits_of_the_others():
    kernels = ef.get_kernels(arguments(bias_gelu, m=16, bias=torch.empty(512, dtype=BF16)), cc=90)
    whole = {kernel.plan.allocation.bits for kernel in kernels if kernel.spec.design.split == 1}
    assert len(whole) == 1
    assert None not in whole


@pytest.mark.parametrize("name", on_gpu.BODIES)
def test_launches_of_the_transposed_product(name, emulated):  # noqa: F811
    """Operands and outputs are handed over as they lie, by rows and by columns."""
    for rows, shape in ((16, (17, 72, 24)), (64, (1, 40, 8)), (32, (128, 9, 16))):
        on_gpu.judged(emulated, name, rows, shape)


def test_batches(emulated):  # noqa: F811
    on_gpu.test_batches(16, emulated)


def test_without_k(emulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch, "empty", lambda *shape, empty=torch.empty, **o: empty(*shape, **{**o, "device": "cpu"}))
    on_gpu.test_without_k(emulated)


@pytest.mark.parametrize(("name", "design"), on_gpu.MANY)
def test_launches_for_many_rows(name, design, emulated):  # noqa: F811
    on_gpu.of_many(emulated, name, design, (257, 72, 1032))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "design"), on_gpu.MANY)
def test_the_epilogue_of_each_wide_tile(name, design, simulated: Emulated):  # noqa: F811
    on_gpu.of_many(simulated, name, design, (257, 72, 1024))


BY_KIND = [
    (design, design.subtile, design.pingpong, design.split > 1) for design in (*WIDE_SWAPPED_DESIGNS, *NARROW_DESIGNS)
]


@pytest.mark.sweep("subtile", "pingpong", "in_parts")
@pytest.mark.parametrize(("design", "subtile", "pingpong", "in_parts"), BY_KIND, ids=str)
def test_wide_tiles_are_compiled_without_spills(design, subtile, pingpong, in_parts, capfd, tmp_path):
    """Of subtiles of 16 or 32 columns of the kernel, beside a vector, an operand and two outputs, or sums of parts."""
    alone = design.split > 1 or design.tile == on_gpu.FULL  # with no operand beside sums, or so many accumulators
    operand, stored = ("", "t") if alone else ("D = t + C; ", "t, D")
    text = on_gpu.source(f"t = gelu(accum + row); {operand}return {stored}")
    operands = {"C": torch.empty(512, 1024, dtype=BF16)} if operand else {}
    row = torch.empty(1024)
    ptx = built(arguments(text, m=512, n=1024, k=2048, row=row, **operands), tmp_path, design)[2].__ptx__
    assert f"wgmma.mma_async.sync.aligned.m64n{design.tile[0 if design.swapped else 1]}k16" in ptx
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report


@pytest.mark.parametrize("rows", on_gpu.TILES)
@pytest.mark.parametrize("name", ["of every access", "coordinates"])
def test_the_epilogue_of_each_tile(name, rows, simulated: Emulated):  # noqa: F811
    on_gpu.judged(simulated, name, rows, (33, 72, 16), ["rows"])


@pytest.mark.parametrize(("rows", "columns"), on_gpu.LOW[::5])
@pytest.mark.parametrize("name", ["of every access", "coordinates"])
def test_the_epilogue_of_tiles_of_few_columns(name, rows, columns, simulated: Emulated):  # noqa: F811
    on_gpu.judged(simulated, name, rows, (33, 72, 16), ["rows"], columns=columns)


def test_the_narrowest_tile_is_compiled_without_spills(capfd, tmp_path):
    """Of a subtile of 16 columns, one slot to store from, and reductions both ways."""
    text = on_gpu.source("t = accum + C * column; s = sum(t, dim=0); r = logsumexp(t, dim=-1); return t, s, r")
    operands = {"C": torch.empty(16, 512, dtype=BF16), "column": torch.empty(16, 1)}
    ptx = built(arguments(text, m=16, n=512, **operands), tmp_path, SWAPPED_DESIGNS[0])[2].__ptx__
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in ptx
    report = capfd.readouterr().err
    assert set(spills(report)) == {0}
    assert "serialized" not in report
