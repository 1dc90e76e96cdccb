"""What a device can do in a second: memory and products. Asked of the device where it is there."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Rates(NamedTuple):
    """Bytes a second of the device's memory by its clock and width, operations a second that large products of 16-bit
    matrices reach, and multiprocessors. Those of a CPU are assumed."""

    bytes_a_second: float
    operations_a_second: float
    multiprocessors: int

    @staticmethod
    def of_gpu(multiprocessors: int, memory_clock: float, bus_bits: int) -> Rates:
        """`memory_clock` in Hz: two transfers a cycle."""
        return Rates(2 * memory_clock * bus_bits / 8, multiprocessors * OPERATIONS, multiprocessors)


OPERATIONS = 800e12 / 132
"""Of one multiprocessor of an H100 or H200 in a second, in a training step. cuBLAS's large products reach 840e12 where
the GPU rests between them (benchmarks/results/sites.json), and 690e12 one after the other, at the card's 700 W
(benchmarks/results/design_choice.json)."""

_CPU = Rates(10e9, 1e11, 1)
_H100 = Rates.of_gpu(132, 2.619e9, 5120)
"""3.35 TB/s; the clock that its driver tells. An H200's 4.8."""


@cache
def rates_of(device: str) -> Rates:
    """Of a device by its name in PyTorch; of an H100 where there is none, for FakeTensors."""
    if not device.startswith("cuda"):
        return _CPU
    if not torch.cuda.is_available():
        return _H100
    found = torch.cuda.get_device_properties(device)
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)  # since PyTorch 2.8
    if not clock or not width:
        return _H100._replace(multiprocessors=found.multi_processor_count)
    return Rates.of_gpu(found.multi_processor_count, 1e3 * clock, width)
