"""Activation modules of torch.nn: each is a vocabulary function whose parameters are attributes of the module."""

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
    """The function that `module` computes, or None. A subclass or an altered module may compute anything: None."""
    found = _ACTIVATIONS.get(type(module))
    return None if found is None or is_altered(module) else found


def is_altered(module: Any) -> bool:
    """Whether calling a module runs hooks, or a `forward` that is not its class's."""
    return isinstance(module, nn.Module) and any(vars(module).get(name) for name in _ALTERING)


_ALTERING = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")


def is_module(value: object) -> bool:
    """Whether `value` is a module of PyTorch. Calling one runs its hooks and its `forward`."""
    return isinstance(value, torch.nn.Module)


def as_text(module: object) -> str | None:
    """The source of an epilogue that applies an activation module to accum, or None for another object. The text calls
    the module by the name in `PARAMETER`."""
    name = type(module).__name__
    return f"def {name}(accum): return {PARAMETER}(accum)" if activation_of(module) is not None else None
