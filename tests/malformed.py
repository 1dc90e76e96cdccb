"""Malformed epilogues, generated: every class of syntax in every position, every call with one thing wrong.

`cases()` draws from the tables of the language, so that a new name or a new class of syntax is tried without writing a
test. A case need not be wrong in the end (`x.sum(0)` is what one gets from "a wrong argument"): `verdict` says what
happened, and accepted cases must compute what PyTorch computes.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import epifuse as ef
from epifuse.base.errors import EpifuseError, InternalError
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import METHODS, VOCABULARY, Entry, torchs
from tests.frontend.pieces import EXPRESSIONS, SIGNATURES, STATEMENTS, WRONG
from tests.frontend.sources import check, function_from

PARAMETERS = "accum, C, row, col, alpha"

POSITIONS = {
    "value": "D = {0}",
    "returned": "return {0}",
    "left": "D = {0} + accum",
    "right": "D = accum * {0}",
    "compared": "D = accum < {0}",
    "masked": "D = (accum > 0) & {0}",
    "inverted": "D = ~{0}",
    "negated": "D = -{0}",
    "argument": "D = torch.relu({0})",
    "second argument": "D = ef.maximum(accum, {0})",
    "keyword": "D = ef.clamp(accum, max={0})",
    "dim": "D = accum + accum.sum(dim={0}, keepdim=True)",
    "dtype": "D = accum.to({0})",
    "test": "D = accum if {0} else C",
    "branch": "D = {0} if alpha > 0 else accum",
    "host and": "D = accum * (alpha and {0})",
    "receiver": "D = ({0}).relu()",
    "callee": "D = ({0})(accum)",
    "subscript": "D = accum[{0}]",
    "subscripted": "D = ({0})[:, None]",
    "attribute": "D = ({0}).relu",
    "statement": "{0}\n    D = accum",
    "tuple": "a, D = {0}, accum",
    "unpacked": "a, D = {0}",
    "unused": "t = {0}\n    D = accum",
    "helper": "D = helper({0})",
    "annotated": "D: {0} = accum",
    "printed": "ef.debug_print('{{}}', {0})\n    D = accum",
}

_BY_PARAMETER = {
    "p": "0.25",
    "seed": "7",
    "dim": "-1",
    "keepdim": "True",
    "dtype": "torch.float16",
    "dims": "(1, 0)",
    "shape": "(-1,)",
    "fmt": "'{}'",
    "approximate": "'tanh'",
    "condition": "(C > 0)",
    "negative_slope": "0.2",
    "min": "-0.5",
    "max": "0.5",
    "min_val": "-0.5",
    "max_val": "0.5",
    "threshold": "0.3",
    "beta": "1.5",
}
_BY_RULE = {
    "logic": "(accum > 0)",
    "integer": "(ef.index_m(accum) + 1)",
    "bits": "ef.index_m(accum)",
    "random": "ef.index_m(accum)",
}


class Case(NamedTuple):
    """One epilogue and where it came from."""

    origin: str
    source: str


def epilogue(body: str, parameters: str = PARAMETERS) -> str:
    ending = "" if "return" in body else "\n    return D"
    return f"def helper(x):\n    return x * 2\n\ndef epi({parameters}):\n    {body}{ending}\n"


def cases() -> Iterator[Case]:
    yield from syntax_cases()
    yield from call_cases()


def syntax_cases() -> Iterator[Case]:
    for position, pattern in POSITIONS.items():
        for expression in EXPRESSIONS:
            yield Case(f"{expression} as {position}", epilogue(pattern.format(expression)))
    for statement in STATEMENTS:
        yield Case(f"statement {statement}", epilogue(f"{statement}\n    D = accum\n    return D"))
        yield Case(f"last statement {statement}", epilogue(f"E = accum * 2\n    {statement}"))
        yield Case(f"only statement {statement}", f"def epi({PARAMETERS}):\n    {statement}\n")
        yield Case(
            f"in a helper: {statement}",
            f"def helper(D, C, alpha, accum):\n    {statement}\n    return D\n\n"
            f"def epi({PARAMETERS}):\n    return helper(accum, C, alpha, accum)\n",
        )
    for parameters in SIGNATURES:
        yield Case(f"parameters {parameters}", epilogue("D = accum * 2", parameters))
        yield Case(
            f"helper parameters {parameters}",
            f"def h({parameters}):\n    return 1.0\n\ndef epi({PARAMETERS}):\n    return accum * h(accum, C)\n",
        )


def call_cases() -> Iterator[Case]:
    for entry in VOCABULARY.values():
        for spelling in spellings(entry):
            for how, arguments in mutations(entry):
                call = written(spelling, arguments)
                if call is not None:
                    yield Case(f"{spelling} {how}", epilogue(f"D = {call}"))


def spellings(entry: Entry) -> list[str]:
    found = [f"ef.{entry.name}"]
    found += [
        f"{prefix}.{entry.name}"
        for prefix, module in (("torch", torch), ("F", torch.nn.functional))
        if torchs(getattr(module, entry.name, None)) is not None
    ]
    return found + [f"x.{name}" for name, ours in METHODS.items() if ours == entry.name]


Arguments = list[tuple[str | None, str]]


def mutations(entry: Entry) -> Iterator[tuple[str, Arguments]]:
    names = list(entry.signature.parameters)
    rule = PRIMITIVES[entry.name].rule if entry.name in PRIMITIVES else ""
    values = [_BY_PARAMETER.get(name, _BY_RULE.get(rule, "C" if i else "accum")) for i, name in enumerate(names)]
    good: Arguments = [(None, value) for value in values]
    by_name: Arguments = [good[0], *((name, value) for name, value in zip(names[1:], values[1:], strict=True))]
    keyword_only = [p.name for p in entry.signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if keyword_only:
        good = [pair if name not in keyword_only else (name, pair[1]) for name, pair in zip(names, good, strict=True)]
    yield "as it is", good
    yield "by name", by_name
    yield "with one more", [*good, (None, "C")]
    yield "with a name it has not", [*good, ("undefined", "C")]
    yield "with out=", [*good, ("out", "C")]
    yield "with an argument twice", [*good, (names[0], "accum")]
    yield "with nothing", []
    for i, name in enumerate(names):
        yield f"without {name}", good[:i] + good[i + 1 :]
        yield f"without {name}, by name", by_name[:i] + by_name[i + 1 :]
        yield f"with {name} misnamed", [*good[:i], (name + "_", values[i]), *by_name[i + 1 :]]
        for wrong in WRONG:
            yield f"with {name} = {wrong}", [*good[:i], (good[i][0], wrong), *good[i + 1 :]]
        yield f"with {name} by name, wrong", [*good[:i], (name, "C"), *by_name[i + 1 :]]


def written(spelling: str, arguments: Arguments) -> str | None:
    """The call as text; None where it has no receiver."""
    if spelling.startswith("x."):
        if not arguments or arguments[0][0] is not None:
            return None
        spelling = f"({arguments[0][1]}){spelling[1:]}"
        arguments = arguments[1:]
    return f"{spelling}({', '.join(value if name is None else f'{name}={value}' for name, value in arguments)})"


def operands(parameters: str = PARAMETERS) -> dict[str, Any]:
    values = {"C": torch.randn(6, 10) + 0.1, "row": torch.randn(10), "col": torch.randn(6, 1), "alpha": 0.25}
    return {name: value for name, value in values.items() if name in parameters}


def verdict(case: Case) -> str:
    """ "refused: <key>" or "accepted"; raises for everything else, and where PyTorch computes something else."""
    function = defined(case)
    A, B = torch.randn(6, 4), torch.randn(4, 10)
    named = operands() if function is None else operands(" ".join(inspect.signature(function).parameters))
    try:
        fused = ef.gemm(A, B, epilogue=case.source if function is None else function, **named)
    except EpifuseError as error:
        return refusal(error)
    if function is None:
        raise AssertionError("accepted, though Python refuses it")
    check(fused, ef.reference(function)(A @ B, **named))
    return "accepted"


def defined(case: Case) -> Any:
    """The function; None where Python itself refuses it, so that only the string is left."""
    try:
        return function_from(case.source)
    except (SyntaxError, ValueError, NameError, TypeError):
        return None


def refusal(error: EpifuseError) -> str:
    """Says so; raises where the refusal is a fault of ours, or does not show the place."""
    if isinstance(error, InternalError):
        raise error
    placed = error.loc is not None and "^" in str(error)
    if not placed and error.key not in _FAULT_OF_THE_CALL:
        raise AssertionError(f"no place: {error}")
    return f"refused: {error.key}"


_FAULT_OF_THE_CALL = {"operand_not_given", "extra_operand", "integer_division"}
"""Not in the source: operands that were not handed over, a divisor that holds a zero."""


def main() -> None:
    """Every case, and how often each verdict was reached."""
    count = Counter(map(verdict, cases()))
    print("\n".join(f"{number:6} {said}" for said, number in count.most_common()))


if __name__ == "__main__":
    main()
