"""No second stall on a Hopper GPU: the longest of 400 calls with random M, and the same bits once all is compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

N = K = 1024
STALL = 300.0  # ms: compiling a kernel takes over a second

SETTING = f"""
import sys, time, warnings
import torch
import epifuse as ef
from epifuse.base.loaded import LOADED
from epifuse.runtime import background

def gelu(accum, bias):
    D = ef.gelu(accum + bias, approximate="tanh")
    return D

warnings.filterwarnings("error", message=".*compile")
torch.manual_seed(0)
a, b = torch.randn(8192, {K}).bfloat16().cuda(), torch.randn({N}, {K}).bfloat16().cuda().t()
bias = torch.randn({N}).cuda()
want = torch.nn.functional.gelu(a.float() @ b.float() + bias, approximate="tanh")

def run(m):
    return ef.gemm(a[:m], b, epilogue=gelu, bias=bias)

def timed(m):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    found = run(m)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun), found

def submitted():
    return [entry[0] for entry in background._SUBMITTED._entries.values()]

def wait():
    for outcome in submitted():
        assert outcome.result(timeout=300) is None
"""

CALLS = """
sizes = torch.randint(1, 8193, (400,)).tolist()
times, found = zip(*map(timed, sizes))
for m, one in zip(sizes, found):
    torch.testing.assert_close(one.float(), want[:m], rtol=2e-2, atol=2e-2)
waited_for = None
while waited_for != len(submitted()):
    waited_for = len(submitted())
    wait()
    again = [run(m) for m in sizes]
assert all(map(torch.equal, found, again)), "a stand-in has other bits"
print(times[0], max(times[1:]), len(submitted()), len(LOADED), "cutlass" in sys.modules)
"""

CAPTURED = """
run(200)
run(4096)
assert len(submitted()) == 1, "there was no stand-in"
wait()
before, graph, stream = len(LOADED), torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph, stream=stream):
    captured = run(4096)
    unseen = run(4000)
assert len(LOADED) == before, "a kernel was loaded while a graph was captured"
graph.replay()
torch.cuda.synchronize()
swapped = run(4096)
assert len(LOADED) == before + 1, "the better kernel does not serve"
assert torch.equal(captured, swapped) and torch.equal(unseen, run(4000))
torch.testing.assert_close(captured.float(), want[:4096], rtol=2e-2, atol=2e-2)
"""

FORBIDDEN = """
try:
    run(64)
except ef.errors.UnsupportedError as error:
    print(error)
warnings.resetwarnings()
with warnings.catch_warnings(record=True) as told:
    found = ef.gemm(a[:64], b, epilogue=gelu, bias=bias, fallback="torch")
assert "is not compiled" in str(told[-1].message)
torch.testing.assert_close(found.float(), want[:64], rtol=2e-2, atol=2e-2)
assert "cutlass" not in sys.modules
"""


def printed(program: str, folder: Path, **variables: str) -> str:
    """What a new process prints."""
    environment = os.environ | {"EPIFUSE_CACHE_DIR": str(folder)} | variables
    file = folder.with_suffix(".py")  # an epilogue's source is read from its file
    file.write_text(SETTING + program)
    command = [sys.executable, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_call_but_the_first_waits_for_a_compiler(tmp_path: Path) -> None:
    for process in ("with an empty store", "with the store that it left"):
        first, longest, submitted, loaded, imported = printed(CALLS, tmp_path / "store").split()
        print(
            f"{process}: {float(first):.0f} ms for the first call, {float(longest):.1f} ms for the longest other; "
            f"{submitted} kernels compiled in the background, {loaded} loaded"
        )
        assert float(longest) < STALL
        is_second = process.endswith("left")
        assert (imported == "True") is not is_second
        assert (int(submitted) == 0) is is_second


def test_switched_off_each_design_is_waited_for(tmp_path: Path) -> None:
    """So that the test above can fail."""
    longest = float(printed(CALLS, tmp_path / "store", EPIFUSE_BACKGROUND="0").split()[1])
    print(f"without: {longest:.0f} ms for the longest call but the first")
    assert longest > STALL


def test_no_kernel_is_loaded_or_swapped_during_graph_capture(tmp_path: Path) -> None:
    printed(CAPTURED, tmp_path / "store")


def test_where_nothing_may_be_compiled_the_kernel_is_named(tmp_path: Path) -> None:
    text = printed(FORBIDDEN, tmp_path / "store", EPIFUSE_NO_COMPILE="1")
    assert text.startswith("sm90_gemm_")
    assert "ef.precompile" in text
