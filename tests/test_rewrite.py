"""The kernel that writes A and B anew before they are multiplied, whole or in parts: its PTX, executed on the CPU."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from machine_code import reported
from ptx_machine import Kernel, execute

import epifuse as ef
from epifuse.providers.cutedsl import inputs
from epifuse.providers.cutedsl.design import Rewriting

POISON = 0xEE
THREADS = 256


class Kind(NamedTuple):
    """What is written: in so many parts, of these elements, of which a store takes some, in squares of so many."""

    dtype: torch.dtype
    parts: int
    asked: Mapping[str, Any]
    held: type[np.generic]
    at_once: int
    side: int


KINDS = {
    "16 bits": Kind(torch.bfloat16, 1, {}, np.uint16, 2, 64),
    "tf32": Kind(torch.float32, 1, {"precision": "tf32"}, np.uint32, 1, 32),
    "float32 in full": Kind(torch.float32, inputs.PARTS, {}, np.uint32, 1, 32),
}
LAYOUTS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "along K": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 3)))[..., : x.shape[-1]],
    "along rows": lambda x: np.pad(np.ascontiguousarray(x.swapaxes(1, 2)), ((0, 0), (0, 0), (0, 5)))[
        ..., : x.shape[1]
    ].swapaxes(1, 2),
    "neither": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}
"""(L, rows, K) in memory of their own."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Kernel]:
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    own = KINDS[request.param]
    folder: Path = tmp_path_factory.mktemp("ptx")
    a, b = torch.empty(3, 300, 257, dtype=own.dtype), torch.empty(3, 257, 300, dtype=own.dtype)
    args = ef.GemmArguments(a, b, constraints=ef.Constraints(**own.asked))
    text = ef.get_kernels(args, cc=90, limit=1)[0].plan.allocation.program.text
    function = reported(text, folder)
    return own, Kernel.of(function.__ptx__, "Rewrite")


@pytest.mark.sweep("kind", "layouts", "shape")
@pytest.mark.parametrize("layouts", [("along K", "along rows"), ("along rows", "neither"), ("neither", "along K")])
@pytest.mark.parametrize("shape", [(70, 65, 131, 1), (1, 3, 5, 1), (64, 130, 128, 1), (33, 70, 67, 2)])
def test_rows_are_written_along_k_and_zeros_behind_them(
    kind: tuple[Kind, Kernel], shape: tuple[int, int, int, int], layouts: tuple[str, str]
) -> None:
    own, kernel = kind
    of_a, of_b, k, batches = shape
    size = np.dtype(own.held).itemsize
    bits = np.random.default_rng(0)
    matrices = [bits.standard_normal((batches, rows, k)).astype(np.float32).view(np.uint32) for rows in (of_a, of_b)]
    matrices = [x if size == 4 else (x >> 16).astype(own.held) for x in matrices]
    laid_out = [LAYOUTS[name](x) for name, x in zip(layouts, matrices, strict=True)]
    depth, row = _extents(own, k)
    # Memory: A and B as they lie, then the workspace.
    sources = [x.base if x.base is not None else x for x in laid_out]
    starts = np.cumsum([0, *(-(-source.nbytes // 256) * 256 for source in sources)])
    counts = [batches * rows * row for rows in (of_a, of_b)]
    memory = np.full(starts[-1] + sum(counts), POISON, np.uint8)
    for start, source in zip(starts, sources, strict=False):
        memory[start : start + source.nbytes] = source.reshape(-1).view(np.uint8)
    before = memory.copy()
    whole = [-(-rows // own.side) * -(-depth // own.side) * batches for rows in (of_a, of_b)]
    places = starts[-1], starts[-1] + counts[0]
    parameters = [
        *(_read(start, x, batches) for start, x in zip(starts, laid_out, strict=False)),
        *(_written(start, own, rows, depth, row, batches) for start, rows in zip(places, (of_a, of_b), strict=True)),
        *(number for rows in (of_a, of_b) for number in _squares(rows, depth, own.side)),
        struct.pack("<i", whole[0]),
    ]
    stored = execute(kernel, parameters, memory, range(sum(whole)), THREADS)
    assert stored == batches * (of_a + of_b) * own.parts * depth // own.at_once, "each element once"
    assert np.array_equal(memory[: starts[-1]], before[: starts[-1]])
    for start, count, x, is_b in zip(places, counts, matrices, (False, True), strict=True):
        found = memory[start : start + count].view(own.held).reshape(*x.shape[:2], -1)
        padded = np.pad(x, ((0, 0), (0, 0), (0, depth - k)))
        for part, want in enumerate(_parts(own, padded, is_b)):
            assert np.array_equal(found[..., part * depth : (part + 1) * depth], want), part


def _extents(own: Kind, k: int) -> tuple[int, int]:
    """Elements of a part along K, and bytes from row to row, as planning knows them."""
    a, b = torch.empty(8, k, dtype=own.dtype), torch.empty(k, 8, dtype=own.dtype)
    problem = ef.GemmArguments(a, b, constraints=ef.Constraints(**own.asked)).problem
    multiplied = inputs.multiplied(problem, Rewriting(own.parts))
    return multiplied.a.shape[-1] // own.parts, multiplied.a.strides[-2] * own.dtype.itemsize


def _read(start: int, x: np.ndarray, batches: int) -> bytes:
    """A tensor as (rows, K, L): its address, shape and strides."""
    batch, row, column = (stride // x.itemsize for stride in x.strides)
    return struct.pack("<qiiiiqqq", start, *x.shape[1:], batches, 0, row, column, batch if batches > 1 else 0)


def _written(start: int, own: Kind, rows: int, depth: int, row: int, batches: int) -> bytes:
    """A tensor as (rows, K, parts, L), in elements of 32 bits."""
    step = row // 4
    return struct.pack(
        "<qiiiiqqq", start, rows, depth // own.at_once, batches, 0, step, depth // own.at_once, rows * step
    )


def _squares(rows: int, depth: int, side: int) -> list[bytes]:
    """How many lie down and across, each with its reciprocal in two halves (`raster.Divisor`)."""
    found = []
    for count in (-(-rows // side), -(-depth // side)):
        high, low = divmod(-(-(1 << 62) // count), 1 << 31)
        found += [struct.pack("<i", count), struct.pack("<q", high), struct.pack("<q", low)]
    return found


def _parts(own: Kind, x: np.ndarray, is_b: bool) -> list[np.ndarray]:
    """What is written of a matrix, a part behind the other."""
    if own.parts == 1:
        return [x]
    high = _nearest(x)
    low = _nearest((x.view(np.float32) - high.view(np.float32)).view(np.uint32))
    return [high, low, high] if is_b else [low, high, high]


def _nearest(bits: np.ndarray) -> np.ndarray:
    """Of tf32."""
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


PAIRS = [
    (wide, narrow)
    for wide in (torch.bfloat16, torch.float16)
    for narrow in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
]


@pytest.mark.sweep
@pytest.mark.parametrize(("wide", "narrow"), PAIRS, ids=str)
def test_a_weight_of_8_bits_is_written_in_16(wide: torch.dtype, narrow: torch.dtype, tmp_path: Path) -> None:
    """B alone, all of whose values keep their bits: NaN, infinities and zeros of either sign too."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    args = ef.GemmArguments(torch.empty(300, 256, dtype=wide), torch.empty(300, 256, dtype=narrow).t())
    plan = ef.get_kernels(args, cc=90, limit=1)[0].plan
    function = reported(plan.allocation.program.text, tmp_path)
    kernel = Kernel.of(function.__ptx__, "Rewrite")
    for layout, rows, k in (("along K", 70, 131), ("along rows", 3, 1), ("neither", 65, 130)):
        values = (np.arange(rows * k) * 7 % 256).astype(np.uint8).reshape(1, rows, k)
        x = LAYOUTS[layout](values)
        source = x.base if x.base is not None else x
        depth = -(-k // 8) * 8
        row = -(-2 * depth // 128) * 128
        start = -(-source.nbytes // 256) * 256
        memory = np.full(start + rows * row, POISON, np.uint8)
        memory[: source.nbytes] = source.reshape(-1).view(np.uint8)
        parameters = [
            _read(0, x, 1),
            struct.pack("<qiiiiqqq", start, rows, depth // 2, 1, 0, row // 4, depth // 2, rows * row // 4),
            *_squares(rows, depth, 64),
        ]
        blocks = -(-rows // 64) * -(-depth // 64)
        assert execute(kernel, parameters, memory, range(blocks), THREADS) == rows * depth // 2, "each pair once"
        found = memory[start:].view(np.uint16).reshape(rows, -1)[:, :depth]
        want = torch.from_numpy(np.pad(values[0], ((0, 0), (0, depth - k)))).view(narrow).to(wide)
        got = torch.from_numpy(found.copy()).view(wide)
        is_nan = want.isnan()
        assert torch.equal(got.isnan(), is_nan)
        assert torch.equal(got.view(torch.int16)[~is_nan], want.view(torch.int16)[~is_nan])
