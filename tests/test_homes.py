"""Facts that have one home: a pattern that gives a second one away, and the files where it may stand."""

import re
from pathlib import Path

import pytest

import epifuse

PACKAGE = Path(epifuse.__file__).parent
CUTEDSL = PACKAGE / "providers" / "cutedsl"
HOMES = {
    "which way an access travels": (r"\.way\b\s*(==|!=|in\b|not in\b|is\b)", ()),
    "how registers lie": (r"\blane\w*(\(\))?\s*(%|//)\s*[48]\b|\b[iv]\s*[&^]\s*\d|\brange\((8|16)\)", ("fragment.py",)),
}


def found(pattern: str, homes: tuple[str, ...], folder: Path) -> list[str]:
    lines = [
        (path.name, line.strip())
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if path.name not in homes
    ]
    return [f"{name}: {line}" for name, line in lines if re.search(pattern, line.split("#")[0])]


@pytest.mark.parametrize("fact", HOMES)
def test_a_fact_has_one_home(fact: str) -> None:
    assert found(*HOMES[fact], CUTEDSL) == []


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        ("which way an access travels", 'if access.way == "tile":'),
        ("which way an access travels", 'ways = [a for a in loads if a.way in ("row", "column")]'),
        ("how registers lie", "column = 2 * (lane % 4) + (v & 1)"),
        ("how registers lie", "other = i ^ 2"),
    ],
)
def test_a_second_home_is_found(tmp_path: Path, fact: str, line: str) -> None:
    (tmp_path / "kernel.py").write_text(f"{line}\n")
    assert found(*HOMES[fact], tmp_path) == [f"kernel.py: {line}"]


def test_a_gpus_multiprocessors_are_counted_in_its_record() -> None:
    count = r"\b132\b"
    assert found(count, ("processors.py",), PACKAGE) == []
    assert found(count, (), PACKAGE / "base") != [], "there is nothing to find"


def test_names_of_tests_are_short() -> None:
    """A report of failures shows them on one line."""
    files = Path(__file__).parent.rglob("*.py")
    names = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    assert {name for name in names if len(name) >= 60} == set()
