"""What the GPU tests share: the machine they run on, and a count of what the Hopper kernel refused."""

import pytest
import torch
from gpu.harness import REFUSED, Machine


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def machine(request: pytest.FixtureRequest) -> Machine:
    """A Hopper GPU, and the CPU with the same test: there only Hopper's plan is checked, and the test's own logic."""
    if request.param == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is built for sm_90a")
    return Machine(request.param)


@pytest.fixture
def hopper() -> Machine:
    """A Hopper GPU; the test is marked `gpu`."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is built for sm_90a")
    return Machine("cuda")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(REFUSED in str(report.longrepr[-1]) for report in skipped)
    if count:
        terminalreporter.write_line(f"{count} gpu tests skipped: the Hopper kernel refuses them", yellow=True)
