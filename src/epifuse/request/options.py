"""The options of one call, and the operands and destinations that it passes by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import fail, kind_of
from epifuse.frontend import Parsed
from epifuse.frontend.hints import argument_hint
from epifuse.request.problem import Constraints


class Options(NamedTuple):
    """How a call is to run; see `gemm`.

    `by_tma` names the operands and outputs that TMA is to copy. `pinned`, if given, replaces the constraints that
    follow from the other options. `hint` is part of the error if no kernel can run the call.
    """

    accumulator_type: torch.dtype | None
    precision: str | None = None
    fast_math: bool = False
    allow_recompute: bool = False
    fallback: str | None = None
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None
    accumulate: str | Iterable[str] = ()
    save: str = "auto"
    tune: bool = False
    fast_accum: bool = False
    by_tma: tuple[str, ...] = ()
    pinned: Constraints | None = None
    hint: str = "fallback='torch' runs it unfused in PyTorch"

    @staticmethod
    def of(
        accumulator_type: Any,
        precision: Any,
        fast_math: Any,
        allow_recompute: Any,
        fallback: Any,
        out_dtypes: Any,
        accumulate: Any,
        save: Any,
        tune: Any,
        fast_accum: Any,
    ) -> Options:
        """The options of a call. Most calls set none and get `USUAL`, because it takes 0.3 us to make options."""
        nothing = accumulator_type is precision is fallback is out_dtypes is None
        nothing = nothing and fast_math is allow_recompute is tune is fast_accum is False
        if nothing and accumulate == () and save == "auto":
            return USUAL
        for name, flag in (
            ("fast_math", fast_math), ("allow_recompute", allow_recompute), ("tune", tune), ("fast_accum", fast_accum)
        ):  # fmt: skip
            if not isinstance(flag, bool):  # 1 equals True as a cache key: it would pass if True was there before
                raise fail("option", None, name=name, want="True or False", value=flag)
        return Options(
            accumulator_type, precision, fast_math, allow_recompute, fallback, out_dtypes, accumulate, save, tune,
            fast_accum,
        )  # fmt: skip

    def check(self) -> None:
        if not (self.fallback is None or (isinstance(self.fallback, str) and self.fallback == "torch")):
            raise fail("option", None, name="fallback", want="None or 'torch'", value=self.fallback)
        if not (isinstance(self.save, str) and self.save in _SAVED):
            raise fail("option", None, name="save", want=" or ".join(map(repr, _SAVED)), value=self.save)

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable cache key."""
        dtypes = self.out_dtypes
        if dtypes is None and self.accumulate == ():  # for the many launches like this: `isinstance` takes 0.2 us
            return self
        if isinstance(dtypes, Mapping):
            return (*self._replace(out_dtypes=None, accumulate=self.accumulated), *dtypes.items())
        return self if self.accumulate == () else self._replace(accumulate=self.accumulated)

    @property
    def accumulated(self) -> tuple[str, ...]:
        """Names of the outputs that are added onto the content of their destinations. Raises `ArgumentError`."""
        given: Any = self.accumulate
        alone = isinstance(given, (str, Mapping)) or not isinstance(given, Iterable)
        names = (given,) if alone else tuple(given)
        if not all(isinstance(name, str) for name in names):
            shown = kind_of(given) if isinstance(given, Mapping) else given  # a mapping would show whole tensors
            raise fail("option", None, name="accumulate", want="names of outputs", value=shown)
        return names

    @property
    def constraints(self) -> Constraints:
        if self.pinned is not None:
            return self.pinned
        return Constraints(
            fast_math=self.fast_math,
            precision=self.precision,
            allow_recompute=self.allow_recompute,
            tune=self.tune,
            fast_accum=self.fast_accum,
        )


_SAVED = ("auto", "recompute", "preactivation")
USUAL = Options(None)
_OPTIONS = {*Options._fields, "epilogue", "out", "operands"} - {"by_tma", "pinned", "hint"}
_CONSTRAINING = {"constraints", *(field.name for field in fields(Constraints))}
_TAKEN = {"gemm": frozenset(_OPTIONS), "linear": frozenset((*_OPTIONS, "x", "weight"))}


def given_by_name(
    parsed: Parsed,
    by_name: Mapping[str, Any],
    operands: Mapping[str, Any] | None,
    out: Any,
    function: str = "gemm",
) -> Mapping[str, Any]:
    """Operands and destinations by name. Raises `ArgumentError` for a name that the epilogue does not have.

    `function` is the function that was called. An operand with the name of one of its parameters must be in `operands`.
    """
    if operands is None and not (parsed.parameters or by_name):
        return {} if out is None else _destinations(out, parsed.output_names)
    if operands is not None and not isinstance(operands, Mapping):
        raise fail("operand_names", None, type=kind_of(operands))
    names, parameters = parsed.output_names, parsed.parameters
    if not _TAKEN[function].isdisjoint(parameters):
        for name in parameters:
            if name in _TAKEN[function] and name not in (operands or {}):
                raise fail("name_clash", None, name=name, function=function)
    if operands:
        for name in by_name.keys() & operands.keys():
            raise fail("operand_twice", None, function=function, name=name)
        by_name = {**by_name, **operands}
    given = parsed.named(by_name)
    for name in given:
        if name not in parameters:
            if name in names:
                raise fail("output_by_name", None, name=name)
            shown = ", ".join(parameters) or "none"
            hint = argument_hint(name, (*_TAKEN[function], *parameters, *names))
            if name in _CONSTRAINING:
                said = "..." if name == "constraints" else f"ef.Constraints({name}=...)"
                hint = f"it constrains a plan: pass ef.GemmArguments(A, B, epilogue=..., constraints={said})"
            raise fail("extra_operand", None, name=name, operands=shown, outputs=", ".join(names), hint=hint)
    return given if out is None else {**given, **_destinations(out, names)}


def _destinations(out: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    if not isinstance(out, torch.Tensor) and isinstance(out, Mapping):  # the test for Mapping alone takes 0.3 us
        for name in out:
            if name not in names:
                raise fail("unknown_output", None, option="out", name=name, outputs=", ".join(names))
        return dict(out)
    if isinstance(out, (list, tuple)):
        raise fail("out_type", None, type=kind_of(out))
    if "D" in names:
        return {"D": out}
    if len(names) > 1:
        raise fail("out_single", None, outputs=", ".join(names))
    return {names[0]: out}
