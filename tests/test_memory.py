"""Memory for results: large blocks on huge pages, everything else as torch makes it."""

import resource
from pathlib import Path

import pytest
import torch

from epifuse.base import memory

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MODE = _SETTING.read_text() if _SETTING.exists() else "[never]"


def first_touches(tensor):
    """Pages the kernel hands out while the tensor is written for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif("[never]" in _MODE, reason="this machine has no huge pages")
def test_a_large_result_lies_on_huge_pages():
    """Most of it: a machine whose memory is in pieces has too few. With small pages each is touched, 16384."""
    made = memory.empty((4096, 4096), (4096, 1), torch.float32, torch.device("cpu"))
    assert first_touches(made) < made.nbytes // resource.getpagesize() // 2


def test_what_is_not_large_or_not_here_is_as_torch_makes_it(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", None)  # calling it would fail
    assert memory.empty((2, 3), (3, 1), torch.int8, torch.device("cpu")).shape == (2, 3)
    assert memory.empty((1 << 15, 1 << 15), (1 << 15, 1), torch.float32, torch.device("meta")).is_meta
    monkeypatch.setattr(memory, "_HUGE_PAGES", None)
    assert memory.empty((4096, 4096), (4096, 1), torch.float32, torch.device("cpu")).shape == (4096, 4096)


@pytest.mark.parametrize("private", [memory._DIRECT, None])
def test_what_is_made_for_a_launch_is_as_torch_makes_it(monkeypatch, private):
    monkeypatch.setattr(memory, "_DIRECT", private)
    made = memory.allocator(torch.device("cpu"))((2, 3), (1, 2), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.bfloat16, "cpu")


@pytest.mark.parametrize("view", [memory.seen_as, memory._as_strided])
def test_memory_is_seen_in_another_shape(view):
    tensor = torch.arange(24.0)[2:].requires_grad_()
    with torch.no_grad():
        found = view(tensor, (3, 4), (1, 5), 2)
    assert torch.equal(found, tensor.as_strided((3, 4), (1, 5), 4))
    assert (found.data_ptr() - tensor.data_ptr(), found.requires_grad) == (8, False)
