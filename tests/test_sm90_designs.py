"""What a design makes of an epilogue: stages, registers, what makes room. Needs no compiler."""

import math
from dataclasses import replace

import pytest
import torch
from gpu import test_last_tile
from gpu.harness import Machine, function_of
from hopper import (
    BF16,
    CASES,
    SCHEDULES,
    SPILLING,
    arguments,
    arranged,
    bias_relu,
    hopper_kernel,
    layer_norm,
    many,
    residual,
)

import epifuse as ef
from epifuse.base.target import TARGETS
from epifuse.providers.cutedsl import DESIGNS, budget
from epifuse.providers.cutedsl.lowering import lower


def test_the_walks_over_a_tile():
    """Each keeps what the next ones need in place of the product, and what only the first needs is read once."""
    args = arguments(layer_norm, C=torch.empty(512, 512), weight=torch.empty(512), bias=torch.empty(512))
    plan = ef.get_kernels(args, cc=90)[0].plan
    first, second, last = lower(plan.graph, plan.problem).walks
    assert [walk.held.op for walk in (first, second, last)] == ["accum", "add", "sub"]
    assert [[node.op for node in walk.nodes] for walk in (first, second)] == [["load", "add"], ["sub", "mul"]]
    assert [len(walk.reductions) for walk in (first, second, last)] == [1, 1, 0]


CROWDED = {
    "residual": CASES["residual"],
    "sine": arguments(lambda accum: ef.sin(accum)),
    "a sum that ends within a subtile": arguments(lambda accum: ef.sum(accum), n=520, k=1024),
    "sums of an exact error function": arguments(lambda accum: ef.sum(ef.gelu(accum)), k=1024),
    "three sums": arguments(lambda accum: ef.sum(accum) + ef.amax(accum) + ef.amin(accum), k=1024),
    "sums where K is short": arguments(lambda accum: ef.sum(accum, dim=0), k=512),
    "results of 64 bits": arguments("def f(accum): D = accum; return D", D=torch.empty(512, 512, dtype=torch.int64)),
}


@pytest.mark.parametrize("case", CROWDED)
def test_the_widest_accumulator_refuses_what_would_spill(case):
    args = CROWDED[case]
    refusals = {refusal.kernel: refusal.reason for refusal in ef.explain(args, cc=90).refusals}
    assert "leaves too few registers" in refusals["sm90_gemm_128x192_pingpong_2x1"]
    assert "sm90_gemm_128x128_pingpong_2x1" not in refusals


@pytest.mark.parametrize(("name", "most"), [("amax", 201), ("logsumexp", 100)])
def test_as_many_reductions_as_the_merge_has_shared_memory_for(name, most):
    def explained(count):
        lines = "".join(f"    r{i} = {name}(accum * {i + 2}.0, dim=1)\n" for i in range(count))
        source = f"def epilogue(accum):\n{lines}    return {', '.join(f'r{i}' for i in range(count))}\n"
        return ef.explain(arguments(source), cc=90)

    assert explained(most).plan is not None
    refused = explained(most + 1)
    assert refused.plan is None
    assert any("merges 201 numbers of 32 bits a result at once" in reason.reason for reason in refused.refusals)


@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize("operands", [0, 1, 8])
def test_designs_fit_shared_memory(design, operands):
    """What does not fit goes direct; three stages of A and B are kept in any case."""
    args = many(operands, operands, torch.float32) if operands else CASES["plain"]
    program, fitted = arranged(args, design)
    loads = [access for _, access in program.loads]
    assert fitted.stages >= 3
    assert budget.shared_bytes(fitted, loads, program.stores) <= TARGETS[90].shared_memory
    ways = [access.way for access in (*loads, *program.stores)]
    assert set(ways) == ({"tile"} if operands < 8 else {"tile", "direct"})


def ways_of(program):
    """Ways of operands and outputs."""
    return [access.way for _, access in program.loads], [access.way for access in program.stores]


def test_float32_leaves_room_for_stages_if_k_is_long():
    """Beside two in and two out of float32 A and B have four stages in 128 x 128, if each output has one slot.

    Where K is long an operand goes direct, and they have five."""
    design = SCHEDULES[128, 128]
    some, all_ = ["tile", "direct"], ["tile", "tile"]
    program, staged = arranged(many(2, 2, torch.float32, k=4096), design)
    assert (staged.stages, *ways_of(program)) == (5, some, all_)
    program, staged = arranged(many(2, 2, torch.float32, k=1024), design)
    assert (staged.stages, *ways_of(program)) == (4, all_, all_)
    program, staged = arranged(many(3, 3, BF16, k=4096), design)
    assert (staged.stages, *ways_of(program)) == (4, ["tile"] * 3, ["tile"] * 3)


def test_tiles_stay_tiles_where_fewer_of_their_stages_make_room():
    """One operand and one output of float32 in 64 x 128, the tile of small M."""
    program, staged = arranged(many(1, 1, torch.float32, k=4096), SCHEDULES[64, 128])
    assert (staged.stages, *ways_of(program)) == (6, ["tile"], ["tile"])


def test_what_was_asked_to_go_by_tma_makes_room_last():
    args = many(2, 1, torch.float32, k=4096)
    args.problem = args.problem._replace(by_tma=("C1",))
    program, _ = arranged(args, SCHEDULES[128, 128])
    assert ways_of(program) == (["direct", "tile"], ["tile"])


def squares(accum, C):
    D = accum + C
    rows = ef.sum_of_squares(D, dim=-1)
    return D, rows


def heavy(accum, C):
    D = ef.tanh(accum) + C
    return D


def with_c(epilogue, k, design, dtype=BF16):
    """Program and design with its stages of an epilogue with one operand."""
    return arranged(arguments(epilogue, k=k, C=torch.empty(512, 512, dtype=dtype)), design)


def test_stages_of_a_and_b():
    """Six beside an operand where K is not short, room first where it is or much is computed."""

    def stages(epilogue, k):
        design = with_c(epilogue, k, SCHEDULES[128, 128])[1]
        return design.stages, design.load_stages

    assert stages(residual, 512) == stages(squares, 512) == (5, 4)
    assert stages(residual, 1024) == stages(squares, 1024) == (6, 2)
    assert stages(heavy, 1024) == (5, 4)
    columns = torch.empty(512, 512, dtype=BF16).t()
    made = arranged(arguments(residual, k=1024, C=columns, D=columns), SCHEDULES[128, 128])[1]
    assert (made.stages, made.load_stages, made.store_stages) == (5, 4, 4)
    assert arranged(many(2, 1, k=1024), SCHEDULES[128, 128])[1].stages == 5
    assert arranged(many(2, 1, k=512), SCHEDULES[128, 128])[1].stages == 4


def test_scales_of_rows_and_columns_take_no_slot_of_the_output():
    """In the widest tile, whose stages leave little room: a group's own rows of a vector fit beside its columns."""

    def scaled(accum, row, column):
        D = accum * row * column
        return D

    vectors = {"row": torch.empty(512), "column": torch.empty(512, 1)}
    plain, made = (
        arranged(arguments(epilogue, k=1024, D=torch.empty(512, 512, dtype=BF16), **operands), SCHEDULES[128, 256])[1]
        for epilogue, operands in (("def f(accum): D = accum; return D", {}), (scaled, vectors))
    )
    assert (made.stages, made.store_stages) == (plain.stages, plain.store_stages)


def test_who_has_spare_stages_for_the_last_tile():
    def spare(epilogue, k, tile):
        return with_c(epilogue, k, SCHEDULES[tile])[1].spare

    assert spare(residual, 1024, (128, 128)) == spare(squares, 4096, (128, 128)) == 1
    assert spare(residual, 1024, (128, 256)) == spare(residual, 512, (128, 256)) == 1
    assert spare(residual, 512, (128, 128)) == 0  # what finding them costs is not hidden
    assert spare(residual, 1024, (128, 192)) == 0  # four bytes of sums of squares would spill
    assert spare(heavy, 4096, (128, 128)) == spare(heavy, 4096, (128, 256)) == 0
    assert arranged(arguments(bias_relu, k=4096, bias=torch.empty(512)), SCHEDULES[128, 256])[1].spare == 0


@pytest.mark.parametrize("design", test_last_tile.PINNED, ids=str)
@pytest.mark.parametrize("case", test_last_tile.OPERANDS)
def test_the_test_of_the_last_tile_has_spare_stages(case, design):
    """On a GPU it would not notice that nothing waits in them."""
    laid_out = Machine("cpu").laid_out
    for m, n in test_last_tile.SHAPES:
        operands = {
            name: laid_out(torch.zeros(m, n, dtype=dtype), layout)
            for name, (dtype, layout) in test_last_tile.OPERANDS[case].items()
        }
        epilogue = function_of(test_last_tile.source_of(operands), {})
        staged = arranged(arguments(epilogue, m=m, n=n, k=test_last_tile.K, **operands), design)[1]
        # Half of three stages of 48 KB do not hold what 128 x 256 adds of float32.
        assert (staged.spare > 0) == (design.pingpong or case != "float32")
    clusters = [-(-extent // (tile * c)) for extent, tile, c in zip((m, n), design.tile, design.cluster, strict=True)]
    assert clusters[0] * clusters[1] * design.cluster[0] * design.cluster[1] > 132


def test_a_plan_says_where_operands_of_the_last_tile_wait():
    said = "operands of each CTA's last tile are loaded ahead of their use, into 1 of the stages of A and B"
    sizes = {"m": 2048, "n": 2048, "k": 1024, "C": torch.empty(2048, 2048, dtype=BF16)}
    assert said in str(hopper_kernel(arguments(residual, **sizes)).plan)
    assert "last tile" not in str(hopper_kernel(arguments(heavy, **sizes)).plan)


def softmax_of_sum(accum, C):
    D = ef.softmax(accum + C, dim=-1)
    return D


def test_who_walks_a_tile_several_times_has_no_spare_stages():
    assert with_c(softmax_of_sum, 4096, replace(SCHEDULES[128, 256], cluster=(1, 2)))[1].spare == 0


@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, BF16, torch.float32], ids=str)
def test_last_tile_operands_do_not_overlap_in_spare_stages(dtype, design):
    """Every round of subtiles but the first has a place of its own, of whole swizzle patterns."""
    program, staged = with_c(residual, 1024, design, dtype)
    places = budget.spare_places(staged, program)
    rounds = range(1, staged.subtiles // staged.load_stages)
    if not places:
        assert staged.spare == 0
        return
    assert set(places) == {(within, r, 0) for within in range(staged.sharing) for r in rounds}
    size = staged.load_stages * 64 * 32 * dtype.itemsize
    taken = {(*part, byte) for *part, first in places.values() for byte in range(first, first + size, 1024)}
    assert len(taken) == len(places) * size // 1024
    assert staged.spare in (0, 1 + max(stage for stage, _, _ in taken))
    assert all(stage < staged.stages // 2 for stage, _, _ in taken)
    assert all(byte + 1024 <= budget.stage_bytes(staged)[matrix] for _, matrix, byte in taken)


AHEAD = {
    "the product": (lambda accum: accum, 1),
    "squares of rows": (lambda accum: ef.sum_of_squares(accum, dim=-1), 1),
    "the largest": (lambda accum: ef.absmax(accum), 1),
    "sums of columns": (lambda accum: ef.sum(accum, dim=0), 2),
    "logsumexp of rows": (lambda accum: ef.logsumexp(accum, dim=-1), 2),
    "sums of what takes long": (lambda accum: ef.sum(ef.tanh(accum)), 2),
    "what takes long alone": (lambda accum: ef.tanh(accum), 1),
}


@pytest.mark.parametrize("case", AHEAD)
def test_long_reducing_epilogues_keep_two_blocks_of_k_in_flight(case):
    epilogue, blocks = AHEAD[case]
    program, staged = arranged(arguments(epilogue, k=1024), SCHEDULES[128, 128])
    assert staged.stages >= 6
    assert budget.ahead(staged, program) == blocks
    assert budget.ahead(replace(staged, stages=5), program) == 1


@pytest.mark.parametrize(("operands", "dtype", "k"), [(5, BF16, 4096), (2, torch.float32, 1024), (4, BF16, 1024)])
def test_fewer_operands_and_outputs_do_not(operands, dtype, k):
    best = hopper_kernel(many(operands, operands, dtype, k, 4096))
    assert math.prod(best.metadata.tile_shape) >= 128 * 128
    assert SPILLING not in best.plan.allocation.notes


def test_short_and_long_k_share_a_function_for_any_raster():
    both = [ef.get_kernels(arguments(bias_relu, k=k, bias=torch.empty(512)), cc=90) for k in (256, 4096)]
    short, long = (
        next(kernel.plan.allocation.program for kernel in kernels if kernel.spec.design == SCHEDULES[128, 128])
        for kernels in both
    )
    assert short.design.raster != long.design.raster
    assert short.text == long.text
