"""`import epifuse` is cheap and silent: no compiler and no form is loaded, no device is touched.

What launches a kernel is loaded where PyTorch can drive a GPU, so that no first call waits for it."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_each, run_python

PROBE = """
import epifuse, sys, torch
assert "cutlass" not in sys.modules, "cutlass was imported"
assert ("tvm_ffi" in sys.modules) <= (torch.version.cuda is not None), "the runtime was imported"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
"""


def run(program: str, folder: Path) -> str:
    file = folder / "program.py"  # an epilogue's source is read from its file
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def test_import_is_silent_and_lazy(tmp_path: Path) -> None:
    assert run(PROBE, tmp_path) == ""


BROADCAST = """
import epifuse as ef, sys, torch
def scaled(accum, scale, slope):
    heads = accum.unflatten(-1, (-1, 2))
    rows = accum.logsumexp(-1) + scale * 2
    D = heads.mean(-1, keepdim=True) * slope + heads
    return rows, D
ef.gemm(torch.ones(3, 5), torch.ones(5, 8), epilogue=scaled, scale=torch.ones(1), slope=torch.ones(2))
assert "sympy" not in sys.modules
"""


def test_operands_broadcast_without_a_slow_import(tmp_path: Path) -> None:
    assert run(BROADCAST, tmp_path) == ""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_are_imported_on_every_gpu(arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel for one GPU is imported with those for others: no other GPU's operation may be made then."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)  # in place of the machine's GPU
    (tmp_path / "program.py").write_text("import epifuse.providers.cutedsl.compile")
    done = run_python(str(tmp_path / "program.py"))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


IN_AN_EPILOGUE = """
import torch
def identity(accum):
    return ef.evt.functional.identity(accum)
print(int(ef.gemm(torch.ones(2, 3), torch.ones(3, 2), epilogue=identity)[0, 0]))
"""
PROGRAMS = {
    "print(ef.DenseGemm.__name__)": "DenseGemm",
    "print(ef.evt.EVT.__name__)": "EVT",
    "from epifuse import Gemm; print(Gemm.__name__)": "Gemm",
    "import epifuse.thread; print(ef.thread.__name__)": "epifuse.forms.thread",
    "try: ef.densegemm\nexcept AttributeError as error: print(error)": "write epifuse.DenseGemm",
    IN_AN_EPILOGUE: "3",
}
"""What each prints."""


def test_a_form_is_imported_when_it_is_asked_for(tmp_path: Path) -> None:
    before = "import sys, epifuse as ef\nassert not [name for name in sys.modules if 'epifuse.forms' in name]\n"
    files = {tmp_path / f"{i}.py": program for i, program in enumerate(PROGRAMS)}
    for file, program in files.items():
        file.write_text(before + program)
    printed = run_each([[str(file)] for file in files])
    assert len(printed) == len(PROGRAMS)
    for file, program in files.items():
        assert PROGRAMS[program] in printed[str(file)]
