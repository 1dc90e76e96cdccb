"""docs/five_ways.md is a program, and what it shows is what it prints; docs/cutlass_names.md names what exists."""

import re
from pathlib import Path

import pytest

import epifuse as ef
from epifuse.forms import evt, thread
from tests.test_docs import ROOT, output_of

FIVE_WAYS, NAMES = ROOT / "docs" / "five_ways.md", ROOT / "docs" / "cutlass_names.md"
SHOWN = re.compile(r"```text\n(.*?)```", re.DOTALL)


def printed(folder: Path) -> str:
    blocks = re.findall(r"```python\n(.*?)```", FIVE_WAYS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    return output_of("\n".join(blocks), folder)


def test_the_page_shows_what_it_prints(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text, output = FIVE_WAYS.read_text(encoding="utf-8"), printed(tmp_path)
    if request.config.getoption("--update-golden"):
        FIVE_WAYS.write_text(SHOWN.sub(lambda _: f"```text\n{output}```", text), encoding="utf-8")
    else:
        assert SHOWN.findall(text) == [output]


def test_the_page_shows_one_digest() -> None:
    [shown] = SHOWN.findall(FIVE_WAYS.read_text(encoding="utf-8"))
    ways = re.findall(r"^(\S.*?)  +([0-9a-f]{12}) (True|False)$", shown, re.MULTILINE)
    assert [way for way, _, _ in ways] == ["function", "tree", "functor", "class", "plan object"]
    assert len({digest for _, digest, _ in ways}) == 1
    assert {equal for _, _, equal in ways} == {"True"}


def ours() -> list[str]:
    """What stands in the second column of a table, in backticks and without its arguments."""
    rows = re.findall(r"^\| .*? \| (.*?) \|", NAMES.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(?:epifuse|ef)\.([\w.]+)", row)]


def test_the_names_of_ours_exist() -> None:
    names = ours()
    assert len(names) > 60
    for name in names:
        value: object = ef
        for part in name.split("."):
            assert hasattr(value, part), f"epifuse.{name}"
            value = getattr(value, part)


def test_every_functor_and_node_is_on_the_page() -> None:
    """Else the map would fall behind the library."""
    text = NAMES.read_text(encoding="utf-8")
    for name in (*(f"thread.{n}" for n in thread.__all__), *(f"evt.{n}" for n in dir(evt.fusion) if n[0].isupper())):
        value = getattr(thread if name.startswith("thread") else evt.fusion, name.partition(".")[2])
        if getattr(value, "__module__", "").startswith(("epifuse.forms.thread", "epifuse.forms.evt.fusion")):
            assert name.partition(".")[2] in text, name
