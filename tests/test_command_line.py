"""The commands `doctor`, `explain` and `cache`: what they say is so, at 80 columns, and their errors are sentences."""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import epifuse as ef
from epifuse.__main__ import main
from epifuse.base import store
from epifuse.base.config import Config, from_environment
from epifuse.providers.cpu import toolchain
from epifuse.providers.cutedsl import load
from epifuse.tools import described, doctor, tune
from epifuse.tools.doctor import Gpu
from epifuse.tools.lines import rows, size, wrapped

FILE = """
from dataclasses import dataclass

import epifuse as ef
from beside import SLOPE

@dataclass
class Options:
    slope: float = SLOPE

def gelu_bias(accum, bias, residual, alpha=2.0):
    D = ef.gelu(alpha * accum + bias) + residual
    return D

def odd(accum, table, flag=None):
    D = accum * table + (0.0 if flag is None else flag)
    return D

def _helper(x):
    return x
"""
H100 = Gpu("NVIDIA H100", 90, 80 << 30)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("SLOPE = 0.5\n")
    (tmp_path / "epilogues.py").write_text(FILE)
    return str(tmp_path / "epilogues.py")


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """What a command prints, which fits 80 columns but for words that are longer."""
    assert main(words) == status
    out = capsys.readouterr().out
    long = [line for line in out.splitlines() if len(line) > 80 and len(line.split()) > 1 and "/" not in line]
    assert long == []
    return out


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code in (1, 2)
    return capsys.readouterr().err


# --- doctor ---------------------------------------------------------------------------------------------------------


def machine(monkeypatch: pytest.MonkeyPatch, gpus: Iterable[Gpu] = (), lacks: str | None = None) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: list(gpus))
    monkeypatch.setattr(load, "lacking", lambda: lacks)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(monkeypatch)
    out = said(capsys, "doctor")
    for row in (f"PyTorch       {torch.__version__}", "GPU           none that PyTorch can use", "EPIFUSE_CACHE_DIR="):
        assert row in out
    able, unable = out.split("Kernels that can run here")[1].split("Kernels that cannot")
    assert "cpu_panel" in able
    assert "cpu_native" in able
    assert "needs a GPU of compute capability 9.0 (sm_90a), and this machine has none" in " ".join(unable.split())
    assert "ef.precompile(args, cc=90)" in unable


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(monkeypatch, [H100])
    out = said(capsys, "doctor")
    assert "0: NVIDIA H100, compute capability 9.0, 85.9 GB" in out
    able, _, unable = out.partition("Kernels that cannot")
    assert "sm90_gemm" in able
    assert "sm90_gemm" not in unable


def test_a_gpu_whose_kernels_cannot_run_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, [H100], "nvidia-cutlass-dsl is not there")
    assert "nvidia-cutlass-dsl is not there" in said(capsys, "doctor", status=1)


def test_another_gpu_and_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(monkeypatch, [Gpu("NVIDIA A100", 80, 40 << 30)])
    monkeypatch.setattr(toolchain, "missing", lambda: "it needs g++ or clang++ on the PATH")
    unable = " ".join(said(capsys, "doctor", status=1).split("Kernels that cannot")[1].split())
    assert "and this machine has 8.0" in unable
    assert "it has never run on a GPU of sm_80: EPIFUSE_UNTESTED=1, set before Python starts, takes it" in unable
    assert "it needs g++ or clang++" in unable


def test_what_is_lacking_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[str, ...]:
        raise load._not_installed()

    monkeypatch.setattr(load, "compiler", absent)
    assert "nvidia-cutlass-dsl" in str(load.lacking())
    monkeypatch.setattr(load, "compiler", lambda: ())
    assert load.lacking() is None


def test_what_pytorch_and_the_driver_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert doctor._gpus() == [H100, H100]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._gpus() == []
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    assert doctor._driver() == ""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Tue\nGCC version: 12\n"
    )
    assert doctor._driver() == "580.65.06, "
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [doctor._why_no_gpu(newest) for newest in (None, 13)] == ["", "install a build of PyTorch for CUDA"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in doctor._why_no_gpu(13)


# --- explain --------------------------------------------------------------------------------------------------------


def test_an_epilogue_in_a_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "explain", f"{file}:gelu_bias", "--mnk", "4096", "14336", "4096", "--cc", "90")
    assert "bias, residual: guessed from the name" in out
    assert "call gelu_erf" in out
    assert "M=4096 N=14336 K=4096, A bf16, B bf16, accumulator f32, on sm_90a" in out
    assert "cpu_native, cpu_panel: runs on the CPU" in out


def test_it_says_what_explain_says(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = "lambda accum, bias: relu(accum + bias)"
    out = said(capsys, "explain", source, "--m", "64", "--n", "32", "--k", "16", "--dtype", "float32", "--cc", "0")
    a, b = torch.empty(64, 16, device="meta"), torch.empty(32, 16, device="meta").t()
    epilogue = ef.EpilogueArguments.partial(source, {"bias": torch.empty(32, device="meta")})
    explained = str(ef.explain(ef.GemmArguments(a, b, epilogue=epilogue), cc=0))
    assert out.split() == [*out.split("\n\n")[0].split(), *explained.split()]


def test_operands_are_described(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --arg table=N for a row" in error(capsys, "explain", f"{file}:odd")
    words = ("explain", f"{file}:odd", "--batch", "2", "--m", "48", "--arg", "table=LxMx1:float32", "--arg", "flag=2")
    out = said(capsys, *words, "--dtype", "float8_e4m3fn", "--cc", "0")
    assert "load     table: batch column, f32[2, 48, 1]" in out
    assert "host #0 = flag" in out


def test_nothing_can_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "lambda accum: accum.softmax(-1)", "--n", "10000", "--cc", "90")
    out = said(capsys, *words, status=1)
    assert "no kernel can run this" in out
    assert "softmax over N = 10000 does not fit" in " ".join(out.split())
    assert "2 launches" in said(capsys, *words, "--allow-recompute")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{file}:nothing"], "names no function\n  hint: write {file}:gelu_bias; there are gelu_bias, odd"),
        (["{file}"], "{file} names no function"),
        (["{file}x.py:f"], "there is no such file"),
        (["{folder}/beside.py:f"], "it defines no function"),
        (["{folder}/wrong.py:f"], "line 2: ZeroDivisionError: division by zero"),
        (["{folder}/exits.py:f"], "SystemExit: 3"),
        (["no.such:f"], "No module named 'no'"),
        (["{file}:gelu_bias", "--cc", "42"], "cc must be one of"),
        (["{file}:gelu_bias", "--m", "-3"], "M must be a whole number"),
        (["{file}:gelu_bias", "--arg", "bias=Q"], "is not a name and dims or a number"),
        (["{file}:gelu_bias", "--arg", "no_such=N"], "Unexpected argument 'no_such'"),
        (["{file}:gelu_bias", "--dtype", "complex64"], "complex64 is none of"),
        (["{file}:gelu_bias", "--dtype", "float17"], "no dtype of PyTorch"),
        (["{file}:gelu_bias", "--arg", "bias=7x7"], "does not broadcast"),
        (["wrong:f"], "ZeroDivisionError: division by zero"),
        (["exits:f"], "SystemExit: 3"),
        ([".beside:f"], "TypeError: the 'package' argument is required"),
        (["{file}:gelu_bias", "--m", "9" * 20], "a tensor on meta must be one that PyTorch can make"),
        (["{file}:gelu_bias", "--arg", f"bias={'9' * 20}x1"], "a tensor on meta must be one that PyTorch can make"),
        (["{file}:gelu_bias", "--mnk", *["4294967296"] * 3], "Storage size calculation overflowed"),
    ],
    ids=str,
)
def test_mistakes(
    words: list[str],
    sentence: str,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(file).parent
    monkeypatch.syspath_prepend(folder)
    (folder / "wrong.py").write_text("x = 0\n1 / x\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    places = {"file": file, "folder": str(folder)}
    printed = " ".join(error(capsys, "explain", *(word.format(**places) for word in words)).split())
    assert " ".join(sentence.format(**places).split()) in printed


def test_the_only_function_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def epi(accum):\n    return accum\n")
    assert described.epilogue(str(tmp_path / "one.py")).__name__ == "epi"
    assert described.epilogue("lambda accum: accum") == "lambda accum: accum"


def test_operands_beside_8_bits_are_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In both commands that describe operands."""
    asked: list[ef.GemmArguments] = []
    monkeypatch.setattr(tune, "tune", lambda args, *, anew: asked.extend(args) or True)
    said(capsys, "tune", "64x64x64", "--dtype", "int8", "--epilogue", "lambda accum, s: accum * s", "--arg", "s=N")
    assert dict(asked[0].problem.operands)["s"].dtype == torch.float32
    words = ("--mnk", "64", "64", "64", "--dtype", "int8", "--cc", "0", "--arg", "s=N", "--arg", "z=N:int8")
    out = said(capsys, "explain", "lambda accum, s, z: (accum - z) * s", *words)
    assert "s: row, f32[64]" in out
    assert "z: row, s8[64]" in out


def test_constraints_are_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[ef.GemmArguments] = []
    monkeypatch.setattr(tune, "tune", lambda args, *, anew: asked.extend(args) or True)
    flags = dict.fromkeys(("allow_recompute", "batch_invariant", "fast_accum", "fast_math"), True)
    words = [f"--{name.replace('_', '-')}" for name in flags]
    said(capsys, "tune", "64x64x64", *words, "--split", "2", "--precision", "ieee")
    said(capsys, "tune", "64x64x64")
    given, none = (args.problem.constraints for args in asked)
    assert given == ef.Constraints(**flags, split=2, precision="ieee")
    assert none == ef.Constraints()
    split = said(capsys, "explain", "lambda accum: accum", "--mnk", "64", "64", "4096", "--cc", "90", "--split", "2")
    assert "K in 2 parts" in split


def test_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a tensor on cuda:99 must be one" in error(capsys, "tune", "64x64x64", "--device", "cuda:99")


def test_an_interrupt_or_a_closed_pipe_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor"]) == 130
    source, sink = os.pipe()
    os.close(source)
    command = [sys.executable, "-m", "epifuse", "doctor"]
    done = subprocess.run(command, stdout=sink, stderr=subprocess.PIPE, text=True, check=False)
    os.close(sink)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_an_encoding_lacks_is_escaped() -> None:
    command, variables = [sys.executable, "-m", "epifuse", "docs"], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "\\u2013" in done.stdout


# --- cache ----------------------------------------------------------------------------------------------------------


def filled(folder: Path) -> Path:
    first, second = (digits + "0" * 62 for digits in ("0a", "0b"))
    stored = (f"0a/{first}.{'1' * 64}.so", f"0a/{first}.{'2' * 64}.json", f"0b/{second}.{'3' * 64}.o")
    for place in (*stored, f"0b/{'4' * 16}.part", "0b/lock", f"tuned/{'5' * 64}.json"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text("ten bytes.")
    return folder


def test_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own, image = filled(tmp_path / "own"), filled(tmp_path / "image")
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=own, cache_readonly=image))
    shown = said(capsys, "cache")
    assert shown.count("2 kernels, times of 1 site, tuned: 1 file, 50 bytes") == 2
    assert str(own) in shown
    assert str(image) in shown
    assert said(capsys, "cache", "info") == shown
    assert "removed 2 kernels, times of 1 site, 40 bytes" in said(capsys, "cache", "clear")
    assert sorted(path.name for path in own.rglob("*.*")) == [f"{'5' * 64}.json"]
    assert len(list(image.rglob("*.*"))) == 5, "that folder is only read"
    said(capsys, "cache", "clear", "--tuned")
    assert list(own.rglob("*.*")) == []
    assert "0 kernels, 0 bytes" in said(capsys, "cache")


def test_what_another_process_makes_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = filled(tmp_path / "own")
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=own))
    with store.lock(own, "0a"):
        assert "removed 1 kernel, 20 bytes" in said(capsys, "cache", "clear", status=1)
    assert list(own.glob("0a/*.so"))
    assert said(capsys, "cache", "clear").startswith("removed 1 kernel, times of 1 site, 20 bytes")


def test_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=tmp_path / "file"))
    monkeypatch.setattr(store, "_warned", {})
    with pytest.warns(UserWarning, match="are not shared"):
        assert "none that can be used" in said(capsys, "cache")
    monkeypatch.setattr(store, "_warned", {})
    machine(monkeypatch)
    assert "no folder; compiled kernels and what was measured are not shared" in said(capsys, "doctor")


# --- lines ----------------------------------------------------------------------------------------------------------


def test_long_lines_are_cut_below_their_text() -> None:
    assert wrapped("note     " + "word " * 8, 30).splitlines() == [
        "note     word word word word",
        "         word word word word",
    ]
    assert wrapped("  %12 = short") == "  %12 = short"
    assert list(rows([("a", "one two three"), ("bc", "x\ny")], 13)) == [
        "  a   one two\n      three",
        "  bc  x",
        "      y",
    ]


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1500, 2 << 30, 10**13)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2.15 GB",
        "1e+04 GB",
    ]


def test_tuning_knows_operands_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "16x16x16", "--device", "cpu", "--dtype", "f32", "--epilogue"]
    assert main([*words, "lambda accum, bias: accum + bias"]) == 0
    assert "cpu" in capsys.readouterr().out
    assert "nothing says what that is" in error(capsys, *words, "lambda accum, zz: accum + zz")
    assert "must be an operand of an --epilogue" in error(capsys, *words[:-1], "--arg", "zz=N")


# --- outputs, compilers and folders that fail ------------------------------------------------------------------------


def command(shell: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell in which $EPIFUSE is the command line."""
    variables = {**os.environ, "EPIFUSE": f"{sys.executable} -W ignore -m epifuse", "EPIFUSE_CACHE_DIR": str(folder)}
    return subprocess.run(
        ["sh", "-c", shell], env={**variables, **environment}, capture_output=True, text=True, check=False
    )


def test_a_closed_output_is_nobody_who_reads(tmp_path: Path) -> None:
    done = command("$EPIFUSE version >&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    done = command("$EPIFUSE docs >/dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["epifuse: [Errno 28] No space left on device"]


TUNE = "$EPIFUSE tune 64x64x64 --dtype float32 --epilogue 'lambda accum: tanh(accum - 0.5)'"


@pytest.mark.parametrize("compiler", ["/bin/false", "garbage"])
def test_tuning_goes_on_beside_a_compiler_that_does_not_run(compiler: str, tmp_path: Path) -> None:
    (garbage := tmp_path / "garbage").write_text("garbage")
    garbage.chmod(0o755)
    chosen = str(garbage) if compiler == "garbage" else compiler
    done = command(TUNE, tmp_path / "cache", CXX=chosen, EPIFUSE_NATIVE_ELEMENTS="1")
    assert "Traceback" not in done.stderr
    assert "the fastest of" in done.stdout


def test_batches_are_tuned(tmp_path: Path) -> None:
    done = command("$EPIFUSE tune 8x8x8 --dtype float32 --batch 4 --epilogue 'lambda accum: accum + 1'", tmp_path)
    assert done.returncode == 0
    assert "L=4 M=8 N=8 K=8" in done.stdout
    assert "no whole number, 1 or more" in command("$EPIFUSE tune 8x8x8 --batch 0", tmp_path).stderr


def test_tuning_says_where_nothing_is_kept(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    done = command("$EPIFUSE tune 8x8x8 --dtype float32", shared)
    assert done.returncode == 1
    assert "nothing was kept: set EPIFUSE_CACHE_DIR" in done.stderr


def test_tuning_says_so_where_its_own_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "tuned").touch()
    done = command("$EPIFUSE tune 8x8x8 --dtype float32", tmp_path)
    assert (done.returncode, "nothing was kept" in done.stderr) == (1, True)


def test_merging_reads_all_before_it_writes(tmp_path: Path) -> None:
    assert command("$EPIFUSE tune 8x8x8 --dtype float32", tmp_path / "one").returncode == 0
    (tmp_path / "one" / "tuned" / f"{'f' * 64}.json").write_text("{broken")
    done = command(f"$EPIFUSE tune --merge {tmp_path / 'one'}", tmp_path / "two")
    assert done.returncode == 1
    assert "holds no results of ef.tune" in done.stderr
    assert not list((tmp_path / "two").rglob("*.json"))


def test_an_empty_variable_is_an_unset_one() -> None:
    assert from_environment({"EPIFUSE_UNTESTED": "", "EPIFUSE_CACHE_BYTES": "", "EPIFUSE_CACHE_DIR": ""}) == Config()
