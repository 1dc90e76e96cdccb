"""How many clusters of CTAs run at once, and where, as the CUDA driver and the GPU say. Imports no cutlass."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from epifuse.base.errors import fail
from epifuse.base.target import TARGETS

# Of the driver's cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4

_THREADS = 384  # of a CTA of ours
_STAYED = 50_000  # cycles, in which all CTAs of a launch have begun
_WHERE = f"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry where(.param .u64 multiprocessors)
{{
    .reg .u32 %block, %clusters, %own;
    .reg .u64 %at, %from, %offset, %now;
    .reg .pred %early;
    mov.u64 %from, %clock64;
    mov.u32 %block, %ctaid.y;
    mov.u32 %clusters, %ctaid.z;
    mov.u32 %own, %nctaid.y;
    mad.lo.u32 %block, %clusters, %own, %block;
    mov.u32 %own, %smid;
    ld.param.u64 %at, [multiprocessors];
    cvta.to.global.u64 %at, %at;
    mul.wide.u32 %offset, %block, 4;
    add.u64 %at, %at, %offset;
    st.global.u32 [%at], %own;
stay:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %from;
    setp.lt.u64 %early, %now, {_STAYED};
    @%early bra stay;
    ret;
}}
""".encode()
"""A kernel whose CTAs say on which multiprocessors they are, and stay until all are somewhere."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier and a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def resident_clusters(device: int, size: int) -> int:
    """How many clusters of `size` CTAs run at once, where there is nothing else; asked of the driver once.

    A CTA takes the whole shared memory of its multiprocessor. A cluster lies within one group of multiprocessors: an
    H200 has 33 times four of them, and runs 32 such clusters. A cluster more would wait for all others to end. Raises
    `LaunchError` where the driver does not answer.
    """
    if size <= 2:  # multiprocessors come in pairs
        return torch.cuda.get_device_properties(device).multi_processor_count // size
    with torch.cuda.device(device), _Probe() as probe:
        return probe.resident(size)


MOST_AT_ONCE = 144
"""Multiprocessors of a GPU of compute capability 9.0."""
GROUPS = 8
"""Groups of multiprocessors (GPC) of an H100 or H200."""


def rank_words(size: int) -> int:
    """Words of 64 bits in which a byte for each cluster of `size` CTAs lies."""
    return -(-(MOST_AT_ONCE // size) // 8)


def rank_table(device: int, size: int, split: int, count: int) -> tuple[int, bool]:
    """Where in host memory the ranks of `count` clusters of `size` CTAs are, and whether they are so for good.

    `count` clusters run at once for each part of K. Row i has the rank of each of the first i clusters among these i, a
    byte in `rank_words(size)` words. Those of one group of multiprocessors come one after the other. In which group a
    cluster is placed differs from GPU to GPU. It is measured once, on the current stream, which is waited for.

    Eight groups that take clusters in turn are assumed while that stream is recorded, for clusters of more than two
    CTAs, and where clusters are not placed alike twice, because something else runs on the GPU. Raises `LaunchError`
    where the driver does not answer.
    """
    if size > 2:
        return _assumed(size, count).data_ptr(), True
    if torch.cuda.is_current_stream_capturing():
        return _assumed(size, count).data_ptr(), False
    found = _measured(device, size, split, count)
    return (_assumed(size, count) if found is None else found).data_ptr(), True


@cache
def _assumed(size: int, count: int) -> torch.Tensor:
    return _ranked([cluster % GROUPS for cluster in range(count)], size)


@cache
def _measured(device: int, size: int, split: int, count: int) -> torch.Tensor | None:
    with torch.cuda.device(device), _Probe() as probe:
        placed = probe.placed(size, count * split)
        if placed != probe.placed(size, count * split) or len(set(placed)) < len(placed):
            return None
    groups = _groups_of(device)
    return _ranked([groups.get(first, first) for first in placed[:: size * split]], size)


@cache
def _groups_of(device: int) -> dict[int, int]:
    with torch.cuda.device(device), _Probe() as probe:
        return _groups(cluster for several in _TOGETHER for cluster in probe.together(several))


_TOGETHER = (16, 8, 6, 4, 3, 2)
"""CTAs of the clusters that show which multiprocessors are of one group: parts of a group may take small ones alone."""


def _groups(together: Iterable[Sequence[int]]) -> dict[int, int]:
    """By multiprocessor the least one of its group, of those that were seen together in a cluster."""
    groups: dict[int, int] = {}
    for seen in together:
        merged = {groups.setdefault(one, one) for one in seen}
        groups |= {one: min(merged) for one, group in groups.items() if group in merged}
    return groups


def _ranked(groups: Sequence[int], size: int) -> torch.Tensor:
    """Row i has the ranks of the first i by group, and then in the order given."""
    count = len(groups)
    keys = torch.tensor(groups) * count + torch.arange(count)
    taken = torch.arange(count) < torch.arange(count + 1)[:, None]
    ranks = torch.where(taken, keys, keys.max() + 1).argsort(dim=1, stable=True).argsort(dim=1)
    return torch.nn.functional.pad(ranks, (0, 8 * rank_words(size) - count)).to(torch.uint8)


class _Probe:
    """The kernel `where`, in the current context."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> _Probe:
        _call(self.driver, "cuModuleLoadData", ctypes.byref(self.module), _WHERE)
        _call(self.driver, "cuModuleGetFunction", ctypes.byref(self.kernel), self.module, b"where")
        return self

    def __exit__(self, *_: object) -> None:
        _call(self.driver, "cuModuleUnload", self.module)

    def resident(self, size: int, shared: int = TARGETS[90].shared_memory) -> int:
        """How many clusters of CTAs with so much shared memory run at once."""
        count = ctypes.c_int()
        asked = self._shape(size, 1, shared)
        _call(self.driver, "cuOccupancyMaxActiveClusters", ctypes.byref(count), self.kernel, ctypes.byref(asked))
        return count.value

    def placed(self, size: int, clusters: int, shared: int = TARGETS[90].shared_memory) -> list[int]:
        """The multiprocessor of each CTA of so many clusters."""
        found = torch.empty(size * clusters, dtype=torch.int32, device="cuda")
        asked, stream = self._shape(size, clusters, shared), torch.cuda.current_stream()
        asked.stream = stream.cuda_stream
        address = ctypes.c_void_p(found.data_ptr())
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(address), ctypes.c_void_p))
        _call(self.driver, "cuLaunchKernelEx", ctypes.byref(asked), self.kernel, arguments, None)
        return found.tolist()

    def together(self, size: int) -> Iterable[Sequence[int]]:
        """Multiprocessors of each of some clusters, which may have several CTAs."""
        if self.resident(size, _LITTLE):
            placed = self.placed(size, _SHOWN, _LITTLE)
            yield from (placed[start : start + size] for start in range(0, len(placed), size))

    def _shape(self, size: int, clusters: int, shared: int) -> _Configuration:
        _call(self.driver, "cuFuncSetAttribute", self.kernel, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        _call(self.driver, "cuFuncSetAttribute", self.kernel, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        cluster = _Attribute(_CLUSTER_DIMENSION, 0, (1, size, 1))
        return _Configuration((1, size, clusters), (_THREADS, 1, 1), shared, None, ctypes.pointer(cluster), 1)


_SHOWN, _LITTLE = 64, 1024
"""Clusters, and bytes of shared memory: enough to see all multiprocessors."""


def _call(driver: Any, name: str, *arguments: Any) -> None:
    if status := getattr(driver, name)(*arguments):
        raise fail("driver", None, call=name, status=status)
