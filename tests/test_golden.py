"""Golden files: each belongs to a test, so that none stays behind when its test goes."""

from pathlib import Path

import pytest

from tests.conftest import GOLDEN, STALE

TESTS = Path(__file__).parent


def test_every_golden_file_is_compared_with(request: pytest.FixtureRequest) -> None:
    """Among the files of tests that this run collected: all of them, where the whole suite runs."""
    assert request.config.stash.get(STALE, []) == []


def test_every_golden_folder_belongs_to_a_test_file() -> None:
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    assert [path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name not in tests] == []
