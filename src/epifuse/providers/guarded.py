"""A provider of another package. Where its code fails, its kernels refuse with that as the reason, and others run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from epifuse.base.errors import EpifuseError, fail, kind_of
from epifuse.ir import Graph
from epifuse.plan import Answers, KernelSpec, Plan, Refusal
from epifuse.providers.base import Provider, Runner
from epifuse.request.problem import Problem


class _Failure(str):
    """Why `lower` made nothing: a text, as an error would keep what its frames hold."""


class Guarded:
    """What planning and building ask of `own`. All else is its own."""

    def __init__(self, own: Provider) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def lower(self, graph: Graph, problem: Problem) -> Any:
        """What it makes of the graph, or why that failed."""
        try:
            return self._own.lower(graph, problem)
        except Exception as error:
            return _Failure(_told(error))

    def supports(self, specs: Sequence[KernelSpec], work: Any, problem: Problem) -> Answers:
        """What it answers, or with a warning a refusal for each kernel."""
        if isinstance(work, _Failure):
            return self._refused(specs, work)
        try:
            answers = self._own.supports(specs, work, problem)
        except Exception as error:
            return self._refused(specs, _told(error))
        if not isinstance(answers, Answers):
            return self._refused(specs, f"supports returned {kind_of(answers)}, and not Answers")
        return answers

    def _refused(self, specs: Sequence[KernelSpec], failure: str) -> Answers:
        why = f"the provider '{self._own.name}' failed: {failure}"
        warnings.warn(why, stacklevel=2)
        return Answers.of([(spec, Refusal(spec.name, why)) for spec in specs])

    def build(self, plan: Plan) -> Runner:
        """What it builds. Raises `UnsupportedError` where that fails."""
        try:
            return self._own.build(plan)
        except EpifuseError:
            raise
        except Exception as error:
            named = {"kernel": plan.spec.name, "provider": self._own.name}
            raise fail("not_built", None, **named, detail=_told(error)) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
