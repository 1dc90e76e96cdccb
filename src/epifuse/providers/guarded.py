"""A guard around a provider of another package. If its code fails, its kernels refuse for that reason; others run."""

from __future__ import annotations

import importlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from epifuse.base.errors import EpifuseError, fail, kind_of
from epifuse.ir import Graph
from epifuse.plan import Allocation, Answers, Details, KernelSpec, Plan, Refusal
from epifuse.providers.base import Provider, Runner
from epifuse.providers.cutedsl import untested
from epifuse.request.problem import Problem

_NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen ")


class _Failure(str):
    """Why `lower` failed. It is a text, because an exception would keep alive what its frames hold."""


def failure(provider: str) -> str:
    """The beginning of a refusal's reason if the provider's code failed."""
    return f"the provider '{provider}' failed: "


class Guarded:
    """Guards the methods of the provider `own` that planning and building call. Its kernels are `specs`. Every other
    attribute is that of `own`."""

    def __init__(self, own: Provider, specs: tuple[KernelSpec, ...]) -> None:
        self._own, self._specs = own, specs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernels that the provider had when it was found."""
        return self._specs

    def lacks(self, spec: KernelSpec) -> str | None:
        """What the provider answers, or how it failed."""
        try:
            found = self._own.lacks(spec) or None
        except Exception as error:
            return self._failed(error_text(error))
        return found if found is None or isinstance(found, str) else self._failed(f"lacks returned {kind_of(found)}")

    def lower(self, graph: Graph, problem: Problem) -> Any:
        """What the provider makes of the graph, or a `_Failure`."""
        try:
            return self._own.lower(graph, problem)
        except Exception as error:
            return _Failure(error_text(error))

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Answers:
        """What the provider answers. A kernel whose answer cannot be planned gets a refusal, with a warning."""
        if isinstance(work, _Failure):
            return self._refused(specs, work)
        target = problem.target
        if never := [spec for spec in specs if target.cc in spec.never_on and not untested.are_allowed()]:
            refused = Answers.of([(spec, Refusal(spec.name, untested.refused(target) or "")) for spec in never])
            others = [spec for spec in specs if spec not in never]
            return self.supports(others, work, problem).followed_by(refused) if others else refused
        try:
            answers = self._own.supports(specs, work, problem)
            if not isinstance(answers, Answers):
                return self._refused(specs, f"supports returned {kind_of(answers)}, and not Answers")
            given = {spec.name: answers.allocation(index) for index, spec in enumerate(answers.specs)}
            refusals = {refusal.kernel: refusal for refusal in answers.refusals()}
        except Exception as error:
            return self._refused(specs, error_text(error))
        checked = Answers.of(
            (spec, self._answer(spec.name, given.get(spec.name), refusals.get(spec.name))) for spec in specs
        )
        is_whole = [*checked.specs] == [*answers.specs]
        return checked._replace(of_rows=answers.of_rows) if is_whole else checked

    def _answer(self, kernel: str, allocation: Any, refusal: Refusal | None) -> Allocation | Refusal:
        if allocation is None and refusal is not None:
            return Refusal(kernel, partial(self._reason, refusal.why))
        if (wrong := next(_unplannable(allocation), None)) is not None:
            self._warn(wrong)
            return Refusal(kernel, self._failed(wrong))
        return replace(allocation, details=partial(self._details, allocation.details))  # type: ignore[no-any-return]

    def _reason(self, why: str | Callable[[], str]) -> str:
        """The text of a refusal's reason, or how the provider failed to give it."""
        try:
            text = why() if callable(why) else why
        except Exception as error:
            return self._failed(error_text(error))
        return text if isinstance(text, str) else self._failed(f"a reason is {kind_of(text)}")

    def _details(self, details: Details | Callable[[], Details]) -> Details:
        """The details of a plan that `explain` prints, or how the provider failed to give them."""
        try:
            found = details() if callable(details) else details
            return Details(tuple((str(name), str(how)) for name, how in found.transports), tuple(map(str, found.notes)))
        except Exception as error:
            return Details(notes=(self._failed(error_text(error)),))

    def _refused(self, specs: Sequence[KernelSpec], how: str) -> Answers:
        self._warn(how)
        return Answers.of([(spec, Refusal(spec.name, self._failed(how))) for spec in specs])

    def _failed(self, how: str) -> str:
        return failure(self._own.name) + how

    def _warn(self, how: str) -> None:
        warnings.warn(self._failed(how), stacklevel=4)

    def kernels(self, plan: Plan) -> tuple[str, ...]:
        """The texts of the provider's kernels. Raises `UnsupportedError` if it fails."""
        try:
            return tuple(self._own.kernels(plan))
        except Exception as error:
            raise self._not_built(plan, error_text(error)) from error

    def build(self, plan: Plan) -> Runner:
        """The runner that the provider builds. Raises `UnsupportedError` if it fails."""
        try:
            runner = self._own.build(plan)
        except EpifuseError:
            raise
        except Exception as error:
            raise self._not_built(plan, error_text(error)) from error
        if not callable(runner):
            raise self._not_built(plan, f"build returned {kind_of(runner)}, and no function")
        return runner

    def _not_built(self, plan: Plan, how: str) -> EpifuseError:
        return fail("not_built", None, kernel=plan.spec.name, provider=self._own.name, detail=how)


def _unplannable(allocation: Any) -> Iterator[str]:
    """Yield why the answer about a kernel cannot be planned; nothing if it can."""
    if allocation is None:
        yield "supports answered nothing about this kernel"
        return
    if not isinstance(allocation, Allocation):
        yield f"supports answered {kind_of(allocation)}, and neither Allocation nor Refusal"
        return
    cost, tile = allocation.cost, allocation.tile
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not math.isfinite(cost):
        yield f"its cost is {cost!r}, and has to be a finite int or float"
    if not (isinstance(tile, tuple) and len(tile) == 2 and all(type(size) is int for size in tile)):
        yield f"its tile is {tile}, and has to be rows and columns"


def error_text(error: Exception) -> str:
    """The text of an error in another package's code, with its place there: frames of epifuse and of Python's import
    system are skipped."""
    walked = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in walked if not frame.filename.startswith(_NOT_THEIRS)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
