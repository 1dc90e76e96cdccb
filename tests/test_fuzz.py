"""Three hundred random epilogues; `make fuzz N=10000` runs more and prints what they covered."""

import pytest
from fuzzing import case, check

CASES, CHUNK = 300, 25


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_random_epilogues(start):
    for seed in range(start, start + CHUNK):
        check.run(case.make(seed))
