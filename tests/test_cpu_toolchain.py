"""The system's compiler: found, asked once a source, and replaced by the panel kernel where it cannot build."""

import itertools
import os
import subprocess

import pytest
import torch
from processes import run_python

import epifuse as ef
from epifuse.base import cache, store
from epifuse.base.config import Config
from epifuse.providers.cpu import native, toolchain
from epifuse.providers.cpu.emit_cpp import LANES

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in LANES or toolchain.missing() is not None,
    reason="no vector unit we emit for, or no C++ compiler: the kernel is refused there, which other tests cover",
)

FACTORS = itertools.count(2)

FIRST_CALLS = """
import threading, torch, epifuse as ef
a, b, c = torch.randn(2048, 64), torch.randn(64, 2048), torch.randn(2048, 2048)
start, results = threading.Barrier(4), []
def call(epilogue):
    start.wait()
    results.append(ef.gemm(a, b, epilogue=epilogue, C=c))
for factor in range(4):
    epilogue = f"lambda accum, C: (accum + C) * {factor}.5"
    threads = [threading.Thread(target=call, args=(epilogue,)) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for result in results: torch.testing.assert_close(result, (a @ b + c) * (factor + 0.5))
    assert len(results) == 4
    results.clear()
args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(epilogue, C=c, D=None))
assert "cpu_native (" in str(ef.explain(args)), ef.explain(args)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Small problems compile too, nothing is built or stored yet, and no compiler has failed."""
    monkeypatch.setattr(native, "CONFIG", Config(native_elements=0))
    monkeypatch.setattr(native, "FEWEST_ROWS", 1)
    monkeypatch.setattr(store, "CONFIG", Config(cache_dir=tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "_failures", {})
    cache.forget()
    toolchain._origin.cache_clear()
    yield
    toolchain._origin.cache_clear()


def arguments():
    """An epilogue that no test has planned before, and what it is to give."""
    a, b, c, factor = torch.randn(32, 8), torch.randn(8, 33), torch.randn(32, 33), next(FACTORS)
    epilogue = ef.EpilogueArguments.partial(f"lambda accum, C: gelu(accum + C) * {factor}.0", {"C": c})
    return ef.GemmArguments(a, b, epilogue=epilogue), torch.nn.functional.gelu(a @ b + c) * factor


def best(args):
    return ef.get_kernels(args)[0]


def name(args):
    return best(args).metadata.kernel_name


def run(program, **environment):
    done = run_python("-c", program, options=("error",), env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr


def test_four_threads_compile_once_and_another_process_nothing(tmp_path):
    run(FIRST_CALLS, OMP_NUM_THREADS="1", EPIFUSE_CACHE_DIR=str(tmp_path))
    assert len(list(tmp_path.glob("??/*.so"))) == 4
    run(FIRST_CALLS, OMP_NUM_THREADS="1", EPIFUSE_CACHE_DIR=str(tmp_path), EPIFUSE_NO_COMPILE="1")


def test_planning_starts_no_compiler(monkeypatch):
    def start(*_, **__):
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(subprocess, "Popen", start)
    args, _ = arguments()
    assert "plan" in str(ef.explain(args))
    assert name(args) == "cpu_native"


def test_cxx_may_hold_arguments(monkeypatch, tmp_path):
    program = tmp_path / "my compiler"
    program.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\nexec g++ "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{program}' -m64 -DX='a b'")
    args, want = arguments()
    torch.testing.assert_close(best(args).run(args)["D"], want)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(call.startswith("-m64 -DX=a b ") for call in calls)
    assert sum("--version" not in call for call in calls) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no-such-compiler -m64", "CXX='no-such-compiler -m64' names no program on the PATH"),
        ("g++ '-m64", 'CXX="g++ \'-m64" is not a command: No closing quotation'),
    ],
)
def test_a_cxx_that_is_no_program_is_refused_by_name(text, reason, monkeypatch):
    monkeypatch.setenv("CXX", text)
    args, want = arguments()
    assert reason in str(ef.explain(args))
    assert name(args) == "cpu_panel"
    torch.testing.assert_close(best(args).run(args)["D"], want)


def test_without_cxx_the_path_is_searched(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "g++ or clang++" in toolchain.missing()


BROKEN = {
    "says why": ('echo "no space in the head" >&2; exit 1', "no space in the head"),
    "dies silently": ('[ "$1" = --version ] || kill -9 $$', "died with"),
    "makes no file": ("exit 0", "No such file"),
    "makes no library": (
        '[ "$1" = --version ] || for last; do [ "$o" = -o ] && echo x > "$last"; o=$last; done',
        "file too short",
    ),
    "leaves the function out": ('cat > /dev/null; [ "$1" = --version ] || echo | g++ "$@"', "undefined symbol"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_compiler_warns_once_and_the_panel_runs(how, monkeypatch, tmp_path):
    script, words = BROKEN[how]
    program = tmp_path / "broken"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    first, second = arguments(), arguments()
    kernels = [best(args) for args, _ in (first, second)]
    assert [kernel.metadata.kernel_name for kernel in kernels] == ["cpu_native"] * 2
    with pytest.warns(UserWarning, match=words) as caught:
        results = [kernel.run(args)["D"] for kernel, (args, _) in zip(kernels, (first, second), strict=True)]
    torch.testing.assert_close(results, [first[1], second[1]])
    assert len(caught) == 1
    later, _ = arguments()
    assert name(later) == "cpu_panel"
    assert words in str(ef.explain(later))


def _other_cpu(monkeypatch, tmp_path):
    text = toolchain._CPU.read_text().replace(" avx2", "", 1)
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(toolchain, "_CPU", tmp_path / "cpuinfo")


def _moved_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))


DIFFERENCES = {
    "another CPU": _other_cpu,
    "PyTorch in another folder": _moved_torch,
    "another PyTorch": lambda monkeypatch, _: monkeypatch.setattr(torch, "__version__", "2.8.0"),
    "other flags": lambda monkeypatch, _: monkeypatch.setattr(toolchain, "_FLAGS", (*toolchain._FLAGS, "-O2")),
    "another compiler": lambda monkeypatch, _: monkeypatch.setattr(toolchain, "_run", lambda *_: "g++ 1.0"),
    "an argument of the compiler": lambda monkeypatch, _: monkeypatch.setenv("CXX", "g++ -m64"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_was_built_otherwise_is_not_found(difference, monkeypatch, tmp_path):
    before = toolchain._key(toolchain._compiler(), "source")
    assert before == toolchain._key(toolchain._compiler(), "source")
    assert before != toolchain._key(toolchain._compiler(), "another source")
    toolchain._origin.cache_clear()
    DIFFERENCES[difference](monkeypatch, tmp_path)
    assert toolchain._key(toolchain._compiler(), "source") != before


def test_a_cpu_that_cannot_be_identified_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_CPU", tmp_path / "not there")
    with pytest.raises(toolchain.BuildError, match="which instructions"):
        toolchain._key(toolchain._compiler(), "source")


def test_forbidden_compiling_is_an_error_of_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "CONFIG", Config(cache_dir=tmp_path / "cache", no_compile=True))
    args, _ = arguments()
    with pytest.raises(ef.errors.UnsupportedError, match="EPIFUSE_NO_COMPILE"):
        best(args).run(args)
