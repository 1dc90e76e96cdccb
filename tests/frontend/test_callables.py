"""Whatever Python calls may be an epilogue: methods, partials, objects, modules; and one parse serves all of a kind."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epifuse as ef
from epifuse import passes
from epifuse.base.errors import ArgumentError, EpilogueSyntaxError
from epifuse.frontend import parse_cache, parsed, remembered
from tests.frontend.sources import function_from

A, B = torch.randn(6, 5), torch.randn(5, 8)
C = torch.randn(6, 8)
SHAPE: tuple[int, ...] = (2, 8)


def check(epilogue: Callable[..., Any], **operands: Any) -> None:
    torch.testing.assert_close(ef.gemm(A, B, epilogue=epilogue, **operands), epilogue(A @ B, **operands))


class Head(nn.Module):
    """A user's module: numbers, activations and methods of its own."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale
        self.act = nn.LeakyReLU(0.25)
        self.weight = nn.Parameter(torch.ones(8))

    def halved(self, x: Any) -> Any:
        return x * 0.5

    def epilogue(self, accum: Any, C: Any) -> Any:
        return self.act(self.halved(accum) * self.scale) + C

    def closure(self) -> Callable[..., Any]:
        return lambda accum: self.halved(accum) * self.scale

    def reads_a_weight(self, accum: Any) -> Any:
        return accum * self.weight

    def calls_a_submodule(self, accum: Any) -> Any:
        return self.linear(accum)


@dataclass(slots=True)
class Scaled:
    """A callable object, whose numbers lie in slots."""

    scale: float

    def __call__(self, accum: Any, C: Any) -> Any:
        return accum * self.scale + C


class Settings(NamedTuple):
    """Numbers in the fields of a named tuple."""

    scale: float


def linear(accum: Any, C: Any, alpha: Any = 1.0, act: Any = None) -> Any:
    y = accum * alpha + C
    return y if act is None else act(y)


def test_fields_of_a_named_tuple_are_read_at_each_call() -> None:
    def scaled(accum: Any) -> Any:
        return accum * settings.scale

    for settings in (Settings(2.0), Settings(5.0), Settings(3)):
        assert torch.equal(ef.gemm(A, B, epilogue=scaled), A @ B * settings.scale)


def test_methods_and_objects_read_numbers_at_each_call(typed: list[Any]) -> None:
    head, scaled = Head(), Scaled(3.0)
    for number in (2.0, 5.0, -1.5):
        head.scale = scaled.scale = number
        head.act.negative_slope = number / 8
        check(head.epilogue, C=C)
        check(head.closure())
        check(scaled, C=C)
    assert len(typed) == 3, "a number that changes plans nothing anew"


def test_objects_of_one_class_are_one_parse(read: list[Any]) -> None:
    for number in (2.0, 3.0, 4.0):
        check(Head(number).epilogue, C=C)
        check(Head(number).closure())
        check(Scaled(number), C=C)
    assert len(read) == 3


def test_a_partial_is_a_function_with_other_defaults() -> None:
    fixed = functools.partial(linear, alpha=3.0)
    check(fixed, C=C)
    check(fixed, C=C, alpha=0.5)
    check(functools.partial(linear, C=C))
    for act in (torch.relu, nn.ReLU(), nn.SiLU(), lambda x: x * 2):
        check(functools.partial(linear, act=act), C=C)
    check(functools.partial(functools.partial(linear, alpha=3.0), alpha=4.0), C=C)
    check(functools.partial(Head().epilogue), C=C)
    fixed.keywords["alpha"] = 7.0
    check(fixed, C=C)


@pytest.mark.parametrize(
    "epilogue",
    [
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(F.leaky_relu, negative_slope=0.2),
        functools.partial(functools.partial(torch.softmax, dim=0), dim=-1),
    ],
    ids=["a string", "a number", "a dim"],
)
def test_a_partial_of_a_function_of_torch(epilogue: Callable[..., Any]) -> None:
    check(epilogue)
    torch.testing.assert_close(ef.gemm(A, B, epilogue=epilogue), ef.reference(epilogue)(A @ B))


def test_a_partial_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(EpilogueSyntaxError, match=r"gelu\(\) has no parameter 'approximation'"):
        ef.gemm(A, B, epilogue=functools.partial(F.gelu, approximation="tanh"))
    with pytest.raises(ArgumentError, match="linear has no parameter 'beta'"):
        ef.gemm(A, B, epilogue=functools.partial(linear, beta=1.0), C=C)


MODULES = [
    nn.Identity(),
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(0.1),
    nn.ELU(0.5),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SiLU(inplace=True),
    nn.Mish(),
    nn.Sigmoid(),
    nn.LogSigmoid(),
    nn.Tanh(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.Hardtanh(-0.5, 0.25),
    nn.Softplus(2.0, 3.0),
    nn.Threshold(0.1, -2.0),
    nn.Softmax(dim=-1),
    nn.LogSoftmax(dim=1),
]


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_an_activation_module_is_an_epilogue_or_captured(module: nn.Module) -> None:
    check(module)
    check(lambda accum: module(accum * 0.5) + 1.0)


def test_an_attribute_of_a_module_is_read_again() -> None:
    slope, gelu = nn.LeakyReLU(0.1), nn.GELU()
    check(slope)
    check(gelu)
    slope.negative_slope, gelu.approximate = 0.7, "tanh"
    check(slope)
    check(gelu)


def test_a_module_with_hooks_is_refused_while_it_has_them() -> None:
    def captured(accum: Any) -> Any:
        return module(accum)

    module = nn.ReLU()
    for epilogue in (module, captured):
        check(epilogue)
        hook = module.register_forward_hook(lambda module, inputs, output: output + 1)
        with pytest.raises(EpilogueSyntaxError, match="has hooks"):
            ef.gemm(A, B, epilogue=epilogue)
        hook.remove()
        check(epilogue)
        module.forward = torch.tanh  # type: ignore[method-assign]  # what a person may do
        with pytest.raises(EpilogueSyntaxError, match="a forward of its own"):
            ef.gemm(A, B, epilogue=epilogue)
        del module.forward
        check(epilogue)


@pytest.mark.parametrize(
    ("epilogue", "sentence"),
    [
        (nn.Linear(8, 8), "not a Linear"),
        (type("Subclass", (nn.ReLU,), {})(), "not a Subclass"),
        (Head().reads_a_weight, "self.weight"),
        (Head().calls_a_submodule, "self.linear"),
        (lambda accum: MODULE(accum), "'MODULE' is a Dropout from outside"),
        (functools.partial(linear, C=[1.0]), "the default of 'C' must be a number, None or a string"),
    ],
    ids=["module", "subclass", "weight", "submodule", "captured", "list"],
)
def test_what_else_can_be_called_is_refused_by_name(epilogue: Any, sentence: str) -> None:
    with pytest.raises((EpilogueSyntaxError, TypeError), match=sentence):
        ef.gemm(A, B, epilogue=epilogue)


MODULE = nn.Dropout()
HELPERS = types.SimpleNamespace(factor=lambda x: x * 3)


# --- defaults ------------------------------------------------------------------------------------------------------


def optional(accum: Any, C: Any = None, mode: str = "relu") -> Any:
    y = accum if C is None else accum + C
    return F.relu(y) if mode == "relu" else F.gelu(y, approximate=mode)


@pytest.mark.parametrize("given", [{}, {"C": C}, {"C": None}, {"mode": "tanh"}, {"mode": "none", "C": C}, {"C": 2.0}])
def test_none_and_strings_are_decided_while_parsing(given: dict[str, Any]) -> None:
    text = (
        "def epi(accum, C=None, mode='relu'):\n    y = accum if C is None else accum + C\n"
        "    return F.relu(y) if mode == 'relu' else F.gelu(y, approximate=mode)\n"
    )
    want = optional(A @ B, **given)
    torch.testing.assert_close(ef.gemm(A, B, epilogue=optional, **given), want)
    torch.testing.assert_close(ef.gemm(A, B, epilogue=optional, operands=given), want)
    torch.testing.assert_close(ef.gemm(A, B, epilogue=text, **given), want)
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments(optional, **given, D=torch.empty(6, 8)))
    ef.get_kernels(args)[0].run(args)
    torch.testing.assert_close(args.epilogue.tensors["D"], want)


def test_a_needed_optional_operand_is_accepted_if_given() -> None:
    def needs(accum, C=None):
        return accum + C

    check(needs, C=C)
    with pytest.raises(EpilogueSyntaxError, match="None cannot be used as a value"):
        ef.gemm(A, B, epilogue=needs)


def test_defaults_that_change_after_a_call_are_seen() -> None:
    def scaled(accum, alpha=2.0, mode="plain"):
        return accum * alpha if mode == "plain" else -accum * alpha

    check(scaled)
    scaled.__defaults__ = (3.0, "plain")
    check(scaled)
    scaled.__defaults__ = (3.0, "negative")
    check(scaled)

    def keyword(accum, *, alpha=2.0):
        return accum * alpha

    check(keyword)
    keyword.__kwdefaults__["alpha"] = 5.0
    check(keyword)

    def of_helper(accum):
        return keyword(accum) + keyword(accum, alpha=1.0)

    check(of_helper)
    for change in ({"alpha": 7.0}, {"alpha": 7}, {"alpha": 0.0}, {"alpha": -0.0}):
        keyword.__kwdefaults__ = change
        check(of_helper)
    assert torch.signbit(ef.gemm(A, B, epilogue=lambda accum: keyword(1.0 + 0 * accum))).all()
    keyword.__kwdefaults__["alpha"] = 8.0
    check(of_helper)


# --- what is remembered ----------------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were typed since."""
    found: list[Any] = []
    run = passes.typed

    def counted(graph: Any, problem: Any) -> Any:
        found.append(graph)
        return run(graph, problem)

    monkeypatch.setattr(passes, "typed", counted)
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were parsed since."""
    found: list[Any] = []
    plain = parse_cache.parse
    remembered.KEPT.clear()

    def counted(function: Any, **options: Any) -> Any:
        found.append(function)
        return plain(function, **options)

    monkeypatch.setattr(parse_cache, "parse", counted)
    return found


def closure(scale: float) -> Callable[..., Any]:
    return lambda accum: accum * scale


def test_closures_share_a_parse_and_read_their_own_cells(read: list[Any]) -> None:
    functions = [closure(float(i)) for i in range(5)]
    parses = [parsed(function) for function in functions]
    assert len(read) == 1
    for i, made in enumerate(parses):
        assert list(made.captured().values()) == [i]
    assert len({made.key for made in parses}) == 1
    assert len(set(parses)) == 5
    assert parsed(functions[0]) == parses[0]


def test_equal_text_at_other_places_is_another_parse() -> None:
    text = "def epi(accum): return accum * 2\n"
    one, same = parsed(function_from(text, file="here.py")), parsed(function_from(text, file="here.py"))
    elsewhere = parsed(function_from(text, file="there.py"))
    moved = parsed(function_from("\n" + text, file="here.py"))
    assert one is not same
    assert one == same
    assert len({one, moved, elsewhere}) == 3
    assert str(moved.graph.loc(moved.graph.outputs[0].node)).startswith("  here.py:2")


def test_no_function_and_no_object_is_kept_alive() -> None:
    head, function = Head(), closure(2.0)
    operand = torch.ones(6, 8)
    for epilogue in (head.epilogue, head.closure(), functools.partial(linear, C=operand), function):
        named = {"C": C} if parsed(epilogue).parameters == ("C",) else {}
        ef.gemm(A, B, epilogue=epilogue, **named)
    del epilogue
    gone = [weakref.ref(thing) for thing in (head, function, operand)]
    del head, function, operand
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_one_stale_functor_leaves_the_others_parses(read: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(closure(2.0))

    class Custom(ef.thread.Functor):
        @staticmethod
        def formula(accum):
            return HELPERS.factor(accum)

    functor = Custom()
    torch.testing.assert_close(ef.gemm(A, B, epilogue=functor), A @ B * 3)
    before = len(read)
    monkeypatch.setattr(HELPERS, "factor", lambda x: x * 5)
    torch.testing.assert_close(ef.gemm(A, B, epilogue=functor), A @ B * 5)
    check(closure(3.0))
    assert len(read) == before


# --- tuples from outside ---------------------------------------------------------------------------------------------


def unpacked(accum: Any) -> Any:
    first, second = SHAPE
    D = accum * first + second
    return D


@pytest.mark.parametrize("epilogue", [unpacked, lambda accum: F.layer_norm(accum, SHAPE[1:]) * SHAPE[0]])
def test_a_tuple_from_outside_is_like_one_that_is_written_out(
    epilogue: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SHAPE", (2, 8))
    check(epilogue)
    monkeypatch.setitem(globals(), "SHAPE", (3, 8))
    check(epilogue)


def test_a_whole_tuple_from_outside_is_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SHAPE", (8,))
    check(lambda accum: F.layer_norm(accum, SHAPE))
    tree = ef.evt.EVT(ef.evt.Compute(F.layer_norm, normalized_shape=(8,)), ef.evt.AccFetch())
    torch.testing.assert_close(ef.gemm(A, B, epilogue=tree), F.layer_norm(A @ B, (8,)))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epilogue", "x", "weight", "bias", "out", "operands", "A", "precision"])
def test_a_parameter_of_any_name_is_reached_through_operands(name: str) -> None:
    text = f"lambda accum, {name}: accum * {name}"
    torch.testing.assert_close(ef.gemm(A, B, epilogue=text, operands={name: C}), A @ B * C)
    torch.testing.assert_close(ef.linear(A, B.t(), epilogue=text, operands={name: C}), A @ B * C)


@pytest.mark.parametrize("name", ["epilogue", "x", "weight", "out", "precision"])
def test_a_name_that_linear_has_itself_is_said_to_be_one(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"'{name}' is also a parameter of linear(.|\n)*operands={{'{name}': ...}}"
    ):
        ef.linear(A, B.t(), epilogue=f"lambda accum, {name}: accum * {name}")
