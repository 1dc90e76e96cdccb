"""Texts for error messages: what a piece of syntax is called in English, and what to write instead of it."""

from __future__ import annotations

import ast
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from epifuse.base.errors import fail
from epifuse.fusion.vocabulary import METHODS, VOCABULARY

_WORDS: dict[type[ast.AST], str] = {
    ast.AsyncFor: "an async for loop",
    ast.AsyncFunctionDef: "an async function",
    ast.AsyncWith: "an async with statement",
    ast.Attribute: "an attribute",
    ast.AugAssign: "an augmented assignment",
    ast.Await: "await",
    ast.Call: "a call",
    ast.ClassDef: "a class",
    ast.Delete: "del",
    ast.Dict: "a dictionary",
    ast.DictComp: "a dictionary comprehension",
    ast.For: "a for loop",
    ast.FunctionDef: "a nested function",
    ast.GeneratorExp: "a generator expression",
    ast.Global: "a global statement",
    ast.If: "an if statement",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.In: "in",
    ast.JoinedStr: "an f-string",
    ast.Lambda: "a lambda",
    ast.ListComp: "a list comprehension",
    ast.MatMult: "@",
    ast.Match: "a match statement",
    ast.NamedExpr: "an assignment inside an expression",
    ast.Nonlocal: "a nonlocal statement",
    ast.NotIn: "not in",
    ast.Set: "a set",
    ast.SetComp: "a set comprehension",
    ast.Starred: "a starred name",
    ast.Subscript: "an element",
    ast.Try: "a try statement",
    ast.TryStar: "a try statement",
    ast.While: "a while loop",
    ast.With: "a with statement",
}


def words_for(syntax: type[ast.AST]) -> str:
    """The English name of a piece of syntax."""
    return _WORDS.get(syntax) or re.sub("(?<!^)(?=[A-Z])", " ", syntax.__name__).lower()


_PRODUCT = "the product is accum; a second product needs a second GEMM"
_STEPS = "write the steps out; one that repeats may be a helper function, which is called for each"
_HELPER = "define the helper outside the epilogue; it is inlined"
_NO_FLOW = "an epilogue has no control flow; use where"

_HINTS: dict[type[ast.AST], str] = {
    ast.If: "use where(mask, a, b) for tensors, or `a if flag else b` for host numbers",
    ast.Match: "use where(mask, a, b) for tensors, or `a if flag else b` for host numbers",
    **dict.fromkeys((ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp), _STEPS),
    **dict.fromkeys((ast.FunctionDef, ast.Lambda, ast.ClassDef), _HELPER),
    ast.MatMult: _PRODUCT,
    ast.In: "write out the comparisons: `x == 1 or x == 2` of host values, (x == 1) | (x == 2) of tensors",
    ast.NotIn: "write out the comparisons: `x != 1 and x != 2` of host values, (x != 1) & (x != 2) of tensors",
    ast.Starred: "name each part: a, b, c, d = x.chunk(4, dim=-1)",
    ast.JoinedStr: "debug_print takes a plain format string",
    ast.NamedExpr: "assign on a line of its own",
    ast.AugAssign: "assign to a plain name: x = x + y",
    ast.Delete: "leave it out: what is not returned is not stored",
    **dict.fromkeys((ast.Global, ast.Nonlocal), "an epilogue assigns names of its own alone; return what it computes"),
    ast.With: "leave it out: no context applies to an epilogue, and a gradient passes through every value of it",
    **dict.fromkeys((ast.Dict, ast.Set), "give each value a name of its own"),
    **dict.fromkeys((ast.Import, ast.ImportFrom), "import at the top of the module"),
    **dict.fromkeys((ast.Raise, ast.Try, ast.TryStar), _NO_FLOW),
    ast.Assert: f"{_NO_FLOW}, or debug_print",
}


def hint_for(syntax: type[ast.AST]) -> str:
    """What to write instead of a piece of Python that is not in the language."""
    return _HINTS.get(syntax, _THE_PAGE)


_THE_PAGE = "`python -m epifuse docs` prints all that an epilogue may contain"
_NO_SHAPE = "an epilogue holds for every shape; an extent is x.shape[-1], a mean mean(x, dim=...)"
_AS_IT_IS = "leave it out: a value has no memory of its own"
_NO_GRADIENT = "a derivative passes through every value of a call: store the value, and detach it in PyTorch"
_NO_ORDER = "an epilogue has no order of columns but that of parts: store the value, and do this in PyTorch"
_NUMBER = "write the number itself, or x.to(dtype) for a tensor"
_SPREAD = "write it out: mean, then (x - mean) squared, then its mean"
_GROUPS = (
    "with g = x.unflatten(-1, (groups, -1)) write (g - g.mean(-1, keepdim=True)) / (g.var(-1, correction=0, "
    "keepdim=True) + eps).sqrt(), and .flatten(-2) of it"
)
_TOWARDS_0 = "where(q < 0, ceil(q), floor(q))"
_LOSS = "write it out, and reduce that: {}"
_HUBER = "torch.where((x - y).abs() < 1, 0.5 * (x - y).square(), (x - y).abs() - 0.5)"
_MODULE = "write the function, as F.gelu(x) for nn.GELU()(x)"
_PARTS_OF_FLOATS = "with p = 2 * ef.floor_power_of_two(x.abs()) write x / p for the fraction, p.log2() for the exponent"
_NORM_OF_P = "x.abs().pow({p}).sum(dim=-1).pow(1 / {p})"
_OTHER_NORMS = f"ef.absmax(x, dim=-1) for the order infinity, {_NORM_OF_P.format(p='p')} for another p"
_NEAREST_EVEN = "outputs are rounded to nearest even: none is rounded stochastically"
_QUANTISED = "write round(x / scale + zero_point).clamp(-128, 127).to(torch.int8)"
_FAKE = "write ((round(x / scale) + zero_point).clamp(low, high) - zero_point) * scale"

_INSTEAD: dict[str, str] = {
    **dict.fromkeys(("swapaxes", "movedim", "moveaxis"), "write permute"),
    "narrow": "write x[..., start:start + length]",
    "select": "write x[..., place], or x[:, place]",
    "tensor_split": "write split([width, width, ...], dim=-1)",
    **dict.fromkeys(("tuple", "list"), "leave it out: the parts of a value are a tuple"),
    **dict.fromkeys(("flip", "sort", "topk", "argsort", "cumsum", "cumprod", "unique"), _NO_ORDER),
    **dict.fromkeys(("median", "nanmedian", "quantile", "kthvalue", "mode"), _NO_ORDER),
    **dict.fromkeys(("len", "ndim", "dim"), _NO_SHAPE),
    **dict.fromkeys(("clone", "contiguous", "cpu", "cuda"), _AS_IT_IS),
    **dict.fromkeys(("detach", "data", "requires_grad_"), _NO_GRADIENT),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), "leave it out: values broadcast by themselves"),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), "store the value, and repeat it in PyTorch"),
    **dict.fromkeys(("concat", "concatenate", "hstack", "vstack"), "write cat([x, y], dim=...)"),
    "batch_norm": _SPREAD,
    "group_norm": _GROUPS,
    **{f"{name}_mean": f"write x.{name}(dim=-1) and x.mean(dim=-1)" for name in ("var", "std")},
    "normalize": "write x / ef.norm(x, dim=-1, keepdim=True).clamp_min(1e-12)",
    **dict.fromkeys(("ones", "zeros", "full", "tensor"), _NUMBER),
    "int": "write x.to(torch.int32) for a tensor; of host numbers n // 2, math.floor(x) or math.trunc(x)",
    "bool": "write a comparison",
    **dict.fromkeys(("rsub", "__rsub__"), "write y - x for x.rsub(y)"),
    **dict.fromkeys(("stochastic_round", "stochastic_rounding"), _NEAREST_EVEN),
    **dict.fromkeys(("quantize_per_tensor", "quantize_per_channel"), _QUANTISED),
    **dict.fromkeys(("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"), _FAKE),
    "frexp": _PARTS_OF_FLOATS,
    "ldexp": "write x * 2.0 ** y",
    "triu": "write where(index_n(x) >= index_m(x), x, 0.0)",
    "tril": "write where(index_n(x) <= index_m(x), x, 0.0)",
    "arange": "index_n(x) and index_m(x) are the column and the row of each element",
    "float": "write x.float() for a tensor, math.inf for infinity; a host number needs no conversion",
    "logical_xor": "write a != b",
    **dict.fromkeys(("trunc", "fix"), f"write {_TOWARDS_0.replace('q', 'x')}"),
    "fmod": f"with q = x / y write x - y * {_TOWARDS_0}; of integers sign(x) * (abs(x) % abs(y))",
    "erfc": "write 1 - erf(x)",
    "celu": "write where(x > 0, x, alpha * expm1(x / alpha))",
    "hardshrink": "write where(abs(x) > 0.5, x, 0.0)",
    **dict.fromkeys(("linalg", "norm", "vector_norm"), f"write ef.norm(x, dim=-1), {_OTHER_NORMS}"),
    **dict.fromkeys(("view_as", "reshape_as"), "write x.view(y.shape[0], y.shape[1])"),
    "swish": "write silu(x)",
    "item": "a reduction's result may be used as it is",
    "print": "write ef.debug_print('{}', x)",
    "dtype": "floats are float32 inside an epilogue, and out_dtypes=... chooses the dtypes of outputs",
    "device": "floats are float32 inside an epilogue, on A's device",
    **dict.fromkeys(("type_as", "astype"), "write x.to(dtype), which y.dtype may be"),
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "einsum", "addmm"), _PRODUCT),
    "binary_cross_entropy_with_logits": _LOSS.format("ef.softplus(x) - x * y"),
    "mse_loss": _LOSS.format("(x - y).square()"),
    "l1_loss": _LOSS.format("(x - y).abs()"),
    "kl_div": _LOSS.format("torch.where(y > 0, y * (y.log() - x), 0.0)"),
    **dict.fromkeys(("smooth_l1_loss", "huber_loss"), _LOSS.format(_HUBER)),
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), "make the random numbers an operand"),
    "dropout": "write ef.dropout(x, p, seed)",
    **dict.fromkeys(("isinstance", "type", "getattr", "hasattr"), "decide outside the epilogue, and pass a number"),
}
_VERSION = re.compile(r"^Sm\d+")  # CUTLASS names its visitors by architecture


def absent(namespace: Mapping[str, Any], instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Make the `__getattr__` of the module with this namespace: it says what to write for a CUTLASS name it lacks.

    `instead` has hints for names that resemble no name of the module. The function raises `AttributeError`, which
    `hasattr` expects.
    """

    def __getattr__(name: str) -> NoReturn:  # noqa: N807 - the name it is called by
        home, plain = str(namespace["__name__"]), _VERSION.sub("", name).lower()
        module = home.replace(".forms.", ".")  # the name under which users import it
        alike = (f"write {module}.{own}" for own in namespace if own[0] != "_" and own.lower() == plain)
        near = instead.get(name) or next(alike, "") or _alike(name, namespace, module)
        said = fail("no_attribute", None, module=module, name=name, near=near)
        raise AttributeError(str(said), name=name, obj=sys.modules.get(home))

    return __getattr__


_CLOSE = 0.75  # least similarity of two names, as difflib measures it
_LONG_ENOUGH = 3  # least letters of a name: "os" is similar to "cos", but means something else
_OURS = ("ef.", "epifuse.")


def unknown_function_hint(spelled: str, *, exists: bool = False) -> str:
    """What to write for a name that is not in the vocabulary: an equivalent, our own function, or similar names.

    If a function of this name `exists`, it was no misspelling, so no similar names are suggested.
    """
    last = spelled.rsplit(".", 1)[-1]
    if last in _INSTEAD:
        return _INSTEAD[last]
    plain = last.strip("_").lower()
    if plain in VOCABULARY:
        return f"write ef.{plain}" if spelled.startswith(_OURS) else f"write ef.{plain}, after `import epifuse as ef`"
    if exists:
        return _MODULE if last[:1].isupper() else _THE_PAGE
    return _nearest(plain, VOCABULARY, "ef.")


def _alike(name: str, namespace: Iterable[str], module: str) -> str:
    found = difflib.get_close_matches(name, (own for own in namespace if own[0] != "_"), n=3, cutoff=_CLOSE)
    return f"did you mean {', '.join(f'{module}.{own}' for own in found)}?" if found else f"see dir({module})"


def _nearest(name: str, known: Iterable[str], prefix: str) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=_CLOSE) if len(name) >= _LONG_ENOUGH else ()
    return f"did you mean {', '.join(prefix + found for found in near)}?" if near else _THE_PAGE


def undefined_hint(name: str, defined: Iterable[str] = ()) -> str:
    """What to do about a name that nothing defines. `defined` are the names that the epilogue defines."""
    if near := difflib.get_close_matches(name, defined, n=1, cutoff=_CLOSE):
        return f"did you mean {near[0]}?"
    known = unknown_function_hint(name)
    return "make it a parameter, or define it before the epilogue" if known is _THE_PAGE else known


def module_hint(name: str) -> str:
    """What to write in place of a module of this class."""
    own = f" with ef.{name.lower()}" if name.lower() in VOCABULARY else ""
    return f"write a def or a lambda{own}; parameters of a module become parameters of the function"


def unknown_method_hint(name: str) -> str:
    """What to write for a method that values do not have, such as `name_`, which changes a tensor in place."""
    plain = name.strip("_").lower()
    if name not in _INSTEAD and plain in METHODS:
        return f"write .{plain}" + (", which gives a new value" if name.endswith("_") else "")
    if name not in _INSTEAD and plain in VOCABULARY:
        return f"write ef.{plain}(x), after `import epifuse as ef`"
    return _INSTEAD.get(name) or _nearest(plain, METHODS, ".")


_PARAMETERS: dict[str, str] = {
    "axis": "write dim=",
    "keepdims": "write keepdim=",
    "inplace": "leave it out: a value is never changed in place",
    "out": "leave it out: return the value",
    "dtype": "write .to(dtype) before or after",
    "alpha": "write x + alpha * y for add, and x - alpha * y for sub",
    "rounding_mode": (
        f"with q = x / y write floor(q) for 'floor', {_TOWARDS_0} for 'trunc'; of integers x // y, and "
        "sign(x) * sign(y) * (abs(x) // abs(y))"
    ),
    "decimals": "with n = 10 ** decimals write round(x * n) / n",
    "rounding": _NEAREST_EVEN,
    **dict.fromkeys(("copy", "non_blocking", "memory_format", "device"), _AS_IT_IS),
}


def parameter_hint(name: str, value: Any = None) -> str:
    """What to write for a parameter that torch or NumPy has, but the vocabulary has not. `value` is what it was given,
    or None if that is not known."""
    if name == "decimals" and isinstance(value, int) and value:
        return f"write round(x {'*/'[value < 0]} {10 ** abs(value)}) {'/*'[value < 0]} {10 ** abs(value)}"
    return _PARAMETERS.get(name, "")


def choice_hint(value: Any) -> str:
    """What to do if a parameter does not take this `value`."""
    return _NEAREST_EVEN if value == "stochastic" else ""


_NORMS: dict[Any, str] = {
    math.inf: "write ef.absmax(x, dim=-1)",
    -math.inf: "write x.abs().amin(dim=-1)",
    0: "write (x != 0).float().sum(dim=-1)",
    1: "write x.abs().sum(dim=-1)",
    "fro": "leave it out: norm(x, dim=..., keepdim=...) is the Euclidean norm",
}


def norm_hint(order: Any) -> str:
    """What to write for a norm of this order. `order` is None if it is not known."""
    of_p = _NORM_OF_P.format(p=order) if isinstance(order, (int, float)) else _OTHER_NORMS
    return _NORMS.get(order, f"write {of_p}")


_SCALES = (
    "write an epilogue that returns accum * scale_a * scale_b; for scales of blocks pass ef.Scaled(a, scales) as A"
)
_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(("scale_a", "scale_b", "a_scale", "b_scale"), _SCALES),
    "scale_result": "write an epilogue that returns accum * scale_result",
}


def argument_hint(name: str, known: Iterable[str]) -> str:
    """A hint for an argument that a call does not take: a similar name among `known`, or what to write instead."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
    return f"did you mean {near[0]}=?" if near else _ARGUMENTS.get(name, "")
