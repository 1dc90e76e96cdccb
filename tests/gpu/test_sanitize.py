"""The program for compute-sanitizer is right: on the CPU here, on a GPU under the tool."""

import pytest
from gpu import sanitize


@pytest.mark.parametrize("name", sanitize.SETS)
def test_a_set(name: str) -> None:
    assert sanitize.main(["--device", "cpu", name]) == 0
