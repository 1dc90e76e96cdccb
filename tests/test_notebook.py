"""The reference notebook, cell by cell, from its own text with four edits made by rule."""

import ast
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epifuse import providers

TEXT = (Path(__file__).parent / "reference" / "002_notebook.txt").read_text(encoding="utf-8")
FENCE = "In [None]:\n"
GPU = torch.cuda.is_available() and set(providers.NAMES) > {"cpu"}
DEVICE = "cuda" if GPU else "cpu"

# (what the notebook says, what stands there instead, how often)
EDITS = (
    (r"\bcutlass_api\b", "epifuse", 9),
    (r"\{100, 103\}", "{0, 90, 100, 103}", 1),
    (r", cc=100\b", "", 3),
    # Random fp16 would ask for fp16 epilogue arithmetic; small integers are exact in every order.
    (r'torch\.randn\(\(?([^()]*?)\)?, device="cuda"', r'torch.randint(-1, 2, (\1), device="there"', 6),
    (r'device="cuda"', 'device="there"', 8),
    (r'device="there"', f'device="{DEVICE}"', 14),
)


def code_under(fence: str) -> str:
    """The longest prefix that is Python: the text does not mark where a cell ends."""
    lines = fence.splitlines()
    return next(text for end in range(len(lines), 0, -1) if parses(text := "\n".join(lines[:end])))


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def cells() -> list[str]:
    found = [code_under(fence) for fence in TEXT.split(FENCE)[1:]]
    text = "\0".join(found)
    for pattern, replacement, count in EDITS:
        text, made = re.subn(pattern, replacement, text)
        assert made == count, f"{pattern} stands {made} times in the notebook's cells, not {count}"
    return text.split("\0")


def run(cell: str, number: int, namespace: dict[str, Any]) -> None:
    """As a notebook does: one namespace, and the source of each cell where `inspect` finds it."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    exec(compile(cell, name, "exec"), namespace)


def test_the_notebook_has_twelve_cells() -> None:
    assert len(cells()) == 12
    assert sum("assert_close" in cell for cell in cells()) == 4
    assert sum("except Exception" in cell for cell in cells()) == 4


def test_every_cell_runs(capsys: pytest.CaptureFixture[str], golden: Callable[[str], None]) -> None:
    namespace: dict[str, Any] = {"__name__": "notebook"}
    said = []
    for number, cell in enumerate(cells(), 1):
        run(cell, number, namespace)
        said.append(capsys.readouterr().out)
    assert not any(said[:8]), "a cell that succeeds prints nothing"
    assert all(said[8:]), "each failure example prints its reason"
    golden("\n".join(said[8:]))
