"""How many clusters of CTAs run at once, as the CUDA driver says. Runs no compiler and imports no cutlass."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from epifuse.base.errors import fail
from epifuse.base.target import TARGETS

# Of the driver's cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_CLUSTER_DIMENSION = 4

_THREADS = 384  # of a CTA of ours
_NOTHING = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n"


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
    with torch.cuda.device(device):
        return _occupancy(size)


def _occupancy(size: int) -> int:
    """Of a kernel that does nothing, in the current context."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    shared = TARGETS[90].shared_memory
    cluster = _Attribute(_CLUSTER_DIMENSION, 0, (1, size, 1))
    shape = _Configuration((1, size, 1), (_THREADS, 1, 1), shared, None, ctypes.pointer(cluster), 1)
    _call(driver, "cuModuleLoadData", ctypes.byref(module), _NOTHING)
    try:
        _call(driver, "cuModuleGetFunction", ctypes.byref(kernel), module, b"nothing")
        _call(driver, "cuFuncSetAttribute", kernel, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        _call(driver, "cuOccupancyMaxActiveClusters", ctypes.byref(count), kernel, ctypes.byref(shape))
    finally:
        _call(driver, "cuModuleUnload", module)
    return count.value


def _call(driver: Any, name: str, *arguments: Any) -> None:
    if status := getattr(driver, name)(*arguments):
        raise fail("driver", None, call=name, status=status)
