"""The store rule: the CPU's function against one written from bit patterns, and that one against torch's."""

import pytest
import torch

from epifuse.base.dtypes import BY_TORCH
from epifuse.providers.cpu.store import store
from epifuse.tools.store_rule import FORMATS, store_reference

OUTPUTS = list(BY_TORCH)
EVERY_16_BITS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Powers of two, halves between neighbours, limits of every integer, specials, and the neighbours of them all."""
    info = torch.finfo(dtype)
    powers = torch.tensor([2.0**e for e in range(-150, 128)], dtype=torch.float64)
    limits = [float(torch.iinfo(d).max) for d in OUTPUTS if not d.is_floating_point and d != torch.bool]
    values = [powers * f for f in (1.0, 1.5, 1.25, 1.125, 1.0625, 1.75, 1.03125)]
    values += [torch.arange(0, 600, dtype=torch.float64) / 4, torch.tensor(limits, dtype=torch.float64)]
    values += [torch.tensor([0.0, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 65520.0, info.max, info.tiny])]
    x = torch.cat([v.to(torch.float64) for v in values]).to(dtype)
    inf = torch.tensor(torch.inf, dtype=dtype)
    near = torch.cat([x, torch.nextafter(x, inf), torch.nextafter(x, -inf)])
    return torch.cat([near, -near, torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)])


INPUTS = {
    "every float16": EVERY_16_BITS.view(torch.float16),
    "every bfloat16": EVERY_16_BITS.view(torch.bfloat16),
    "float32": edges(torch.float32),
    "float64": edges(torch.float64),
    "int32": torch.tensor([0, 1, -1, 127, 128, -128, -129, 255, 256, 2**15, 2**24 + 1, 2**31 - 1, -(2**31)]).int(),
    "int64": torch.tensor([0, 1, -1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, -(2**63)]),
    "mask": torch.tensor([True, False]),
}


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Element by element the same bits, but for NaN: every NaN is NaN."""
    assert x.dtype == y.dtype
    storage = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    wide = (x.to(torch.float32), y.to(torch.float32))
    nan = wide[0].isnan() & wide[1].isnan()
    return (x.view(storage) == y.view(storage)) | nan


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
def test_the_cpu_stores_by_the_rule(dtype: torch.dtype, source: str) -> None:
    x = INPUTS[source]
    destination = torch.empty(x.shape, dtype=dtype)
    store(x, destination)
    want = store_reference(x, dtype)
    wrong = ~same(destination, want)
    shown = [t[wrong][:5].to(torch.float64).tolist() for t in (x, destination, want)]
    assert not wrong.any(), f"{int(wrong.sum())} of {len(x)}; value, stored, wanted: {shown}"


@pytest.mark.parametrize("source", ["every float16", "every bfloat16", "float32", "int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_wide_floats_are_torchs(dtype: torch.dtype, source: str) -> None:
    assert same(store_reference(INPUTS[source], dtype), INPUTS[source].to(dtype)).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_within_its_range_is_torchs(dtype: torch.dtype) -> None:
    x = edges(torch.float32)
    inside = x[x.abs() <= torch.finfo(dtype).max]
    assert same(store_reference(inside, dtype), inside.to(dtype)).all()


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        (torch.int8, 0.5, 0), (torch.int8, 1.5, 2), (torch.int8, 2.5, 2), (torch.int8, -0.5, 0), (torch.int8, -1.5, -2),
        (torch.int8, 127.5, 127), (torch.int8, -300.0, -128), (torch.uint8, -1.0, 0), (torch.uint8, 255.5, 255),
        (torch.int32, 2.0**31, 2**31 - 1), (torch.int64, torch.inf, 2**63 - 1), (torch.int64, -torch.inf, -(2**63)),
        (torch.int16, torch.nan, 0), (torch.float8_e4m3fn, torch.inf, 448.0), (torch.float8_e5m2, -torch.inf, -57344.0),
        (torch.float8_e4m3fn, 17.0, 16.0), (torch.float8_e4m3fn, 19.0, 20.0), (torch.bool, torch.nan, True),
        (torch.bool, -0.0, False),
    ],
)  # fmt: skip
def test_by_hand(dtype: torch.dtype, value: float, stored: float) -> None:
    for rule in (store_reference, lambda x, d: (store(x, out := torch.empty(1, dtype=d)), out)[1]):
        assert rule(torch.tensor([value]), dtype).item() == stored


def test_fp8_keeps_nan() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert store_reference(torch.tensor([torch.nan]), dtype).to(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", [dtype for dtype in FORMATS if dtype.itemsize <= 2], ids=str)
def test_every_number_of_a_format_is_stored_as_itself(dtype: torch.dtype) -> None:
    x = torch.arange(256).to(torch.uint8).view(dtype) if dtype.itemsize == 1 else EVERY_16_BITS.view(dtype)
    finite = x[x.to(torch.float32).isfinite()]
    assert same(store_reference(finite.to(torch.float64), dtype), finite).all()
