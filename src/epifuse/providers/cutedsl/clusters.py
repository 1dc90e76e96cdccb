"""How many clusters of CTAs run at once, and on which multiprocessors. Driver and GPU are asked. Imports no cutlass."""

from __future__ import annotations

import ctypes
import threading
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from epifuse.base.errors import LaunchError, fail
from epifuse.base.target import TARGETS

# Values from the driver's cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4

_THREADS = 384  # threads of a CTA of the Hopper kernel
_SPIN_CYCLES = 50_000  # cycles that a CTA runs; all CTAs of a launch have begun by then
_PROBE_PTX = f"""
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
    setp.lt.u64 %early, %now, {_SPIN_CYCLES};
    @%early bra stay;
    ret;
}}
""".encode()
"""A kernel whose CTAs write the number of the multiprocessor they run on, and stay until all CTAs have begun."""


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
    """How many clusters of `size` CTAs run at once on a GPU that runs nothing else. The driver is asked once.

    A CTA takes the whole shared memory of its multiprocessor. A cluster lies within one group of multiprocessors: an
    H200 has 33 times four multiprocessors, and runs 32 clusters of four. One more cluster would wait for all others to
    end. Raises `LaunchError` if the driver does not answer.
    """
    if size <= 2:  # multiprocessors come in pairs
        return torch.cuda.get_device_properties(device).multi_processor_count // size
    with _probe_of(device) as probe:
        return probe.resident(size)


MOST_AT_ONCE = 144
"""Multiprocessors of a GPU of compute capability 9.0."""
GROUPS = 8
"""Groups of multiprocessors (GPC) of an H100 or H200."""


def rank_words(size: int) -> int:
    """How many words of 64 bits hold one byte for each cluster of `size` CTAs."""
    return -(-(MOST_AT_ONCE // size) // 8)


class RankTable:
    """A table in host memory of the ranks of the clusters that run at once; `groups` holds the group of each.

    Row i has the rank of each of the first i clusters among these i, one byte each, in `words` words of 64 bits. The
    ranks of clusters in one group are consecutive.
    """

    def __init__(self, groups: Sequence[int], words: int) -> None:
        count = len(groups)
        self.memory = (ctypes.c_uint64 * (words * (count + 1)))()
        rows = memoryview(self.memory).cast("B").cast("B", (count + 1, 8 * words))
        order: list[int] = []
        for taken in range(count + 1):
            for rank, cluster in enumerate(order):
                rows[taken, cluster] = rank
            if taken < count:
                insort(order, taken, key=lambda cluster: (groups[cluster], cluster))

    @property
    def address(self) -> int:
        """The address of the first row."""
        return ctypes.addressof(self.memory)


def rank_table(device: int, size: int, split: int, count: int) -> tuple[RankTable, bool]:
    """Return the ranks of `count` clusters of `size` CTAs that run at once for each part of K, and if they are final.

    The group of multiprocessors in which a cluster is placed differs from GPU to GPU. It is measured once, in 10 ms.
    For clusters of more than two CTAs the table assumes eight groups that take clusters in turn. It also does so where
    it cannot measure: while a stream is captured, or if two launches place clusters differently, because something
    else runs on the GPU. Then later launches try again, a few times.
    """
    assumed = _rank_table(("assumed", size, count), lambda: [cluster % GROUPS for cluster in range(count)], size)
    if size > 2:
        return assumed, True
    key = device, size, split, count
    with _one_at_a_time:
        if key in _TABLES:
            return _TABLES[key], True
        if _TRIES.get(key, 0) == _MOST_TRIES:
            return assumed, True
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return assumed, False
        groups = placed(device, size, count * split)
        if groups is None:
            _TRIES[key] = _TRIES.get(key, 0) + 1
            return assumed, False
        return _rank_table(key, lambda: groups[::split], size), True


_one_at_a_time = threading.RLock()
_TABLES: dict[Hashable, RankTable] = {}
"""No table is ever freed, because launches hold their addresses."""
_TRIES: dict[Hashable, int] = {}
_MOST_TRIES = 4


def _rank_table(key: Hashable, groups: Callable[[], Sequence[int]], size: int) -> RankTable:
    with _one_at_a_time:
        if key not in _TABLES:
            _TABLES[key] = RankTable(groups(), rank_words(size))
        return _TABLES[key]


def placed(device: int, size: int, count: int) -> list[int] | None:
    """Return the group of each of `count` clusters that run at once, named by the group's lowest multiprocessor.

    None if two launches place the clusters differently, if two CTAs share a multiprocessor, or if the driver fails.
    """
    try:
        with _probe_of(device) as probe:
            first = probe.placed(size, count)
            if first != probe.placed(size, count) or len(set(first)) < len(first):
                return None
            if device not in _GROUPS_OF:
                _GROUPS_OF[device] = _groups(each for ctas in _GROUP_PROBE_SIZES for each in probe.together(ctas))
    except (LaunchError, RuntimeError):  # a measurement is no reason for a launch to fail
        return None
    return [_GROUPS_OF[device].get(one, one) for one in first[::size]]


_GROUPS_OF: dict[int, dict[int, int]] = {}
_GROUP_PROBE_SIZES = (16, 8, 6, 4, 3, 2)
"""Sizes in CTAs of the clusters whose placement shows which multiprocessors form a group. Small ones are among them,
because some multiprocessors of a group may run no large cluster."""


def _groups(together: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return for each multiprocessor the lowest one of its group. Multiprocessors of one cluster are of one group."""
    groups: dict[int, int] = {}
    for seen in together:
        merged = {groups.setdefault(one, one) for one in seen}
        groups |= {one: min(merged) for one, group in groups.items() if group in merged}
    return groups


class _Probe:
    """The kernel `where`, loaded in the current context. It runs on a stream of its own, which waits for nothing."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> _Probe:
        _call(self.driver, "cuModuleLoadData", ctypes.byref(self.module), _PROBE_PTX)
        try:
            _call(self.driver, "cuModuleGetFunction", ctypes.byref(self.kernel), self.module, b"where")
        except LaunchError:
            self.driver.cuModuleUnload(self.module)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.cuModuleUnload(self.module)

    def resident(self, size: int, shared: int = TARGETS[90].shared_memory) -> int:
        """How many clusters of `size` CTAs run at once, if each CTA takes `shared` bytes of shared memory."""
        count = ctypes.c_int()
        asked = self._shape(size, 1, shared)
        _call(self.driver, "cuOccupancyMaxActiveClusters", ctypes.byref(count), self.kernel, ctypes.byref(asked))
        return count.value

    def placed(self, size: int, clusters: int, shared: int = TARGETS[90].shared_memory) -> list[int]:
        """Launch `clusters` clusters of `size` CTAs, and return the multiprocessor of each CTA."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            found = torch.empty(size * clusters, dtype=torch.int32, device="cuda")
            asked = self._shape(size, clusters, shared)
            asked.stream = stream.cuda_stream
            address = ctypes.c_void_p(found.data_ptr())
            arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(address), ctypes.c_void_p))
            _call(self.driver, "cuLaunchKernelEx", ctypes.byref(asked), self.kernel, arguments, None)
            return found.tolist()

    def together(self, size: int) -> Iterable[Sequence[int]]:
        """Yield the multiprocessors of each of some clusters. Several CTAs may share a multiprocessor."""
        if self.resident(size, _LITTLE):
            placed = self.placed(size, _SHOWN, _LITTLE)
            yield from (placed[start : start + size] for start in range(0, len(placed), size))

    def _shape(self, size: int, clusters: int, shared: int) -> _Configuration:
        _call(self.driver, "cuFuncSetAttribute", self.kernel, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        _call(self.driver, "cuFuncSetAttribute", self.kernel, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        cluster = _Attribute(_CLUSTER_DIMENSION, 0, (1, size, 1))
        return _Configuration((1, size, clusters), (_THREADS, 1, 1), shared, None, ctypes.pointer(cluster), 1)


@contextmanager
def _probe_of(device: int) -> Iterator[_Probe]:
    """Yield the probe on one GPU. The driver refuses a thread without a context, so a call of the runtime makes one."""
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()
        with _Probe() as probe:
            yield probe


_SHOWN, _LITTLE = 64, 1024
"""Number of clusters, and bytes of shared memory of a CTA, for `together`: enough to see all multiprocessors."""


def _call(driver: Any, name: str, *arguments: Any) -> None:
    if status := getattr(driver, name)(*arguments):
        raise fail("driver", None, call=name, status=status)
