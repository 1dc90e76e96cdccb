"""The random epilogues prove themselves: each planted fault is noticed within a bounded number of cases."""

import pytest
from fuzzing import case, check
from mutants.faults import FAULTS, forget

CASES = 500


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def noticed_at():
    """The first seed whose case fails, or None."""
    for seed in range(CASES):
        made = case.make(seed)
        try:
            check.run(made)
        except Exception:  # a crash notices a fault as well as a wrong number does
            return seed
    return None


def test_without_a_fault_nothing_is_noticed():
    for seed in range(50):
        check.run(case.make(seed))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    assert noticed_at() is not None
