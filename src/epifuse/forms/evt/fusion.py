"""CUTLASS's built-in fusions under their names: functions that return a tree of the nodes of `epifuse.evt`.

Formulas are those of cutlass/epilogue/fusion/operations.hpp. Arguments are passed by name: `alpha`, `beta`, `bias`,
`aux`, `scale_a` and so on, or as pointers and strides, such as `alpha_ptr` and `dAlpha`. Arguments of an activation
have CUTLASS's names, such as `lower_bound` of `functional.Clamp`. "Per row" means one value for each row: a column
vector, (M,). Defaults are CUTLASS's: alpha 1, beta 0, scales 1, and 0 for a null bias. The source C is always read,
except by `ScaledAcc`, which has none. An `activation` is what `Compute` takes, or a `Compute`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from epifuse.base.dtypes import is_storable
from epifuse.base.errors import fail
from epifuse.forms.evt.functional import (
    Identity,
    homogeneous_multiply_add,
    maximum_absolute_value_reduction,
    multiplies,
    plus,
)
from epifuse.forms.evt.nodes import AccFetch, AuxLoad, ColBroadcast, RowBroadcast, ScalarBroadcast, SrcFetch
from epifuse.forms.evt.operators import AuxStore, ColReduction, Compute, ScalarReduction
from epifuse.forms.evt.tree import EVT, SplitTreeVisitor, TopologicalVisitor
from epifuse.forms.evt.visitor import Visitor
from epifuse.frontend.hints import absent
from epifuse.fusion.primitives import Value, eq, exp, where
from epifuse.fusion.reduction import amax, sum

# --- the pieces --------------------------------------------------------------------------------------------------


def _check(name: str, want: str, value: Any, *, holds: bool) -> None:
    if not holds:
        raise fail("option", None, name=name, want=want, value=value)


def _is_fp8(element: torch.dtype) -> bool:
    _check("element", "a torch dtype that can be stored", element, holds=is_storable(element))
    return element in (torch.float8_e4m3fn, torch.float8_e5m2)


def _alpha(*scales: str) -> Visitor:
    return ScalarBroadcast((*scales, "alpha") if scales else "alpha", 1.0)


def _beta(*scales: str) -> Visitor:
    return ScalarBroadcast((*scales, "beta"), (*(1.0 for _ in scales), 0.0)) if scales else ScalarBroadcast("beta", 0.0)


def _row_bias() -> Visitor:
    """A bias with one value for each row."""
    return ColBroadcast("bias", 0.0)


def _col_bias() -> Visitor:
    """A bias with one value for each column."""
    return RowBroadcast("bias", 0.0)


def _source_added(beta: Visitor, rest: Visitor) -> EVT:
    return EVT(Compute(homogeneous_multiply_add), beta, SrcFetch(), rest)


def _biased(bias: Visitor, alpha: Visitor | None = None, beta: Visitor | None = None) -> EVT:
    """beta * C + (alpha * acc + bias)."""
    product = EVT(Compute(homogeneous_multiply_add), alpha or _alpha(), AccFetch(), bias)
    return _source_added(beta or _beta(), product)


def _activated(activation: Any, tree: Visitor) -> EVT:
    return EVT(activation if isinstance(activation, Compute) else Compute(activation), tree)


def _activated_with_aux(activation: Any, tree: Visitor, *, mask: bool) -> Visitor:
    """The activation of `tree`, whose value is also stored as aux. With `mask` aux says instead where the activation
    left the value unchanged, which is all that the derivative needs."""
    _check("mask", "True or False", mask, holds=isinstance(mask, bool))
    if not mask:
        return _activated(activation, EVT(AuxStore("aux"), tree))
    function = activation if isinstance(activation, Compute) else Compute(activation)
    edges = ((), (0,), (0, 1), (2,), (1,))
    return TopologicalVisitor(edges, tree, function, Compute(eq), AuxStore("aux"), Compute(Identity))


# --- linear combinations -----------------------------------------------------------------------------------------


def ScaledAcc() -> EVT:
    """D = alpha * acc."""
    return EVT(Compute(multiplies), _alpha(), AccFetch())


def LinearCombination() -> EVT:
    """D = alpha * acc + beta * C."""
    return _source_added(_beta(), ScaledAcc())


def LinCombEltAct(activation: Any) -> EVT:
    """D = activation(alpha * acc + beta * C)."""
    return _activated(activation, LinearCombination())


def LinCombTopKSoftmaxCol(k: int) -> EVT:
    """D = softmax over the k largest of each row of alpha * acc + beta * C; the others become 0.

    Elements equal to the k-th largest all count. Raises `ArgumentError` unless k is 1, 2, 3 or 4.
    """
    _check("k", "1, 2, 3 or 4", k, holds=type(k) is int and k in _TOP_K)
    return _activated(_TOP_K[k], LinearCombination())


def LinCombPerRowBias() -> EVT:
    """D = alpha * acc + beta * C + bias, a bias for each row."""
    return _biased(_row_bias())


def LinCombPerColBias() -> EVT:
    """D = alpha * acc + beta * C + bias, a bias for each column."""
    return _biased(_col_bias())


def LinCombPerRowBiasEltAct(activation: Any) -> EVT:
    """D = activation(alpha * acc + beta * C + bias), a bias for each row."""
    return _activated(activation, LinCombPerRowBias())


def LinCombPerColBiasEltAct(activation: Any) -> EVT:
    """D = activation(alpha * acc + beta * C + bias), a bias for each column."""
    return _activated(activation, LinCombPerColBias())


def LinCombPerRowBiasEltActAux(activation: Any, *, mask: bool = False) -> Visitor:
    """D = activation(aux), aux = alpha * acc + beta * C + bias, a bias for each row.

    With `mask` aux is a mask instead: whether D equals the activation's argument. An element takes a byte, and a bit in
    CUTLASS.
    """
    return _activated_with_aux(activation, LinCombPerRowBias(), mask=mask)


def LinCombPerColBiasEltActAux(activation: Any, *, mask: bool = False) -> Visitor:
    """As `LinCombPerRowBiasEltActAux`, a bias for each column."""
    return _activated_with_aux(activation, LinCombPerColBias(), mask=mask)


def PerRowLinCombPerRowBiasEltAct(activation: Any) -> EVT:
    """D = activation(alpha * acc + beta * C + bias), with alpha, beta and bias for each row."""
    alpha, beta = ColBroadcast("alpha", 1.0), ColBroadcast("beta", 0.0)
    return _activated(activation, _biased(_row_bias(), alpha, beta))


def PerColLinCombPerColBiasEltAct(activation: Any) -> EVT:
    """D = activation(alpha * acc + beta * C + bias), with alpha, beta and bias for each column."""
    alpha, beta = RowBroadcast("alpha", 1.0), RowBroadcast("beta", 0.0)
    return _activated(activation, _biased(_col_bias(), alpha, beta))


def PerColResAddPerColBiasEltAct(activation: Any) -> EVT:
    """D = activation(alpha * acc + bias) + beta * C, with alpha, beta and bias for each column."""
    product = EVT(Compute(homogeneous_multiply_add), RowBroadcast("alpha", 1.0), AccFetch(), _col_bias())
    return _source_added(RowBroadcast("beta", 0.0), _activated(activation, product))


# --- scaled, for fp8 ---------------------------------------------------------------------------------------------


def _scaled(bias: Visitor) -> EVT:
    return _biased(bias, _alpha("scale_a", "scale_b"), _beta("scale_c"))


def _quantised(tree: Visitor, scale: str, element: torch.dtype) -> Visitor:
    """`tree` times the operand `scale` if `element`, as which it is stored, is fp8; else `tree`."""
    return EVT(Compute(multiplies), ScalarBroadcast(scale, 1.0), tree) if _is_fp8(element) else tree


def _with_amax(tree: Visitor, name: str, element: torch.dtype) -> Visitor:
    """`tree`, with its largest absolute value stored as output `name` if `element` is fp8. The scale of the next call
    is computed from that."""
    return EVT(ScalarReduction(name, maximum_absolute_value_reduction), tree) if _is_fp8(element) else tree


def _with_amax_and_aux(activation: Any, bias: Visitor, element: torch.dtype, element_aux: torch.dtype) -> Visitor:
    result = _quantised(_with_amax(_activated(activation, AccFetch()), "amax_D", element), "scale_d", element)
    kept = _quantised(_with_amax(AccFetch(), "amax_aux", element_aux), "scale_aux", element_aux)
    return SplitTreeVisitor(_scaled(bias), result, EVT(AuxStore("aux"), kept))


def ScaledLinCombPerRowBiasEltAct(activation: Any, element: torch.dtype = torch.float8_e4m3fn) -> Visitor:
    """D = scale_d * activation(Z), Z = scale_a * scale_b * alpha * acc + beta * scale_c * C + bias, one for each row.

    scale_d applies only where D's `element` is fp8.
    """
    return _quantised(_activated(activation, _scaled(_row_bias())), "scale_d", element)


def ScaledLinCombPerColBiasEltAct(activation: Any, element: torch.dtype = torch.float8_e4m3fn) -> Visitor:
    """As `ScaledLinCombPerRowBiasEltAct`, a bias for each column."""
    return _quantised(_activated(activation, _scaled(_col_bias())), "scale_d", element)


def ScaledLinCombPerRowBiasEltActAmaxAux(
    activation: Any, element: torch.dtype = torch.float8_e4m3fn, element_aux: torch.dtype = torch.float8_e4m3fn
) -> Visitor:
    """As `ScaledLinCombPerRowBiasEltAct`, with aux = scale_aux * Z, amax_D = max abs D unscaled, amax_aux = max abs Z.

    scale_d and amax_D exist only if D's `element` is fp8, and scale_aux and amax_aux only if aux's `element_aux` is.
    """
    return _with_amax_and_aux(activation, _row_bias(), element, element_aux)


def ScaledLinCombPerColBiasEltActAmaxAux(
    activation: Any, element: torch.dtype = torch.float8_e4m3fn, element_aux: torch.dtype = torch.float8_e4m3fn
) -> Visitor:
    """As `ScaledLinCombPerRowBiasEltActAmaxAux`, a bias for each column."""
    return _with_amax_and_aux(activation, _col_bias(), element, element_aux)


# --- backward ----------------------------------------------------------------------------------------------------


def LinCombDeEltAct(derivative: Any) -> EVT:
    """D = derivative(alpha * acc + beta * C, aux): dY and the value before the activation.

    `functional.drelu_bit` takes the mask of `LinCombPerRowBiasEltActAux` as aux.
    """
    function = derivative if isinstance(derivative, Compute) else Compute(derivative)
    return EVT(function, LinearCombination(), AuxLoad("aux"))


def LinCombDeEltActDePerRowBias(derivative: Any) -> EVT:
    """As `LinCombDeEltAct`, with dbias = the sum of each row of D."""
    return EVT(Compute(Identity), EVT(ColReduction("dbias", plus), LinCombDeEltAct(derivative)))


# --- top-k -------------------------------------------------------------------------------------------------------


def _below(x: Value, limit: Value) -> Value:
    """The largest element of each row that is below the limit."""
    return amax(where(x < limit, x, -math.inf), dim=-1, keepdim=True)


def _count(x: Value, limit: Value) -> Value:
    """The number of elements of each row that are at least the limit."""
    return sum(where(x >= limit, 1.0, 0.0), dim=-1, keepdim=True)


def _softmax_from(x: Value, limit: Value, top: Value) -> Value:
    """The softmax of those elements of each row that are at least the limit; 0 for the others. `top` is the largest."""
    kept = where(x >= limit, exp(x - top), 0.0)
    return kept / sum(kept, dim=-1, keepdim=True)


def top_1_softmax(x: Value) -> Value:
    """The softmax of the largest element of each row. Elements that equal it have equal shares."""
    top = amax(x, dim=-1, keepdim=True)
    return _softmax_from(x, top, top)


def top_2_softmax(x: Value) -> Value:
    """The softmax of the two largest elements of each row."""
    top = amax(x, dim=-1, keepdim=True)
    limit = where(_count(x, top) >= 2.0, top, _below(x, top))
    return _softmax_from(x, limit, top)


def top_3_softmax(x: Value) -> Value:
    """The softmax of the three largest elements of each row."""
    top = amax(x, dim=-1, keepdim=True)
    second = _below(x, top)
    limit = where(_count(x, second) >= 3.0, where(_count(x, top) >= 3.0, top, second), _below(x, second))
    return _softmax_from(x, limit, top)


def top_4_softmax(x: Value) -> Value:
    """The softmax of the four largest elements of each row."""
    top = amax(x, dim=-1, keepdim=True)
    second = _below(x, top)
    third = _below(x, second)
    upper = where(_count(x, second) >= 4.0, where(_count(x, top) >= 4.0, top, second), third)
    limit = where(_count(x, third) >= 4.0, upper, _below(x, third))
    return _softmax_from(x, limit, top)


_TOP_K = {1: top_1_softmax, 2: top_2_softmax, 3: top_3_softmax, 4: top_4_softmax}

if not TYPE_CHECKING:  # with it, a type checker would accept any name
    __getattr__ = absent(globals(), {"LinearCombinationGroupedWgrad": "there is none yet"})
