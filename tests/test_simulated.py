"""The epilogue's own code on a CPU: walks, blocks, slots and what meets in registers, beside float64."""

import itertools

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from emulated import Emulated
from fuzzing.check import function_of
from gpu import test_reshapes as reshapes
from gpu import test_segments as on_gpu
from gpu.harness import check, run
from hopper import SCHEDULES
from simulated import registers, simulated  # noqa: F401  # fixtures

import epifuse as ef
from epifuse.request.problem import Constraints

ELSEWHERE = ("column sums beside", "row sums beside", "a whole row rotated")
"""What another kernel merges, or other CTAs hold."""


@pytest.mark.parametrize("name", [name for name in on_gpu.CASES if name not in ELSEWHERE])
def test_parts_of_rows_are_what_they_are_in_float64(name, simulated: Emulated):  # noqa: F811
    on_gpu.test_each_segment_has_its_own(name, "rows", simulated)


@pytest.mark.parametrize("name", on_gpu.ALONE)
@pytest.mark.parametrize("n", [64, 128, 256])
def test_a_row_that_is_one_segment(n, name, simulated: Emulated):  # noqa: F811
    on_gpu.test_a_row_that_is_one_segment(n, name, simulated)


TILES = [
    *itertools.product(["a sum rotated", "of two widths"], [(128, 256), (256, 128)]),
    ("rotated and normed", (128, 96)),
    ("layer norm", (128, 96)),
    ("a sum rotated", (128, 192)),
]


@pytest.mark.parametrize(("name", "tile"), TILES, ids=str)
def test_in_tiles_of_every_kind(name, tile, simulated: Emulated):  # noqa: F811
    text = on_gpu.source(on_gpu.CASES[name])
    operands, asked = on_gpu.operands_of(simulated, text), Constraints(tile=tile, cluster=SCHEDULES[tile].cluster)
    options = {"out_dtypes": torch.float32, "layouts": ["rows"], "constraints": asked}
    check(simulated, text, *on_gpu.product_of(simulated), operands, **options)


def test_heads_of_112_columns(simulated: Emulated):  # noqa: F811
    on_gpu.test_heads_that_tiles_of_one_width_hold(300, 112, 1344, simulated)


@pytest.mark.parametrize("name", ["stored of what is read", "softmax"])
def test_of_batches(name, simulated: Emulated):  # noqa: F811
    on_gpu.test_of_batches(name, simulated)


@pytest.mark.parametrize("n", [192, 256])
def test_whole_rows_of_one_cta(n, simulated: Emulated):  # noqa: F811
    text = on_gpu.source(on_gpu.CASES["a whole row rotated"])
    a, b = on_gpu.product_of(simulated, 130, n)
    check(simulated, text, a, b, {}, constraints=Constraints(tile=(128, 256), cluster=(1, 1)), layouts=["rows"])


def test_beside_sums_down_columns(simulated: Emulated):  # noqa: F811
    """The tile is walked down first, and a block has all of its rows."""
    a, b = on_gpu.product_of(simulated)
    function = function_of(on_gpu.source(on_gpu.CASES["column sums beside"]), {})
    for tile in ((128, 128), (256, 128)):
        asked = Constraints(tile=tile, cluster=(2, 1))
        found = run(simulated, function, a, b, {}, out_dtypes=torch.float32, constraints=asked, layouts=["rows"])["D"]
        assert torch.equal(found, ef.reference(function)((a.double() @ b.double()).float())[0])


def test_lanes_that_do_not_merge_are_found(simulated: Emulated, registers, monkeypatch):  # noqa: F811
    monkeypatch.setitem(vars(registers[32][0]), "along_row", (1,))
    with pytest.raises(AssertionError, match="elements"):
        on_gpu.test_each_segment_has_its_own("less the largest", "rows", simulated)


@pytest.mark.parametrize("tile", [None, (128, 96), (128, 192), (64, 64)])
@pytest.mark.parametrize("name", reshapes.SHARED)
def test_columns_that_share_an_element(name, tile, simulated: Emulated):  # noqa: F811
    """A thread loads an element once for those of its columns that share it."""
    asked = {} if tile is None else {"constraints": Constraints(tile=tile)}
    for turn in range(3):
        reshapes.judge_reshape(name, turn, simulated, **asked)
