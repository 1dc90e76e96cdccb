"""The functors under CUTLASS's names: each is a formula, and its differences from its base are given as data."""

from __future__ import annotations

from typing import Any

import torch

from epifuse.base.errors import fail
from epifuse.forms.thread import formulas
from epifuse.forms.thread.functor import Functor
from epifuse.fusion.activation import gelu_erf, gelu_tanh, hardswish, sigmoid, silu


class LinearCombination(
    Functor, formula=formulas.linear_combination, partial=formulas.linear_combination, sources={"C": None}
):
    """alpha * accum + beta * C."""


class LinearCombinationGeneric(LinearCombination, formula=formulas.generic):
    """activation(alpha * accum + beta * C). The activation is any of epifuse's or torch's, or a function of the caller.

    `activation_args` are up to two numbers that the activation takes beside the value.
    """

    def __init__(self, *options: Any, activation_args: tuple[Any, ...] = (), **parameters: Any) -> None:
        if not isinstance(activation_args, tuple) or len(activation_args) > 2:
            want = "a tuple of two numbers at most"
            raise fail("option", None, name="activation_args", want=want, value=activation_args)
        parameters |= {f"argument{index}": value for index, value in enumerate(activation_args)}
        super().__init__(*options, **parameters)


class LinearCombinationRelu(LinearCombination, formula=formulas.threshold_relu):
    """max(alpha * accum + beta * C, threshold); the threshold is 0 unless given."""


class LinearCombinationGELU(LinearCombination, formula=formulas.generic):
    """gelu(alpha * accum + beta * C): the fast form by tanh, or with is_fast=False the precise one by erf."""

    def __init__(self, *options: Any, is_fast: bool = True, **parameters: Any) -> None:
        if not isinstance(is_fast, bool):
            raise fail("option", None, name="is_fast", want="True or False", value=is_fast)
        if "activation" in parameters:
            known = "alpha, beta, is_fast"
            raise fail("unknown_parameter", None, function=type(self).__name__, name="activation", parameters=known)
        super().__init__(*options, activation=gelu_tanh if is_fast else gelu_erf, **parameters)


class LinearCombinationSigmoid(LinearCombination, formula=formulas.generic, preset={"activation": sigmoid}):
    """sigmoid(alpha * accum + beta * C)."""


class LinearCombinationSilu(LinearCombination, formula=formulas.generic, preset={"activation": silu}):
    """silu(alpha * accum + beta * C)."""


class LinearCombinationHardSwish(LinearCombination, formula=formulas.generic, preset={"activation": hardswish}):
    """hardswish(alpha * accum + beta * C)."""


class LinearCombinationLeakyRelu(LinearCombination, formula=formulas.leaky):
    """leaky_relu(alpha * accum + beta * C, leaky_alpha)."""


class LinearCombinationClamp(LinearCombination, formula=formulas.clamped):
    """alpha * accum + beta * C limited to [clamp_min, clamp_max], by default the range of element_output."""

    def __init__(self, element_output: torch.dtype | None = None, *options: Any, **parameters: Any) -> None:
        for name, limit in _range(element_output).items():
            if not any(key.startswith(name) for key in parameters):
                parameters[name] = limit
        if not any(key.startswith("clamp_") for key in parameters):
            why = "pass element_output, clamp_min or clamp_max"
            raise fail("undefined_functor", None, functor=type(self).__name__, what="no range", why=why)
        super().__init__(element_output, *options, **parameters)


def _range(dtype: Any) -> dict[str, float]:
    if not isinstance(dtype, torch.dtype) or dtype == torch.bool:
        return {}
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return {"clamp_min": float(limits.min), "clamp_max": float(limits.max)}


class LinearCombinationBiasElementwise(LinearCombination, formula=formulas.bias_elementwise):
    """T = binary_op(alpha * accum + beta * C, bias); D = elementwise_op(T). Stores D and T."""


class LinearCombinationBiasRelu(LinearCombination, formula=formulas.bias_relu):
    """D = max(z, threshold) with z = alpha * accum + beta * C + bias, and the mask T, false where z is below it."""


class LinearCombinationResidualBlock(
    Functor, formula=formulas.residual_block, sources={"residual1": "binary_op1", "residual2": "binary_op2"}
):
    """unary_op(binary_op2(binary_op1(activation(alpha * accum + bias), beta * residual1), beta * residual2)).

    Without a binary_op2 there is no residual2.
    """


class LinearCombinationTensorBroadcast(
    Functor, formula=formulas.tensor_broadcast, sources={"C0": "binary_op0", "C1": "binary_op1"}
):
    """unary_op(binary_op1(binary_op0(activation(alpha * accum + bias), beta * C0), beta * C1)).

    A binary operation that is None leaves its source out.
    """


class LinearCombinationDRelu(LinearCombination, formula=formulas.drelu):
    """The gradient through a relu: alpha * accum + beta * C where Z is above the threshold (or NaN), else 0."""


class LinearCombinationDReluConditionalBits(LinearCombination, formula=formulas.drelu_conditional):
    """The gradient through a relu: alpha * accum + beta * C where the mask Z holds, else 0."""


class LinearCombinationDGelu(LinearCombination, formula=formulas.dgelu_erf):
    """The gradient through a gelu: (alpha * accum + beta * C) times the derivative of gelu at Z."""


class LinearCombinationGenericWithScalingAndAbsMax(
    LinearCombination, formula=formulas.scaling_and_abs_max, partial=formulas.scaled_combination
):
    """z = (alpha scale_a scale_b) accum + (beta scale_c) C + bias; D = scale_d activation(z), Aux = scale_aux z.

    Also stores abs_max_D and abs_max_aux, the largest absolute values before scale_d and scale_aux.
    """


class Convert(Functor, formula=formulas.convert):
    """accum, converted to element_output."""
