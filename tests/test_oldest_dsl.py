"""The oldest CuTe DSL that pyproject promises compiles every kind of Hopper kernel; `make test` installs it too."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
INSTALLED = HOME / ".venv" / "oldest"


def promised():
    return re.search(r"nvidia-cutlass-dsl\[cu13\]>=([\d.]+)", (HOME / "pyproject.toml").read_text())[1]


@pytest.mark.skipif(not INSTALLED.exists(), reason="`make oldest` installs the oldest CuTe DSL that is promised")
def test_each_kind_of_kernel_compiles_with_the_oldest_dsl(whole_sweeps):
    """Each schedule, reductions, whole rows, 8 bits, and a weight that is converted; more where sweeps are whole."""
    packages = os.pathsep.join(map(str, (INSTALLED / "nvidia_cutlass_dsl" / "dsl_packages", INSTALLED)))
    done = subprocess.run(
        [sys.executable, __file__, *(["all"] if whole_sweeps else [])],
        env=os.environ | {"PYTHONPATH": packages},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, *schedules = done.stdout.splitlines()
    assert version == promised()
    assert set(schedules) == {"pingpong", "cooperative", "swapped"}
    assert len(schedules) == (11 if whole_sweeps else 6)


def compile_all(is_whole):
    """Prints its version and the schedules; each must hold machine code of a warp group's multiplication."""
    import test_eight_bits as eight
    import test_sm90_compile as ours
    import test_weight_only as weight
    import torch

    bias = torch.empty(512, dtype=ours.BF16)
    # The design that is to be, or None for the best.
    wanted = [
        (ours.CASES["plain"], ours.SCHEDULES[128, 256]),
        (ours.CASES["bias gelu"], ours.SCHEDULES[128, 192]),
        (ours.arguments(ours.column_sums, bias=bias), None),
        (ours.arguments(ours.softmax), None),
        (eight.MEANT["e4m3"][0], None),
        (weight.arguments(m=16, n=4096, k=4096), None),
    ]
    further = [
        (ours.CASES["plain"], None),
        (ours.CASES["residual"], ours.SCHEDULES[128, 128]),
        (ours.arguments(ours.row_statistics), ours.SCHEDULES[128, 256]),
        (eight.MEANT["uint8 x int8 to int8"][0], None),
        (weight.arguments(m=4096, n=4096, k=4096), None),
    ]
    print(importlib.metadata.version("nvidia-cutlass-dsl"))
    for args, design in [*wanted, *further] if is_whole else wanted:
        with tempfile.TemporaryDirectory() as folder:
            _, made, function = ours.built(args, folder, design)
        assert "wgmma.mma_async" in function.__ptx__
        print(made.schedule)


if __name__ == "__main__":
    compile_all("all" in sys.argv)
