"""A and B exchanged, for few rows: each access and reduction from the other side, and the bits of the other designs."""

import itertools
from typing import Any

import pytest
import torch
from gpu.harness import LAYOUTS, Machine, check, check_the_same_bits, exact_product, function_of, judge, run

import epifuse as ef
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.designs import NARROW_DESIGNS, SWAPPED_DESIGNS, WIDE_SWAPPED_DESIGNS
from epifuse.request.problem import Constraints

BF16 = torch.bfloat16
TILES = (16, 32, 64)
"""Rows of the result in a tile; 64 columns each."""
LOW = sorted({design.tile for design in SWAPPED_DESIGNS if design.exchanged_sides.is_low})
"""Tiles of fewer columns than are multiplied for them."""
ROWS = (1, 3, 8, 16, 17, 33, 64, 100, 128)
COLUMNS = ((1000, 72), (264, 1032), (259, 136), (64, 8))
"""N and K: what ends within a tile or a stage, lines that TMA cannot write, one tile and less than a stage."""
BODIES = {
    "plain": "D = accum; return D",
    "of every access": "t = alpha * accum + C * column + row; D = silu(t); Aux = t - E; return D, Aux",
    "coordinates": "D = where(index_n(accum) <= index_m(accum), accum, row * index_m(accum)); return D",
    "vectors down and across": "t = accum + C; s = sum(t, dim=0); r = amax(t, dim=-1); return t, s, r",
    "of columns and of all": "q = sum(accum * accum) / 1024; g = logsumexp(accum * 0.125, dim=0); return q, g",
    "of rows": "n = sum_of_squares(accum + row, dim=-1); e = logsumexp(accum * 0.125, dim=-1); return n, e",
}
DTYPES = {
    "plain": BF16,
    "of every access": {"D": BF16, "Aux": torch.float32},
    "coordinates": torch.float16,
    "vectors down and across": {"t": torch.int8, "s": torch.float32, "r": BF16},
}
FOR_MANY = (*(design for design in WIDE_SWAPPED_DESIGNS if design.split == 1), *NARROW_DESIGNS)
"""Designs for many rows, and those of tiles with the same subtiles where A and B are not exchanged."""
OF_MANY = {
    "plain": "D = accum; return D",
    "of every access": "t = alpha * accum + C * column + row; D = silu(t); Aux = t - C; return D, Aux",
    "coordinates": "D = where(index_n(accum) <= index_m(accum), accum, row * index_m(accum)); return D",
}
FULL = (192, 128)
"""The tile whose accumulators leave no room for operands."""
MANY = [
    pytest.param(name, design, id=f"{design} {name}")
    for design in FOR_MANY
    for name in OF_MANY
    if not (design.tile == FULL and name == "of every access")
]
ELEMENTWISE = ("plain", "of every access", "coordinates")


def alone(design: Design) -> Constraints:
    """That design."""
    return Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule, split=1)


def pinned(rows: int, columns: int = 64) -> Constraints:
    """The design with A and B exchanged, of so many rows and columns a tile."""
    return Constraints(tile=(rows, columns), schedule="swapped")


def source(body: str) -> str:
    names = [name for name in ("alpha", "C", "E", "column", "row") if name in body]
    return f"def epi({', '.join(['accum', *names])}): {body}"


def operands_of(machine: Machine, text: str, m: int, n: int) -> dict[str, Any]:
    """C by rows and E by columns, both of 16 bits; vectors of float32."""
    made = {
        "alpha": 0.5,
        "C": machine.whole(m, n, most=4),
        "E": machine.laid_out(machine.whole(m, n, most=4), "columns"),
        "column": machine.whole(m, 1, most=3, dtype=torch.float32),
        "row": machine.whole(n, most=3, dtype=torch.float32),
    }
    return {name: value for name, value in made.items() if name in text.split(":")[0]}


def product_of(machine: Machine, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B as the transpose of a weight, whose N may be odd."""
    return machine.whole(m, k, most=1), machine.whole(n, k, most=1).t()


def judged(
    machine: Machine,
    name: str,
    rows: int,
    shape: tuple[int, int, int],
    layouts: Any = LAYOUTS[:2],
    *,
    columns: int = 64,
) -> None:
    m, n, k = shape
    text = source(BODIES[name])
    a, b = product_of(machine, m, n, k)
    options = {"constraints": pinned(rows, columns), "out_dtypes": DTYPES.get(name), "layouts": layouts}
    check(machine, text, a, b, operands_of(machine, text, m, n), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("name", BODIES)
def test_few_rows(name: str, rows: int, hopper: Machine) -> None:
    for m, (n, k) in itertools.product(ROWS, COLUMNS):
        judged(hopper, name, rows, (m, n, k))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), LOW)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_tiles_of_few_columns(name: str, rows: int, columns: int, hopper: Machine) -> None:
    """What is multiplied beyond their columns is the next tile's, or nobody's, and has numbers that are not finite."""
    for m, (n, k) in itertools.product((1, 16, 33, 100), (*COLUMNS, (40_000, 200))):
        judged(hopper, name, rows, (m, n, k), columns=columns)


def of_many(machine: Machine, name: str, design: Design, shape: tuple[int, int, int]) -> None:
    """A design for many rows, with operands and outputs of 16 bits, and B by columns; by rows, too, if exchanged."""
    m, n, k = shape
    text = source(OF_MANY[name])
    a, by_columns = product_of(machine, m, n, k)
    asked = alone(design)
    for b in (by_columns, by_columns.contiguous())[: 1 + design.swapped]:
        check(machine, text, a, b, operands_of(machine, text, m, n), constraints=asked, layouts=["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "design"), MANY)
def test_many_rows(name: str, design: Design, hopper: Machine) -> None:
    """A tile and a half, more than a wave of tiles, and a K that ends within a stage."""
    for m, n, k in ((257, 264, 1032), (320, 1000, 1096), (353, 8, 1024), (600, 6144, 1032), (304, 520, 4096)):
        of_many(hopper, name, design, (m, n, k))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "design"), MANY)
def test_many_rows_have_the_bits_of_the_other_designs(name: str, design: Design, hopper: Machine) -> None:
    text = source(OF_MANY[name])
    own = alone(design)
    other = Constraints(tile=(128, 128), cluster=(1, 1), schedule="pingpong", split=1)
    for m, n, k in ((298, 1032, 4096), (1000, 520, 1096)):
        a, b = hopper.normal(m, k, dtype=BF16), hopper.normal(n, k, dtype=BF16).t()
        operands, function = operands_of(hopper, text, m, n), function_of(text, {})
        found, want = (
            run(hopper, function, a, b, operands, constraints=asked, layouts=["rows"]) for asked in (own, other)
        )
        for output, wanted in want.items():
            assert torch.equal(found[output], wanted), (output, m, k)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS[2:])
def test_outputs_in_every_layout(layout: str, hopper: Machine) -> None:
    for m in (1, 17, 64):
        judged(hopper, "of every access", 16, (m, 1000, 264), [layout, "columns"])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", TILES)
def test_more_tiles_than_one_wave(rows: int, hopper: Machine) -> None:
    """Each slot and stage is used again by the next tile of a CTA."""
    for m, name in itertools.product((16, 128), ("of every access", "vectors down and across")):
        judged(hopper, name, rows, (m, 40_000, 200))


@pytest.mark.gpu
@pytest.mark.parametrize("majors", range(4))
def test_a_and_b_by_rows_and_by_columns(majors: int, hopper: Machine) -> None:
    for m in (8, 64):
        a, b = hopper.whole(m, 136, most=1), hopper.whole(136, 328, most=1)
        a = hopper.laid_out(a, "columns") if majors & 1 else a
        b = hopper.laid_out(b, "columns") if majors & 2 else b
        for rows in TILES:
            check(hopper, source(BODIES["plain"]), a, b, {}, constraints=pinned(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize(
    ("dtype", "accumulator"), [(torch.float32, None), (torch.float16, None), (torch.float16, torch.float16)], ids=str
)
def test_inputs(dtype: torch.dtype, accumulator: torch.dtype | None, rows: int, hopper: Machine) -> None:
    a, b = hopper.whole(17, 264, most=1, dtype=dtype), hopper.whole(520, 264, most=1, dtype=dtype).t()
    asked = Constraints(tile=(rows, 64), schedule="swapped", precision="tf32")
    text = source(BODIES["of every access"])
    operands = operands_of(hopper, text, 17, 520)
    check(hopper, text, a, b, operands, constraints=asked, accumulator=accumulator, out_dtypes=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", TILES)
def test_batches(rows: int, hopper: Machine) -> None:
    function = function_of("def epi(accum, C, row): t = accum + C + row; s = sum(t, dim=1); return t, s", {})
    a, b = hopper.whole(3, 17, 72, most=1), hopper.whole(3, 72, 328, most=1)
    operands = {"C": hopper.whole(3, 17, 328), "row": hopper.whole(328, dtype=torch.float32)}
    options = {"constraints": pinned(rows), "out_dtypes": torch.float32, "layouts": ["rows"]}
    judge(run(hopper, function, a, b, operands, **options), ef.reference(function), exact_product(a, b), operands)


@pytest.mark.gpu
def test_without_k(hopper: Machine) -> None:
    a, b = torch.empty(5, 0, dtype=BF16, device="cuda"), torch.empty(0, 72, dtype=BF16, device="cuda")
    operands = {"row": hopper.whole(72, dtype=torch.float32)}
    found = run(hopper, function_of("def epi(accum, row): D = accum + row; return D", {}), a, b, operands)
    assert torch.equal(found["D"].float(), operands["row"].cpu().expand(5, 72))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*((rows, 64) for rows in TILES), *LOW], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_bits_of_the_other_designs(name: str, dtype: torch.dtype, tile: tuple[int, int], hopper: Machine) -> None:
    """Of sums that are not exact: `bits` of both plans are the same, so each may stand in for the other."""
    text = source(BODIES[name])
    swapped = Constraints(tile=tile, schedule="swapped", split=1, precision="tf32")
    other = Constraints(tile=(64, 128), cluster=(1, 1), schedule="pingpong", split=1, precision="tf32")
    for m, k in ((1, 4096), (16, 14336), (64, 1000)):
        a, b = hopper.normal(m, k, dtype=dtype), hopper.normal(1032, k, dtype=dtype).t()
        operands = operands_of(hopper, text, m, 1032)
        options = {"out_dtypes": torch.float32, "layouts": ["rows"]}
        function = function_of(text, {})
        found = run(hopper, function, a, b, operands, constraints=swapped, **options)
        want = run(hopper, function, a, b, operands, constraints=other, **options)
        for output, wanted in want.items():
            assert torch.equal(found[output], wanted), (output, m, k)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", TILES)
def test_random_numbers_of_the_other_designs(rows: int, hopper: Machine) -> None:
    """They follow from an element's place in the result."""
    function = function_of("def epi(accum, seed): D = dropout(accum, 0.3, seed); return D", {})
    a, b = product_of(hopper, 33, 1000, 136)
    options = {"out_dtypes": torch.float32, "layouts": ["rows"]}
    found, want = (
        run(hopper, function, a, b, {"seed": 12345678901}, constraints=asked, **options)["D"]
        for asked in (pinned(rows), Constraints(schedule="pingpong"))
    )
    assert torch.equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["of every access", "vectors down and across"])
def test_the_same_bits_on_two_streams_at_once(name: str, hopper: Machine) -> None:
    text = source(BODIES[name])
    a, b = hopper.normal(16, 4096, dtype=BF16), hopper.normal(4096, 4096, dtype=BF16).t()
    operands = operands_of(hopper, text, 16, 4096)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function_of(text, {}), operands))
    assert hopper.kernel(args).spec.design.swapped
    check_the_same_bits(hopper, function_of(text, {}), a, b, operands)


@pytest.mark.gpu
def test_a_call_that_repeats(hopper: Machine) -> None:
    """The quick road hands A and B over as the first call does."""
    weight, bias = hopper.whole(1024, 512, most=1), hopper.whole(1024)
    for _ in range(3):
        x = hopper.whole(4, 512, most=1)
        found = ef.linear(x, weight, bias=bias)
        assert torch.equal(found.float(), (x.float() @ weight.float().t() + bias.float()).to(BF16).float())
