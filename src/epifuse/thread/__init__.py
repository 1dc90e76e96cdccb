"""Thread functors, by CUTLASS's names: `gemm(A, B, epilogue=LinearCombinationRelu(alpha=2.0, beta=1.0), C=C)`."""

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
