"""docs/accuracy.md says what docs/accuracy.json holds, of every function that gives floats, within what is promised."""

import json

import pytest
from accuracy import table
from accuracy.cases import CASES

DATA = json.loads((table.DOCS / "accuracy.json").read_text())
ROWS = {row["name"]: row for row in DATA["rows"]}


def test_the_page_is_generated_from_the_data():
    assert (table.DOCS / "accuracy.md").read_text() == table.render(DATA)


def test_what_was_measured_exists():
    """That all was measured is tested where there is a GPU to measure what is new."""
    assert list(ROWS) == [case.name for case in CASES if case.name in ROWS]


@pytest.mark.parametrize("name", ROWS)
def test_what_was_measured_is_within_what_is_promised(name):
    row = ROWS[name]
    figures = [value for value in row.values() if isinstance(value, dict) and "kept" in value]
    assert len(figures) == 4
    assert all(figure["kept"] for figure in figures)
    assert row["composite"] or row["float32"]["ulp"] <= 4
