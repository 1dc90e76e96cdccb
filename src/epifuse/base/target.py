"""One row for each architecture: data, no code. A kernel asks for a property in a row, and never `if sm == 90`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from epifuse.base import processors
from epifuse.base.processors import GPUS, Processor, model_of


@dataclass(frozen=True)
class Target:
    """Where a kernel runs. `cc` is the compute capability times ten (90 = Hopper), 0 for the CPU.

    `shared_memory` is the most bytes that a CTA can have. `has_wgmma`: it has the multiplication of warp groups, which
    only Hopper has. `has_narrow_floats`: it converts floats of 8 bits. `processor` is the model that plans are made
    for: estimates depend on it, and results of kernels do not.
    """

    name: str
    cc: int
    device: str
    shared_memory: int = 0
    has_wgmma: bool = False
    has_narrow_floats: bool = True
    processor: Processor = GPUS[processors.DEFAULT]


CPU = Target("cpu", 0, "cpu", processor=processors.CPU)

TARGETS: dict[int, Target] = {
    target.cc: target
    for target in (
        CPU,
        Target("sm_80", 80, "cuda", shared_memory=163 << 10, has_narrow_floats=False),
        Target("sm_86", 86, "cuda", shared_memory=99 << 10, has_narrow_floats=False),
        Target("sm_89", 89, "cuda", shared_memory=99 << 10),
        Target("sm_90a", 90, "cuda", shared_memory=227 << 10, has_wgmma=True),
        Target("sm_100a", 100, "cuda", shared_memory=227 << 10),
        Target("sm_103a", 103, "cuda", shared_memory=227 << 10),
        Target("sm_120a", 120, "cuda", shared_memory=99 << 10),
    )
}


def target_for(cc: int) -> Target:
    """The target of a compute capability. If there is no row for it, the target has no kernels."""
    return TARGETS.get(cc) or Target(f"sm_{cc}", cc, "cuda")


def target_of(device: str) -> Target:
    """The target of a device, by its name in PyTorch. A GPU without a row is a target without kernels."""
    kind = device.partition(":")[0]
    if kind != "cuda":
        return CPU if kind in ("cpu", "meta") else Target(kind, -1, kind)
    if not torch.cuda.is_available():  # a FakeTensor of a GPU this machine does not have
        return Target("unknown GPU", -1, "cuda")
    return _of_gpu(device)


@cache
def _of_gpu(device: str) -> Target:
    """The target of a GPU. PyTorch is asked once, because that takes as long as the checks of A and B."""
    found = torch.cuda.get_device_properties(device)
    return replace(target_for(found.major * 10 + found.minor), processor=model_of(found))
