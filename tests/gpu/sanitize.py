"""A small set of launches for compute-sanitizer: every design, access, transport and reduction, each result judged.

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python tests/gpu/sanitize.py
    done

CuTe DSL asks the driver for functions that it does not have, which memcheck would count as errors.

`--device cpu` runs the same on the CPU kernel, to know that the program itself is right. Names choose among the sets.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

import torch  # noqa: E402 - found through the path above, as what follows
from gpu import (  # noqa: E402
    test_accesses,
    test_bad_input,
    test_copied,
    test_full,
    test_inputs,
    test_last_tile,
    test_mma_sync,
    test_recompute,
    test_reductions,
    test_regions,
    test_repeat,
    test_row_stage,
    test_scaled,
    test_stores,
)
from gpu.harness import Machine, exact_product, judge, run  # noqa: E402

import epifuse as ef  # noqa: E402
from epifuse.providers.cutedsl import DESIGNS  # noqa: E402
from epifuse.request.problem import Constraints  # noqa: E402


def everything(accum, C, row, column, odd, alpha):
    """Both transports in and out, every vector, a reduction of each shape."""
    t = alpha * accum + C * row
    D = ef.relu(t) + column
    Aux = ef.where(ef.index_n(accum) <= ef.index_m(accum), t - odd, 0.0)
    rows, columns, total, largest = D.sum(dim=1), D.sum(dim=0), Aux.sum(), ef.amax(D)
    return D, Aux, rows, columns, total, largest


def few(accum, C, row, column, odd, alpha):
    """What the widest accumulators leave registers for."""
    D = ef.relu(alpha * accum + C * row) + column
    return D


def designs(machine: Machine) -> None:
    """Every design on ragged extents, more tiles than one, K of a stage and of several."""
    for design in DESIGNS if machine.gpu else DESIGNS[::6]:
        for m, n, k in ((300, 328, 72), (129, 264, 520)):
            a, b = machine.whole(m, k, most=1), machine.whole(k, n, most=1)
            operands = {
                "C": machine.laid_out(torch.randint(-4, 5, (m, n)).bfloat16(), "padded"),
                "row": machine.whole(n).float(),
                "column": machine.whole(m, 1).float(),
                "odd": machine.laid_out(torch.randint(-4, 5, (m, n)).float(), "odd"),
                "alpha": 0.5,
            }
            pinned = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule)
            made = ef.EpilogueArguments.partial(everything, operands)
            taken = ef.get_kernels(ef.GemmArguments(a, b, epilogue=made, constraints=pinned), cc=90, limit=1)
            epilogue = everything if taken else few
            got = run(machine, epilogue, a, b, operands, constraints=pinned if machine.gpu else None)
            judge(got, ef.reference(epilogue), exact_product(a, b), operands)


def accesses(machine: Machine) -> None:
    """Every access, aligned and not, in place too."""
    for group in range(len(test_accesses.GROUPS)):
        test_accesses.test_every_dtype_in_every_access(0, group, machine)
    for layout in ("odd", "shifted", "columns", "padded"):
        test_bad_input.test_operands_and_outputs_lie_anywhere(torch.float32, layout, machine)
        if layout != "shifted":
            test_repeat.test_d_may_be_c(torch.bfloat16, layout, machine)
    for design in test_last_tile.PINNED:
        if design.cluster == (2, 1) and design.tile in ((128, 128), (128, 256)):
            test_last_tile.test_operands_of_the_last_tile("of two widths", design, machine)


def reductions(machine: Machine) -> None:
    """Every kind to every destination."""
    for destination in test_reductions.DESTINATIONS:
        for names in test_reductions.KINDS if machine.gpu else test_reductions.KINDS[:1]:
            test_reductions.test_every_kind_to_every_destination(destination, names, machine)
    test_reductions.test_sums_of_logarithms_beside_float64("a loss", 0.0, machine)


def rows(machine: Machine) -> None:
    """Values that need whole rows, in clusters of 1, 2, 4 and 8, and those that a second launch computes."""
    for design in test_row_stage.HOLDERS[:: 1 if machine.gpu else 8]:
        test_row_stage.test_every_design_holds_rows_as_wide_as_its_cluster("layer norm", design, machine)
    test_recompute.test_beside_float64("a number", "ragged", machine)


def regions(machine: Machine) -> None:
    """Ranges of columns with an epilogue each: vectors, segments, both transports out, in one launch and several."""
    for name in test_regions.CASES if machine.gpu else test_regions.IN_DESIGNS[:2]:
        for layout in ("rows", "odd"):
            test_regions.test_each_region_has_its_own(name, layout, machine)
    for design in DESIGNS if machine.gpu else ():
        for name in test_regions.IN_DESIGNS:
            test_regions.test_in_every_design(design, name, machine)


def inputs(machine: Machine) -> None:
    """tf32, sums in float16, nothing to multiply, and outputs of other kinds than floats."""
    test_inputs.test_tf32_of_any_numbers(machine)
    test_inputs.test_a_float16_accumulator_holds_float16(machine)
    test_inputs.test_reductions_of_no_product(machine)
    for group in range(len(test_stores.GROUPS)):
        test_stores.test_every_value_is_stored_by_the_rule(next(iter(test_stores.SOURCES)), group, machine)


def full(machine: Machine) -> None:
    """float32 in full: every layout, few rows and several tiles, batches, and what lies behind the parts."""
    with test_full.taken():
        for layouts in test_full.LAYOUT_PAIRS[:: 1 if machine.gpu else 3]:
            for shape in ((17, 40, 61), (129, 263, 81)):
                test_full.test_products_of_whole_numbers_are_exact(shape, layouts, machine)
        test_full.test_no_mode_need_be_contiguous(machine)
        test_full.test_batches(machine)
        for name in test_full.EPILOGUES:
            test_full.test_epilogues(name, machine)


def copied(machine: Machine) -> None:
    """16 bits that TMA cannot address: every layout, few rows and several tiles, batches, and what lies behind."""
    for layouts in test_copied.LAYOUT_PAIRS[:: 1 if machine.gpu else 3]:
        for shape in test_copied.SHAPES[1 : 5 if machine.gpu else 2]:
            test_copied.test_products_of_whole_numbers_are_exact(shape, layouts, machine)
    test_copied.test_no_mode_need_be_contiguous(machine)
    test_copied.test_batches(machine)
    for name in test_copied.EPILOGUES:
        test_copied.test_epilogues(name, machine)


def scaled(machine: Machine) -> None:
    """Block scales of each side and in each layout; every design, whose stages and tiles end behind the last block."""
    for shape in test_scaled.SHAPES[1:]:
        for layout in test_scaled.LAYOUTS:
            test_scaled.test_powers_of_two_are_exact(shape, "AB", layout, machine)
        for side in "AB":
            test_scaled.test_powers_of_two_are_exact(shape, side, "along K", machine)
    if machine.gpu:
        for shape in ((61, 200, 1168), (300, 330, 528)):
            test_scaled.test_designs_of_the_same_bits_have_them(shape, machine)


def mma_sync(machine: Machine) -> None:
    """The kernel for mma.sync: every tile, copies of each size and through registers, every kind of epilogue."""
    with test_mma_sync.taken():
        for layouts in test_mma_sync.LAYOUT_PAIRS[:: 1 if machine.gpu else 3]:
            for shape in test_mma_sync.SHAPES[:4] if machine.gpu else test_mma_sync.SHAPES[1:2]:
                test_mma_sync.test_products_of_whole_numbers_are_exact(shape, layouts, machine)
        for design in test_mma_sync.MULTISTAGE_DESIGNS if machine.gpu else test_mma_sync.MULTISTAGE_DESIGNS[:1]:
            for layouts in (("rows", "columns"), ("columns", "rows"), ("odd", "odd")):
                if layouts != ("odd", "odd") or design.tile != (256, 128):
                    test_mma_sync.test_every_tile(design, layouts, machine)
        test_mma_sync.test_no_mode_need_be_contiguous(machine)
        test_mma_sync.test_batches(machine)
        test_mma_sync.test_a_result_may_take_an_operand_s_place(256, machine)
        for name in test_mma_sync.PARTS:
            test_mma_sync.test_parts_of_rows(name, machine)
        for name in test_mma_sync.EPILOGUES:
            test_mma_sync.test_epilogues(name, (131, 253, 77), machine)
        for dtypes in test_mma_sync.NARROW[1:3]:
            test_mma_sync.test_products_of_8_bits_are_exact(dtypes, machine)
        for name in test_mma_sync.NARROW_EPILOGUES:
            test_mma_sync.test_epilogues_of_8_bits(name, machine)


def extents(machine: Machine) -> None:
    """Smaller than a tile, and one."""
    for shape in ((1, 1, 8), (1, 8, 8), (7, 1, 64), (65, 9, 16), (129, 257, 8)):
        test_bad_input.test_ragged_extents(shape, machine)


SETS: Mapping[str, Callable[[Machine], None]] = {
    function.__name__: function
    for function in (designs, accesses, reductions, rows, regions, inputs, full, copied, scaled, mma_sync, extents)
}


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("sets", nargs="*", help=f"among {', '.join(SETS)}; all of them unless given")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        # PyTorch's cache would hide what lies outside a tensor, and what was never written. Read by its first
        # allocation; not set for who only imports this, because without the cache nothing can be captured.
        os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    for name in options.sets or SETS:
        torch.manual_seed(0)
        began = time.perf_counter()
        SETS[name](Machine(options.device))
        print(f"{name}: right, in {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
