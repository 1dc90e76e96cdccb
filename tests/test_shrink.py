"""Cutting a failing case down: what is left still fails in the same way, and nothing more can be left out."""

from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from fuzzing import case, check, shrink
from fuzzing.case import Case
from mutants.faults import FAULTS, forget

SEEDS = range(200)
Plant = Callable[[Callable[[Case], None]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """A case fails where the function given to it raises."""
    return lambda fails: monkeypatch.setattr(shrink, "run", fails)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing built of a faulty part is used again."""
    forget()
    yield
    forget()


def big(word: str) -> Case:
    """A case of many statements and several outputs, one of which says `word`."""
    for seed in SEEDS:
        made = case.make(seed)
        if len(made.statements) > 10 and len(made.outputs) > 1 and word in made.source():
            return made
    raise AssertionError(f"no case says {word}")


def mismatch_at(word: str) -> Callable[[Case], None]:
    def fails(made: Case) -> None:
        if word in made.source():
            raise check.MismatchError("planted")

    return fails


@pytest.mark.parametrize("word", ["relu(", "where(", "sum("])
def test_what_is_left_is_the_planted_failure_alone(word: str, plant: Plant) -> None:
    made = big(word)
    plant(mismatch_at(word))
    least = shrink.smallest(made)
    assert word in least.source()
    assert len(least.outputs) == 1
    assert len(least.statements) < len(made.statements) / 2
    assert least.tile == (1 << 20, 1 << 20)
    # Whatever more is left out, the failure goes with it.
    assert not any(word in smaller.source() for smaller in shrink._smaller(least))


def test_the_way_of_failing_is_kept(plant: Plant) -> None:
    """A smaller case that fails in another way is not the same failure."""
    made, met = big("relu("), []

    def fails(smaller: Case) -> NoReturn:
        met.append(smaller)
        if "relu(" in smaller.source() and len(smaller.outputs) > 1:
            raise check.MismatchError("planted")
        raise ZeroDivisionError("another")

    plant(fails)
    least = shrink.smallest(made)
    assert "relu(" in least.source()
    assert len(least.outputs) == len(made.outputs) > 1
    assert any(len(smaller.outputs) == 1 for smaller in met), "one output was tried, and is another failure"


def test_the_class_of_a_failure_is_what_counts(plant: Plant) -> None:
    made = big("relu(")

    def fails(smaller: Case) -> NoReturn:
        raise KeyError(len(smaller.statements))

    plant(fails)
    least = shrink.smallest(made)
    assert list(shrink._smaller(least)) == [], "whatever could be left out is"
    assert len(least.outputs) == 1


def test_a_case_that_passes_loses_only_what_it_does_not_need(plant: Plant) -> None:
    made = big("relu(")
    plant(lambda smaller: None)
    least = shrink.smallest(made)
    assert least.outputs == made.outputs
    assert {statement.name for statement in least.statements} <= {statement.name for statement in made.statements}


@pytest.mark.usefixtures("fresh")
def test_a_fault_of_the_library_is_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a word in its text, but by running it."""
    FAULTS["subtraction swapped"](monkeypatch)
    made = next(made for made in map(case.make, SEEDS) if len(made.statements) > 10 and shrink._failure(made))
    way = shrink._failure(made)
    least = shrink.smallest(made)
    assert shrink._failure(least) is way is check.MismatchError
    assert len(least.outputs) == 1
    assert len(least.statements) < len(made.statements) / 2
    monkeypatch.undo()
    forget()
    assert shrink._failure(least) is None, "what is left is right without the fault"
