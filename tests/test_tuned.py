"""Tuned numbers are rows with a measurement that exists, and so do the experiments that pages and comments cite."""

import json
import re
from pathlib import Path

import pytest

from epifuse.providers.cutedsl import tuned
from epifuse.providers.cutedsl.tuned import Tuned

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = json.loads((RESULTS / "kernel_variants.json").read_text(encoding="utf-8"))["experiments"]
IDS = [experiment["id"] for experiment in EXPERIMENTS]
ROWS = {name: row for name, row in vars(tuned).items() if isinstance(row, Tuned)}
COMPILING = (ROOT / "tests" / "test_sm90_compile.py").read_text(encoding="utf-8")


def test_each_experiment_has_a_name_of_its_own() -> None:
    assert len(IDS) == len(set(IDS))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each) for each in IDS)


def exists(source: str) -> bool:
    if source.startswith("test_"):
        return f"def {source}(" in COMPILING
    return source in IDS or (source.endswith(".json") and (RESULTS / source).is_file())


@pytest.mark.parametrize("name", ROWS)
def test_a_tuned_number_was_measured(name: str) -> None:
    row = ROWS[name]
    assert row.measured
    assert [source for source in row.measured if not exists(source)] == []
    assert row.unit
    assert re.fullmatch(r"[A-Z].*[^.]\.", row.why), "one sentence"


def test_a_source_that_does_not_exist_is_noticed() -> None:
    assert not any(map(exists, ("no-such-experiment", "no_such_file.json", "test_no_such_test")))


def test_experiments_that_comments_cite_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    cited = set(re.findall(r"kernel_variants\.json#([\w-]+)", sources))
    assert cited
    assert cited <= set(IDS)


def test_the_page_names_experiments_that_exist() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    cited = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+|senders)`", page))
    assert cited <= set(IDS)
    assert {source for row in ROWS.values() for source in row.measured} & set(IDS) <= cited
