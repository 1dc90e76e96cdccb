"""How operands and outputs travel, and what is asked of an output: hints around the tensors a person hands over."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from epifuse.errors import fail, kind_of


class Transport(enum.Enum):
    """How an operand or output travels between global memory and the epilogue."""

    TMA = "tma"
    SYNC_GMEM_LOAD = "sync_gmem_load"
    ASYNC_GMEM_LOAD = "async_gmem_load"
    SYNC_GMEM_STORE = "sync_gmem_store"


_LOADS = (Transport.TMA, Transport.SYNC_GMEM_LOAD, Transport.ASYNC_GMEM_LOAD)
_STORES = (Transport.TMA, Transport.SYNC_GMEM_STORE)


@dataclass(frozen=True)
class Hint:
    """What `Load` and `Store` have in common."""

    tensor: torch.Tensor
    via: Transport | str | None = None
    num_bits_per_copy: int | None = None

    def __post_init__(self) -> None:
        allowed = _LOADS if type(self) is Load else _STORES
        name, via = type(self).__name__, self.via
        values = [transport.value for transport in allowed]
        if via is not None:
            if via not in allowed and via not in values:
                shown = via.value if isinstance(via, Transport) else via
                raise fail("transport", None, hint=name, allowed=values, value=shown)
            object.__setattr__(self, "via", Transport(via))
        width = self.num_bits_per_copy
        if width is None:
            return
        if not isinstance(width, int) or isinstance(width, bool):
            raise fail("transport_width_type", None, hint=name, type=kind_of(width))
        if self.via in (None, Transport.TMA):
            raise fail("transport_width", None, hint=name, via=via and "tma")


class Load(Hint):
    """An operand with the transport it shall take: "tma", "sync_gmem_load", "async_gmem_load", or None for any.

    `num_bits_per_copy` is the width of one copy, for the two that are not TMA. A kernel that cannot honour the hint is
    refused; the CPU's take "tma" for any. Raises `ArgumentError` and `ArgumentTypeError`.
    """


@dataclass(frozen=True)
class Store(Hint):
    """An output with the transport it shall take: "tma", "sync_gmem_store", or None for any. See `Load`.

    With `accumulate` the value is added onto what `tensor` holds: in float32, rounded once.
    """

    accumulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.accumulate, bool):
            raise fail("option", None, name="accumulate", want="True or False", value=self.accumulate)
