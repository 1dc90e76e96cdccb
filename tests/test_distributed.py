"""On two processes, with gloo on the CPU: what distributed_checks.py checks."""

from pathlib import Path

import pytest
import torch.distributed as dist
from processes import failures


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_processes_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIFUSE_NO_COMPILE", "1")  # of the CPU's kernels, which other tests compile
    assert failures("cpu", tmp_path) == {}
