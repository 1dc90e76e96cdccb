"""Device functions against float64, as docs/accuracy.md promises; integers against PyTorch, all pairs of signs."""

import itertools
import json

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

from accuracy import measure, table
from accuracy.cases import CASES
from accuracy.probe import BLOCK, WIDTH, compiled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_functions_are_as_exact_as_promised(case):
    built = measure.kernels(case)
    full = measure.measure_full(case, built["full"])
    assert full.kept, f"float32: {full}"
    for dtype in (torch.bfloat16, torch.float16):
        short = measure.measure_short(case, built["narrow"], dtype, measure.short_patterns(dtype))
        assert short.kept, f"{dtype}: {short}"


def test_every_function_was_measured():
    rows = json.loads((table.DOCS / "accuracy.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [case.name for case in CASES], table.__doc__


def test_the_measure_sees_an_error_of_one_unit():
    x = torch.tensor([1.0, 3.0, 2.0**-140], device="cuda")
    one_off = torch.nextafter(x, torch.full_like(x, 9.0))
    assert measure.ulps(one_off, x.double(), torch.float32).tolist() == [1.0, 1.0, 1.0]
    assert measure.ulps(x, x.double(), torch.float32).tolist() == [0.0, 0.0, 0.0]
    nan = torch.full_like(x, float("nan"))
    assert measure.ulps(nan, x.double(), torch.float32).isinf().all()


INTEGERS = torch.tensor([-(2**31), -(2**31) + 1, -1000003, -7, -2, -1, 0, 1, 2, 3, 10, 65537, 2**31 - 1]).int()
EXPRESSIONS = {
    "x // y": lambda x, y: x // y,
    "x % y": lambda x, y: x % y,
    "x // 7 + y % 7": lambda x, y: x // 7 + y % 7,
    "x // -7 + y % -7": lambda x, y: x // -7 + y % -7,
    "x ** 5 + y ** 0": lambda x, y: x**5 + y**0,
    "(x > y).to(torch.int32) + (x < 3) * y": lambda x, y: (x > y).int() + (x < 3) * y,
    "where((x > 0) < (y > 0), x, y)": lambda x, y: torch.where((x > 0) < (y > 0), x, y),
    "x.to(torch.int8).to(torch.int32) + y.to(torch.uint8).to(torch.int32)": lambda x, y: (
        x.to(torch.int8).int() + y.to(torch.uint8).int()
    ),
    "(x.to(torch.float32) / 7.0).to(torch.int16).to(torch.int32)": lambda x, y: (x.float() / 7).int().short().int(),
    "maximum(x, y) - minimum(x, -3) + abs(y) * sign(x)": lambda x, y: (
        torch.maximum(x, y) - x.clamp(max=-3) + y.abs() * x.sign()
    ),
}


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_integers(expression):
    pairs = [(x, y) for x, y in itertools.product(INTEGERS.tolist(), repeat=2) if y and (x, y) != (-(2**31), -1)]
    x, y = (torch.tensor(values, dtype=torch.int32) for values in zip(*pairs, strict=True))
    wanted = EXPRESSIONS[expression](x, y)
    padded = [torch.nn.functional.pad(v, (0, BLOCK - v.numel()), value=1).view(-1, WIDTH).cuda() for v in (x, y)]
    out = torch.full((BLOCK // WIDTH, WIDTH), 77, dtype=torch.int32, device="cuda")
    compiled(expression, (torch.int32, torch.int32), torch.int32)(padded, out)
    assert torch.equal(out.view(-1)[: x.numel()].cpu(), wanted)


WIDE = {
    "((x // y) % 1000003).to(torch.int32)": lambda x, y: ((x // y) % 1000003).int(),
    "(x % y).to(torch.int32)": lambda x, y: (x % y).int(),
    "((x * y - 3) % 65537 + x ** 3 % 7).to(torch.int32)": lambda x, y: ((x * y - 3) % 65537 + x**3 % 7).int(),
    "(maximum(x, y) > 3000000000).to(torch.int32) + (x == y)": lambda x, y: (
        (torch.maximum(x, y) > 3000000000).int() + (x == y)
    ),
    "(abs(x) * sign(y) + where(x < y, 1, 2)).to(torch.int32)": lambda x, y: (
        x.abs() * y.sign() + torch.where(x < y, 1, 2)
    ).int(),
}


@pytest.mark.parametrize("expression", WIDE, ids=str)
def test_wide_integers(expression):
    values = [*INTEGERS.tolist(), 2**40 + 1, -(2**40), 5 * 10**9]
    pairs = [(x, y) for x, y in itertools.product(values, repeat=2) if y]
    x, y = (torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True))
    wanted = WIDE[expression](x, y)
    padded = [torch.nn.functional.pad(v, (0, BLOCK - v.numel()), value=1).view(-1, WIDTH).cuda() for v in (x, y)]
    out = torch.full((BLOCK // WIDTH, WIDTH), 77, dtype=torch.int32, device="cuda")
    compiled(expression, (torch.int64, torch.int64), torch.int32)(padded, out)
    assert torch.equal(out.view(-1)[: x.numel()].cpu(), wanted)
