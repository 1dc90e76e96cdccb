"""One row an architecture: data, no code. A kernel asks for what a row says, never `if sm == 90`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Target:
    """Where a kernel runs. `cc` is the compute capability times ten (90 = Hopper), 0 for the CPU.

    `shared_memory` are a CTA's bytes, and `multiprocessors` those of the GPUs that plans are made for: of H100 and H200
    with SXM sockets. It is a plan's estimate alone that depends on them; a launch asks the GPU.
    """

    name: str
    cc: int
    device: str
    shared_memory: int = 0
    multiprocessors: int = 0


CPU = Target("cpu", 0, "cpu")

TARGETS: dict[int, Target] = {
    target.cc: target
    for target in (
        CPU,
        Target("sm_80", 80, "cuda", shared_memory=163 << 10),
        Target("sm_86", 86, "cuda", shared_memory=99 << 10),
        Target("sm_89", 89, "cuda", shared_memory=99 << 10),
        Target("sm_90a", 90, "cuda", shared_memory=227 << 10, multiprocessors=132),
        Target("sm_100a", 100, "cuda", shared_memory=227 << 10),
        Target("sm_103a", 103, "cuda", shared_memory=227 << 10),
        Target("sm_120a", 120, "cuda", shared_memory=99 << 10),
    )
}


def target_of(device: str) -> Target:
    """The target that a device is, by its name in PyTorch. A GPU we have no row for is a target without kernels."""
    kind = device.partition(":")[0]
    if kind != "cuda":
        return CPU if kind in ("cpu", "meta") else Target(kind, -1, kind)
    if not torch.cuda.is_available():  # a FakeTensor of a GPU this machine does not have
        return Target("unknown GPU", -1, "cuda")
    cc = capability(device)
    return TARGETS.get(cc, Target(f"sm_{cc}", cc, "cuda"))


@cache
def capability(device: str) -> int:
    """The compute capability of a GPU times ten: asked of PyTorch once, which takes as long as to check A and B."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
