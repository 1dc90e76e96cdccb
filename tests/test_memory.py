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
    made = memory.empty((4096, 4096), (4096, 1), torch.float32, torch.device("cpu"))
    assert first_touches(made) < made.nbytes // resource.getpagesize() // 10


def test_what_is_not_large_or_not_here_is_as_torch_makes_it(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", None)  # calling it would fail
    assert memory.empty((2, 3), (3, 1), torch.int8, torch.device("cpu")).shape == (2, 3)
    assert memory.empty((1 << 15, 1 << 15), (1 << 15, 1), torch.float32, torch.device("meta")).is_meta
    monkeypatch.setattr(memory, "_HUGE_PAGES", None)
    assert memory.empty((4096, 4096), (4096, 1), torch.float32, torch.device("cpu")).shape == (4096, 4096)
