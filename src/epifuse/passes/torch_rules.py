"""Rules for kinds and shapes that PyTorch's functions have, and epilogue functions of the same name have not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from epifuse.ir import Kind
from epifuse.passes.kinds import NAMES


class Argument(NamedTuple):
    """What inference knows about an argument: its shape, and fields of `Typed`."""

    host: bool
    kind: Kind
    narrow: torch.dtype | None
    shape: tuple[int, ...]


def _prelu(x: Argument, weight: Argument) -> bool:
    channels = x.shape[1] if len(x.shape) == 2 else 1
    return (
        (x.kind, x.narrow) == (weight.kind, weight.narrow) == ("float", weight.narrow)
        and len(x.shape) > 0
        and weight.shape in ((1,), (channels,))
    )


def _same_floats(*arguments: Argument) -> bool:
    """Whether all tensors are floats of one dtype. A number takes the dtype of the tensors beside it."""
    tensors = [argument for argument in arguments if not argument.host]
    return all((x.kind, x.narrow) == ("float", tensors[0].narrow) for x in tensors)


_RULES: dict[str, tuple[Callable[..., bool], str]] = {
    "tensor": (lambda x: not x.host, "tensor_wanted"),
    "number": (lambda x: x.host, "number_wanted"),
    "float": (lambda x: x.kind == "float", "float_wanted"),
    "same floats": (_same_floats, "dtypes_differ"),
    "mask": (lambda x: x.kind == "mask", "mask_wanted"),
    "no mask": (lambda x: x.kind != "mask", "masks_in_arithmetic"),
    "not all numbers": (lambda x, y: not (x.host and y.host), "tensor_wanted"),
    "held": (lambda x, value: x.kind == "float" or value.kind != "float", "float_wanted"),
    "alike": (lambda x, y: x.host == y.host, "bounds_differ"),
    "prelu weight": (_prelu, "prelu_weight"),
    "whole": (lambda x: x.kind in ("int32", "int64"), "integers_wanted"),
    "logits": (lambda target, x: len(x.shape) == 2 and target.shape == x.shape[:1], "logits_wanted"),
}


def broken(rule: str, arguments: Sequence[Argument]) -> tuple[str, dict[str, object]] | None:
    """The key and the values of the error in the catalogue if `arguments` break `rule`; else None."""
    holds, key = _RULES[rule]
    if holds(*arguments):
        return None
    return key, {"kind": NAMES[arguments[0].kind], "shapes": " and ".join(str(a.shape) for a in arguments)}
