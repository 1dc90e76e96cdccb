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
def test_each_kind_of_kernel_compiles_with_the_oldest_dsl():
    packages = os.pathsep.join(map(str, (INSTALLED / "nvidia_cutlass_dsl" / "dsl_packages", INSTALLED)))
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"PYTHONPATH": packages}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, *schedules = done.stdout.splitlines()
    assert version == promised()
    assert set(schedules) == {"pingpong", "cooperative", "swapped"}
    assert len(schedules) == 11


def compile_all():
    """Prints its version and the schedules; each must hold machine code of a warp group's multiplication."""
    import test_eight_bits as eight
    import test_sm90_compile as ours
    import test_weight_only as weight
    import torch

    bias = torch.empty(512, dtype=ours.BF16)
    # The design that is to be, or None for the best.
    wanted = [
        (ours.CASES["plain"], None),
        (ours.CASES["plain"], ours.SCHEDULES[128, 256]),
        (ours.CASES["bias gelu"], ours.SCHEDULES[128, 192]),
        (ours.CASES["residual"], ours.SCHEDULES[128, 128]),
        (ours.arguments(ours.column_sums, bias=bias), None),
        (ours.arguments(ours.row_statistics), ours.SCHEDULES[128, 256]),
        (ours.arguments(ours.softmax), None),
        *((eight.MEANT[name][0], None) for name in ("e4m3", "uint8 x int8 to int8")),
        *((weight.arguments(m=m, n=4096, k=4096), None) for m in (16, 4096)),
    ]
    print(importlib.metadata.version("nvidia-cutlass-dsl"))
    for args, design in wanted:
        with tempfile.TemporaryDirectory() as folder:
            _, made, function = ours.built(args, folder, design)
        assert "wgmma.mma_async" in function.__ptx__
        print(made.schedule)


if __name__ == "__main__":
    compile_all()
