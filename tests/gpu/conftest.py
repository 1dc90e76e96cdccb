"""What the GPU tests share: the machine they run on."""

import pytest
from gpu.harness import Machine


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def machine(request: pytest.FixtureRequest) -> Machine:
    """A Hopper GPU, and the CPU with the same test: there only Hopper's plan is checked, and the test's own logic.

    With `--schedule` a GPU whose kernel of that schedule is tested."""
    return Machine(request.param, request.config.getoption("--schedule"))


@pytest.fixture
def hopper(request: pytest.FixtureRequest) -> Machine:
    """A Hopper GPU; the test is marked `gpu`."""
    return Machine("cuda", request.config.getoption("--schedule"))
