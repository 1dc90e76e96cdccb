"""Thread functors under CUTLASS's names: `gemm(A, B, epilogue=LinearCombinationRelu(alpha=2.0, beta=1.0), C=C)`."""

from typing import TYPE_CHECKING

from epifuse.forms.thread.formulas import linear_combination
from epifuse.forms.thread.functor import Functor
from epifuse.forms.thread.operators import (
    Convert,
    LinearCombination,
    LinearCombinationBiasElementwise,
    LinearCombinationBiasRelu,
    LinearCombinationClamp,
    LinearCombinationDGelu,
    LinearCombinationDRelu,
    LinearCombinationDReluConditionalBits,
    LinearCombinationGELU,
    LinearCombinationGeneric,
    LinearCombinationGenericWithScalingAndAbsMax,
    LinearCombinationHardSwish,
    LinearCombinationLeakyRelu,
    LinearCombinationRelu,
    LinearCombinationResidualBlock,
    LinearCombinationSigmoid,
    LinearCombinationSilu,
    LinearCombinationTensorBroadcast,
)
from epifuse.forms.thread.options import FloatRoundStyle, ScaleType
from epifuse.frontend.hints import absent

__all__ = [
    "Convert",
    "FloatRoundStyle",
    "Functor",
    "LinearCombination",
    "LinearCombinationBiasElementwise",
    "LinearCombinationBiasRelu",
    "LinearCombinationClamp",
    "LinearCombinationDGelu",
    "LinearCombinationDRelu",
    "LinearCombinationDReluConditionalBits",
    "LinearCombinationGELU",
    "LinearCombinationGeneric",
    "LinearCombinationGenericWithScalingAndAbsMax",
    "LinearCombinationHardSwish",
    "LinearCombinationLeakyRelu",
    "LinearCombinationRelu",
    "LinearCombinationResidualBlock",
    "LinearCombinationSigmoid",
    "LinearCombinationSilu",
    "LinearCombinationTensorBroadcast",
    "ScaleType",
    "linear_combination",
]

if not TYPE_CHECKING:  # with a `__getattr__` a type checker would accept any name
    _ANY_ACTIVATION = "write epifuse.thread.LinearCombinationGeneric(activation=epifuse.{})"
    _INSTEAD = {
        "LinearCombinationPlanarComplex": "there is none yet: it needs two accumulators",
        "LinearCombinationTanh": _ANY_ACTIVATION.format("tanh"),
        "LinearCombinationMish": _ANY_ACTIVATION.format("mish"),
    }
    __getattr__ = absent(globals(), _INSTEAD)
