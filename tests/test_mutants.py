"""The random epilogues prove themselves: each planted fault is noticed within a bounded number of cases."""

import pytest
import torch
from fuzzing import case, check
from mutants.faults import FAULTS, IDENTITY_FAULTS, SHOWN_BY, forget
from mutants.seeds import FOUND

import epifuse as ef
from epifuse.base.errors import ArgumentError

CASES = 500


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def noticed_at(fault):
    """A seed whose case fails, or None."""
    for seed in sorted(range(CASES), key=lambda seed: seed != FOUND.get(fault)):
        made = case.make(seed)
        if not SHOWN_BY.get(fault, lambda case: True)(made):
            continue
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
    assert noticed_at(fault) is not None


TWINS = (("accum * x - y", "accum * y - x"), ("x * y - accum", "accum - x * y"))


def arguments(body):
    given = {"x": torch.ones(3, 5), "y": torch.zeros(3, 5)}
    epilogue = ef.EpilogueArguments.partial(f"def epi(accum, x, y): D = {body}; return D", given)
    return ef.GemmArguments(torch.ones(3, 4), torch.ones(4, 5), epilogue=epilogue)


def exchanged():
    """Twins of which what was built for the one runs for the other."""
    found = []
    for twins in TWINS:
        one, other = map(arguments, twins)
        (kernel,) = ef.get_kernels(one, limit=1)
        try:
            kernel.run(other, compiled_artifact=kernel.compile(one))
        except ArgumentError:
            continue
        found.append(twins)
    return found


def test_an_artifact_is_for_its_operands():
    assert exchanged() == []


@pytest.mark.parametrize("fault", IDENTITY_FAULTS)
def test_fault_of_identity_is_noticed(fault, monkeypatch):
    IDENTITY_FAULTS[fault](monkeypatch)
    assert exchanged()
