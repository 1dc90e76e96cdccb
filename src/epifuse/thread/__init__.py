"""Thread functors, by CUTLASS's names: `gemm(A, B, epilogue=LinearCombinationRelu(alpha=2.0, beta=1.0), C=C)`."""

from typing import TYPE_CHECKING

from epifuse.frontend.hints import absent
from epifuse.thread.formulas import linear_combination
from epifuse.thread.functor import Functor
from epifuse.thread.operators import (
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
from epifuse.thread.options import FloatRoundStyle, ScaleType

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

if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _ANY_ACTIVATION = "write epifuse.thread.LinearCombinationGeneric(activation=epifuse.{})"
    _INSTEAD = {
        "LinearCombinationPlanarComplex": "there is none yet: it needs two accumulators",
        "LinearCombinationTanh": _ANY_ACTIVATION.format("tanh"),
        "LinearCombinationMish": _ANY_ACTIVATION.format("mish"),
    }
    __getattr__ = absent(globals(), _INSTEAD)
