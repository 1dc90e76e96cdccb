"""The documentation as a whole: its programs run, its links lead somewhere, its lists are complete, its site builds."""

import argparse
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from processes import run_python

import epifuse as ef
from epifuse.__main__ import commands
from epifuse.base import exceptions
from epifuse.base.config import Config, to_environment
from epifuse.fusion import VOCABULARY
from tests.test_docs import ROOT

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
BY_OTHERS = {"README", "caching", "five_ways", "pytorch", "reductions", "visitor_trees"}
"""Pages whose blocks another test runs: of test_docs.py, test_five_ways.py, evt/test_page.py, or below."""
PROGRAMS = [page for page in PAGES if page.stem not in BY_OTHERS and "```python" in page.read_text(encoding="utf-8")]
BLOCK = re.compile(r"```python\n(?P<source>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)
NEXT = "--- the next block ---\n"
RUNNER = """
import contextlib, io, pathlib, runpy, sys
for name in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(name)
    pathlib.Path(name).with_suffix(".txt").write_text(printed.getvalue())
"""


def test_programs_of_pages_print_what_the_pages_show(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each page is one program; all of them run in one process, for it takes as long to import PyTorch."""
    files = {}
    for page in PROGRAMS:
        blocks = list(BLOCK.finditer(page.read_text(encoding="utf-8")))
        assert page.read_text(encoding="utf-8").count("```python") == len(blocks)
        files[page] = tmp_path / f"{page.stem}.py"
        sources = (block["source"] for block in blocks)
        files[page].write_text(f"print({NEXT!r}, end='')\n".join(sources), encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "EPIFUSE_CACHE_DIR": str(tmp_path / "store")}
    done = run_python("-c", RUNNER, *map(str, files.values()), options=("error",), cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    for page, file in files.items():
        shown = page.read_text(encoding="utf-8")
        blocks = list(BLOCK.finditer(shown))
        outputs = file.with_suffix(".txt").read_text().split(NEXT)
        if request.config.getoption("--update-golden"):
            for block, output in zip(blocks, outputs, strict=True):
                if block["output"] is not None:
                    anew = block[0].replace(f"```text\n{block['output']}```", f"```text\n{output}```")
                    shown = shown.replace(block[0], anew)
            page.write_text(shown, encoding="utf-8")
        else:
            assert outputs == [block["output"] or "" for block in blocks], page.name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_of_the_page_on_pytorch(tmp_path: Path) -> None:
    """In this process, which has the compiler imported; the last one is run by tests/distributed_checks.py."""
    sources = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8"), re.DOTALL)
    assert ["torch.distributed" in source for source in sources] == [False, False, True]
    for index, source in enumerate(sources[:-1]):
        (tmp_path / f"block{index}.py").write_text(source, encoding="utf-8")
        runpy.run_path(str(tmp_path / f"block{index}.py"))


# --- links ------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_a_broken_link_would_be_found() -> None:
    assert anchors(ROOT / "docs" / "hopper.md") >= {"whole-rows", "what-is-refused-by-name"}
    assert LINK.findall("[a](b.md#c) [d](e) [f](#g) [h](https://i)") == [("b.md", "c"), ("e", ""), ("", "g")]


# --- lists ------------------------------------------------------------------------------------------------------------


def table(page: str) -> dict[str, str]:
    """The first two cells of the rows of a page's tables, without backticks."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {name: text.strip() for name, text in rows}


def test_every_variable_is_documented_with_its_default() -> None:
    defaults = {name: value for name, value in to_environment(Config()).items() if value}
    shown = {name: text for name, text in table("environment.md").items() if name.startswith("EPIFUSE_")}
    assert set(shown) == {f"EPIFUSE_{field.name.upper()}" for field in fields(Config)}
    assert {name: shown[name] for name in defaults} == defaults


def test_every_error_is_documented_with_its_base() -> None:
    kinds = [
        kind for kind in vars(exceptions).values() if isinstance(kind, type) and kind.__module__ == exceptions.__name__
    ]
    expected = {kind.__name__: f"`{kind.__bases__[1].__name__}`" for kind in kinds if len(kind.__bases__) > 1}
    assert table("errors.md") == expected


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    (choices,) = (action for action in commands()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(choices.choices) == set(table("command_line.md"))
    for name, words in re.findall(r"python -m epifuse (\w+)(.*)", page):
        parser = choices.choices[name]
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"(--\w+)", words)) <= known


def test_every_public_name_stands_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = [name for name in ef.__all__ if name not in VOCABULARY]
    assert [name for name in names if f"ef.{name}\n" not in page and f"`ef.{name}`" not in page] == []


# --- the site ---------------------------------------------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """MkDocs' files may name Python objects, which are nothing here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def test_every_page_stands_once_in_the_navigation() -> None:
    listed = [
        page for part in CONFIG["nav"] for one in part.values() for page in ([one] if isinstance(one, str) else one)
    ]
    assert sorted(listed) == sorted([*MADE, *(page.name for page in (ROOT / "docs").glob("*.md"))])


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="MkDocs is not installed; `make setup` installs it")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert str(ef.get_kernels.__doc__).partition("`")[0].strip() in api
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="first_epilogue/"' in home
    assert (tmp_path / "site" / "repository" / "benchmarks" / "results" / "gemm_epilogue.json").exists()
