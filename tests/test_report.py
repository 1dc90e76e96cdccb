"""What `ef.report` tells of a model: as text and as a picture, of the kernels of its device, and of each copy."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.base.target import TARGETS
from epifuse.plan import settle
from epifuse.plan.select import Selection
from epifuse.pytorch.fuse import Fuse
from epifuse.pytorch.report import Report

pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def reported(function: Callable[..., Any], *args: Tensor) -> Report:
    """What the pass says of the products of a function."""
    fuse = Fuse(sites="all")
    fuse(make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args).graph)
    return fuse.report


def unknown(a: Tensor, b: Tensor) -> Tensor:
    return torch.cumsum(a @ b, -1)


def chained(a: Tensor, b: Tensor) -> Any:
    y = torch.relu(a @ b)
    z = torch.sigmoid(y @ b.t())
    return z * z.sum(0), y


A, B = torch.ones(24, 16), torch.ones(16, 32)


def test_the_report_reads(golden: Callable[[str], None]) -> None:
    golden(str(reported(unknown, A, B)) + "\n" + str(reported(chained, A, B)))


LEFT = {
    "a gate": (lambda a, b: (a @ b) * torch.relu(a @ (2 * b)), "only other products read it, or their epilogues"),
    "a gate and an output": (lambda a, b: ((c := a @ b) * torch.relu(a @ (2 * b)), c), "and its graph returns it"),
    "a reader of two": (lambda a, b: (c := a @ b) * c.cumsum(1), "(cumsum: aten::cumsum"),
    "an output": (lambda a, b: a @ b, "nothing in its graph reads it"),
    "an unknown reader": (unknown, "(cumsum: aten::cumsum is not in the epilogue language)"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_reads_a_product_that_is_left(name: str) -> None:
    function, reason = LEFT[name]
    assert reason in reported(function, A, B).rows[0].reason


def test_a_reader_outside_the_language_is_told_so() -> None:
    """Also if it reads a second value that the epilogue does not compute, and was never looked at."""
    (row,) = reported(lambda a, b: torch.relu(a @ b).scatter(1, (a @ b).cumsum(1).long(), 1.0), A, B).rows[:1]
    assert dict(row.left)["scatter"] == "aten::scatter is not in the epilogue language"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_a_cast_to_8_bits_is_told_to_stay(dtype: torch.dtype) -> None:
    (row,) = reported(lambda a, b: torch.relu(a @ b).to(dtype), A, B).rows
    assert row.taken
    ((_, reason),) = row.left
    assert "8 bits" in reason
    assert "ef.gemm" in reason


def test_the_picture_has_each_sort_of_product_once(tmp_path: Path) -> None:
    report = reported(lambda a, b: [*chained(a, b), *chained(a, 2 * b), unknown(a, b)], A, B)
    dot = ef.debug.to_dot(report)
    titles = re.findall(r"<B>(.*?)</B>", dot)
    assert [title for title in titles if "mm" in title] == [
        "2 of mm 24 × 32 × 16 f32",
        "2 of mm 24 × 16 × 32 f32",
        "mm 24 × 32 × 16 f32",
    ]
    for row in report.rows:
        assert all(name in titles for name, _ in row.left)
        assert all(name in dot for name in row.taken)
    pytest.importorskip("pygraphviz")
    assert "24 × 16 × 32" in ef.debug.to_svg(report, tmp_path / "report.svg").read_text(encoding="utf-8")


def test_reasons_are_of_kernels_for_the_device_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the many cones that are tried around a product: to tell why thirty designs refuse one takes 10 ms."""
    told, reasons = [], Selection.reasons.fget
    monkeypatch.setattr(Selection, "reasons", property(lambda self: told.append(self) or reasons(self)))
    monkeypatch.setattr(settle, "target_of", lambda device: TARGETS[90])
    (row,) = reported(lambda a, b: torch.softmax(torch.relu(a @ b) + 1, -1), A.double(), B.double()).rows
    assert "sm90_gemm" in row.reason
    assert "float64" in row.reason
    assert "cpu" not in row.reason
    assert len(told) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_report_of_its_own(copied: Callable[[Any], Any]) -> None:
    first = ef.compile(nn.Linear(16, 32, bias=False), sites="all", dynamic=False)
    second, x = copied(first), torch.randn(8, 16)
    torch.testing.assert_close(second(x), first._orig_mod(x))
    assert (len(ef.report(first).rows), len(ef.report(second).rows)) == (0, 1)
