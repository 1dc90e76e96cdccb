"""What the prediction says follows from what it reads: more bytes, a slower memory, a dearer plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from site_cases import Case, Given, gelu, graph_of, relu_backward, softmax
from torch._subclasses.fake_tensor import FakeTensorMode

import epifuse as ef
from epifuse.base.processors import GPUS
from epifuse.base.target import CPU, TARGETS, Target
from epifuse.providers.cutedsl import costs
from epifuse.providers.cutedsl.code import waited_for
from epifuse.providers.cutedsl.designs import DESIGNS
from epifuse.pytorch.cone import below, grow, pull
from epifuse.pytorch.payoff import Moved, moved
from epifuse.pytorch.prediction import Extents, Site, predicted

ROWS, WIDTH, INNER = 16384, 1024, 4096
HIDDEN, WIDE = 2 * ROWS * WIDTH, 2 * ROWS * INNER  # bytes
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COUNTED = json.loads((RESULTS / "epilogue_instructions.json").read_text(encoding="utf-8"))
H100, H200 = (replace(TARGETS[90], processor=GPUS[name]) for name in ("H100", "H200"))


def tiles_of(m: int, n: int) -> int:
    """Of 128 x 128."""
    return -(-m // 128) * -(-n // 128)


def cost_of(tiles: int, k: int) -> float:
    """Whole waves of them."""
    return float(-(-tiles // GPUS["H200"].multiprocessors) * 128 * 128 * k)


def gelu_of(target: Target) -> Site:
    """The first product of BERT-large's perceptron, with gelu behind it."""
    factors, tiles = HIDDEN + 2 * INNER * WIDTH, tiles_of(ROWS, INNER)
    moves = Moved(WIDE, 2 * INNER, WIDE, 2 * WIDE, 0, 1)
    extents = Extents(1, ROWS, INNER, WIDTH, (128, 128))
    return Site(target, extents, factors, moves, cost_of(tiles, WIDTH), 1e-3 * cost_of(tiles, WIDTH))


@pytest.fixture(params=[CPU, H100, H200], ids=lambda target: target.processor.name)
def site(request: pytest.FixtureRequest) -> Site:
    """The same on each device."""
    return gelu_of(request.param)


def gain(site: Site) -> float:
    return predicted(site).gain


def test_gelu_pays_on_a_gpu_alone(site: Site) -> None:
    """A CPU runs one operation of an epilogue after the other, and Inductor runs all in one loop."""
    if site.target == CPU:
        assert gain(site) < 0
    else:
        assert gain(site) > 0.01 * predicted(site).apart


@pytest.mark.parametrize(
    ("field", "is_better"),
    [("loops_apart", True), ("kernels", True), ("bytes_reread_for_sums", True), ("loops_fused", False)],
)
def test_what_loops_no_longer_move_pays(site: Site, field: str, is_better: bool) -> None:
    if site.target == CPU and field == "kernels":
        return  # what a loop costs the host is little beside a call of ours
    more = site._replace(moved=site.moved._replace(**{field: getattr(site.moved, field) + (10 << 20)}))
    assert (gain(more) > gain(site)) == is_better


def test_loops_take_as_long_as_bytes_or_instructions(site: Site) -> None:
    """A value takes 7 instructions beside a residual, and 40 in a gelu with erf, which bound its loop."""
    none, few, many = (
        gain(site._replace(moved=site.moved._replace(instructions=each * ROWS * INNER))) for each in (0, 7, 40)
    )
    assert none == few
    assert none == many if site.target == CPU else none < many


def test_what_the_epilogue_moves_or_adds_costs(site: Site) -> None:
    for field in ("operands", "outputs"):
        more = site._replace(moved=site.moved._replace(**{field: getattr(site.moved, field) + (100 << 20)}))
        assert gain(more) < gain(site)
    if site.target != CPU:
        assert gain(site._replace(shown=3 * site.shown)) < gain(site)


def test_a_dearer_plan_costs(site: Site) -> None:
    if site.target != CPU:
        assert gain(site._replace(multiplying=1.3 * site.multiplying)) < gain(site)


def test_waiting_for_rows_costs(site: Site) -> None:
    if site.target != CPU:
        assert gain(site._replace(waits=True)) < gain(site)


def test_operands_wait_with_the_rows(site: Site) -> None:
    """They cost more than what is written, and more than where the main loop hides them."""
    if site.target == CPU:
        return

    def more(field: str, *, waits: bool) -> float:
        given = site._replace(waits=waits)
        moves = given.moved._replace(**{field: getattr(given.moved, field) + (100 << 20)})
        return predicted(given._replace(moved=moves)).fused - predicted(given).fused

    assert more("operands", waits=True) > more("outputs", waits=True)
    assert more("operands", waits=True) > more("operands", waits=False)


def test_reducing_columns_costs(site: Site) -> None:
    if site.target != CPU:
        assert gain(site._replace(columns=True)) < gain(site)


def test_the_library_loses_most_where_k_is_short() -> None:
    """8192 x 8192 by 512 and by 4096 without an epilogue: 0.81 and 0.98 of cuBLAS's time (gemm_epilogue.json)."""

    def ratio(k: int) -> float:
        tiles, out, factors = tiles_of(ROWS, INNER), 2 * ROWS * INNER, 2 * k * (ROWS + INNER)
        extents, moves = Extents(1, ROWS, INNER, k, (128, 128)), Moved(out, 0, out, 0, 0, 0)
        found = predicted(Site(H200, extents, factors, moves, cost_of(tiles, k), 0.0))
        return found.fused / found.apart

    assert ratio(512) < 0.9 * ratio(4096)


def test_factors_that_leave_the_cache_cost() -> None:
    """With a long K, bands of A do not stay in the L2 cache; with a short one they do, whatever is as large in all."""

    def fused(n: int, k: int) -> float:
        extents, factors = Extents(1, ROWS, n, k, (128, 128)), 2 * k * (ROWS + n)
        moves = Moved(2 * ROWS * n, 0, 0, 0, 0, 0)
        found = predicted(Site(H200, extents, factors, moves, cost_of(tiles_of(ROWS, n), k), 0.0))
        return found.fused / found.apart

    assert fused(WIDTH, 4 * INNER) > 1.02 * fused(WIDTH, INNER)


def test_few_tiles_and_a_long_k_do_not_pay() -> None:
    """A gradient of a weight, widened to float32: cuBLAS splits K, and these tiles leave half of the GPU idle."""
    weight = 2 * WIDTH * WIDTH
    moves = Moved(weight, 0, 2 * weight, 3 * weight, 0, 1)
    tiles = tiles_of(WIDTH, WIDTH)
    extents = Extents(1, WIDTH, WIDTH, ROWS, (128, 128))
    site = Site(H200, extents, 2 * HIDDEN, moves, cost_of(tiles, ROWS), 0.0)
    assert gain(site) < 0


def test_bytes_weigh_more_where_memory_is_slower() -> None:
    assert gain(gelu_of(H100)) > gain(gelu_of(H200))


def test_a_kernel_is_not_faster_than_its_parts(site: Site) -> None:
    if site.target == CPU:
        return
    found = predicted(site)
    assert found.fused > predicted(site._replace(shown=0.0)).fused
    assert found.fused > (site.factors + site.moved.outputs) / site.target.processor.bytes_a_second
    assert found.apart > site.extents.operations / site.target.processor.operations_a_second


def moves_of(case: Case, target: Target) -> Moved:
    """Of all that stands around the case's product."""
    _, product = graph_of(case, "cuda")
    cone = grow(product, "sums", {}, below(product), cuts=True)
    pull(cone, {}, lambda _: True)
    return moved(cone, target)


@pytest.mark.parametrize(("target", "wide", "kernels"), [(H200, 4096, 3), (H200, 16384, 1), (CPU, 16384, 3)])
def test_inductor_splits_few_sums(target: Target, wide: int, kernels: int) -> None:
    """What it makes of these graphs: a loop and two kernels for sums, or one that stores dz and adds it up."""
    case = Case(0, "mm", relu_backward, (256, wide), 1024, torch.bfloat16, wide=False, by_columns=True)
    found, whole = moves_of(case, target), 2 * 256 * wide
    assert found.kernels == kernels
    assert found.bytes_reread_for_sums == (whole if kernels > 1 else 0)
    assert found.loops_apart == 3 * whole


def test_instructions_are_those_of_the_machine_code() -> None:
    """Inductor's kernel for gelu has 40 a value (loop_instructions.json)."""
    case = Case(0, "mm", gelu, (256, 4096), 1024, torch.bfloat16, wide=False, by_columns=True)
    assert 36 <= moves_of(case, H200).instructions / (256 * 4096) <= 44


def test_a_long_row_is_computed_twice() -> None:
    """Inductor holds a row of up to 1024 values in registers, in lanes whose number is a power of two."""

    def each(wide: int) -> float:
        case = Case(0, "mm", softmax, (256, wide), 512, torch.bfloat16, wide=False, by_columns=True)
        return moves_of(case, H200).instructions / (256 * wide)

    assert each(640) == pytest.approx(1.6 * each(512))
    assert each(512) == each(1024)
    assert each(2048) == each(4096) == pytest.approx(2 * each(1024))
    assert each(1536) == pytest.approx(each(2048) / 0.75)


def masked(y: torch.Tensor, at: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout whose mask the backward pass reads."""
    from torch._inductor import inductor_prims

    mask = inductor_prims.random(list(y.shape), at.row(torch.int64).select(0, 0), "rand") > 0.1
    return torch.where(mask, y * (1 / 0.9), 0.0), mask


def read_twice(y: torch.Tensor, at: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where another loop computes with the mask, and so may draw it."""
    dropped, mask = masked(y, at)
    return dropped, mask, torch.where(mask, at.full(), 0.0)


def test_a_mask_that_others_read_is_drawn_ahead() -> None:
    """A loop that draws 16384 x 1024 numbers and stores a mask took 51 us on an H200 (model_time_gpt2_h200.json)."""
    ahead, elsewhere = (
        moves_of(Case(0, "mm", tail, (ROWS, WIDTH), 1024, torch.bfloat16, wide=False, by_columns=True), H200)
        for tail in (masked, read_twice)
    )
    assert ahead.drawn / H200.processor.instructions_a_second == pytest.approx(51e-6, rel=0.1)
    assert elsewhere.drawn == 0


def test_drawing_ahead_costs(site: Site) -> None:
    drawn = site._replace(moved=site.moved._replace(drawn=86 * ROWS * INNER))
    if site.target != CPU:
        assert predicted(drawn).fused - predicted(site).fused > predicted(drawn).apart - predicted(site).apart > 0


def shown_of(epilogue: Callable[..., object], shape: tuple[int, int, int] = (4096, 4096, 4096)) -> dict[str, float]:
    """What each kernel's epilogue adds by its name, in microseconds."""
    m, n, k = shape
    processor = H200.processor
    with FakeTensorMode():
        a, b = (torch.empty(size, k, dtype=torch.bfloat16, device="cuda") for size in (m, n))
        args = ef.GemmArguments(a, b.T, epilogue=ef.EpilogueArguments.partial(epilogue, {}))
        allocations = {each.plan.spec.name: each.plan.allocation for each in ef.get_kernels(args, cc=90)}
    second = processor.operations_a_second / (2 * processor.multiprocessors)
    return {name: 1e6 * each.estimate().shown / second for name, each in allocations.items() if each.estimate}


def test_every_operation_of_an_epilogue_is_counted() -> None:
    plain, doubled, gelu = (
        shown_of(each)
        for each in (lambda accum: accum, lambda accum: 2.0 * accum + 1.0, lambda accum: ef.gelu(2.0 * accum + 1.0))
    )
    assert all(plain[name] < doubled[name] < gelu[name] for name in gelu)


def test_an_epilogue_that_nothing_hides_costs_most() -> None:
    """Two warp groups that share a tile compute its epilogue together, and no main loop runs beside them."""
    found = shown_of(lambda accum: ef.gelu(accum), (16384, 4096, 4096))
    assert found["sm90_gemm_128x192_cooperative_2x1"] > 2 * found["sm90_gemm_128x192_pingpong_2x1"]


def test_code_that_other_kernels_drive_out_is_waited_for() -> None:
    """Once a launch; a thread with half of the values has half of the code."""
    wide, small = (next(each for each in DESIGNS if each.tile == tile) for tile in ((128, 256), (64, 128)))
    light, heavy, heaviest = (waited_for(instructions, wide) for instructions in (8, 40, 60))
    assert light == waited_for(8, small) == waited_for(40, small) == 0.0
    assert 0 < heavy < heaviest
    assert waited_for(80, small) == heavy


@pytest.mark.parametrize(("name", "counts"), COUNTED["a value"].items())
def test_instructions_are_as_counted(name: str, counts: dict[str, float]) -> None:
    """Beside a cast to int32 and back, or what a text has besides (epilogue_instructions.json)."""
    besides = {"floor_divide": 2, "remainder": 2, "bitwise_and": 2, "where": 1, "atan2": 1, "philox_rand": 3}
    if name in costs.COSTS:
        row = costs.COSTS[name]
        for kind in ("full", "narrow"):
            assert abs(row.of(kind) - (counts[kind] - besides.get(name, 0))) <= 1.5


@pytest.mark.parametrize("row", [costs.Cost, costs.Reduced])
def test_a_row_of_costs_says_all_of_it(row: Callable[..., object]) -> None:
    with pytest.raises(TypeError):
        row("few")
