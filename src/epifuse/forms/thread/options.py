"""The options of a functor: dtypes, rounding, and which terms its linear combination has."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epifuse.base.dtypes import is_storable
from epifuse.base.errors import fail


class ScaleType(enum.Enum):
    """Which terms of alpha * accum + beta * C there are. Alpha and beta per channel hold one number a column."""

    Default = "alpha * accum + beta * C"
    NoBetaScaling = "alpha * accum + C"
    OnlyAlphaScaling = "alpha * accum"
    PerChannelScaling = "alpha[n] * accum + beta[n] * C"
    OnlyAlphaPerChannelScaling = "alpha[n] * accum"
    Nothing = "accum"

    @property
    def absent(self) -> tuple[str, ...]:
        """Those of "alpha", "beta" and "source" that this scale type leaves out."""
        return _ABSENT[self.name]

    @property
    def per_channel(self) -> bool:
        """Whether alpha is a vector."""
        return "PerChannel" in self.name


_ABSENT: Mapping[str, tuple[str, ...]] = {
    "Default": (),
    "NoBetaScaling": ("beta",),
    "OnlyAlphaScaling": ("beta", "source"),
    "PerChannelScaling": (),
    "OnlyAlphaPerChannelScaling": ("beta", "source"),
    "Nothing": ("alpha", "beta", "source"),
}


class FloatRoundStyle(enum.Enum):
    """How results are rounded to the output's dtype. Kernels round to nearest even; integers and fp8 saturate."""

    round_indeterminate = "any"
    round_to_nearest = "nearest even"
    round_toward_zero = "toward zero"
    round_toward_infinity = "up"
    round_toward_neg_infinity = "down"


_OURS = (FloatRoundStyle.round_to_nearest, FloatRoundStyle.round_indeterminate)
_COMPUTE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Options:
    """The template parameters of a functor, see `Functor`. Raises `ArgumentError` for one that no kernel can honour."""

    element_output: torch.dtype | None
    count: int | None
    element_accumulator: torch.dtype | None
    element_compute: torch.dtype
    scale: ScaleType
    round: FloatRoundStyle
    element_source: torch.dtype | None
    element_aux_output: torch.dtype | None

    def __post_init__(self) -> None:
        stored = {name: f"element_{name}" for name in ("output", "accumulator", "source", "aux_output")}
        wide = self.element_compute != torch.float64 or self.element_accumulator == torch.float64
        options: list[tuple[str, bool, str]] = [
            ("count", self.count is None or (type(self.count) is int and self.count > 0), "a whole number above 0"),
            ("scale", isinstance(self.scale, ScaleType), "a ScaleType"),
            ("round", self.round in _OURS, "FloatRoundStyle.round_to_nearest, as no kernel rounds otherwise"),
            ("element_compute", self.element_compute in _COMPUTE, "a float dtype, as formulas are computed in float32"),
            ("element_compute", wide, "float64 only with element_accumulator=torch.float64"),
            *((name, _is_dtype(getattr(self, name)), "a torch dtype that can be stored") for name in stored.values()),
        ]
        for name, right, want in options:
            if not right:
                raise fail("option", None, name=name, want=want, value=getattr(self, name))

    def dtypes(self, sources: Mapping[str, Any]) -> dict[str, torch.dtype]:
        """The dtypes that operands, outputs and accumulator must have, by name. A name without one may have any."""
        declared = {"accum": self.element_accumulator, "D": self.element_output}
        declared |= dict.fromkeys(sources, self.element_source)
        declared |= dict.fromkeys(("T", "Aux"), self.element_aux_output)
        return {name: dtype for name, dtype in declared.items() if dtype is not None}

    def notes(self) -> Iterator[str]:
        """Yield what `explain` says about options that are only hints."""
        if self.element_compute.itemsize < torch.float32.itemsize:
            yield f"element_compute is {self.element_compute}; the epilogue is computed in float32"
        if self.count is not None:
            yield f"count is {self.count}; each kernel chooses itself how many elements it takes at once"


def _is_dtype(value: object) -> bool:
    return value is None or is_storable(value)
