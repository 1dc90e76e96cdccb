"""The command `doctor`: print what is installed, which kernels can run here, and why the other kernels cannot."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from epifuse import providers
from epifuse.base import store
from epifuse.base.target import target_for
from epifuse.plan import KernelSpec
from epifuse.providers.base import Provider
from epifuse.providers.cutedsl import untested
from epifuse.providers.cutedsl.load import cuda_of_the_driver
from epifuse.tools import cache
from epifuse.tools.lines import rows, size

_DRIVER = Path("/proc/driver/nvidia/version")


class Gpu(NamedTuple):
    """A GPU that PyTorch can use. `cc` is its compute capability times ten, `memory` its bytes."""

    name: str
    cc: int
    memory: int


def run(options: argparse.Namespace) -> int:
    """Print the findings. Return 1 if kernels are built for a GPU of this machine and none of them can run, else 0."""
    gpus = _gpus()
    print("Installed", *rows(_installed(gpus)), sep="\n")
    families = list(_families(gpus))
    print("\nKernels that can run here")
    print(*rows((family.name, family.summary) for family in families if family.why_not is None), sep="\n")
    others = [(family.name, f"{family.summary}:\n{family.why_not}") for family in families if family.why_not]
    if others:
        print("\nKernels that cannot", *rows(others), sep="\n")
    able = {cc for family in families if family.why_not is None for cc in family.ccs}
    wanted = {cc for family in families for cc in family.ccs} & {gpu.cc for gpu in gpus}
    print("\nSee them at work: python -m epifuse demo")
    return 1 if wanted - able else 0


# --- what is installed ------------------------------------------------------------------------------------------------


def _installed(gpus: list[Gpu]) -> Iterator[tuple[str, str]]:
    yield "epifuse", f"{_version('epifuse') or 'from its source'}, in {Path(__file__).parents[1]}"
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield "PyTorch", f"{torch.__version__}, {built}"
    newest = cuda_of_the_driver()
    needed = "kernels for GPUs need it" if gpus or newest else "it is needed only to compile for another machine's GPU"
    for name, package in ("CuTe DSL", "nvidia-cutlass-dsl"), ("tvm-ffi", "apache-tvm-ffi"):
        yield name, _version(package) or f"{package} is not installed; {needed}: {_EXTRA}"
    yield "driver", "no NVIDIA driver found" if newest is None else f"{_driver()}for CUDA up to {newest}"
    if gpus:
        shown = (f"{one.name}, compute capability {one.cc / 10}, {size(one.memory)}" for one in gpus)
        yield "GPU", "\n".join(f"{index}: {text}" for index, text in enumerate(shown))
    else:
        yield "GPU", "none that PyTorch can use" + (f": {why}" if (why := _why_no_gpu(newest)) else "")
    for name, programs in ("C compiler", ("cc", "gcc", "clang")), ("C++ compiler", ("g++", "clang++")):
        found = os.environ.get("CXX", "") if name == "C++ compiler" else ""
        yield name, found or next(filter(None, map(shutil.which, programs)), f"none of {', '.join(programs)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = store.folders()[0]
    told = (
        f"{folder}: {cache.describe(folder)}" if folder else "no folder; " + "; ".join(str(w.message) for w in caught)
    )
    yield "cache", told
    if chosen := sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("EPIFUSE_")):
        yield "variables", "\n".join(chosen)


_EXTRA = "in a checkout of epifuse pip install '.[cuda]', from a wheel pip install 'FILE.whl[cuda]'"
"""The same words as in the error `missing_package`."""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    """The version of the driver's kernel module and a comma; empty if the system does not tell it."""
    try:
        found = re.search(r"\b\d{3}\.[\d.]+", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return f"{found[0]}, " if found else ""


def _gpus() -> list[Gpu]:
    """The GPUs that PyTorch can use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning of a driver that is too old; `_why_no_gpu` tells of it
        if not torch.cuda.is_available():
            return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, properties.major * 10 + properties.minor, properties.total_memory))
    return found


def _why_no_gpu(newest: int | None) -> str:
    if newest is None:
        return ""
    if not torch.version.cuda:
        return "install a build of PyTorch for CUDA"
    return "the driver, or CUDA_VISIBLE_DEVICES, hides it; `nvidia-smi` says what the driver sees"


# --- kernels ----------------------------------------------------------------------------------------------------------


class _Family:
    """Kernels of one provider that are one kernel in several designs. `why_not` says why none can run, or is None."""

    def __init__(self, provider: Provider, specs: list[KernelSpec], gpus: list[Gpu]) -> None:
        first = specs[0]
        words = zip(*(spec.name.split("_") for spec in specs), strict=False)
        self.name = "_".join(one[0] for one in itertools.takewhile(lambda one: len(set(one)) == 1, words))
        self.summary = first.summary + (f", in {len(specs)} designs" if len(specs) > 1 else "")
        self.ccs, self.never_on = first.ccs, frozenset(() if untested.are_allowed() else first.never_on)
        self.why_not = self._why_not(provider.lacks(first), {0} | {gpu.cc for gpu in gpus})

    def _why_not(self, lacks: str | None, here: set[int]) -> str | None:
        runs = here & set(self.ccs)
        if lacks is not None:
            return lacks if runs else f"{self._needs(here)}. To compile it here: {lacks.splitlines()[0]}"
        if runs:
            return None if runs - self.never_on else untested.refused(target_for(min(runs)))
        asked = ", with EPIFUSE_UNTESTED=1" if self.ccs[0] in self.never_on else ""
        return f"{self._needs(here)}. It can be compiled here: ef.precompile(args, cc={self.ccs[0]}){asked}"

    def _needs(self, here: set[int]) -> str:
        wanted = " or ".join(f"{cc / 10} ({target_for(cc).name})" for cc in self.ccs)
        have = ", ".join(str(cc / 10) for cc in sorted(here - {0}))
        return f"needs a GPU of compute capability {wanted}, and this machine has {have or 'none'}"


def _families(gpus: list[Gpu]) -> Iterator[_Family]:
    for provider_name in providers.names():
        provider = providers.load(provider_name)
        groups: dict[tuple[str, tuple[int, ...]], list[KernelSpec]] = {}
        for spec in provider.specs():
            groups.setdefault((spec.summary, spec.ccs), []).append(spec)
        for specs in groups.values():
            yield _Family(provider, specs, gpus)
