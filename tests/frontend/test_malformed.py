"""Malformed epilogues are refused by an error of ours with its place; what is accepted is what PyTorch computes."""

import contextlib
import io
import zlib
from collections import Counter

import pytest

from tests import malformed
from tests.malformed import Case

PARTS = 16
EVERY = 12
"""One case in so many runs here; `python -m tests.malformed` runs them all."""

CHOSEN = [case for case in malformed.cases() if zlib.crc32(case.origin.encode()) % EVERY == 0]


@pytest.mark.parametrize("part", range(PARTS))
def test_refused_or_right(part: int) -> None:
    for case in CHOSEN[part::PARTS]:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                malformed.verdict(case)
            except Exception as error:
                raise AssertionError(f"{case.origin}\n{case.source}") from error


def test_there_are_enough_and_most_are_refused() -> None:
    count = Counter(malformed.verdict(case).split(":")[0] for case in CHOSEN[:: len(CHOSEN) // 300])
    assert len(CHOSEN) > 1500
    assert count["refused"] > 200


@pytest.mark.parametrize("body", ["D = accum + C\n    return D, D", "D = C.sum("])
def test_a_wrong_verdict_would_show(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself is checked: an accepted case that computes something else, or a bare error, fails."""
    monkeypatch.setattr(malformed.ef, "gemm", lambda *_, **__: None)
    with pytest.raises((AssertionError, TypeError)):
        malformed.verdict(Case("planted", malformed.epilogue(body)))
