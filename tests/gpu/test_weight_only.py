"""A of 16 bits and a weight of 8: values of every pair and of all sizes, NaN, scales, biases, reductions and gates,
from few rows, where registers convert the weight, to many, where a first kernel does."""

import itertools
from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import LAYOUTS, Machine, check, check_the_same_bits, judge, product, run

import epifuse as ef
from epifuse.providers.cutedsl import SWAPPED_DESIGNS
from epifuse.providers.cutedsl.design import Design
from epifuse.request.problem import Constraints

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, INT8, UINT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
PAIRS = list(itertools.product((BF16, F16), (INT8, UINT8, E4M3, E5M2)))
USUAL = [(BF16, INT8), (F16, INT8), (BF16, E4M3), (F16, E4M3)]
ROWS = (1, 3, 8, 16, 17, 33, 64, 100, 128, 129, 256)
SHAPES = [(1, 72, 64), (3, 64, 16), (17, 264, 1040), (64, 1032, 80), (256, 259, 336), (300, 520, 2048)]
"""Ragged in every axis; one tile and less than a stage; N that TMA cannot store by rows; long."""
DESIGNS = [design for design in SWAPPED_DESIGNS if not design.exchanged_sides.is_low]
"""Those that exchange A and B and convert a weight."""
TILES = [design.tile for design in DESIGNS if design.split == 1]
"""Of the result."""

PLAIN = "def epi(accum): D = accum; return D\n"
SCALED = "def epi(accum, scale, bias): D = gelu(accum * scale + bias, approximate='tanh'); return D\n"
REDUCED = (
    "def epi(accum, scale, C):\n"
    "    t = accum * scale + C\n"
    "    s, r, e, q = sum(t, dim=0), amax(t, dim=-1), logsumexp(t * 0.125, dim=-1), sum(t * t)\n"
    "    return t, s, r, e, q\n"
)
WHOLE_ROWS = "def epi(accum, scale): D = softmax(accum * scale, dim=-1); return D\n"
GATED = "def epi(accum, scale): gate, up = (accum * scale).chunk(2, dim=-1); D = silu(gate) * up; return D\n"
SPLIT = "def epi(accum): D = relu(accum[:, :256]); E = accum[:, 256:]; return D, E\n"


def swapped(tile: tuple[int, int], split: int | None = None) -> Constraints:
    """The design that exchanges A and B, of such tiles."""
    return Constraints(tile=tile, schedule="swapped", split=split)


def every(machine: Machine, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes at random, of all values that are finite."""
    bits = torch.arange(256, dtype=torch.uint8).view(dtype)
    bits = bits[bits.float().isfinite()]
    return bits.view(torch.uint8)[torch.randint(len(bits), shape)].view(dtype).to(machine.device)


def small(machine: Machine, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Whole numbers whose products and sums are exact, -1 only where there is a sign."""
    return (
        machine.whole(*shape, most=2, dtype=F32).abs().to(dtype)
        if dtype == UINT8
        else machine.whole(*shape, most=2, dtype=dtype)
    )


def matrices(machine: Machine, pair: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int) -> tuple[Any, Any]:
    """Normal numbers, A's rows padded, and a weight of every value."""
    a = machine.laid_out(machine.normal(m, k, dtype=pair[0]), "padded")
    return a, every(machine, pair[1], n, k).t()


def scales(machine: Machine, b: torch.Tensor, k: int) -> torch.Tensor:
    """Of each column: results are a few units in size."""
    size = b.float().square().mean().sqrt().item() * k**0.5
    return ((torch.rand(b.shape[-1]) + 0.5) / size).to(machine.device)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_small_whole_numbers_are_exact(
    shape: tuple[int, int, int], pair: tuple[torch.dtype, torch.dtype], machine: Machine
) -> None:
    m, n, k = shape
    a = machine.laid_out(machine.whole(m, k, dtype=pair[0]), "padded")
    check(machine, PLAIN, a, small(machine, pair[1], n, k).t(), {}, out_dtypes=F32)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("m", [1, 16, 257])
def test_every_value_is_converted_exactly(m: int, pair: tuple[torch.dtype, torch.dtype], machine: Machine) -> None:
    """A picks one element of each column: -128, the least and the largest numbers, zeros, infinities and NaN."""
    bits = torch.arange(256, dtype=torch.uint8)
    weight = torch.stack([bits.roll(i) for i in range(256)]).view(pair[1]).to(machine.device)
    a = torch.zeros(m, 256, dtype=pair[0])
    places = torch.arange(m) * 37 % 256
    a[torch.arange(m), places] = 1.0
    finite = torch.where(weight.float().isfinite(), weight.float(), 0.0).to(pair[1])
    got = run(machine, PLAIN, a.to(machine.device), finite.t(), {}, out_dtypes=F32)["D"]
    assert torch.equal(got, finite.cpu().float()[:, places].t())
    if pair[1].is_floating_point:  # what is not finite makes its whole sum NaN, or infinite
        ones = torch.ones(m, 256, dtype=pair[0], device=machine.device)
        bad = torch.zeros(64, 256, device=machine.device)
        bad[5, 7], bad[9, 200] = torch.nan, torch.nan if pair[1] == E4M3 else torch.inf
        got = run(machine, PLAIN, ones, bad.to(pair[1]).t(), {}, out_dtypes=F32)["D"]
        want = bad.cpu().sum(1).expand(m, 64)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.sweep
@pytest.mark.parametrize("out", [F32, BF16, F16, E4M3], ids=str)
@pytest.mark.parametrize("pair", USUAL, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_bias_and_gelu(
    shape: tuple[int, int, int], pair: tuple[torch.dtype, torch.dtype], out: torch.dtype, machine: Machine
) -> None:
    a, b = matrices(machine, pair, *shape)
    given = {"scale": scales(machine, b, shape[2]), "bias": machine.normal(shape[1])}
    check(machine, SCALED, a, b, given, exact=False, out_dtypes=out)


@pytest.mark.parametrize("pair", USUAL, ids=str)
@pytest.mark.parametrize("m", [1, 17, 64, 300])
def test_reductions_of_rows_and_columns(m: int, pair: tuple[torch.dtype, torch.dtype], machine: Machine) -> None:
    a, b = machine.whole(m, 272, dtype=pair[0]), small(machine, pair[1], 328, 272).t()
    given = {"scale": (2.0 ** torch.randint(-6, -3, (328,))).to(machine.device), "C": machine.whole(m, 328)}
    check(machine, REDUCED, a, b, given, out_dtypes=F32)


@pytest.mark.parametrize("source", [WHOLE_ROWS, GATED], ids=["whole rows", "gated"])
@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("pair", USUAL, ids=str)
def test_whole_rows_and_gated_products(
    pair: tuple[torch.dtype, torch.dtype], m: int, source: str, machine: Machine
) -> None:
    a, b = matrices(machine, pair, m, 256, 528)
    check(machine, source, a, b, {"scale": scales(machine, b, 528)}, exact=False, out_dtypes=BF16, layouts=("rows",))


def test_regions_of_n(machine: Machine) -> None:
    for m in (5, 300):
        check(machine, SPLIT, machine.whole(m, 144), small(machine, INT8, 768, 144).t(), {})


@pytest.mark.parametrize("m", [5, 257])
def test_batches(m: int, machine: Machine) -> None:
    """Of both, of one, and one weight for all."""
    a, b = machine.whole(3, m, 96), small(machine, INT8, 3, 72, 96).mT
    check(machine, PLAIN, a, b, {})
    check(machine, PLAIN, a, b[0], {})
    check(machine, PLAIN, a[:1], b, {})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [5, 260])
def test_weights_lie_in_any_way(m: int, layout: str, machine: Machine) -> None:
    for pair in USUAL:
        a, b = machine.whole(m, 131, dtype=pair[0]), small(machine, pair[1], 131, 200)
        check(machine, PLAIN, machine.laid_out(a, layout), machine.laid_out(b, layout), {}, out_dtypes=F32)
    a, b = machine.whole(m, 136), small(machine, INT8, 200, 136).t()
    check(machine, PLAIN, machine.laid_out(a, "columns"), b, {}, out_dtypes=F32)


def test_nothing_along_k(machine: Machine) -> None:
    for m in (4, 300):
        a, b = (torch.empty(*shape, dtype=t, device=machine.device) for shape, t in (((m, 0), BF16), ((0, 72), INT8)))
        check(machine, "def epi(accum, bias): D = accum + bias; return D", a, b, {"bias": machine.whole(72)})


def test_gradients(machine: Machine) -> None:
    """Of A, beside those of the converted weight."""
    found = []
    torch.manual_seed(0)
    x, weight = machine.normal(64, 256, dtype=BF16), every(machine, INT8, 128, 256)
    scale = torch.full((128,), 2.0**-9, device=machine.device)
    for one in (weight, weight.to(BF16)):
        given = x.clone().requires_grad_()
        ef.linear(given, one, epilogue="lambda accum, scale: silu(accum * scale)", scale=scale).sum().backward()
        found.append(given.grad.float())
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02 * found[1].abs().max().item())


# --- designs ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_few_rows(pair: tuple[torch.dtype, torch.dtype], tile: tuple[int, int], hopper: Machine) -> None:
    for m, (n, k) in itertools.product(ROWS, ((1000, 80), (264, 1040), (259, 144), (64, 16))):
        a, b = hopper.whole(m, k, dtype=pair[0]), small(hopper, pair[1], n, k).t()
        check(hopper, PLAIN, a, b, {}, out_dtypes=F32, constraints=swapped(tile))


@pytest.mark.gpu
@pytest.mark.parametrize("design", [design for design in DESIGNS if design.split <= 2], ids=str)
def test_more_tiles_than_one_wave(design: Design, hopper: Machine) -> None:
    """Each stage is used again by the next tile of a CTA, and registers by the next stage."""
    for m, pair in itertools.product((16, 128), USUAL):
        k = 2064 if design.split > 1 else 208
        a, b = hopper.whole(m, k, most=1, dtype=pair[0]), small(hopper, pair[1], 20_000, k).t()
        check(hopper, PLAIN, a, b, {}, out_dtypes=F32, constraints=swapped(design.tile, design.split))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1032, 4096), (61, 1000, 4096), (256, 520, 1024), (300, 1290, 528)], ids=str)
def test_designs_of_the_same_bits_have_them(
    shape: tuple[int, int, int], pair: tuple[torch.dtype, torch.dtype], hopper: Machine
) -> None:
    """Every design, which are also those of the converted weight: their kernels multiply the same numbers."""
    m, n, k = shape
    a, b = hopper.normal(m, k, dtype=pair[0]), every(hopper, pair[1], n, k).t()
    options = {"epilogue": ef.EpilogueArguments.partial(PLAIN, {}), "out_dtypes": F32}
    converted, args = (ef.GemmArguments(a, weight.t(), **options) for weight in (b.t().to(pair[0]), b.t()))
    found: dict[Any, torch.Tensor] = {}
    for kernel in ef.get_kernels(converted):
        found.setdefault(kernel.plan.allocation.bits, kernel.run(converted)["D"])
    kernels = ef.get_kernels(args)
    assert any(kernel.spec.design.swapped for kernel in kernels) == (m <= 256)
    for kernel in kernels:
        for _ in range(2):
            D = kernel.run(args)["D"]
            assert torch.equal(D, found[kernel.plan.allocation.bits]), kernel.metadata.kernel_name
    for D in found.values():
        judge({"D": D.cpu()}, lambda accum: accum, product(a, b.to(pair[0])), {})


@pytest.mark.gpu
def test_sums_in_float16(hopper: Machine) -> None:
    for m in (16, 300):
        a, b = hopper.whole(m, 144, most=1, dtype=F16), small(hopper, INT8, 264, 144).t()
        check(hopper, PLAIN, a, b, {}, accumulator=F16, out_dtypes=F16)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 300])
def test_the_same_bits_on_two_streams_at_once(m: int, hopper: Machine) -> None:
    a, b = matrices(hopper, (BF16, INT8), m, 4096, 4096)
    given = {"scale": scales(hopper, b, 4096), "bias": hopper.normal(4096)}
    check_the_same_bits(hopper, function_of(SCALED, {}), a, b, given)


@pytest.mark.gpu
def test_a_call_that_repeats(hopper: Machine) -> None:
    """The quick road hands A and B over as the first call does."""
    weight, scale = every(hopper, INT8, 1024, 512), torch.full((1024,), 2.0**-8, device="cuda")
    for m in (4, 300):
        for _ in range(3):
            x = hopper.whole(m, 512, most=1)
            found = ef.linear(x, weight, epilogue="lambda accum, scale: accum * scale", scale=scale)
            assert torch.equal(found, ((x.float() @ weight.float().t()) * scale).to(BF16))
