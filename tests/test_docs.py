"""What the documents show is what happens: examples run, pages are made anew, the names they name exist."""

import os
import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gpu.test_mma_sync import never_run as never_run  # a fixture
from processes import run_python

from epifuse.base.errors import CATALOGUE
from epifuse.fusion import VOCABULARY
from epifuse.tools.debug import to_dot
from epifuse.tools.demo import Problem
from epifuse.tools.gpus import table
from epifuse.tools.language import EXAMPLES, OPERANDS, REFUSALS, page, refusal, typed

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/language.md",
    "docs/numerics.md",
    "docs/reductions.md",
    "docs/five_ways.md",
    "docs/cutlass_names.md",
    "docs/visitor_trees.md",
    "docs/hopper.md",
    "docs/hopper_kernel.md",
    "docs/hopper_notes.md",
    "docs/caching.md",
    "docs/performance.md",
)
EXAMPLE = re.compile(r"```python\n(?P<source>.*?)```\n\n```text\n(?P<output>.*?)```", re.DOTALL)


def examples() -> list[re.Match[str]]:
    return list(EXAMPLE.finditer((ROOT / "README.md").read_text(encoding="utf-8")))


def output_of(source: str, folder: Path) -> str:
    """What a person sees who saves the example as example.py and runs it, with no kernel compiled before."""
    (folder / "example.py").write_text(source, encoding="utf-8")
    of_torch = "ignore:`torch.jit.script:DeprecationWarning"  # its compiler warns of itself as it is imported
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "EPIFUSE_CACHE_DIR": str(folder / "store")}
    done = run_python("example.py", options=("error", of_torch), cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("position", range(3))
def test_readme_shows_what_its_examples_print(position: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    example = examples()[position]
    printed = output_of(example["source"], tmp_path)
    if request.config.getoption("--update-golden"):
        readme = ROOT / "README.md"
        text = readme.read_text(encoding="utf-8")
        shown = example[0].replace(f"```text\n{example['output']}```", f"```text\n{printed}```")
        readme.write_text(text.replace(example[0], shown), encoding="utf-8")
    else:
        assert printed == example["output"]


_COMPILES = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux"
)
PROGRAMS = ("docs/reductions.md", pytest.param("docs/caching.md", marks=_COMPILES))
"""Pages whose blocks are one program, each block with the text that it prints."""
_NEXT = "--- the next block ---\n"


@pytest.mark.parametrize("document", PROGRAMS)
def test_a_page_shows_what_its_program_prints(document: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = list(EXAMPLE.finditer(text))
    assert text.count("```python") == len(blocks) > 1
    printed = output_of(f"print({_NEXT!r}, end='')\n".join(block["source"] for block in blocks), tmp_path)
    outputs = printed.split(_NEXT)
    if request.config.getoption("--update-golden"):
        for block, output in zip(blocks, outputs, strict=True):
            shown = block[0].replace(f"```text\n{block['output']}```", f"```text\n{output}```")
            text = text.replace(block[0], shown)
        (ROOT / document).write_text(text, encoding="utf-8")
    else:
        assert outputs == [block["output"] for block in blocks]


def test_every_python_block_of_the_readme_is_such_an_example() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("```python") == len(examples()) == 3


def test_the_first_example_is_short() -> None:
    assert len(examples()[0]["source"].splitlines()) <= 12


def test_the_language_page_is_the_generators(request: pytest.FixtureRequest) -> None:
    committed = ROOT / "docs" / "language.md"
    if request.config.getoption("--update-golden"):
        committed.write_text(page(), encoding="utf-8")
    assert page() == committed.read_text(encoding="utf-8"), "run: python -m epifuse docs > docs/language.md"


def test_the_table_of_gpus_is_what_planning_says(never_run: None) -> None:
    how = "run: EPIFUSE_UNTESTED=1 python -m epifuse gpus"
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8"), how


def test_without_being_asked_for_no_other_gpu_has_a_kernel() -> None:
    rows = [line.split(" | ") for line in table().splitlines()[2:]]
    assert {row[1] for row in rows if row[-1].startswith("compiled")} == {"no"}


def test_the_language_page_names_the_whole_vocabulary() -> None:
    text = page()
    assert [name for name in VOCABULARY if f"| `{name}(" not in text] == []


@pytest.mark.parametrize("statements", [statements for statements, _ in EXAMPLES])
def test_examples_of_the_page_are_accepted(statements: str) -> None:
    assert typed(statements, OPERANDS).graph.outputs


@pytest.mark.parametrize("statements", REFUSALS)
def test_refusals_of_the_page_come_from_the_catalogue(statements: str) -> None:
    sentence, _ = refusal(statements, OPERANDS)
    patterns = (re.sub(r"\\{\w+(![rs])?\\}", ".*", re.escape(row.what)) for row in CATALOGUE.values())
    assert any(re.fullmatch(pattern, sentence) for pattern in patterns)


def test_the_page_refuses_to_show_a_refusal_that_is_none() -> None:
    with pytest.raises(AssertionError, match="nothing was refused"):
        refusal("D = accum", OPERANDS)


def paths(text: str) -> set[str]:
    """Files and folders that a document names: link targets, and what stands in backticks and looks like one."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    quoted = re.findall(r"`((?:src|docs|tests|benchmarks)/[^`\s]*)`", text)
    return {*links, *quoted}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    named = paths((ROOT / document).read_text(encoding="utf-8"))
    assert named, "the pattern finds nothing"
    homes = {name: ROOT if name.startswith(("src/", "tests/")) else (ROOT / document).parent for name in named}
    assert [name for name in sorted(named) if not (homes[name] / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS[:2])
def test_targets_of_make_that_are_named_exist(document: str) -> None:
    named = set(re.findall(r"\bmake (\w+)\b", (ROOT / document).read_text(encoding="utf-8").replace("make of", "")))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= targets


def test_the_picture_is_of_the_demos_loss() -> None:
    """Titles alone: where Graphviz puts them depends on the machine's fonts."""
    picture = (ROOT / "docs" / "bce.svg").read_text(encoding="utf-8")
    shapes = ((64, 16), (16, 10), (64, 10), (10,))
    problem = Problem(*(torch.empty(shape, device="meta") for shape in shapes))
    titles = {unescape(title) for title in re.findall(r"<B>(.*?)</B>", to_dot(problem.arguments.graph))}
    drawn = {unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture)}
    assert titles
    assert titles <= drawn
