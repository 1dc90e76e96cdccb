"""What the language takes from a user's Python, phrase by phrase: fused, it gives what the function itself gives."""

import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epifuse as ef
from epifuse.base.errors import EpifuseError
from epifuse.passes.structure import STRUCTURES
from tests.frontend import helpers
from tests.frontend.helpers import half
from tests.frontend.sources import K, M, N, check, compare, function_from, operands

SCALE = 3


def refused(epilogue: Any, key: str, **named: Any) -> EpifuseError:
    with pytest.raises(EpifuseError) as caught:
        ef.gemm(*operands(), epilogue=epilogue, **named)
    assert caught.value.key == key, str(caught.value)
    return caught.value


# --- parameters ----------------------------------------------------------------------------------------------------


def test_positional_keyword_only_and_defaults() -> None:
    def epi(accum, C, /, row, alpha=0.5, *, beta=2):
        return accum * alpha + C * beta + row

    C, row = torch.randn(M, N), torch.randn(N)
    A, B = operands()
    fused = ef.gemm(A, B, epilogue=epi, C=C, row=row, beta=3.0)
    check(fused, epi(A @ B, C, row, beta=3.0))


def test_the_default_that_the_function_holds_counts() -> None:
    made = []
    for scale in (2.0, 5.0):

        def epi(accum, s=scale):
            return accum * s

        made.append(epi)
    compare(made[0])
    compare(made[1])


@pytest.mark.parametrize("flag", [True, False])
def test_a_boolean_operand(flag: bool) -> None:
    compare(lambda accum, C, flag: accum if flag else C, C=torch.randn(M, N), flag=flag)


# --- host numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [-2.0, 0.0, 0.5, 3.0])
@pytest.mark.parametrize(
    "expression",
    [
        "accum * (alpha if alpha > 0 else -alpha)",
        "accum * (0 < alpha < 1)",
        "accum if alpha == 3 else C",
        "accum * (alpha and 2.0) + (alpha or 7.0)",
        "accum if not alpha else C",
        "accum * (1.0 / alpha if alpha else 0.0)",
        "accum * max(alpha, 1.0) + min(alpha, 0.0) + abs(alpha)",
        "accum * math.exp(alpha) + math.pi + math.inf * 0.0 if alpha > 5 else accum * math.cos(alpha)",
        "accum * 2 ** -1 + alpha ** 2 - 7 // 2 + 7 % 4",
        "accum * round(alpha + 0.4) + math.floor(alpha)",
        "accum * True + False + (alpha >= 0)",
    ],
)
def test_host_numbers_are_pythons(expression: str, alpha: float) -> None:
    text = f"def epi(accum, C, alpha):\n    return {expression}\n"
    compare(function_from(text), C=torch.randn(M, N), alpha=alpha)


def test_an_unused_number_still_fails_as_in_python() -> None:
    epi = function_from("def epi(accum, alpha):\n    unused = 1 / alpha\n    return accum * 2\n")
    compare(epi, alpha=2.0)
    refused(epi, "host_arithmetic", alpha=0.0)


@pytest.mark.parametrize(
    "expression", ["accum * (1 / alpha) if alpha > 0 else accum", "accum * 2 if alpha <= 0 else C - math.log(alpha)"]
)
def test_a_number_that_is_not_needed_does_not_fail(expression: str) -> None:
    for alpha in (2.0, 0.0):
        test_host_numbers_are_pythons(expression, alpha)
    spoilt = function_from(
        "def epi(accum, alpha):\n    s = 1 / alpha\n    return accum * s if alpha > 0 else accum + s\n"
    )
    refused(spoilt, "host_arithmetic", alpha=0.0)


def test_an_unused_value_is_checked() -> None:
    refused("def epi(accum, C):\n    unused = accum & C\n    return accum\n", "bits_wanted", C=torch.ones(M, N))


# --- captured names ------------------------------------------------------------------------------------------------


def test_a_global_number_is_read_again_without_planning_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def epi(accum):
        return accum * SCALE

    compare(epi)
    planned = len(STRUCTURES)
    monkeypatch.setitem(globals(), "SCALE", 11)
    compare(epi)
    assert len(STRUCTURES) == planned


def test_a_closure_number_is_read_again() -> None:
    scale = 2.0

    def epi(accum):
        return accum * scale

    A, B = operands()
    before = ef.gemm(A, B, epilogue=epi)
    scale = 5.0
    torch.testing.assert_close(ef.gemm(A, B, epilogue=epi), before * 2.5)


def test_a_captured_number_that_becomes_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def epi(accum):
        return accum * SCALE

    compare(epi)
    monkeypatch.setitem(globals(), "SCALE", torch.ones(N))
    refused(epi, "captured_tensor")


def test_a_helper_that_is_redefined_is_inlined_anew() -> None:
    namespace = function_from("def h(x):\n    return x * 2\n\ndef epi(accum):\n    return h(accum)\n").__globals__
    compare(namespace["epi"])
    namespace["h"] = function_from("def h(x):\n    return x * 5\n")
    compare(namespace["epi"])


def test_a_captured_string_or_dtype_decides_while_parsing() -> None:
    text = (
        "def epi(accum):\n    y = F.gelu(accum, approximate=MODE) if MODE != 'none' else accum\n    return y.to(KIND)\n"
    )
    for mode, kind in (("tanh", torch.float32), ("none", torch.float16)):
        compare(function_from(text, MODE=mode, KIND=kind))


def test_same_names_in_two_modules_are_two_numbers() -> None:
    """`SCALE` here is 3, in the helpers' module 0.5."""
    compare(lambda accum: half(accum) * SCALE)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (torch.ones(3), "captured_tensor"),
        (torch.nn.Linear(2, 2), "captured_module"),
        ([1.0], "captured_object"),
        ({"a": 1.0}, "captured_object"),
        (object(), "captured_object"),
        (1j, "captured_object"),
        (functools.partial(torch.relu), "captured_object"),
        (lambda x, *rest: x, "star_in_helper"),
        (None, "not_a_value"),
        ("text", "not_a_value"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # no addresses: xdist compares ids
)
def test_other_captured_objects_are_refused(value: object, key: str) -> None:
    use = "thing(accum)" if callable(value) else "accum * thing"
    if key == "captured_module":
        use = "thing(accum)"
    error = refused(function_from(f"def epi(accum):\n    return {use}\n", thing=value), key)
    assert error.loc is not None
    assert error.loc.line == 2


# --- helpers -------------------------------------------------------------------------------------------------------


def test_helpers_of_other_modules_and_unpacked_results() -> None:
    def epi(accum, C):
        low, high = helpers.split(accum, C)
        D = half(low) + helpers.with_builtins(high, scale=2.0)
        return D, high

    compare(epi, C=torch.randn(M, N))


def test_a_user_may_call_a_helper_relu() -> None:
    text = "def relu(x):\n    return x * 100\n\ndef epi(accum):\n    return relu(accum)\n"
    compare(function_from(text))


def test_an_operand_may_have_the_name_of_a_function() -> None:
    compare(function_from("def epi(accum, relu, max):\n    return accum * relu + max\n"), relu=2.0, max=3.0)


def test_builtins_under_another_name() -> None:
    compare(function_from("def epi(accum):\n    return largest(accum, 0.0)\n", largest=max))


def test_recursion_is_refused_also_when_mutual() -> None:
    text = "def a(x):\n    return b(x)\n\ndef b(x):\n    return a(x)\n\ndef epi(accum):\n    return a(accum)\n"
    error = refused(function_from(text), "recursion")
    assert str(error).count("called from") == 2


def test_a_decorated_helper_is_what_the_decorator_made_of_it() -> None:
    def twice(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(y):
            return function(y) * 2

        return inner

    @twice
    def tripled(x):
        return x * 3

    compare(lambda accum: tripled(accum))


def test_a_helper_made_by_exec_has_no_source() -> None:
    namespace: dict[str, Any] = {}
    exec("def h(x): return x", namespace)
    refused(function_from("def epi(accum):\n    return h(accum)\n", h=namespace["h"]), "no_source")


# --- calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "torch.nn.functional.silu(accum) + F.gelu(accum, approximate='tanh')",
        "accum.relu().clamp(max=2.0).sum(dim=-1, keepdim=True) + accum",
        "accum + row[None] + row[None, :]",
        "accum + row.unsqueeze(0) + accum.amax(1)[:, None] + accum.mean(0)[None, ...]",
        "accum.to(torch.float16).to(torch.float32) + accum.half() + accum.to(dtype=torch.bfloat16)",
        "torch.clamp(accum, min=-0.5, max=0.5) + F.leaky_relu(accum, negative_slope=0.2)",
        "max(accum, C) + min(accum, 0.5) + max(accum) + sum(accum, dim=1, keepdim=True)",
        "abs(C) + round(C) + pow(C, 2) + accum",
        "torch.where(accum > 0, accum, 0.0) + accum.where(C > 0, row)",
        "accum.permute(1, 0).permute((1, 0)) + accum.reshape(-1).reshape(6, 10) + accum.reshape((6, 10))",
        "ef.relu(accum) + ef.multiply_add(accum, C, row) + ef.index_m(accum) * ef.index_n(accum)",
        "torch.add(input=accum, other=C) - torch.pow(accum, exponent=2)",
        "any(accum > 0) & all(accum < 1)",
        "accum.norm(2, dim=-1, keepdim=True) + torch.norm(accum, p=2, dim=0) + accum.norm(dim=1)[:, None]",
    ],
)
def test_calls(expression: str) -> None:
    text = f"def epi(accum, C, row):\n    return {expression}\n"
    compare(function_from(text), C=torch.randn(M, N), row=torch.randn(N))


# --- where functions come from --------------------------------------------------------------------------------------

ONE, TWO = (lambda accum: accum + 1.0), (lambda accum: accum * 2.0)


def test_lambdas_on_one_line() -> None:
    compare(ONE)
    compare(TWO)


def test_a_lambda_in_a_call_over_several_lines() -> None:
    compare(
        lambda accum, C: (
            accum + C  # with a comment
        ),
        C=torch.randn(M, N),
    )


def test_nested_lambdas() -> None:
    make = lambda scale: lambda accum: accum * scale  # noqa: E731
    compare(make(3.0))


class Model:
    @staticmethod
    def activation(accum, C):
        """A static method is a function."""
        return accum * C

    def bound(self, accum):
        return accum

    def __call__(self, accum):
        return accum


def test_static_methods_and_nested_functions() -> None:
    compare(Model.activation, C=torch.randn(M, N))


@pytest.mark.parametrize(
    "thing",
    [Model, functools.partial(math.sqrt), math.sqrt, 3, None.__class__, types.SimpleNamespace()],
    ids=lambda thing: type(thing).__name__,
)
def test_other_callables_are_no_epilogue(thing: object) -> None:
    refused(thing, "not_a_function")


@pytest.mark.parametrize("function", [ef.relu, torch.relu, F.silu, F.gelu, abs])
def test_a_function_of_the_vocabulary_is_an_epilogue(function: Callable[..., Any]) -> None:
    A, B = operands()
    check(ef.gemm(A, B, epilogue=function), function(A @ B))


def test_async_functions_and_generators_are_refused() -> None:
    refused(function_from("async def epi(accum):\n    return accum\n"), "async_function")
    refused(function_from("def epi(accum):\n    yield accum\n"), "generator")


def test_the_decorator_refuses_where_the_function_is_defined() -> None:
    with pytest.raises(SyntaxError, match="a for loop is not supported"):

        @ef.epilogue
        def epi(accum):
            for _ in range(3):
                accum = accum * 2
            return accum


def test_reassignment() -> None:
    @ef.epilogue(reassign=True)
    def epi(accum, C):
        x = accum * 2
        x = x + C
        accum = x.relu()
        return accum, x

    compare(epi, C=torch.randn(M, N))
    plain = function_from(inspect.getsource(epi).split("\n", 1)[1].replace("    ", "", 1).replace("\n    ", "\n"))
    refused(plain, "defined_twice", C=torch.randn(M, N))


def test_a_decorated_epilogue_stays_plain_pytorch() -> None:
    @ef.epilogue
    def epi(accum):
        return ef.relu(accum)

    x = torch.randn(3, 3)
    assert torch.equal(epi(x), torch.relu(x))


# --- strings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "def f(accum, C): D = accum + C; return D",
        "\n        def f(accum, C):\n            D = accum + C\n            return D\n    ",
        "lambda accum, C: accum + C",
        "f = lambda accum, C: accum + C",
        "def f(accum: 'T', C) -> 'T':\n    '''Text.'''\n    # comment\n    D: 'T' = accum + C\n    return D",
        "def f(accum, größe, C=0.0):\n    变量 = accum + größe\n    return 变量",
    ],
)
def test_strings(text: str) -> None:
    A, B = operands()
    C = torch.randn(M, N)
    named = {"größe": C} if "größe" in text else {"C": C}
    check(ef.gemm(A, B, epilogue=text, **named), A @ B + C)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {file}')",
        "def f(accum): return __import__('os').system('touch {file}')",
        "def f(accum): return eval('open({file!r}, \"w\")')",
        "def f(accum, C=open({file!r}, 'w')): return accum",
        "def f(accum): return torch.os.system('touch {file}')",
        "def f(accum): return torch.save(accum, {file!r})",
        "def f(accum): return accum.numpy().tofile({file!r})",
        "def f(accum): return torch.hub.load('x', 'y')",
        "def f(accum): return torch.os.makedirs({file!r})",
        "@open({file!r}, 'w').write\ndef f(accum): return accum.undefined()",
        "def f(accum):\n    debug_print('{{0.__class__}}', accum)\n    return accum",
        "import os\ndef f(accum): return accum",
        "lambda accum: (lambda: open({file!r}, 'w'))()",
    ],
)
def test_strings_run_nothing(text: str, tmp_path: Any) -> None:
    file = tmp_path / "made"
    with pytest.raises(EpifuseError):
        ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=text.format(file=str(file)))
    assert not file.exists()


def test_the_caller_is_never_called() -> None:
    def epi(accum):
        return accum * 2

    def helper(x):
        raise AssertionError("called")

    assert helper
    epi.__code__ = epi.__code__
    compare(epi)
    with pytest.raises(EpifuseError):
        ef.gemm(*operands(), epilogue=lambda accum: helper(accum))
