"""ATen's operations in the epilogue language: `ROWS` has a rule for each one, by the operation's name in its schema.

A rule takes the arguments by their names in the schema, defaults included, and returns the value of the node. Shapes
and dtypes are those of the fx node. Dims of a reduction or of a layout operation are counted as ATen counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node as FxNode

from epifuse.frontend.fx import parts
from epifuse.frontend.fx.reading import FLOATS, HALVES, Reading, Shape, broadcast, value_of
from epifuse.ir import Node

Arguments = dict[str, Any]
Rule = Callable[[Reading, Arguments], Any]


def arguments(node: FxNode) -> Arguments:
    """The arguments of a node by the names of its schema; by their positions where it has none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(index): item for index, item in enumerate(node.args)}
    found: Arguments = {}
    for index, declared in enumerate(node.target._schema.arguments):
        given = index < len(node.args)
        found[declared.name] = node.args[index] if given else node.kwargs.get(declared.name, declared.default_value)
    return found


# --- elementwise -----------------------------------------------------------------------------------------------------


def _floats(op: str, *names: str, attr: Any = None, **wanted: Any) -> Rule:
    """A rule: `op` on the arguments `names`, with a float result. Other arguments must have the values in `wanted`."""

    def rule(reading: Reading, given: Arguments) -> Node:
        for name, want in wanted.items():
            if given.get(name, want) != want:
                raise reading.boundary(f"{name}={given[name]!r} has no form in the epilogue language")
        _check_float(reading)
        return reading.elementwise(op, *(given[name] for name in names), attr=attr)

    return rule


def _check_float(reading: Reading) -> None:
    """Raise `Boundary` for integers, which wrap at their own width in ATen but not in an epilogue, and for masks."""
    if (dtype := value_of(reading.node).dtype) not in FLOATS:
        raise reading.boundary(f"arithmetic whose result is {str(dtype).removeprefix('torch.')}")


def _activation(name: str, *names: str, **wanted: Any) -> Rule:
    return _floats("call", *(names or ("self",)), attr=name, **wanted)


def _scaled(op: str, left: str, right: str) -> Rule:
    """A rule: `op` on the argument `left` and on the argument `right` times alpha."""

    def rule(reading: Reading, given: Arguments) -> Node:
        _check_float(reading)
        first, second, alpha = reading.value(given[left]), reading.value(given[right]), given.get("alpha", 1)
        if alpha != 1:
            second = reading.emit("mul", second, reading.value(alpha))
        reading.shapes[reading.node] = broadcast(reading.shape(given[left]), reading.shape(given[right]))
        return reading.emit(op, first, second)

    return rule


def _compared(op: str, right: str = "other") -> Rule:
    return lambda reading, given: reading.elementwise(op, given["self"], given[right])


def _masks(op: str, *names: str) -> Rule:
    """A rule: the logical operation `op` on the arguments `names`, which must be masks."""

    def rule(reading: Reading, given: Arguments) -> Node:
        for name in names:
            item = given[name]
            if not isinstance(item, bool) and not (isinstance(item, FxNode) and value_of(item).dtype == torch.bool):
                raise reading.boundary(f"{op} of what is no mask")
        return reading.elementwise(op, *(given[name] for name in names))

    return rule


def _bits(op: str, of_masks: str | None = None, names: tuple[str, ...] = ("self", "other")) -> Rule:
    """A rule: `op` on integers of 32 or 64 bits (see `check_dtype`). On masks it is `of_masks`, or refused if None."""

    def rule(reading: Reading, given: Arguments) -> Node:
        if (dtype := value_of(reading.node).dtype) == torch.bool and of_masks is not None:
            return reading.elementwise(of_masks, *(given[name] for name in names))
        if dtype.is_floating_point or dtype == torch.bool:
            raise reading.boundary(f"{op} whose result is {str(dtype).removeprefix('torch.')}")
        return reading.elementwise(op, *(given[name] for name in names))

    return rule


def _where(condition: str, x: str, y: str) -> Rule:
    return lambda reading, given: reading.elementwise("where", given[condition], given[x], given[y])


def _clamp(reading: Reading, given: Arguments) -> Node:
    _check_float(reading)
    low, high = given.get("min"), given.get("max")
    if low is None or high is None:
        op, bound = ("minimum", high) if low is None else ("maximum", low)
        return reading.elementwise(op, given["self"], bound)
    return reading.elementwise("clip", given["self"], low, high)


def _threshold_backward(reading: Reading, given: Arguments) -> Node:
    gradient, x = given["grad_output"], given["self"]
    below = reading.emit("le", reading.value(x), reading.value(given["threshold"]))
    reading.shapes[reading.node] = broadcast(reading.shape(gradient), reading.shape(x))
    return reading.emit("where", below, reading.value(0.0), reading.value(gradient))


def _gelu(reading: Reading, given: Arguments) -> Node:
    name = "gelu_tanh" if given["approximate"] == "tanh" else "gelu_erf"
    return reading.elementwise("call", given["self"], attr=name)


def _cast(x: str) -> Rule:
    def rule(reading: Reading, given: Arguments) -> Node:
        reading.shapes[reading.node] = reading.shape(given[x])
        return _converted(reading, given[x], given["dtype"])

    return rule


def _converted(reading: Reading, x: FxNode, want: torch.dtype | None) -> Node:
    """x as `want`. Floats round here with the numerics "written", or in float64; `Reading.keep` rounds as ATen does."""
    made, held = reading.value(x), value_of(x).dtype
    if want is None:
        return made
    if reading.numerics == "written":
        return reading.emit("cast", made, attr=want)
    if want not in FLOATS:
        return made if want == held else reading.emit("cast", made, attr=want)
    if held not in FLOATS:
        return reading.emit("cast", made, attr=reading.compute)
    wide = want not in HALVES and reading.numerics == "torch" and held in HALVES
    return reading.emit("cast", made, attr=want) if wide or reading.compute == torch.float64 else made


# --- reductions ------------------------------------------------------------------------------------------------------


def _dims(given: Arguments) -> tuple[int, ...] | None:
    dims = given.get("dim")
    if dims is None or dims == []:
        return None
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _kept(shape: Shape, dims: tuple[int, ...] | None, *, keepdim: bool) -> Shape:
    rank = len(shape)
    gone = set(range(rank)) if dims is None else {dim % rank for dim in dims if rank}
    return tuple(1 if i in gone else extent for i, extent in enumerate(shape) if keepdim or i not in gone)


def _reduction(name: str) -> Rule:
    def rule(reading: Reading, given: Arguments) -> Node:
        x = given["self"]
        # The sum and the product of masks and of integers are int64 both in ATen and in an epilogue.
        if value_of(x).dtype not in FLOATS and name not in _OF_ANY:
            raise reading.boundary(f"{name} of what are no floats")
        if (dtype := given.get("dtype")) is not None and dtype not in FLOATS:
            raise reading.boundary(f"{name} as {str(dtype).removeprefix('torch.')}")
        return _reduced(reading, name, x, _dims(given), keepdim=bool(given.get("keepdim", False)))

    return rule


def _reduced(reading: Reading, name: str, x: FxNode, dims: tuple[int, ...] | None, *, keepdim: bool) -> Node:
    made = reading.whole(x)
    reading.shapes[reading.node] = _kept(tuple(value_of(x).shape), dims, keepdim=keepdim)
    return reading.emit("reduce_dims", made, attr=(name, dims, keepdim))


def _variance(result: Callable[[Node, Node], Any]) -> Rule:
    """A rule: `result` of variance and mean, as in PyTorch first the mean, then that of the squared differences."""

    def rule(reading: Reading, given: Arguments) -> Any:
        x, dims, keepdim = given["self"], _dims(given), bool(given.get("keepdim", False))
        shape = tuple(value_of(x).shape)
        count = math.prod(shape) // max(math.prod(_kept(shape, dims, keepdim=False)), 1)
        correction = given.get("correction")
        correction = int(given.get("unbiased", True)) if correction is None else correction
        if count <= correction:
            raise reading.boundary(f"the variance of {count} elements")
        whole = reading.whole(x)
        mean = reading.emit("reduce_dims", whole, attr=("mean", dims, True))
        centred = reading.emit("sub", whole, mean)
        variance = reading.emit("reduce_dims", reading.emit("mul", centred, centred), attr=("mean", dims, keepdim))
        if correction:
            variance = reading.emit("mul", variance, reading.value(count / (count - correction)))
        if not keepdim:
            mean = reading.emit("reduce_dims", whole, attr=("mean", dims, False))
        reading.shapes[reading.node] = _kept(shape, dims, keepdim=keepdim)
        return result(variance, mean)

    return rule


def _getitem(reading: Reading, given: Arguments) -> Any:
    parts, index = given["0"], given["1"]
    values = reading.values.get(parts)
    if not isinstance(values, tuple):
        raise reading.boundary("a part of what is no value of the epilogue")
    reading.shapes[reading.node] = reading.shapes[parts]
    return values[index]


def _softmax(finish: str) -> Rule:
    """A rule: exp(x - amax) / sum if `finish` is "div", otherwise the logarithm of that."""

    def rule(reading: Reading, given: Arguments) -> Node:
        x, dims = given["self"], (given["dim"],)
        whole = reading.whole(x)
        reading.shapes[reading.node] = tuple(value_of(x).shape)
        shifted = reading.emit("sub", whole, reading.emit("reduce_dims", whole, attr=("amax", dims, True)))
        powers = reading.emit("exp", shifted)
        total = reading.emit("reduce_dims", powers, attr=("sum", dims, True))
        if finish == "div":
            return reading.emit("div", powers, total)
        return reading.emit("sub", shifted, reading.emit("log", total))

    return rule


# --- layout and constants --------------------------------------------------------------------------------------------


def _alias(reading: Reading, given: Arguments) -> Any:
    """The value itself. `expand` needs no more, because values broadcast: `Reading.whole` adds the dims if needed."""
    reading.shapes[reading.node] = reading.shape(given["self"])
    return reading.value(given["self"])


def _reshape(reading: Reading, given: Arguments) -> Node:
    x, want = given["self"], tuple(value_of(reading.node).shape)
    if reading.shape(x) == () and math.prod(want) == 1:
        return _alias(reading, given)  # type: ignore[no-any-return]  # one number
    reading.shapes[reading.node] = want
    return reading.reshaped(reading.whole(x), tuple(value_of(x).shape), want)


def _unsqueeze(reading: Reading, given: Arguments) -> Node:
    x = given["self"]
    if reading.shape(x) == ():
        return _alias(reading, given)  # type: ignore[no-any-return]  # one number
    reading.shapes[reading.node] = tuple(value_of(reading.node).shape)
    return reading.emit("unsqueeze", reading.whole(x), attr=given["dim"] % value_of(reading.node).dim())


def _permute(order: Callable[[Arguments, int], tuple[int, ...]]) -> Rule:
    def rule(reading: Reading, given: Arguments) -> Node:
        x = given["self"]
        made = reading.whole(x)
        reading.shapes[reading.node] = tuple(value_of(reading.node).shape)
        return reading.emit("permute", made, attr=order(given, value_of(x).dim()))

    return rule


def _transposed(given: Arguments, rank: int) -> tuple[int, ...]:
    dims = list(range(rank))
    first, second = given["dim0"], given["dim1"]
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


def _constant(number: Callable[[Arguments], Any]) -> Rule:
    def rule(reading: Reading, given: Arguments) -> Node:
        found, dtype = number(given), value_of(reading.node).dtype
        if type(found) not in (bool, int, float):
            raise reading.boundary(f"a constant that is {found}")
        reading.shapes[reading.node] = ()
        return reading.value(float(found) if dtype in FLOATS else bool(found) if dtype == torch.bool else found)

    return rule


# --- random numbers --------------------------------------------------------------------------------------------------


def _positions(reading: Reading, given: Arguments) -> Node:
    """The linear position of each element in the node's shape, which has as many elements as the product."""
    shape = tuple(value_of(reading.node).shape)
    reading.shapes[reading.node] = shape
    return reading.emit("linear_index", reading.product_as(shape))


def _drawn(name: str) -> Rule:
    return lambda reading, given: reading.elementwise(name, given["seed"], given["index"])


def numbers_of(node: FxNode) -> str | None:
    """The primitive that draws the same numbers as `inductor_random` in the backend that would have run, or None.

    None if `mode` is not rand, or if a number depends on more than seed and position: from PyTorch 2.13 on, Triton
    kernels of one dimension draw four numbers at once (torch/_inductor/codegen/triton.py), and other kernels draw one.
    """
    given = arguments(node)
    if given["mode"] != "rand":
        return None
    if given["seed"].meta["val"].device.type == "cpu":
        return "philox_rand_cpp"
    from torch._inductor.codegen.triton import TritonOverrides

    by_element = given.get("align_dtype") is None and not hasattr(TritonOverrides, "_can_use_4x_random")
    return "philox_rand" if by_element else None


def _inductor_random(reading: Reading, given: Arguments) -> Node:
    if given["mode"] != "rand":
        raise reading.boundary(f"random numbers of {given['mode']}, not of rand")
    if (name := numbers_of(reading.node)) is None:
        raise reading.boundary("random numbers that this version of TorchInductor draws otherwise in each kernel")
    return reading.emit(name, reading.value(given["seed"]), _positions(reading, given))


_OF_ONE = (
    *("neg", "abs", "sign", "floor", "ceil", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "log", "log2", "log1p"),
    *("sin", "cos", "tan", "tanh", "erf"),
)
_OF_ANY = ("sum", "prod", "any", "all")
_ACTIVATIONS = ("sigmoid", "silu", "relu", "mish", "hardswish", "hardsigmoid", "expm1")

ROWS: dict[str, Rule] = {
    # elementwise
    **{f"aten::{name}": _floats(name, "self") for name in _OF_ONE},
    **{f"aten::{name}": _activation(name) for name in _ACTIVATIONS},
    **{f"aten::{name}": _compared(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"aten::{name}": _floats(name, "self", "other") for name in ("mul", "maximum", "minimum", "atan2")},
    **{f"aten::logical_{name}": _masks(f"logical_{name}", "self", "other") for name in ("and", "or")},
    "aten::bitwise_and": _bits("bitwise_and", "logical_and"),
    "aten::bitwise_or": _bits("bitwise_or", "logical_or"),
    "aten::bitwise_xor": _bits("bitwise_xor", "ne"),
    "aten::bitwise_not": _bits("bitwise_not", "logical_not", ("self",)),
    **{f"aten::{name}": _bits("bitwise_left_shift") for name in ("bitwise_left_shift", "__lshift__")},
    **{f"aten::{name}": _bits("bitwise_right_shift") for name in ("bitwise_right_shift", "__rshift__")},
    "aten::logical_not": _masks("logical_not", "self"),
    "aten::add": _scaled("add", "self", "other"),
    "aten::sub": _scaled("sub", "self", "other"),
    "aten::rsub": _scaled("sub", "other", "self"),
    "aten::round": _floats("round", "self", decimals=0),
    "aten::sgn": _floats("sign", "self"),
    "aten::div": _floats("div", "self", "other", rounding_mode=None),
    "aten::pow": _floats("pow", "self", "exponent"),
    "aten::isnan": lambda reading, given: reading.elementwise("ne", given["self"], given["self"]),
    "aten::gelu": _gelu,
    "aten::leaky_relu": _activation("leaky_relu", "self", "negative_slope"),
    "aten::elu": _activation("elu", "self", "alpha", scale=1, input_scale=1),
    "aten::softplus": _activation("softplus", "self", "beta", "threshold"),
    "aten::hardtanh": _activation("hardtanh", "self", "min_val", "max_val"),
    "aten::clamp": _clamp,
    "aten::clamp_min": _clamp,
    "aten::clamp_max": _clamp,
    "aten::where": _where("condition", "self", "other"),
    "aten::masked_fill": _where("mask", "value", "self"),
    "aten::threshold_backward": _threshold_backward,
    "prims::fma": _floats("multiply_add", "a", "b", "c"),
    "prims::convert_element_type": _cast("a"),
    "aten::_to_copy": _cast("self"),
    # random numbers
    "epifuse::positions": _positions,
    "epifuse::philox_rand": _drawn("philox_rand"),
    "epifuse::philox_rand_cpp": _drawn("philox_rand_cpp"),
    "prims::inductor_random": _inductor_random,
    # reductions
    **{f"aten::{name}": _reduction(name) for name in (*_OF_ANY, "mean", "amax", "amin", "logsumexp")},
    "aten::var_mean": _variance(lambda variance, mean: (variance, mean)),
    "aten::var": _variance(lambda variance, mean: variance),
    "getitem": _getitem,
    "aten::_softmax": _softmax("div"),
    "aten::_log_softmax": _softmax("log"),
    # layout and constants
    **{f"aten::{name}": _alias for name in ("alias", "detach", "clone", "lift_fresh_copy", "expand")},
    **{f"aten::{name}": _reshape for name in ("view", "_unsafe_view", "reshape", "squeeze", "_reshape_alias")},
    "aten::unsqueeze": _unsqueeze,
    "aten::permute": _permute(lambda given, rank: tuple(given["dims"])),
    "aten::transpose": _permute(_transposed),
    "aten::t": _permute(lambda given, rank: tuple(reversed(range(rank)))),
    **parts.ROWS,
    "aten::full": _constant(lambda given: given["fill_value"]),
    "aten::full_like": _constant(lambda given: given["fill_value"]),
    "aten::new_full": _constant(lambda given: given["fill_value"]),
    "aten::scalar_tensor": _constant(lambda given: given["s"]),
    **{f"aten::{name}": _constant(lambda given: 0) for name in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten::{name}": _constant(lambda given: 1) for name in ("ones", "ones_like", "new_ones")},
}
