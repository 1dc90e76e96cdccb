"""The arguments that a user passes, of a GEMM and of its epilogue. They are checked before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import fail, kind_of
from epifuse.frontend import FrontEnd, Parsed, check_importable, parsed
from epifuse.ir import Graph
from epifuse.plan.destinations import check_described
from epifuse.plan.settle import settle
from epifuse.request.checks import check_names
from epifuse.request.options import Options
from epifuse.request.problem import Constraints
from epifuse.request.scaled import Scaled, unscaled
from epifuse.request.signature import Request, with_care
from epifuse.request.transports import Load, Store, without_hints
from epifuse.runtime.launch import destinations, outputs_of, require_data

__all__ = ["EpilogueArguments", "GemmArguments", "Load", "Store", "parsed"]


class EpilogueArguments:
    """An epilogue with a tensor or a number for each operand, and a tensor for each output, by name.

    `epilogue_fn` is a Python function, a lambda or source text, which is parsed and never called, or it is a visitor
    tree or functor. An epilogue that returns `accum` needs a destination `accum=`. Raises `EpilogueSyntaxError` for
    code that the language does not hold, and `ArgumentError` for missing or extra names.
    """

    @outside_graph
    def __init__(self, epilogue_fn: Callable[..., Any] | str | FrontEnd, /, **kwargs: Any) -> None:
        self._bind(epilogue_fn, kwargs, allocate=False)

    @classmethod
    def partial(
        cls,
        epilogue_fn: Callable[..., Any] | str | FrontEnd | Parsed,
        given: Mapping[str, Any],
        accumulate: tuple[str, ...] = (),
    ) -> EpilogueArguments:
        """The same, but outputs may be missing from `given`: a launch allocates them.

        The outputs named in `accumulate` are added onto what their destinations hold.
        """
        if not isinstance(given, Mapping):
            want = "operands and outputs by name"
            raise fail("wrong_arguments", None, function="EpilogueArguments.partial", want=want, type=kind_of(given))
        made = cls.__new__(cls)
        made._bind(epilogue_fn, given, accumulate, allocate=True)
        return made

    def _bind(
        self, epilogue_fn: Any, given: Mapping[str, Any], accumulate: tuple[str, ...] = (), *, allocate: bool
    ) -> None:
        self.parsed = parsed(epilogue_fn, given)
        self.epilogue_fn = epilogue_fn
        given = self.parsed.named(given)
        operands, outputs = self.parsed.parameters, self.output_names
        check_names(self.parsed, given)
        values = {**self.parsed.defaults, **given}
        for name in (*operands, *(() if allocate else outputs)):
            if name not in values:
                raise fail(
                    "operand_not_given" if allocate else "missing_operand", None, name=name, hint=_pass(name, outputs)
                )
        self._values = values
        self.tensors, added, self.by_tma = without_hints(values, outputs)
        self.accumulated = tuple(dict.fromkeys((*added, *accumulate)))

    def __reduce__(self) -> Any:
        check_importable(self.epilogue_fn)
        return EpilogueArguments.partial, self._handed()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpilogueArguments:
        return EpilogueArguments.partial(*copy.deepcopy(self._handed(), memo))

    def _handed(self) -> tuple[Any, ...]:
        """The arguments of `partial` that make an equal object. The graph and the readers of captured numbers are left
        out, since parsing makes them again."""
        return self.epilogue_fn, {**self.parsed.fixed, **self._values}, self.accumulated

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the return statement."""
        return self.parsed.output_names

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the operands, then those of the outputs."""
        return (*self.parsed.parameters, *self.output_names)

    @property
    def parameters(self) -> dict[str, Any]:
        """The operands and outputs by name, without `Load` and `Store` hints."""
        return {name: self.tensors[name] for name in self.parameter_names if name in self.tensors}


def _pass(name: str, outputs: tuple[str, ...]) -> str:
    """The hint of an error about a missing argument."""
    if name not in outputs:
        return f"pass {name}=..."
    allocated = "or use EpilogueArguments.partial(fn, {...}), with which a launch allocates it"
    return f"'{name}' is an output of the epilogue: pass a destination, {name}=tensor, {allocated}"


def check_arguments(function: str, args: object) -> None:
    """Raise `ArgumentTypeError` if `args` is not a `GemmArguments`."""
    if not isinstance(args, GemmArguments):
        raise fail("wrong_arguments", None, function=function, want="GemmArguments", type=kind_of(args))


@cache
def plain() -> Parsed:
    """The epilogue of a plain product, which returns accum as D."""
    return parsed("def plain(accum): D = accum; return D")


class GemmArguments:
    """A @ B with an optional epilogue: (M,K) @ (K,N), or (L,M,K) @ (L,K,N); one of the two may lack the batch.

    Without an epilogue `out` receives D. With one, `out` only describes the product and is not written; the epilogue's
    own destinations are. `accumulator_type` defaults to float32, or to float64 or int32 for inputs of these kinds.
    Raises `ArgumentError` for shapes, dtypes, devices and memory that do not fit together, and `EpilogueTypeError` on
    the user's line for values that do not. Nothing is written then. `names` are the names of A and B in errors.
    """

    @outside_graph
    def __init__(
        self,
        A: torch.Tensor | Scaled,
        B: torch.Tensor | Scaled,
        out: torch.Tensor | None = None,
        accumulator_type: torch.dtype | None = None,
        epilogue: EpilogueArguments | None = None,
        *,
        out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
        constraints: Constraints | None = None,
        names: tuple[str, str] = ("A", "B"),
    ) -> None:
        if epilogue is not None and not isinstance(epilogue, EpilogueArguments):
            want, type_ = "epilogue=ef.EpilogueArguments(fn, ...)", kind_of(epilogue)
            raise fail("wrong_arguments", None, function="GemmArguments", want=want, type=type_)
        if not isinstance(constraints, (Constraints, type(None))):
            want = "constraints=ef.Constraints(...)"
            raise fail("wrong_arguments", None, function="GemmArguments", want=want, type=kind_of(constraints))
        self._product = A, B
        self.A, self.B, scales = unscaled(A, B)
        self.out, self.names = out, names
        self.bound: Any = None  # the launch bound by the kernel that ran last, see `Kernel.run`
        self.epilogue = epilogue or EpilogueArguments.partial(plain(), {} if out is None else {"D": out})
        parsed, accumulated, by_tma = self.epilogue.parsed, self.epilogue.accumulated, self.epilogue.by_tma
        if epilogue is not None and out is not None and "D" not in epilogue.output_names:
            raise fail("no_output_d", parsed.source.loc(parsed.source.definition))
        pinned = constraints or Constraints()
        options = Options(accumulator_type, out_dtypes=out_dtypes, accumulate=accumulated, by_tma=by_tma, pinned=pinned)
        given = {**self.epilogue.tensors, **scales}
        self.call = with_care(Request(self.A, self.B, parsed, given, options, names))
        self.problem, self.structure = settle(self.call)
        if epilogue is not None and out is not None:
            check_described(out, self.graph, self.problem)

    def __reduce__(self) -> Any:
        is_plain = self.epilogue.epilogue_fn is plain() and self.epilogue.tensors.get("D") is self.out
        made = partial(
            GemmArguments,
            out_dtypes=dict(self.problem.dtypes),
            constraints=self.problem.constraints,
            names=self.names,
        )
        return made, (*self._product, self.out, self.accumulator_type, None if is_plain else self.epilogue)

    @property
    def graph(self) -> Graph:
        """The typed graph of the epilogue."""
        return self.structure.graph

    @property
    def accumulator_type(self) -> torch.dtype:
        """The dtype in which the products of elements are added up."""
        return self.problem.accumulator

    def allocate(self) -> dict[str, torch.Tensor]:
        """The destinations by name: those given, and new tensors for the other outputs."""
        require_data(self.call)
        return destinations(outputs_of(self.graph, self.problem), self.call.tensors)
