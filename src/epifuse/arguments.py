"""What a person hands over: GEMM and epilogue arguments. Validated before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from epifuse.checks import (
    check_accumulated,
    check_declared,
    check_operand,
    check_output,
    check_overlaps,
    check_product,
    check_tensor,
    host_number,
    is_written_once,
)
from epifuse.dtypes import default_accumulator, is_storable
from epifuse.dynamo import outside_graph
from epifuse.errors import fail, kind_of
from epifuse.frontend import FrontEnd, Parsed, parsed
from epifuse.ir import Graph, Output
from epifuse.ir.types import shape_of
from epifuse.memory import empty
from epifuse.passes.structure import structure_of
from epifuse.problem import Constraints, HostNumber, Problem, info, old_content, settled
from epifuse.target import CPU, TARGETS, Target
from epifuse.transports import Hint, Load, Store

__all__ = ["EpilogueArguments", "GemmArguments", "Load", "Store", "parsed"]


class EpilogueArguments:
    """An epilogue with a tensor or number for each operand and each output, by name.

    `epilogue_fn` is a Python function, a lambda, or source text, parsed and never called, or a visitor tree or functor.
    A returned `accum` needs a destination `accum=`. Raises `EpilogueSyntaxError` for what the language does not hold
    and `ArgumentError` for missing or extra names.
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
        """The same, with outputs that are not given left to be allocated, and those that `accumulate` names added."""
        made = cls.__new__(cls)
        made._bind(epilogue_fn, given, accumulate, allocate=True)
        return made

    def _bind(
        self, epilogue_fn: Any, given: Mapping[str, Any], accumulate: tuple[str, ...] = (), *, allocate: bool
    ) -> None:
        self.parsed = parsed(epilogue_fn)
        self.epilogue_fn = epilogue_fn
        given = self.parsed.named(given)
        operands, outputs = self.parsed.parameters, self.output_names
        for name in given:
            if name not in operands and name not in outputs:
                shown = (", ".join(operands) or "none", ", ".join(outputs))
                raise fail("extra_operand", None, name=name, operands=shown[0], outputs=shown[1])
        values = {**self.parsed.defaults, **given}
        for name in (*operands, *(() if allocate else outputs)):
            if name not in values:
                raise fail("operand_not_given" if allocate else "missing_operand", None, name=name)
        self.transports = {name: value for name, value in values.items() if isinstance(value, Hint)}
        self.tensors: dict[str, Any] = {n: v.tensor if isinstance(v, Hint) else v for n, v in values.items()}
        for name, hint in self.transports.items():
            side, want = ("operand", "Load") if name in operands and name not in outputs else ("output", "Store")
            if type(hint).__name__ != want:
                raise fail("transport_side", None, name=name, side=side, want=want)
        added = [name for name, hint in self.transports.items() if isinstance(hint, Store) and hint.accumulate]
        self.accumulated = self._onto_given((*added, *accumulate))
        for name, reader in self.parsed.captures.items():
            self.tensors[name] = reader()

    def _onto_given(self, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in self.output_names:
                shown = ", ".join(self.output_names)
                raise fail("unknown_output", None, option="accumulate", name=name, outputs=shown)
            if self.tensors.get(name) is None:
                raise fail("accumulate_new", None, name=name)
        return tuple(dict.fromkeys(names))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the return statement."""
        return self.parsed.output_names

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of operands, then outputs."""
        return (*self.parsed.parameters, *self.output_names)

    @property
    def parameters(self) -> dict[str, Any]:
        """Operands and outputs by name, without their hints."""
        return {name: self.tensors[name] for name in self.parameter_names if name in self.tensors}


def check_arguments(function: str, args: object) -> None:
    """Raises `ArgumentTypeError` where `args` are no `GemmArguments`."""
    if not isinstance(args, GemmArguments):
        raise fail("wrong_arguments", None, function=function, want="GemmArguments", type=kind_of(args))


PLAIN = "def plain(accum): D = accum; return D"


class GemmArguments:
    """A @ B with an optional epilogue: (M,K) @ (K,N), or (L,M,K) @ (L,K,N); one of the two may lack the batch.

    `out` receives D when there is no epilogue. With one, it only describes the product and is not written: the
    epilogue's own destinations are. `accumulator_type` defaults to float32 (float64, int32 for such inputs).
    Raises `ArgumentError` for shapes, dtypes, devices and memory that do not go together, `EpilogueTypeError` on the
    user's line for values that do not; nothing is written. `names` are what errors call A and B.
    """

    @outside_graph
    def __init__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulator_type: torch.dtype | None = None,
        epilogue: EpilogueArguments | None = None,
        *,
        out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
        constraints: Constraints | None = None,
        names: tuple[str, str] = ("A", "B"),
    ) -> None:
        if epilogue is not None and not isinstance(epilogue, EpilogueArguments):
            raise fail(
                "wrong_arguments",
                None,
                function="GemmArguments",
                want="EpilogueArguments",
                type=kind_of(epilogue),
            )
        if not isinstance(constraints, (Constraints, type(None))):
            want = "constraints=ef.Constraints(...)"
            raise fail("wrong_arguments", None, function="GemmArguments", want=want, type=kind_of(constraints))
        self.A, self.B, self.out, self.names = A, B, out, names
        given = {} if out is None else {"D": out}
        self.epilogue = epilogue or EpilogueArguments.partial(PLAIN, given)
        parsed = self.epilogue.parsed
        check_product(A, B, accumulator_type or parsed.dtypes.get("accum"), names)
        self.accumulator_type = accumulator_type or parsed.dtypes.get("accum") or default_accumulator(A.dtype, B.dtype)
        check_declared("accum", self.accumulator_type, parsed)
        if epilogue is not None and out is not None and "D" not in epilogue.output_names:
            raise fail("no_output_d", self.epilogue.parsed.source.loc(self.epilogue.parsed.source.definition))
        self.numbers: dict[str, Any] = {}
        self.problem = self._problem(settled(constraints or Constraints(), A.dtype))
        if out is not None:
            check_tensor("out", out, A.device)
            if tuple(out.shape) != self.problem.accum_shape:
                raise fail("out_shape", None, want=self.problem.accum_shape, shape=tuple(out.shape))
        self.structure = structure_of(parsed.graph, self.problem)
        self.graph: Graph = self.structure.graph
        if isinstance(out_dtypes, torch.dtype):
            out_dtypes = dict.fromkeys(self.epilogue.output_names, out_dtypes)
        if not isinstance(out_dtypes, (Mapping, type(None))):
            raise fail("option", None, name="out_dtypes", want="a torch dtype, or dtypes by name", value=out_dtypes)
        self._settle_outputs(out_dtypes or {})

    def _problem(self, constraints: Constraints) -> Problem:
        operands: list[tuple[str, Any]] = []
        epilogue = self.epilogue
        for name in (*epilogue.parsed.parameters, *epilogue.parsed.captures):
            value = epilogue.tensors[name]
            number = host_number(name, value)
            if number is not None:
                self.numbers[name] = number.value
                operands.append((name, HostNumber(number.kind)))
            else:
                check_operand(name, value, self.A.device, self.accumulator_type)
                check_declared(name, value.dtype, epilogue.parsed)
                operands.append((name, info(value)))
        for name in epilogue.accumulated:
            check_accumulated(name, epilogue.tensors[name], self.A.device, self.accumulator_type)
        return Problem(
            info(self.A),
            info(self.B),
            self.accumulator_type,
            target_of(self.A),
            tuple(operands),
            by_tma=tuple(name for name, hint in epilogue.transports.items() if hint.via),
            accumulated=tuple((name, epilogue.tensors[name].dtype) for name in epilogue.accumulated),
            constraints=constraints,
        )

    def _settle_outputs(self, out_dtypes: Mapping[str, torch.dtype]) -> None:
        """Check every destination given, and choose a dtype for those that are not."""
        tensors = self.epilogue.tensors
        for name, dtype in out_dtypes.items():
            if name not in self.epilogue.output_names:
                shown = ", ".join(self.epilogue.output_names)
                raise fail("unknown_output", None, option="out_dtypes", name=name, outputs=shown)
            if not is_storable(dtype):
                raise fail("output_dtype", None, name=name, dtype=dtype)
        dtypes, infos, declared = [], [], self.epilogue.parsed.dtypes
        for output in self.graph.outputs:
            given = tensors.get(output.name)
            if given is not None:
                check_output(output, given, self.graph, self.problem)
            chosen = (
                given.dtype
                if given is not None
                else out_dtypes.get(output.name)
                or declared.get(output.name)
                or _default(output, self.graph, self.problem)
            )
            check_declared(output.name, chosen, self.epilogue.parsed)
            dtypes.append((output.name, chosen))
            infos.append((output.name, None if given is None else info(given)))
        destinations = {o.name: tensors[o.name] for o in self.graph.outputs if tensors.get(o.name) is not None}
        held = old_contents(self.graph, self.problem, destinations)
        inputs = dict(zip(self.names, (self.A, self.B), strict=True))
        aliases = check_overlaps(inputs, {**held, **tensors}, destinations, self.graph, self.problem)
        operands = (*self.problem.operands, *((name, info(tensor)) for name, tensor in held.items()))
        self.problem = replace(
            self.problem, operands=operands, outputs=tuple(infos), dtypes=tuple(dtypes), aliases=aliases
        )

    @property
    def problem_size(self) -> tuple[int, int, int, int]:
        """(M, N, K, L)."""
        e = self.problem.extents
        return e["m"], e["n"], e["k"], e["l"]

    def allocate(self) -> dict[str, torch.Tensor]:
        """Destinations by name: those given, and new ones for the others."""
        made = {}
        for output in self.graph.outputs:
            given = self.epilogue.tensors.get(output.name)
            shape = shape_of(output.dims or (), self.problem.extents)
            dtype = dict(self.problem.dtypes)[output.name]
            made[output.name] = empty(shape, dtype, self.A.device) if given is None else given
        return made


def old_contents(graph: Graph, problem: Problem, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What outputs are added onto, as operands: their destinations, without the ones of a shape that keeps dims.

    A copy where `is_written_again` says that the destination itself does not keep it.
    """
    found = {}
    for output in graph.outputs:
        if output.name in dict(problem.accumulated):
            held = outputs[output.name].view(shape_of(output.dims or (), problem.extents))
            again = is_written_again(output, graph, problem)
            found[old_content(output.name)] = held.clone(memory_format=torch.contiguous_format) if again else held
    return found


def is_written_again(output: Output, graph: Graph, problem: Problem) -> bool:
    """Whether each row, column or batch of tiles writes the output anew, so that a later one reads what it wrote.

    A graph without stages has no tiles.
    """
    stage = graph.stages.get(output.node)
    return stage is not None and stage.kind != "finish" and not is_written_once(output, problem)


def target_of(tensor: torch.Tensor) -> Target:
    """The target a tensor's device is. A GPU we have no row for is a target without kernels."""
    if tensor.device.type != "cuda":
        return CPU if tensor.device.type in ("cpu", "meta") else Target(tensor.device.type, -1, tensor.device.type)
    if not torch.cuda.is_available():  # a FakeTensor of a GPU this machine does not have
        return Target("unknown GPU", -1, "cuda")
    major, minor = torch.cuda.get_device_capability(tensor.device)
    cc = major * 10 + minor
    return TARGETS.get(cc, Target(f"sm_{cc}", cc, "cuda"))


def _default(output: Output, graph: Graph, problem: Problem) -> torch.dtype:
    """DESIGN: A's dtype for wide floats, the accumulator's for 8-bit inputs, the accumulation dtype for reductions."""
    kind = graph.types[output.node].kind
    if kind == "mask":
        return torch.bool
    if kind != "float":
        return torch.int64 if kind == "int64" else torch.int32
    if graph.stages[output.node].kind == "finish" or problem.accumulator == torch.int32:
        return problem.float_dtype
    narrow = problem.a.dtype.itemsize == 1
    return problem.accumulator if narrow else problem.a.dtype
