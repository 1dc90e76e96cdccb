"""Two notebooks, cell by cell: the reference one, with edits made by rule, and examples/tour.ipynb."""

import ast
import importlib.util
import json
import linecache
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import epifuse as ef

TEXT = (Path(__file__).parent / "reference" / "002_notebook.txt").read_text(encoding="utf-8")
FENCE = "In [None]:\n"

# (what the notebook says, what stands there instead, how often)
EDITS = (
    (r"\bcutlass_api\b", "epifuse", 9),
    (r"\{100, 103\}", "{0, 90, 100, 103}", 1),
    (r", cc=100\b", "", 3),
    # Random fp16 would ask for fp16 epilogue arithmetic; small integers are exact in every order.
    (r'torch\.randn\(\(?([^()]*?)\)?, device="cuda"', r'torch.randint(-1, 2, (\1), device="there"', 6),
    (r'device="cuda"', 'device="there"', 8),
)
THERE, PLACES = 'device="there"', 14


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


def cells(device: str) -> list[str]:
    found = [code_under(fence) for fence in TEXT.split(FENCE)[1:]]
    text = "\0".join(found)
    for pattern, replacement, count in EDITS:
        text, made = re.subn(pattern, replacement, text)
        assert made == count, f"{pattern} stands {made} times in the notebook's cells, not {count}"
    assert text.count(THERE) == PLACES
    return text.replace(THERE, f'device="{device}"').split("\0")


def run(cell: str, number: int, namespace: dict[str, Any]) -> None:
    """As a notebook does: one namespace, and the source of each cell where `inspect` finds it."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    exec(compile(cell, name, "exec"), namespace)


def told(device: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What each cell prints."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    said = []
    for number, cell in enumerate(cells(device), 1):
        run(cell, number, namespace)
        said.append(capsys.readouterr().out)
    assert not any(said[:8]), "a cell that succeeds prints nothing"
    assert all(said[8:]), "each failure example prints its reason"
    return said


def test_the_notebook_has_twelve_cells() -> None:
    assert len(cells("cpu")) == 12
    assert sum("assert_close" in cell for cell in cells("cpu")) == 4
    assert sum("except Exception" in cell for cell in cells("cpu")) == 4


def test_every_cell_runs_and_hopper_carries_each_product(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, get_kernels = [], ef.get_kernels

    def planned(args: ef.GemmArguments) -> Any:
        asked.append(bool(get_kernels(args, cc=90, providers=["cutedsl"])))
        return get_kernels(args)

    monkeypatch.setattr(ef, "get_kernels", planned)
    golden("\n".join(told("cpu", capsys)[8:]))
    assert asked == [True] * 4


@pytest.mark.gpu
def test_every_cell_runs_on_a_gpu_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert told("cuda", capsys) == told("cpu", capsys)


# --- the tour ---------------------------------------------------------------------------------------------------------

TOUR = json.loads((Path(__file__).parents[1] / "examples" / "tour.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in TOUR["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Without a window; and the number of threads, which the notebook sets, as before."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed; `make setup` installs it")
    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")
    torch.set_num_threads(threads)


def toured() -> dict[str, Any]:
    """What the cells define. The first one chooses the device."""
    namespace: dict[str, Any] = {"__name__": "tour"}
    for number, cell in enumerate(CODE, 1):
        run(cell, number, namespace)
    return namespace


def check_tour(pyplot: Any, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = toured()
    assert found["device"].type == device
    assert "<svg" in found["graph"]._repr_svg_()
    printed = capsys.readouterr().out
    assert str(found["here"].plan) in printed
    assert "sm90_gemm" in printed
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    assert len(figures) == 3, "tiles, times and the roofline"
    for figure in figures:
        figure.canvas.draw()
        assert all(axes.has_data() for axes in figure.axes)
    assert all(time > 0 for times in found["seconds"].values() for time in times.values())
    assert found["slope"].grad is not None


def test_the_tour_runs_on_a_cpu(
    pyplot: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_tour(pyplot, "cpu", capsys)


@pytest.mark.gpu
def test_the_tour_runs_on_a_gpu(
    pyplot: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picture of the graph, which the test above draws, is left out where pygraphviz is not installed."""
    if importlib.util.find_spec("pygraphviz") is None:
        monkeypatch.setattr(ef.debug, "to_svg", lambda graph, path: written_as(path, "<svg></svg>"))
    check_tour(pyplot, "cuda", capsys)


def written_as(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_tour_holds_no_outputs() -> None:
    """Times of whoever ran it last would stand beside code that has changed."""
    cells = [cell for cell in TOUR["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
