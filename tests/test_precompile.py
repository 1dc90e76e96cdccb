"""Kernels compiled ahead: into the store and by workers, for any target; what is left out is said."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import epifuse as ef
from epifuse.base import store
from epifuse.base.cache import forget
from epifuse.base.errors import EpifuseError
from epifuse.providers.cpu import toolchain
from epifuse.providers.cpu.emit_cpp import LANES
from epifuse.runtime import precompile as ahead
from epifuse.runtime import workers


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store without files, here and in workers, and nothing loaded."""
    monkeypatch.setenv("EPIFUSE_CACHE_DIR", str(tmp_path / "store"))  # for processes that a test starts
    config = replace(store.CONFIG, cache_dir=tmp_path / "store")
    monkeypatch.setattr(store, "CONFIG", config)
    monkeypatch.setattr(workers, "CONFIG", config)
    forget()
    return tmp_path / "store"


def biased(accum: Any, bias: Any) -> Any:
    D = ef.relu(accum + bias)
    return D


def arguments(m: int = 512, n: int = 512, k: int = 512, dtype: torch.dtype = torch.bfloat16) -> ef.GemmArguments:
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta").t()
    epilogue = ef.EpilogueArguments.partial(biased, {"bias": torch.empty(n, device="meta")})
    return ef.GemmArguments(a, b, epilogue=epilogue)


def test_kernels_for_a_gpu_are_compiled_without_one(empty_store: Path) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    both = arguments(), arguments(m=510)
    done = ef.precompile(iter(both), cc=90, workers=1)
    assert str(done) == "compiled 1 kernel, found 0 in the store"
    assert done
    assert "sm90_gemm" in done.compiled[0]
    assert len(list(empty_store.glob("??/*.so"))) == 1
    again = ef.precompile(both, cc=90)
    assert (again.compiled, again.found) == ((), done.compiled)


@pytest.fixture
def loop() -> ef.GemmArguments:
    """What the CPU compiles a loop for."""
    if torch.backends.cpu.get_cpu_capability() not in LANES or toolchain.missing() is not None:
        pytest.skip("no vector unit we emit for, or no C++ compiler: the kernel is refused, which other tests cover")
    args = arguments(2048, 2048, 64, torch.float32)
    assert ef.get_kernels(args, cc=0)[0].spec.name == "cpu_native"
    return args


RUN = """
import torch, epifuse as ef
a, b, bias = torch.randn(2048, 64), torch.randn(2048, 64).t(), torch.randn(2048)
epilogue = "lambda accum, bias: relu(accum + bias)"
found = ef.gemm(a, b, epilogue=epilogue, bias=bias)
torch.testing.assert_close(found, torch.relu(a @ b + bias))
"""


def test_without_compiling_a_precompiled_kernel_runs(empty_store: Path, loop: ef.GemmArguments) -> None:
    environment = os.environ | {"EPIFUSE_NO_COMPILE": "1"}

    def run() -> subprocess.CompletedProcess[str]:
        return run_python("-c", RUN, env=environment)

    refused = run()
    assert "cpu_native is not compiled" in refused.stderr
    assert "ef.precompile" in refused.stderr
    assert ef.precompile(loop).compiled
    allowed = run()
    assert allowed.returncode == 0, allowed.stderr


def test_several_targets_and_what_has_none(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ef.precompile(arguments(), cc=[0, 80])
    assert not done
    assert str(done).startswith("compiled 0 kernels, found 0 in the store, 1 failed:\n  M=512 N=512 K=512")
    assert "sm_80" in done.failed[0][0]
    with pytest.raises(EpifuseError, match="got '90'"):
        ef.precompile(arguments(), cc="90")


def test_what_does_not_compile_is_listed(
    empty_store: Path, loop: ef.GemmArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "is_stored", lambda source: False)
    monkeypatch.setattr(workers, "CONFIG", replace(workers.CONFIG, no_compile=True))
    done = ef.precompile(loop, workers=1)
    ((name, why),) = done.failed
    assert "cpu_native" in name
    assert "EPIFUSE_NO_COMPILE=1 forbids compiling" in why


def test_what_the_store_does_not_keep_is_listed(loop: ef.GemmArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "is_stored", lambda source: False)
    ((_, why),) = ef.precompile(loop, workers=1).failed
    assert "EPIFUSE_CACHE_DIR" in why


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_told_to_who_watches(
    watched: bool, empty_store: Path, loop: ef.GemmArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: watched)
    monkeypatch.setattr(ahead.sys, "stderr", screen)
    ef.precompile(loop, workers=1)
    assert screen.getvalue() == ("compiled 1 of 1 kernels\n" if watched else "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"args": torch.ones(2)},
        {"args": torch.tensor(1.0)},
        {"args": [None]},
        {"args": "sm90_gemm"},
        {"cc": 91},
        {"cc": [90, "90"]},
        {"workers": 0},
        {"workers": 2.0},
        {"progress": None},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    given = {"args": [], **wrong}
    if "cc" in wrong:
        given["args"] = arguments()
    with pytest.raises(EpifuseError, match=r"precompile|cc must be|workers must be|progress must be"):
        ef.precompile(**given)


def test_nothing_is_no_work() -> None:
    assert str(ef.precompile([])) == "compiled 0 kernels, found 0 in the store"


def test_a_driver_that_is_too_old_is_named(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epifuse.providers.cutedsl import load

    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    monkeypatch.setattr(load, "cuda_of_the_driver", lambda: 11)
    for kept in (load.runtime_library, load.compiler):
        kept.cache_clear()
    with pytest.raises(ef.errors.UnsupportedError, match="the driver knows CUDA up to 11, and the package"):
        ef.precompile(arguments(), cc=90)


def test_without_the_compiler_the_package_is_named(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from epifuse.providers.cutedsl import load

    monkeypatch.setitem(sys.modules, "cutlass", None)
    for kept in (load.runtime_library, load.compiler):
        kept.cache_clear()
    kernel = ef.get_kernels(arguments(), cc=90)[0]
    for run in (lambda: ef.precompile(arguments(), cc=90), lambda: kernel.compile(arguments())):
        with pytest.raises(ef.errors.UnsupportedError, match="needs the package nvidia-cutlass-dsl"):
            run()


def test_an_artifact_for_meta_tensors_names_the_device() -> None:
    a, b = torch.ones(4, 3), torch.ones(3, 5)
    described = ef.GemmArguments(a.to("meta"), b.to("meta"))
    (kernel,) = ef.get_kernels(described, cc=0, limit=1)
    artifact = kernel.compile(described)
    with pytest.raises(ef.errors.ArgumentError, match="for other arguments: tensors on meta, not on cpu"):
        kernel.run(ef.GemmArguments(a, b), compiled_artifact=artifact)
