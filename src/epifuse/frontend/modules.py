"""Activation modules of torch.nn: functions of the vocabulary, whose parameters are the module's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

PARAMETER = "module"


class Activation(NamedTuple):
    """The function that a module computes, and which of its parameters are attributes of the module."""

    function: str
    attributes: tuple[str, ...] = ()
    origin: str = "torch"


_ACTIVATIONS: Mapping[type, Activation] = {
    nn.Identity: Activation("identity", origin="epifuse"),
    nn.ReLU: Activation("relu"),
    nn.ReLU6: Activation("relu6"),
    nn.LeakyReLU: Activation("leaky_relu", ("negative_slope",)),
    nn.ELU: Activation("elu", ("alpha",)),
    nn.GELU: Activation("gelu", ("approximate",)),
    nn.SiLU: Activation("silu"),
    nn.Mish: Activation("mish"),
    nn.Sigmoid: Activation("sigmoid"),
    nn.LogSigmoid: Activation("logsigmoid"),
    nn.Tanh: Activation("tanh"),
    nn.Hardswish: Activation("hardswish"),
    nn.Hardsigmoid: Activation("hardsigmoid"),
    nn.SELU: Activation("selu"),
    nn.Softsign: Activation("softsign"),
    nn.Tanhshrink: Activation("tanhshrink"),
    nn.GLU: Activation("glu", ("dim",)),
    nn.Hardtanh: Activation("hardtanh", ("min_val", "max_val")),
    nn.Softplus: Activation("softplus", ("beta", "threshold")),
    nn.Threshold: Activation("threshold", ("threshold", "value")),
    nn.Softmax: Activation("softmax", ("dim",)),
    nn.LogSoftmax: Activation("log_softmax", ("dim",)),
}


def activation_of(module: object) -> Activation | None:
    """What `module` computes; a subclass may compute anything, and so may one that is altered."""
    found = _ACTIVATIONS.get(type(module))
    return None if found is None or is_altered(module) else found


def is_altered(module: Any) -> bool:
    """Whether calling a module runs hooks, or a `forward` that is not its class's."""
    return isinstance(module, nn.Module) and any(vars(module).get(name) for name in _ALTERING)


_ALTERING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")


def is_module(value: object) -> bool:
    """Whether calling `value` runs hooks and whatever its `forward` is."""
    return isinstance(value, torch.nn.Module)


def as_text(module: object) -> str | None:
    """The epilogue that applies an activation module to accum; the module itself is called `PARAMETER` in it."""
    name = type(module).__name__
    return f"def {name}(accum): return {PARAMETER}(accum)" if activation_of(module) is not None else None
