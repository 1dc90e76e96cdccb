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
    version, *kernels = done.stdout.splitlines()
    assert version == promised()
    assert {name.split("_")[3] for name in kernels} == {"pingpong", "cooperative"}
    assert len(kernels) == 7


def compile_all():
    """Prints its version and the kernels; each must hold machine code of a warp group's multiplication."""
    import test_sm90_compile as ours
    import torch

    import epifuse as ef
    from epifuse.providers.cutedsl.accesses import arrange
    from epifuse.providers.cutedsl.compile import compile_program

    def softmax(accum, bias):
        D = ef.softmax(accum + bias, dim=-1)
        return D

    sums = ours.arguments(ours.column_sums, bias=torch.empty(512, dtype=ours.BF16))
    # The design that is to be, or None for the best.
    wanted = [
        (ours.CASES["plain"], None),
        (ours.CASES["plain"], "128x256_cooperative"),
        (ours.CASES["bias gelu"], "128x192_pingpong"),
        (ours.CASES["residual"], "128x128_pingpong"),
        (sums, None),
        (ours.arguments(ours.row_statistics), "128x256_cooperative"),
        (ours.arguments(softmax, bias=torch.empty(512, dtype=ours.BF16)), None),
    ]
    print(importlib.metadata.version("nvidia-cutlass-dsl"))
    for args, design in wanted:
        kernel = next(k for k in ef.get_kernels(args, cc=90) if (design or "") in k.metadata.kernel_name)
        plan = kernel.plan
        found = arrange(ours.lowered(plan.graph, plan.problem), plan.problem, dict(plan.spec.design)["design"])
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_program(plan, *found, extra_options=f" --keep-ptx --dump-dir={folder}")
        assert "wgmma.mma_async" in compiled.__ptx__
        print(kernel.metadata.kernel_name)


if __name__ == "__main__":
    compile_all()
