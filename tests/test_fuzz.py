"""Three hundred random epilogues; `make fuzz N=10000` runs more and prints what they covered."""

import fuzz
import pytest
from fuzzing import case, check, coverage

CASES, CHUNK = 300, 25


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_random_epilogues(start, whole_sweeps):
    """Of each operand, which two seeds in sequence share, one with each sort of data in turn; all in whole sweeps."""
    for seed in range(start, start + CHUNK):
        if whole_sweeps or seed % 4 in (0, 3):
            check.run(case.make(seed))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command on ten cases: its exit code and what it printed."""
    monkeypatch.setattr(fuzz, "_alone", lambda: None)
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--n", "10", "--jobs", "1"])
    return lambda: (fuzz.main(), capsys.readouterr().out)


def test_the_command_prints_its_coverage(command):
    code, printed = command()
    assert code == 0
    assert "10 cases" in printed
    assert all(f"\n{operation} " in printed for operation in coverage.OPERATIONS)


def test_the_command_fails_where_an_operation_was_hardly_met(command, monkeypatch):
    monkeypatch.setattr(coverage, "PER", 10)
    code, printed = command()
    assert code == 1
    assert "met less than 30 times: add of scalar" in printed


def test_the_command_fails_for_one_mismatch(command, monkeypatch):
    def run(made, right=check.run):
        if made.seed == 7:
            raise check.MismatchError("planted")
        return right(made)

    monkeypatch.setattr(check, "run", run)
    code, printed = command()
    assert code == 1
    assert "--seed 7\nMismatchError: planted" in printed
