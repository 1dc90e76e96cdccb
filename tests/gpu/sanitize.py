"""Launches for compute-sanitizer: every design, access, transport and reduction. Each result is judged.

    seq 14 | xargs -P 14 -I{} python tests/gpu/sanitize.py --share {}/14
    for tool in memcheck racecheck initcheck synccheck; do
        seq 14 | xargs -P 14 -I{} compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 \\
            python tests/gpu/sanitize.py --share {}/14
    done

Compiling takes most of the time, so the launches are split into shares that run in parallel. Compiling under a tool
takes far longer, so the first line compiles all kernels into the store, where the tools find them. CuTe DSL asks the
driver for functions that the driver does not have; `--report-api-errors no` keeps memcheck from reporting these as
errors. initcheck reports the flags of parts of K, which are read before they are written: see split.py.

`--device cpu` runs the same on the CPU kernel, to check the program itself. Names as arguments choose sets.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

import torch  # noqa: E402 - this and the following imports need the path above
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
    test_segments,
    test_splitk,
    test_stores,
    test_swapped,
    test_weight_only,
)
from gpu.harness import Machine, check, exact_product, judge, run  # noqa: E402

import epifuse as ef  # noqa: E402
from epifuse.providers.cutedsl import DESIGNS  # noqa: E402
from epifuse.providers.cutedsl.design import Design  # noqa: E402
from epifuse.request.problem import Constraints  # noqa: E402


def everything(accum, C, row, column, odd, alpha):
    """An epilogue with both transports of operands and outputs, every vector, and a reduction of each shape."""
    t = alpha * accum + C * row
    D = ef.relu(t) + column
    Aux = ef.where(ef.index_n(accum) <= ef.index_m(accum), t - odd, 0.0)
    rows, columns, total, largest = D.sum(dim=1), D.sum(dim=0), Aux.sum(), ef.amax(D)
    return D, Aux, rows, columns, total, largest


def few(accum, C, row, column, odd, alpha):
    """A smaller epilogue, for which designs with the widest accumulators have enough registers."""
    D = ef.relu(alpha * accum + C * row) + column
    return D


Call = tuple[Any, ...]
"""A function and its arguments, except the last one, which is the machine."""


def a_design(design: Design, shape: tuple[int, int, int], machine: Machine) -> None:
    """Run `everything` in one design, or `few` if the design has too few registers."""
    m, n, k = shape
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


def designs(machine: Machine) -> Iterator[Call]:
    """Every design, with ragged extents, several tiles, and K of one stage and of several."""
    for design in DESIGNS if machine.gpu else DESIGNS[::6]:
        for shape in ((300, 328, 72), (129, 264, 520)):
            yield a_design, design, shape


def accesses(_machine: Machine) -> Iterator[Call]:
    """Every access, aligned and not, also with outputs that take the place of operands."""
    for group in range(len(test_accesses.GROUPS)):
        yield test_accesses.test_every_dtype_in_every_access, 0, group
    for layout in ("odd", "shifted", "columns", "padded"):
        yield test_bad_input.test_operands_and_outputs_lie_anywhere, torch.float32, layout
        if layout != "shifted":
            yield test_repeat.test_d_may_be_c, torch.bfloat16, layout
    for design in test_last_tile.PINNED:
        if design.cluster == (2, 1) and design.tile in ((128, 128), (128, 256)):
            yield test_last_tile.test_operands_of_the_last_tile, "of two widths", design


def reductions(machine: Machine) -> Iterator[Call]:
    """Every kind of reduction to every destination."""
    for destination in test_reductions.DESTINATIONS:
        for names in test_reductions.KINDS if machine.gpu else test_reductions.KINDS[:1]:
            yield test_reductions.test_every_kind_to_every_destination, destination, names
    yield test_reductions.test_sums_of_logarithms_beside_float64, "a loss", 0.0


def rows(machine: Machine) -> Iterator[Call]:
    """Values that need whole rows: in clusters of 1, 2, 4 and 8, and by a second launch."""
    for design in test_row_stage.HOLDERS[:: 1 if machine.gpu else 8]:
        yield test_row_stage.test_every_design_holds_rows_as_wide_as_its_cluster, "layer norm", design
    yield test_recompute.test_beside_float64, "a number", "ragged"


def segments(machine: Machine) -> Iterator[Call]:
    """Segments of a row: reduced, distributed to the lanes that share a row, combined, and quantised by blocks."""
    names = list(test_segments.CASES)
    for layout in ("rows", "odd"):
        for name in names if machine.gpu else names[::8]:
            yield test_segments.test_each_segment_has_its_own, name, layout
    for width in (16, 32, 64, 128, 256):
        yield test_segments.test_blocks_are_quantised, width


def regions(machine: Machine) -> Iterator[Call]:
    """Ranges of columns with different epilogues: vectors, segments, both transports out, in one launch and several."""
    for name in test_regions.CASES if machine.gpu else test_regions.IN_DESIGNS[:2]:
        for layout in ("rows", "odd"):
            yield test_regions.test_each_region_has_its_own, name, layout
    for design in DESIGNS if machine.gpu else ():
        for name in test_regions.IN_DESIGNS:
            yield test_regions.test_in_every_design, design, name


def inputs(_machine: Machine) -> Iterator[Call]:
    """tf32, sums in float16, products with K of 0, and outputs that are not floats."""
    yield (test_inputs.test_tf32_of_any_numbers,)
    yield (test_inputs.test_a_float16_accumulator_holds_float16,)
    yield (test_inputs.test_reductions_of_no_product,)
    for group in range(len(test_stores.GROUPS)):
        yield test_stores.test_every_value_is_stored_by_the_rule, next(iter(test_stores.SOURCES)), group


def full(machine: Machine) -> Iterator[Call]:
    """Full float32 precision: every layout, few rows and several tiles, batches, and epilogues."""
    with test_full.taken():
        for layouts in test_full.LAYOUT_PAIRS[:: 1 if machine.gpu else 3]:
            for shape in ((17, 40, 61), (129, 263, 81)):
                yield test_full.test_products_of_whole_numbers_are_exact, shape, layouts
        yield (test_full.test_no_mode_need_be_contiguous,)
        yield (test_full.test_batches,)
        for name in test_full.EPILOGUES:
            yield test_full.test_epilogues, name


def copied(machine: Machine) -> Iterator[Call]:
    """16-bit matrices that TMA cannot address: every layout, few rows and several tiles, batches, and epilogues."""
    for layouts in test_copied.LAYOUT_PAIRS[:: 1 if machine.gpu else 3]:
        for shape in test_copied.SHAPES[1 : 5 if machine.gpu else 2]:
            yield test_copied.test_products_of_whole_numbers_are_exact, shape, layouts
    yield (test_copied.test_no_mode_need_be_contiguous,)
    yield (test_copied.test_batches,)
    for name in test_copied.EPILOGUES:
        yield test_copied.test_epilogues, name


def scaled(machine: Machine) -> Iterator[Call]:
    """Block scales of each side and in each layout; every design, with tiles that extend beyond the last block."""
    for shape in test_scaled.SHAPES[1:]:
        for layout in test_scaled.LAYOUTS:
            yield test_scaled.test_powers_of_two_are_exact, shape, "AB", layout
        for side in "AB":
            yield test_scaled.test_powers_of_two_are_exact, shape, side, "along K"
    for shape in ((61, 200, 1168), (300, 330, 528)) if machine.gpu else ():
        yield test_scaled.test_designs_of_the_same_bits_have_them, shape


def mma_sync(machine: Machine) -> Iterator[Call]:
    """The kernel for mma.sync: every tile, copies of each size and copies through registers, every kind of epilogue."""
    with test_mma_sync.taken():
        for layouts in test_mma_sync.LAYOUT_PAIRS[:: 1 if machine.gpu else 3]:
            for shape in test_mma_sync.SHAPES[:4] if machine.gpu else test_mma_sync.SHAPES[1:2]:
                yield test_mma_sync.test_products_of_whole_numbers_are_exact, shape, layouts
        for design in test_mma_sync.MULTISTAGE_DESIGNS if machine.gpu else test_mma_sync.MULTISTAGE_DESIGNS[:1]:
            for layouts in (("rows", "columns"), ("columns", "rows"), ("odd", "odd")):
                if layouts != ("odd", "odd") or design.tile[0] != 256:
                    yield test_mma_sync.test_every_tile, design, layouts
        yield (test_mma_sync.test_no_mode_need_be_contiguous,)
        yield (test_mma_sync.test_batches,)
        yield test_mma_sync.test_a_result_may_take_an_operand_s_place, 256
        for name in test_mma_sync.PARTS:
            yield test_mma_sync.test_parts_of_rows, name
        for name in test_mma_sync.EPILOGUES:
            yield test_mma_sync.test_epilogues, name, (131, 253, 77)
        for dtypes in test_mma_sync.NARROW[1:3]:
            yield test_mma_sync.test_products_of_8_bits_are_exact, dtypes
        for name in test_mma_sync.NARROW_EPILOGUES:
            yield test_mma_sync.test_epilogues_of_8_bits, name


def a_tile(name: str, tile: tuple[int, int], shape: tuple[int, int, int], machine: Machine) -> None:
    """Run an epilogue in one tile for few rows."""
    test_swapped.judged(machine, name, tile[0], shape, ("rows",), columns=tile[1])


def for_many(name: str, design: Design, machine: Machine) -> None:
    """Run an epilogue in a design for many rows, with a ragged last tile, and a K that ends within a stage."""
    test_swapped.of_many(machine, name, design, (353, 264, 1032))


def exchanged(machine: Machine) -> Iterator[Call]:
    """A and B exchanged, for few rows and for many: every tile, also those that store a part of what they multiply."""
    yield (test_swapped.test_a_call_that_repeats,)
    if not machine.gpu:
        return
    whole = [(rows, 64) for rows in test_swapped.TILES]
    for name in test_swapped.BODIES:
        for tile in (*whole, *test_swapped.LOW) if name in test_swapped.ELEMENTWISE else whole:
            for shape in ((33, 259, 136), (1, 264, 1032)):
                yield a_tile, name, tile, shape
    for design in test_swapped.FOR_MANY:
        yield for_many, "coordinates", design


def in_parts(design: Design, machine: Machine) -> None:
    """Run an epilogue with operands and reductions in a design that splits K."""
    test_splitk.several(machine, (61, 1000, 1544), test_splitk.pinned(design))


def in_parts_exchanged(design: Design, machine: Machine) -> None:
    """The same in a design for few rows."""
    test_splitk.exchanged(machine, design, 1000)


def parts_of_k(machine: Machine) -> Iterator[Call]:
    """Split-K: each design that carries operands and reductions beside the sums of parts."""
    yield (test_splitk.test_the_best_design,)
    if not machine.gpu:
        return
    for design in test_splitk.CARRYING:
        yield in_parts, design
    for design in test_splitk.SWAPPED_DESIGNS:
        if design.split > 1:
            yield in_parts_exchanged, design


def a_weight(pair: tuple[torch.dtype, torch.dtype], tile: tuple[int, int], machine: Machine) -> None:
    """Run a product with an 8-bit weight that the kernel converts, in one tile."""
    a, b = machine.whole(17, 144, dtype=pair[0]), test_weight_only.small(machine, pair[1], 259, 144).t()
    asked = test_weight_only.swapped(tile)
    check(machine, test_weight_only.PLAIN, a, b, {}, out_dtypes=torch.float32, constraints=asked)


def weight_only(machine: Machine) -> Iterator[Call]:
    """An 8-bit weight beside 16-bit activations: every value, every tile for few rows, and a number of rows for which a
    first kernel converts the weight."""
    for pair in test_weight_only.PAIRS if machine.gpu else test_weight_only.PAIRS[::7]:
        yield test_weight_only.test_every_value_is_converted_exactly, 257, pair
        for tile in test_weight_only.TILES if machine.gpu else ():
            yield a_weight, pair, tile


def extents(_machine: Machine) -> Iterator[Call]:
    """Extents smaller than a tile, and extents of one."""
    for shape in ((1, 1, 8), (1, 8, 8), (7, 1, 64), (65, 9, 16), (129, 257, 8)):
        yield test_bad_input.test_ragged_extents, shape


SETS: Mapping[str, Callable[[Machine], Iterator[Call]]] = {
    function.__name__: function
    for function in (
        designs,
        accesses,
        reductions,
        rows,
        segments,
        regions,
        inputs,
        full,
        copied,
        scaled,
        mma_sync,
        exchanged,
        parts_of_k,
        weight_only,
        extents,
    )
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--share", default=(0, 1), type=share, help="as 3/14: every 14th launch, beginning with the 3rd"
    )
    parser.add_argument("sets", nargs="*", help=f"among {', '.join(SETS)}; all of them unless given")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        # PyTorch's cache of memory would hide accesses outside a tensor, and reads of memory that was never written.
        # PyTorch reads the variable at its first allocation. It is not set when this module is only imported, because
        # without the cache no CUDA graph can be captured.
        os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    machine = Machine(options.device)
    own, shares = options.share
    number = itertools.count()
    for name in options.sets or SETS:
        began, done = time.perf_counter(), 0
        for function, *given in SETS[name](machine):
            if next(number) % shares == own:
                torch.manual_seed(0)
                function(*given, machine)
                done += 1
        print(f"{name}: {done} right, in {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def share(text: str) -> tuple[int, int]:
    """Parse a share such as 3/14: its number, counted from zero, and how many there are."""
    own, shares = map(int, text.split("/"))
    if not 1 <= own <= shares:
        raise argparse.ArgumentTypeError(f"{text}: the first number is from 1 to the second")
    return own - 1, shares


if __name__ == "__main__":
    sys.exit(main())
