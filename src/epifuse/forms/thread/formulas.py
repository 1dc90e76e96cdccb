"""What the functors compute, in the epilogue language. An epilogue parses it; called on tensors it is plain PyTorch.

A parameter that is None is absent, because the scale type or a beta of zero leaves it out. The formulas are those of
CUTLASS's include/cutlass/epilogue/thread. Where a header and its documentation differ, they follow the header.
"""

from __future__ import annotations

from epifuse.fusion.activation import dgelu, identity, leaky_relu, relu
from epifuse.fusion.forms import clamp
from epifuse.fusion.primitives import Value, add, le, maximum, where
from epifuse.fusion.reduction import absmax


def scaled(x: Value, factor: Value) -> Value:
    """factor * x, or x if there is no factor."""
    return x if factor is None else factor * x


def linear_combination(accum: Value, C: Value, alpha: Value = 1.0, beta: Value = 0.0) -> Value:
    """alpha * accum + beta * C, without the terms and factors that are absent."""
    return scaled(accum, alpha) if C is None else scaled(accum, alpha) + scaled(C, beta)


def convert(accum: Value) -> Value:
    """accum, converted to the output's dtype."""
    D = accum
    return D


def generic(
    accum: Value,
    C: Value,
    alpha: Value = 1.0,
    beta: Value = 0.0,
    activation: Value = identity,
    argument0: Value = None,
    argument1: Value = None,
) -> Value:
    """activation(alpha * accum + beta * C), the activation with up to two arguments of its own."""
    x = linear_combination(accum, C, alpha, beta)
    one = argument0 is not None and argument1 is None
    D = activation(x) if argument0 is None else activation(x, argument0) if one else activation(x, argument0, argument1)
    return D


def leaky(accum: Value, C: Value, alpha: Value = 1.0, beta: Value = 0.0, leaky_alpha: Value = 0.01) -> Value:
    """leaky_relu(alpha * accum + beta * C, leaky_alpha)."""
    return leaky_relu(linear_combination(accum, C, alpha, beta), leaky_alpha)


def threshold_relu(accum: Value, C: Value, alpha: Value = 1.0, beta: Value = 0.0, threshold: Value = None) -> Value:
    """max(alpha * accum + beta * C, threshold), or relu(alpha * accum + beta * C) if there is no threshold."""
    return relu_above(linear_combination(accum, C, alpha, beta), threshold)


def relu_above(x: Value, threshold: Value) -> Value:
    """max(x, threshold), or relu(x) if there is no threshold. NaN stays NaN."""
    return relu(x) if threshold is None else maximum(x, threshold)


def clamped(
    accum: Value, C: Value, alpha: Value = 1.0, beta: Value = 0.0, clamp_min: Value = None, clamp_max: Value = None
) -> Value:
    """alpha * accum + beta * C, limited to [clamp_min, clamp_max]."""
    return clamp(linear_combination(accum, C, alpha, beta), clamp_min, clamp_max)


def bias_elementwise(
    accum: Value,
    C: Value,
    bias: Value,
    alpha: Value = 1.0,
    beta: Value = 0.0,
    elementwise_op: Value = identity,
    binary_op: Value = add,
) -> Value:
    """T = binary_op(alpha * accum + beta * C, bias); D = elementwise_op(T)."""
    T = binary_op(linear_combination(accum, C, alpha, beta), bias)
    D = elementwise_op(T)
    return D, T


def bias_relu(
    accum: Value, C: Value, bias: Value, alpha: Value = 1.0, beta: Value = 0.0, threshold: Value = None
) -> Value:
    """D = max(z, threshold) with z = alpha * accum + beta * C + bias; T is a mask, false where z is below it."""
    z = linear_combination(accum, C, alpha, beta) + bias
    T = ~(z < (0 if threshold is None else threshold))
    D = relu_above(z, threshold)
    return D, T


def residual_block(
    accum: Value,
    residual1: Value,
    residual2: Value,
    bias: Value,
    alpha: Value = 1.0,
    beta: Value = 1.0,
    activation: Value = identity,
    binary_op1: Value = add,
    binary_op2: Value = None,
    unary_op: Value = identity,
) -> Value:
    """unary_op(binary_op2(binary_op1(activation(alpha accum + bias), beta residual1), beta residual2))."""
    x = activation(linear_combination(accum, bias, alpha, None))
    y = x if residual1 is None else binary_op1(x, scaled(residual1, beta))
    D = unary_op(y if residual2 is None else binary_op2(y, scaled(residual2, beta)))
    return D


def tensor_broadcast(
    accum: Value,
    C0: Value,
    C1: Value,
    bias: Value,
    alpha: Value = 1.0,
    beta: Value = 0.0,
    activation: Value = identity,
    binary_op0: Value = add,
    binary_op1: Value = None,
    unary_op: Value = identity,
) -> Value:
    """unary_op(binary_op1(binary_op0(activation(alpha * accum + bias), beta * C0), beta * C1))."""
    return residual_block(accum, C0, C1, bias, alpha, beta, activation, binary_op0, binary_op1, unary_op)


def drelu(accum: Value, C: Value, Z: Value, alpha: Value = 1.0, beta: Value = 0.0, threshold: Value = 0.0) -> Value:
    """alpha * accum + beta * C where Z is above the threshold (or NaN), 0 elsewhere."""
    return where(le(Z, threshold), 0.0, linear_combination(accum, C, alpha, beta))


def drelu_conditional(accum: Value, C: Value, Z: Value, alpha: Value = 1.0, beta: Value = 0.0) -> Value:
    """alpha * accum + beta * C where the mask Z, of bools or bytes, holds, 0 elsewhere."""
    return where(Z != 0, linear_combination(accum, C, alpha, beta), 0.0)


def dgelu_erf(accum: Value, C: Value, Z: Value, alpha: Value = 1.0, beta: Value = 0.0) -> Value:
    """alpha * accum + beta * C, times the derivative of gelu at Z."""
    return dgelu(linear_combination(accum, C, alpha, beta), Z)


def scaled_combination(
    accum: Value,
    C: Value,
    alpha: Value = 1.0,
    beta: Value = 0.0,
    scale_a: Value = 1.0,
    scale_b: Value = 1.0,
    scale_c: Value = 1.0,
) -> Value:
    """(alpha * scale_a * scale_b) * accum + (beta * scale_c) * C. An absent alpha or beta has no scales either."""
    a = None if alpha is None else alpha * scale_a * scale_b
    b = None if beta is None else beta * scale_c
    return linear_combination(accum, C, a, b)


def scaling_and_abs_max(
    accum: Value,
    C: Value,
    bias: Value,
    alpha: Value = 1.0,
    beta: Value = 0.0,
    activation: Value = identity,
    scale_a: Value = 1.0,
    scale_b: Value = 1.0,
    scale_c: Value = 1.0,
    scale_d: Value = None,
    scale_aux: Value = None,
) -> Value:
    """z = scaled_combination + bias; D = scale_d * activation(z); Aux = scale_aux * z; and the largest absolute values
    of activation(z) and of z."""
    z = scaled_combination(accum, C, alpha, beta, scale_a, scale_b, scale_c) + bias
    y = activation(z)
    D, Aux = scaled(y, scale_d), scaled(z, scale_aux)
    abs_max_D, abs_max_aux = absmax(y), absmax(z)
    return D, Aux, abs_max_D, abs_max_aux
