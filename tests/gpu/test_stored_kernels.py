"""A kernel that one process stored is right in the next, which imports no compiler; the time to its first result."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epifuse as ef
from epifuse.providers.cutedsl import clusters
from epifuse.providers.cutedsl.clusters import resident_clusters

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys, time
import torch
import epifuse as ef

m, n, k, cluster, name = *map(int, sys.argv[1:4]), eval(sys.argv[4]), sys.argv[5]

def gelu(accum, bias):
    D = ef.gelu(accum + bias, approximate="tanh")
    return D

def softmax(accum, bias):
    D = ef.softmax(accum + bias, dim=-1)
    return D

a, b = torch.randn(m, k).bfloat16().cuda(), torch.randn(n, k).bfloat16().cuda().t()
bias = torch.randn(n).cuda()
torch.cuda.synchronize()
begun = time.perf_counter()
epilogue = ef.EpilogueArguments.partial({"gelu": gelu, "softmax": softmax}[name], {"bias": bias})
args = ef.GemmArguments(a, b, epilogue=epilogue, constraints=ef.Constraints(cluster=cluster))
kernel = ef.get_kernels(args, limit=1)[0]
found = kernel.run(args)["D"]
torch.cuda.synchronize()
print(f"{name}: {1e3 * (time.perf_counter() - begun):.0f} ms to the first result")
assert kernel.metadata.kernel_name.endswith("x".join(map(str, cluster))), kernel.metadata.kernel_name
x = a.float() @ b.float() + bias
want = x.softmax(-1) if name == "softmax" else torch.nn.functional.gelu(x, approximate="tanh")
torch.testing.assert_close(found.float(), want, rtol=2e-2, atol=2e-2)
print("cutlass" in sys.modules)
"""

CASES = {
    "gelu": (1000, 2048, 512, (2, 1)),
    "softmax": (1000, 2048, 512, (1, 8)),
}


def run(name: str, folder: Path, **variables: str) -> str:
    """What a new process prints."""
    m, n, k, cluster = CASES[name]
    program = folder.with_suffix(".py")  # an epilogue's source is read from its file
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *map(str, (m, n, k, cluster)), name]
    environment = os.environ | {"EPIFUSE_CACHE_DIR": str(folder)} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def moved(folder: Path) -> str:
    """A path of modules on which the packages that kernels are stored for lie elsewhere, before where they lie now."""
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None
    assert spec.origin is not None
    (folder / "moved").symlink_to(Path(spec.origin).parents[1])
    packages = folder / "moved"
    first = (Path(ef.__file__).parents[1], packages / "nvidia_cutlass_dsl" / "dsl_packages", packages)
    return os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("name", CASES)
def test_a_second_process_runs_a_stored_kernel(name: str, tmp_path: Path) -> None:
    printed = [
        run(name, tmp_path / "store"),
        run(name, tmp_path / "store", EPIFUSE_NO_COMPILE="1"),
        run(name, tmp_path / "store", EPIFUSE_NO_COMPILE="1", PYTHONPATH=moved(tmp_path)),
    ]
    for case, text in zip(("compiled", "stored", "stored, moved"), printed, strict=True):
        first, imported = text.splitlines()
        print(f"{case}: {first}")
        assert imported == str(case == "compiled")


@pytest.mark.parametrize("size", [4, 8])
def test_the_driver_counts_clusters_as_the_compiler_does(size: int) -> None:
    hardware = pytest.importorskip("cutlass.utils", reason="CuTe DSL is an optional dependency")
    torch.empty(1, device="cuda")
    resident_clusters.cache_clear()
    assert resident_clusters(0, size) == hardware.HardwareInfo(0).get_max_active_clusters(size)


def test_clusters_lie_within_groups_of_multiprocessors() -> None:
    """Also while other tests use the GPU: a cluster waits for room in one group."""
    with clusters._Probe() as probe:
        placed = probe.placed(2, resident_clusters(0, 2))
        groups = clusters._groups(cluster for size in clusters._GROUP_PROBE_SIZES for cluster in probe.together(size))
    assert {*placed} <= {*groups}
    assert all(groups[first] == groups[second] for first, second in zip(placed[::2], placed[1::2], strict=True))
    assert max([*groups.values()].count(group) for group in set(groups.values())) <= 18
