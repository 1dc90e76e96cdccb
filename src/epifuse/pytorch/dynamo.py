"""What Dynamo traces in place of `ef.gemm` and `ef.linear`. It gives one node, whose spec is computed during tracing.

The epilogue itself is not traced. But the values that it captured are read here as Python reads them: cells of its
closure, globals, defaults, attributes, functions that it calls. So Dynamo guards each of them as it guards values in
code that it traces. A captured number becomes an input or a guard, never a constant that might go stale. A value that
cannot be read like this breaks the graph, and the call runs outside of it.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from epifuse.base.errors import EpifuseError, UnsupportedError, fail
from epifuse.base.results import Results
from epifuse.frontend import Parsed
from epifuse.frontend import parsed as parse_cached
from epifuse.frontend.biased import with_bias
from epifuse.pytorch.captured import Capture, Path, UnreadableError, captures, follow
from epifuse.pytorch.ops import NAMES, chosen_dtypes, operator, same_elements
from epifuse.pytorch.spec import Spec, decoded, encoded
from epifuse.request.options import Options, given_by_name
from epifuse.request.problem import tf32_allowed
from epifuse.request.scaled import Unscaled, unscaled
from epifuse.runtime.arguments import plain


def gemm(
    a: Any,
    b: Any,
    /,
    *,
    epilogue: Any = None,
    out: Any = None,
    out_dtypes: Any = None,
    operands: Any = None,
    accumulate: Any = (),
    accumulator_type: Any = None,
    precision: Any = None,
    fast_math: Any = False,
    allow_recompute: Any = False,
    fallback: Any = None,
    save: Any = "auto",
    tune: Any = False,
    fast_accum: Any = False,
    **by_name: Any,
) -> Any:
    """See `epifuse.gemm`."""
    chosen = accumulator_type, precision, fast_math, allow_recompute, fallback, out_dtypes, accumulate, save, tune
    options = *chosen, fast_accum
    return _traced("gemm", unscaled(a, b), epilogue, out, operands or {}, by_name, options)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    epilogue: Any = None,
    out: Any = None,
    out_dtypes: Any = None,
    operands: Any = None,
    accumulate: Any = (),
    accumulator_type: Any = None,
    precision: Any = None,
    fast_math: Any = False,
    allow_recompute: Any = False,
    fallback: Any = None,
    save: Any = "auto",
    tune: Any = False,
    fast_accum: Any = False,
    **by_name: Any,
) -> Any:
    """See `epifuse.linear`."""
    chosen = accumulator_type, precision, fast_math, allow_recompute, fallback, out_dtypes, accumulate, save, tune
    options = *chosen, fast_accum
    if bias is not None:
        by_name["bias"] = bias
    x, weight, scales = unscaled(x, weight, b_is_transposed=True)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return _break(_WHY + "the weight is no matrix")
    return _traced("linear", Unscaled(x, weight.t(), scales), epilogue, out, operands or {}, by_name, options)


def _traced(
    form: str, product: Unscaled, epilogue: Any, out: Any, operands: Any, by_name: dict[str, Any], options: Any
) -> Any:
    a, b, scales = product
    plain_out = out is None or isinstance(out, (torch.Tensor, dict))
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and plain_out and isinstance(operands, dict)):
        return _break(_WHY + "it is handed what no operator of PyTorch takes")
    function, receiver = _taken_apart(epilogue)
    nested = isinstance(function, FunctionType) and _is_nested(function)
    if isinstance(receiver, partial):
        return _break(_UNREADABLE)
    if nested and (_holds_more(function, {**by_name, **operands}) or not _converts_functions()):
        return _break(_UNREADABLE)
    identity = None if receiver is None else id(receiver)
    written = {"": out} if isinstance(out, torch.Tensor) else out or {}
    dtypes = {name: value.dtype for name, value in written.items()}
    shown = {name: _shown(value) for name, value in by_name.items()}
    shown_operands = {name: _shown(value) for name, value in operands.items()}
    found = _captures(function, identity, shown, shown_operands, nested)
    if isinstance(found, str):
        return _break(found)
    tensors: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    seen = []
    for name, path, fixed, is_object in found:
        value = follow(function, receiver, path)
        if name:
            numbers[name] = value
        elif fixed is None:
            seen.append(id(value) if is_object else value)
        elif value != fixed:
            return _break(_UNREADABLE)
    for name, value in (*by_name.items(), *operands.items()):
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, (bool, int, float)):
            numbers[name] = value
    tensors.update(scales)
    if not _are_read(function, identity, shown, shown_operands, nested, *seen):
        return _break(_CHANGED)
    spec = _spec(form, function, identity, shown, shown_operands, dtypes, tuple(tensors), tuple(numbers), options)
    if spec.startswith(_WHY) or spec.startswith(_NOT_VALID):  # noqa: PIE810 - Dynamo traces this
        return _break(spec)
    destinations = list(written.values())
    for i, one in enumerate(destinations):
        for other in destinations[:i]:
            if one is other:
                return _break(_WHY + "two destinations are one tensor")
    names, single, accumulated = _names(spec)
    to = {single if name == "" else name: value for name, value in written.items()}
    held = [*tensors.values(), *[to[name] for name in accumulated]]
    made = operator(a, b, held, list(numbers.values()), spec)
    outputs = {}
    for name, value in zip(names, made, strict=True):
        if name in to and not same_elements(value, to[name]):
            return _break(_WHY + "a destination has another shape")
        outputs[name] = to[name].copy_(value.view(to[name].shape)) if name in to else value
    return outputs[names[0]] if len(names) == 1 else Results(outputs)


def _taken_apart(epilogue: Any) -> tuple[Any, Any]:
    """Return the function or text to parse, and the object whose method it is. A callable object has function None."""
    if isinstance(epilogue, MethodType):
        return epilogue.__func__, epilogue.__self__
    if epilogue is None or isinstance(epilogue, _WITHOUT_OBJECT):
        return epilogue, None
    return None, epilogue


_WITHOUT_OBJECT = (str, bool, int, float, type, FunctionType, BuiltinFunctionType)


def _is_nested(function: Any) -> bool:
    """Whether the function was made while Dynamo traces: its cells cannot be read, and its globals have no guard."""
    if not hasattr(function, "__closure__"):  # PyTorch before 2.13, if the closure holds tensors
        return True
    try:
        closure = function.__closure__
    except AttributeError:  # PyTorch 2.13
        return True
    if function.__code__.co_freevars:
        return not _is_same_object(function, function)
    return closure is not None  # before 2.13, for a closure that Dynamo does not know


def _holds_more(function: Any, handed: dict[str, Any]) -> bool:
    """Whether a function made while Dynamo traces has cells, or uses defaults: `handed` has no values for these."""
    code = function.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return code.co_freevars != () or any(name not in handed for name in names)


def _shown(value: Any) -> Any:
    """What a parse sees in place of an operand: None and text themselves, because they decide the parse; for any other
    value one that stands for its type."""
    if value is None or isinstance(value, str):
        return value
    # Literals, because under dynamic=True Dynamo makes a symbol of a float that it finds in a container.
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return 1
    return 1.0 if isinstance(value, float) else ...


def _break(why: str) -> Any:
    """Break the graph: the call of `ef.gemm` or `ef.linear` runs outside of it."""
    torch._dynamo.graph_break(msg=why)
    raise UnreadableError(why)  # reached if the graph breaks inside an inlined function


# --- run while Dynamo traces, and constant for it ---------------------------------------------------------------------


def _constant(function: Any) -> Any:
    """Mark `function`: Dynamo calls it with the values that its arguments have, and takes the result as constant.

    `torch.compiler.assume_constant_result` says the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True
    return function


_UNREADABLE = "epifuse cannot follow what a closure made in the compiled function, or functools.partial, holds: define "
_UNREADABLE += "the epilogue outside, and hand numbers over by name"
_CHANGED = "epifuse cannot follow what the compiled function changes of its epilogue: change it outside"
_WHY = "epifuse plans and launches outside the compiled graph: "
_NOT_VALID = "epifuse cannot run this call: "


def _reason_outside_graph(error: EpifuseError) -> str:
    """The reason why a call is not in the graph. An error of the call itself would occur outside the graph, too."""
    return f"{_WHY if isinstance(error, UnsupportedError) else _NOT_VALID}{error}"


@_constant
def _converts_functions() -> bool:
    """Whether Dynamo can hand a function that was made while it traces to a constant function. PyTorch 2.8 cannot."""
    from torch._dynamo.variables.functions import NestedUserFunctionVariable

    return "as_python_constant" in vars(NestedUserFunctionVariable)


@_constant
def _is_same_object(first: Any, second: Any) -> bool:
    """Whether both are one object. Dynamo makes a new object for each argument from a function made while it traces."""
    return first is second


@_constant
def _captures(
    function: Any, identity: int | None, shown: dict[str, Any], operands: dict[str, Any], nested: bool
) -> tuple[tuple[str, Path, Any, bool], ...] | str:
    """What the epilogue captured: name, path, fixed number, and whether the value is an object. If Dynamo cannot read a
    value, the reason as text."""
    try:
        found = _captured(function, identity, shown, operands, nested)
        return tuple((name, path, fixed, _is_object(value)) for (name, path, fixed), value in found)
    except UnreadableError as error:
        return f"{_WHY}what compiles a model cannot follow {error}"
    except EpifuseError as error:
        return _reason_outside_graph(error)


@_constant
def _are_read(
    function: Any, identity: int | None, shown: dict[str, Any], operands: dict[str, Any], nested: bool, *seen: Any
) -> bool:
    """Whether the values read here are those that Dynamo has `seen`. It guards these since it was asked for them.

    If the compiled function changed or made a value, only Dynamo knows that: the change happens after the graph ran.
    """
    found = _captured(function, identity, shown, operands, nested)
    shaped = [value for (name, _, fixed), value in found if not name and fixed is None]
    return all(
        (id(value) if _is_object(value) else value) is other or (isinstance(value, (str, tuple)) and value == other)
        for value, other in zip(shaped, seen, strict=True)
    )


def _captured(
    function: Any, identity: int | None, shown: dict[str, Any], operands: dict[str, Any], nested: bool
) -> list[tuple[Capture, Any]]:
    parsed = _parsed(function, identity, shown, operands)
    receiver = _object(identity)
    found = captures(receiver if function is None else function, receiver, parsed, {**shown, **operands}, nested)
    return [(capture, follow(function, receiver, capture.path)) for capture in found]


def _object(identity: int | None) -> Any:
    """The object with this `id`. Dynamo holds it while it traces, and guards it since it was asked for the id.

    The id stands for the object because PyTorch before 2.13 hands numbers to constant functions, but no objects.
    """
    return None if identity is None else ctypes.cast(identity, ctypes.py_object).value


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (*_WITHOUT_OBJECT, ModuleType, Enum))


@_constant
def _spec(
    form: str,
    function: Any,
    identity: int | None,
    shown: dict[str, Any],
    operands: dict[str, Any],
    dtypes: dict[str, torch.dtype],
    tensors: tuple[str, ...],
    numbers: tuple[str, ...],
    options: Any,
) -> str:
    """The operator's spec, or text that says why there is none."""
    try:
        parsed = _parsed(function, identity, shown, operands)
        cast: tuple[str, ...] = ()
        if "bias" in shown and form == "linear" and "bias" not in parsed.parameters:
            parsed, cast = with_bias(parsed), ("bias",)
        elif form == "linear" and not {"bias"} <= {*parsed.defaults, *shown, *operands} and "bias" in parsed.parameters:
            raise fail("linear_bias", None)
        given_by_name(parsed, shown, operands or None, dtypes.get("", dtypes or None), form)
        chosen = Options(*options)
        chosen.check()
        names = parsed.output_names
        given = {name or _single(names): dtype for name, dtype in dtypes.items()}
        if not {*chosen.accumulated} <= {*given}:
            return f"{_WHY}it accumulates onto what is not given"
        if chosen.precision == "ieee" and tf32_allowed():
            return f"{_WHY}PyTorch may run its product in tf32"
        lacking = missing(parsed, tensors, numbers)
        if not_given := sorted(lacking - {*shown, *operands}):
            raise fail("operand_not_given", None, name=not_given[0])
        if parsed.graph.effects or parsed.prepare is not None or lacking:
            return f"{_WHY}it prints, or is handed what no operator of PyTorch takes"
        chosen = chosen._replace(out_dtypes=chosen_dtypes(chosen.out_dtypes, names) | given)
        return encoded(Spec(parsed, (*tensors, *chosen.accumulated), numbers, chosen, NAMES[form], cast, form))
    except EpifuseError as error:
        return _reason_outside_graph(error)


def missing(parsed: Parsed, tensors: tuple[str, ...], numbers: tuple[str, ...]) -> set[str]:
    """The operands of `parsed` that are neither tensors nor numbers, or are not given."""
    return {*parsed.graph.inputs} - {*tensors, *numbers}


@_constant
def _names(spec: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """The names of the outputs, the output that a single destination is for, and the accumulated outputs."""
    call = decoded(spec)
    names = call.parsed.output_names
    return names, _single(names), call.options.accumulated


def _single(names: tuple[str, ...]) -> str:
    return "D" if "D" in names else names[0]


def _parsed(function: Any, identity: int | None, shown: dict[str, Any], operands: dict[str, Any]) -> Parsed:
    receiver = _object(identity)
    if function is None and receiver is None:
        return plain()
    epilogue = function if receiver is None else receiver if function is None else MethodType(function, receiver)
    if hasattr(type(epilogue), "__epifuse__"):
        raise UnreadableError("a visitor tree or a functor")
    return parse_cached(epilogue, shown, operands)
