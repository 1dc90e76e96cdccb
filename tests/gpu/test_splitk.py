"""K in parts: every design, several tiles a CTA, ragged ends, every kind of epilogue, the same bits each time.

The first test is the shortest: on a GPU where CTAs would wait for each other, it is the one to run first.
"""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, check, run

import epifuse as ef
from epifuse.providers.cutedsl import SPLIT_DESIGNS, SPLIT_ROW_DESIGNS, SWAPPED_DESIGNS
from epifuse.providers.cutedsl.design import Design
from epifuse.providers.cutedsl.designs import WIDE_SWAPPED_DESIGNS

PLAIN = "def epi(accum): D = accum; return D\n"
EVERYTHING = (
    "def epi(accum, C, row, alpha):\n"
    "    x = alpha * accum + C\n"
    "    D = relu(x) * row\n"
    "    rows, columns, total = sum(x, dim=-1), amax(x, dim=0), absmax(x)\n"
    "    return D, rows, columns, total\n"
)


CARRYING = [one for one in SPLIT_DESIGNS if one.rows * one.tile[1] <= 128**2]
"""Larger tiles have no registers for operands or reductions beside sums of parts."""


def pinned(design: Design) -> ef.Constraints:
    """The design alone."""
    return ef.Constraints(design.tile, design.cluster, design.schedule, split=design.split)


def parts(machine: Machine, split: int | None) -> ef.Constraints | None:
    """So many, which only a GPU has."""
    return ef.Constraints(split=split) if machine.gpu else None


def several(
    machine: Machine, shape: tuple[int, int, int], asked: ef.Constraints | None, weight: torch.dtype = torch.bfloat16
) -> None:
    """The epilogue with operands of all kinds and reductions of all extents."""
    m, n, k = shape
    a, b = machine.whole(m, k, most=1), machine.whole(k, n, most=1)
    if weight != torch.bfloat16:
        b = machine.whole(n, k, most=1, dtype=weight).t()
    C = machine.laid_out(torch.randint(-8, 9, (m, n)).bfloat16())
    operands = {"C": C, "row": torch.randint(1, 3, (n,)).float().to(machine.device), "alpha": 0.5}
    check(machine, EVERYTHING, a, b, operands, constraints=asked)


def exchanged(machine: Machine, design: Design, n: int) -> None:
    """The same in a design for few rows; one of more than 64 columns is for a weight of 8 bits."""
    weight = torch.bfloat16 if design.tile[1] <= 64 else torch.int8
    several(machine, (min(design.tile[0], 61), n, 1552), pinned(design), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("design", SPLIT_DESIGNS, ids=str)
def test_one_tile(design: Design, hopper: Machine) -> None:
    """In each design, of the shortest K that is split, which ends within a block."""
    a, b = hopper.whole(61, 1032, most=1), hopper.whole(1032, 40, most=1)
    check(hopper, PLAIN, a, b, {}, constraints=pinned(design), out_dtypes=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("design", SPLIT_DESIGNS, ids=str)
def test_several_tiles_a_cta(design: Design, hopper: Machine) -> None:
    a, b = hopper.whole(1296, 1544, most=1), hopper.whole(1544, 3600, most=1)
    check(hopper, PLAIN, a, b, {}, out_dtypes=torch.bfloat16, constraints=pinned(design), layouts=("rows",))


@pytest.mark.gpu
@pytest.mark.parametrize("design", CARRYING, ids=str)
def test_operands_and_reductions(design: Design, hopper: Machine) -> None:
    """With one tile a CTA, and with several."""
    for shape in ((61, 1000, 1544), (1100, 3080, 1544)):
        several(hopper, shape, pinned(design))


@pytest.mark.gpu
@pytest.mark.parametrize("design", [one for one in SWAPPED_DESIGNS if one.split > 1], ids=str)
def test_a_and_b_exchanged(design: Design, hopper: Machine) -> None:
    """With one tile a CTA, and with several."""
    for n in (1000, 20000):
        exchanged(hopper, design, n)


@pytest.mark.gpu
@pytest.mark.parametrize("design", [one for one in WIDE_SWAPPED_DESIGNS if one.split > 1], ids=str)
def test_many_rows_exchanged(design: Design, hopper: Machine) -> None:
    """With one tile a CTA, and with several, of which the last are smaller."""
    for m, n, k in ((257, 1000, 1032), (300, 520, 4096), (1000, 6152, 1544)):
        a, b = hopper.whole(m, k, most=1), hopper.whole(n, k, most=1).t()
        check(hopper, PLAIN, a, b, {}, out_dtypes=torch.bfloat16, constraints=pinned(design), layouts=("rows",))


def test_the_best_design(machine: Machine) -> None:
    several(machine, (61, 200, 1544), None)


@pytest.mark.parametrize(("batches", "split"), [(2, 4), (133, 2)])
def test_batches_and_columns(batches: int, split: int, machine: Machine) -> None:
    """A by columns, an output by columns, a sum over each batch."""
    batches = batches if machine.gpu else 2
    a, b = machine.whole(batches, 1544, 136, most=1).mT, machine.whole(batches, 1544, 72, most=1)
    source = "def epi(accum): D = accum + 1.0; s = sum(accum, dim=(-2, -1)); return D, s\n"
    options: dict[str, Any] = {"layouts": ("columns",), "out_dtypes": {"D": torch.float16}}
    check(machine, source, a, b, {}, constraints=parts(machine, split), **options)


ROWS = {
    "softmax": "def epi(accum): D = softmax(accum * 0.0625, dim=-1); return D\n",
    "heads": (
        "def epi(accum):\n"
        "    x = accum.reshape(accum.shape[0], 4, 64)\n"
        "    D = (x * rsqrt(mean(x * x, dim=-1, keepdim=True) + 1.0)).reshape(accum.shape[0], 256)\n"
        "    return D\n"
    ),
    "gated": "def epi(accum): gate, up = accum.chunk(2, dim=-1); D = silu(gate * 0.0625) * up; return D\n",
}


COLUMNS = {"softmax": 120, "heads": 256, "gated": 256}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_values_that_need_more_of_their_row(name: str, hopper: Machine) -> None:
    a, b = hopper.whole(130, 1544, most=1), hopper.whole(COLUMNS[name], 1544, most=1).mT
    check(hopper, ROWS[name], a, b, {}, constraints=parts(hopper, 2), out_dtypes=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("design", SPLIT_ROW_DESIGNS, ids=str)
def test_rows_that_a_cluster_holds(design: Design, hopper: Machine) -> None:
    n = design.tile[1] * design.cluster[1] - 8
    for m in (61, 3000):
        a, b = hopper.whole(m, 1544, most=1), hopper.whole(1544, n, most=1)
        check(hopper, ROWS["softmax"], a, b, {}, constraints=pinned(design), out_dtypes=torch.float32)


SHAPES = [(1024, 1024, 16384), (512, 512, 32768), (256, 4608, 3584), (16, 4096, 14336), (61, 1000, 1544)]


@pytest.mark.gpu
@pytest.mark.parametrize("split", [None, 2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_tiles_and_long_k(shape: tuple[int, int, int], split: int | None, hopper: Machine) -> None:
    """In the best design, and in the best one of so many parts."""
    several(hopper, shape, parts(hopper, split))


@pytest.mark.gpu
@pytest.mark.parametrize("design", CARRYING, ids=str)
def test_the_same_bits_each_time_and_in_a_graph(design: Design, hopper: Machine) -> None:
    """Normal numbers, whose sums differ in other orders; on two streams at once, and replayed onto poison."""
    a, b = hopper.normal(512, 4104, dtype=torch.bfloat16), hopper.normal(4104, 520, dtype=torch.bfloat16)
    D, rows = torch.empty(512, 520, device="cuda"), torch.empty(512, device="cuda")

    def arguments(**outputs: torch.Tensor) -> ef.GemmArguments:
        made = ef.EpilogueArguments(with_sums, **outputs)
        return ef.GemmArguments(a, b, epilogue=made, constraints=pinned(design))

    args = arguments(D=D, rows=rows)
    kernel = hopper.kernel(args)
    kernel.run(args)
    hopper.synchronise()
    want = D.clone(), rows.clone()
    assert torch.allclose(D.double(), a.double() @ b.double(), atol=2e-2)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    others = [(torch.full_like(D, torch.nan), torch.full_like(rows, torch.nan)) for _ in range(50)]
    for i, (d, r) in enumerate(others):
        kernel.run(arguments(D=d, rows=r), stream=streams[i % 2])
    hopper.synchronise()
    assert all(torch.equal(d, want[0]) and torch.equal(r, want[1]) for d, r in others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(args)
    for _ in range(20):
        D.fill_(torch.nan)
        rows.fill_(torch.nan)
        graph.replay()
        hopper.synchronise()
        assert torch.equal(D, want[0])
        assert torch.equal(rows, want[1])


@pytest.mark.gpu
def test_equal_parts_in_tiles_of_any_size_give_equal_bits(hopper: Machine) -> None:
    """Of whatever rows are beside; what planning says of `bits`."""
    a, b = hopper.normal(512, 2056, dtype=torch.bfloat16), hopper.normal(2056, 128, dtype=torch.bfloat16)
    found = []
    for design in SPLIT_DESIGNS:
        if (design.split, design.spans) == (2, 1):
            for x in (a, a[:16]):
                options: dict[str, Any] = {"constraints": pinned(design), "layouts": ("rows",)}
                found.append(run(hopper, function, x, b, {}, out_dtypes=torch.float32, **options)["D"][:16])
    assert all(torch.equal(each, found[0]) for each in found)


def function(accum: Any) -> Any:
    D = accum
    return D


def with_sums(accum: Any) -> Any:
    D = accum
    rows = ef.sum(D, dim=-1)
    return D, rows
