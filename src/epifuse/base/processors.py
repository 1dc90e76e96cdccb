"""One row for each model of processor: what plans and predictions know of a GPU beside its architecture. Only data.

If the GPU is present, the numbers of its driver replace those of its row. The row of the default model is used for
FakeTensors, and for plans that are made for another machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Processor(NamedTuple):
    """A GPU, or a CPU, whose rates are only assumed.

    `clustered` are the CTAs that run at once in clusters of more than two, each CTA with a multiprocessor of its own.
    `l2` are bytes of the L2 cache, which sends `l2_bytes_a_second`: by a fit to picked_h100.json and picked_h200.json.
    Memory moves `bytes_a_second`. Large products of 16-bit matrices reach `operations_a_second`. A lane executes one
    instruction a cycle; `clock` is in Hz, under load. `measured` is the file with the measurements. All files are in
    benchmarks/results.
    """

    name: str
    multiprocessors: int
    clustered: int
    l2: int
    bytes_a_second: float
    operations_a_second: float
    clock: float
    l2_bytes_a_second: float = 7.8e12
    measured: str = ""

    @property
    def instructions_a_second(self) -> float:
        """Instructions a second of all 32-bit lanes together."""
        return self.multiprocessors * 128 * self.clock

    @property
    def multiplications_a_second(self) -> float:
        """Multiplications a second of one multiprocessor. The time of one is the unit of a plan's cost."""
        return self.operations_a_second / (2 * self.multiprocessors)

    def microseconds(self, cost: float) -> float:
        """A plan's cost in microseconds."""
        return 1e6 * cost / self.multiplications_a_second

    def at_once(self, size: int) -> int:
        """CTAs that run at once in clusters of `size`."""
        return self.clustered if size > 2 else self.multiprocessors

    def with_properties_of(self, properties: Any) -> Processor:
        """This model with the numbers of PyTorch's `properties` of a device: parts of a card may be switched off."""
        count = properties.multi_processor_count
        clock, width = (getattr(properties, f"memory_{name}", 0) for name in ("clock_rate", "bus_width"))  # PyTorch 2.8
        return self._replace(
            name=properties.name,
            multiprocessors=count,
            clustered=self.clustered * count // self.multiprocessors // 8 * 8,
            l2=properties.L2_cache_size,
            bytes_a_second=2e3 * clock * width / 8 or self.bytes_a_second,  # kHz; two transfers a cycle
            operations_a_second=self.operations_a_second * count / self.multiprocessors,
        )


BETWEEN_KERNELS = 2.4e-6
"""Seconds between the end of a kernel and the start of the next on a GPU, by the fit of `pytorch/prediction.py`."""

CPU = Processor("CPU", 1, 1, 0, 10e9, 1e11, 0.0)

_H100 = Processor(
    "H100", 132, 128, 50 << 20, bytes_a_second=3.352e12, operations_a_second=800e12, clock=1.7e9, measured="sites.json"
)
"""The H100 with an SXM socket. A cluster lies within one group of 16 or 18 multiprocessors. `operations_a_second` is
the rate in a training step: cuBLAS's large products reach 840e12 if the GPU rests between them, and 690e12 one after
the other, at the card's 700 W (benchmarks/results/design_choice.json)."""

GPUS: dict[str, Processor] = {
    "H100": _H100,
    "H200": _H100._replace(name="H200", bytes_a_second=4.814e12, l2_bytes_a_second=10e12),
}
"""The models, by a word that the driver's name for the device contains."""

DEFAULT = "H100"


def model_of(properties: Any) -> Processor:
    """The processor of a device with these PyTorch `properties`, from its model's row, or the default row if none."""
    row = next((row for word, row in GPUS.items() if word in properties.name), GPUS[DEFAULT])
    return row.with_properties_of(properties)
