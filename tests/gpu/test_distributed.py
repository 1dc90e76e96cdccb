"""On two GPUs, with NCCL: what distributed_checks.py checks."""

from pathlib import Path

import pytest
import torch
from processes import failures


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_two_gpus_compute_what_one_does(tmp_path: Path) -> None:
    assert failures("cuda", tmp_path) == {}
