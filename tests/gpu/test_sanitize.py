"""The program for compute-sanitizer runs, and judges what it ran."""

from gpu import sanitize
from gpu.harness import Machine


def test_every_set(machine: Machine) -> None:
    assert sanitize.main(["--device", machine.device]) == 0
