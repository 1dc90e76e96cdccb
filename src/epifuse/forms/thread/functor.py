"""Thread functors: an epilogue as an object that holds the parameters of its formula, like CUTLASS's output operators.

A functor can stand wherever an epilogue function can. Its formula is written in the epilogue language and is parsed to
the same graph as a function. Called on tensors, a functor computes the formula in plain PyTorch, as a reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any, ClassVar

import torch

from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import EpifuseError, fail
from epifuse.forms.thread import formulas
from epifuse.forms.thread.options import FloatRoundStyle, Options, ScaleType
from epifuse.forms.thread.parameters import parameter_of, resolved
from epifuse.frontend import Parsed, parse, parsed_once
from epifuse.frontend.names import is_number
from epifuse.frontend.remembered import remembered
from epifuse.fusion.primitives import add, sub


class Functor:
    """An epilogue with parameters. A subclass gives a `formula`, a staticmethod in the epilogue language.

    The formula's first parameter is `accum`. Further parameters without a default are operands of each call and
    broadcast to accum's shape. The functor itself holds parameters with a default: functions, and numbers, written
    `name=2.0`, `name_ptr=tensor` (one element, read by the kernel) or `name_ptr_array=tensors` (one element a batch).
    `sources` names the operands that may be None in the formula, such as C in `linear_combination`. Scale types are for
    them alone: a source is not read if the scale type has no source or `beta` is a Python zero.

    The `element_*` are the dtypes that outputs, accumulator and sources must have; None allows any. `count` is a hint.
    `stores` are the outputs that are wanted, by default all. Raises `ArgumentError` for arguments that do not fit.
    """

    formula: ClassVar[Callable[..., Any]]
    _partial: ClassVar[Callable[..., Any] | None] = None
    sources: ClassVar[Mapping[str, str | None]] = {}
    _preset: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(
        cls,
        *,
        formula: Callable[..., Any] | None = None,
        partial: Callable[..., Any] | None = None,
        sources: Mapping[str, str | None] | None = None,
        preset: Mapping[str, Any] | None = None,
    ) -> None:
        """Take as data what distinguishes a functor from its base. An argument that is not given is inherited.

        `partial` is the formula of every partition of K but the last, without activation and bias. `sources` gives for
        each source the name of the parameter that combines it with the value, or None if it is added. `preset` are
        defaults that replace those of the formula.
        """
        super().__init_subclass__()
        for name in _OURS:
            if name in vars(cls):  # as in CUTLASS, but kernels would silently compute the base's formula
                raise fail("undefined_functor", None, functor=cls.__name__, what=f"its own {name}", why=_WRITE)
        if "formula" in vars(cls):  # written as a method; the base's `partial` does not belong to it
            cls._partial = None
        given = {"formula": formula, "_partial": partial, "sources": sources, "_preset": preset}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, staticmethod(value) if callable(value) else value)

    @outside_graph
    def __init__(
        self,
        element_output: torch.dtype | None = None,
        count: int | None = None,
        element_accumulator: torch.dtype | None = None,
        element_compute: torch.dtype = torch.float32,
        scale: ScaleType = ScaleType.Default,
        round: FloatRoundStyle = FloatRoundStyle.round_to_nearest,  # noqa: A002 - CUTLASS's word
        element_source: torch.dtype | None = None,
        *,
        element_aux_output: torch.dtype | None = None,
        stores: tuple[str, ...] | None = None,
        **parameters: Any,
    ) -> None:
        self.options = Options(
            element_output,
            count,
            element_accumulator,
            element_compute,
            scale,
            round,
            element_source,
            element_aux_output,
        )
        if stores is not None and not (isinstance(stores, tuple) and stores):
            raise fail("option", None, name="stores", want="a tuple of names of outputs", value=stores)
        self.stores = stores
        self.name = type(self).__name__
        if not inspect.isfunction(self._function("formula")):
            raise self._undefined("a formula that is no function", "write it as a staticmethod")
        declared = inspect.signature(self._function("formula")).parameters
        held = {name: p.default for name, p in declared.items() if p.default is not p.empty}
        self.operands = tuple(name for name in declared if name not in held)[1:]
        self._held = held
        own = {name: default for name, default in held.items() if name not in self._preset}
        self.written = resolved(self.name, own, parameters)
        self.parameters: dict[str, Any] = {**held, **self._preset, **self.written}
        self._lower(0, 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("parameters", ()):  # the new value would not be read
            raise fail("held_parameter", None, functor=self.name, name=name)
        super().__setattr__(name, value)

    # --- using it ------------------------------------------------------------------------------------------------

    def is_source_needed(self) -> bool:
        """Whether a source is read: not if the scale type has no source, or beta was constructed as a Python zero."""
        return any(name not in self._fixed for name in self.operands if name == "C" or name in self.sources)

    def set_k_partition(self, k_partition: int, k_partition_count: int) -> None:
        """Compute from now on what partition `k_partition` of `k_partition_count` computes if K is split in series.

        Every partition but the first adds C, the sum of those before it. Only the last applies what follows the sum.
        Raises `ArgumentError` if the functor has no C.
        """
        numbers = (k_partition, k_partition_count)
        if not all(type(number) is int for number in numbers) or not 0 <= k_partition < k_partition_count:
            raise fail("option", None, name="k_partition", want="below k_partition_count, from 0", value=numbers)
        if self._partial is None or (k_partition and "source" in self.options.scale.absent):
            raise self._undefined("a split of K", "it has no source C to hold the sum so far")
        self._lower(k_partition, k_partition_count)

    def __call__(self, accum: Any, *operands: Any, **by_name: Any) -> Any:
        """The formula in plain PyTorch, without the conversion to output dtypes. Sources not needed are not read."""
        parsed = self.__epifuse__()
        if len(operands) > len(self.operands):
            want = ", ".join(("accum", *self.operands))
            raise fail("positional", None, function=self.name, want=want, have=len(operands) + 1)
        given = parsed.named({**dict(zip(self.operands, operands, strict=False)), **by_name})
        for name in given:
            if name not in parsed.parameters:
                shown = ", ".join(parsed.parameters)
                raise fail("unknown_parameter", None, function=self.name, name=name, parameters=shown)
        given = {**parsed.defaults, **given}
        for name in parsed.parameters:
            if name not in given:
                raise fail("operand_not_given", None, name=name)
        result = self._running(accum, **given, **{k: v for k, v in self._fixed.items() if k in self._names})
        if not isinstance(result, tuple):
            return result
        kept = tuple(x for x, name in zip(result, self._outputs, strict=True) if self._is_stored(name))
        return kept if len(kept) > 1 else kept[0]

    def __epifuse__(self) -> Parsed:
        """The parsed formula. An object with this method is an epilogue."""
        if "_partition" not in vars(self):
            raise fail("not_constructed", None, name=type(self).__name__)
        return parsed_once(self, self._lowered, self._partition)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_running"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lower(*self._partition)

    def __repr__(self) -> str:
        options = self.options
        shown = [] if options.element_output is None else [str(options.element_output)]
        shown += [] if options.scale is ScaleType.Default else [f"scale={options.scale}"]
        return f"{self.name}({', '.join((*shown, *(f'{k}={v!r}' for k, v in self.written.items())))})"

    # --- lowering ------------------------------------------------------------------------------------------------

    def _lower(self, index: int, count: int) -> None:
        """Parse the formula of partition `index` of `count`, which this functor computes from now on."""
        self._partition = (index, count)
        self.__epifuse__()

    def _lowered(self) -> Parsed:
        """The parsed formula of this partition. Functors that differ only in numbers share one graph."""
        index, count = self._partition
        self._running = self._function("formula" if index == count - 1 else "_partial")
        self._names = tuple(inspect.signature(self._running).parameters)
        self._fixed = self._fixed_values()
        try:
            whole = _parse(self._running, tuple((k, v) for k, v in self._fixed.items() if k in self._names))
        except EpifuseError as error:
            if error.loc is not None and error.loc.file == formulas.__file__:
                raise self._undefined("these functions", str(error).partition("\n")[0]) from None
            if error.key != "not_a_value" or self.is_source_needed():
                raise
            raise self._undefined("a formula that cannot do without its source", _COMBINE) from error
        self._outputs = tuple(output.name for output in whole.graph.outputs)
        values = {k: v for k, v in self.parameters.items() if k in self._names and k not in self._fixed}
        if self._partition == (0, 1):
            self._check(whole, values)
        kept = tuple(output for output in whole.graph.outputs if self._is_stored(output.name))
        return replace(
            whole,
            graph=whole.graph if kept == whole.graph.outputs else replace(whole.graph, outputs=kept),
            name=self.name,
            defaults=values,
            prepare=self._read,
            dtypes=self.options.dtypes(self.sources),
            notes=(*self.options.notes(), *self._sources_not_read()),
        )

    def _function(self, name: str) -> Any:
        """A class attribute that is a function, whether or not it was marked as a staticmethod."""
        found = inspect.getattr_static(type(self), name, None)
        return found.__func__ if isinstance(found, staticmethod) else found

    def _fixed_values(self) -> dict[str, Any]:
        """The parameters and sources that are known while parsing: functions, and None for absent ones."""
        fixed = {name: value for name, value in self.parameters.items() if value is None or callable(value)}
        for name, default in self._held.items():
            if callable(default) and not callable(self.parameters[name]) and name not in self.sources.values():
                raise fail("option", None, name=name, want="a function", value=self.parameters[name])
        absent = set(self.options.scale.absent)
        if self._partition[0]:
            absent.add("beta")
        elif self._is_beta_zero():
            absent |= {"beta", "source"}
        for name, by in self.sources.items():
            operation = add if by is None else self.parameters[by]
            if operation is None or ("source" in absent and operation in (add, sub)):
                fixed[name] = None
            elif "source" in absent:
                raise self._undefined(str(self.options.scale), f"its {by} needs {name}, which nothing replaces")
        return fixed | {name: None for name in ("alpha", "beta") if name in absent and name in self.parameters}

    def _is_beta_zero(self) -> bool:
        """Whether beta is a Python zero and every source is added or subtracted, so that no source has to be read. No
        other structure depends on a number."""
        operations = [add if by is None else self.parameters[by] for by in self.sources.values()]
        beta = None if "beta" in self.options.scale.absent else self.parameters.get("beta")
        return is_number(beta) and beta == 0 and bool(operations) and set(operations) <= {None, add, sub}

    def _is_stored(self, name: str) -> bool:
        return self.stores is None or name in self.stores

    def _read(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as the graph takes them: pointers become parameters, and unneeded sources go."""
        read: dict[str, Any] = {}
        for key, value in named.items():
            if key in self.operands:
                if key not in self._fixed:
                    read[key] = value
                continue
            name = parameter_of(key, self.parameters) or key
            if name in self._fixed:
                raise self._undefined(f"{key} at a call", "it is part of the structure; construct the functor with it")
            if name in read:
                raise fail("parameter_twice", None, function=self.name, name=name)
            plain = name not in self.parameters or (key == name and type(value) is float)
            read[name] = value if plain else resolved(self.name, self.parameters, {key: value})[name]
        return read

    # --- checks --------------------------------------------------------------------------------------------------

    def _undefined(self, what: str, why: str) -> EpifuseError:
        return fail("undefined_functor", None, functor=self.name, what=what, why=why)

    def _check(self, parsed: Parsed, values: Mapping[str, Any]) -> None:
        scale = self.options.scale
        if scale is not ScaleType.Default and not ("alpha" in self.parameters and self.sources):
            raise self._undefined(str(scale), "its formula is not a linear combination")
        for name in self.stores or ():
            if name not in self._outputs:
                raise fail("unknown_output", None, option="stores", name=name, outputs=", ".join(self._outputs))
        for name, value in values.items():
            dims = value.dim() if isinstance(value, torch.Tensor) else 0
            if scale.per_channel and name == "alpha" and dims not in (1, 2):
                raise self._undefined(f"{scale} without a vector", "pass alpha_ptr=, one number a column")
            vector = dims in (1, 2) and value.numel() != 1  # one element may be a number, or the only column
            if vector and not (scale.per_channel and name in ("alpha", "beta")):
                raise self._undefined(f"a vector {name} in {scale}", "the per-channel scale types take one")
        read = {load.attr.name for load in parsed.graph.loads()}
        for name in self.written:
            unread = name not in read if name in values else self._fixed.get(name) is not self.written[name]
            if unread and not (self._is_beta_zero() and name in _OF_THE_SOURCE):
                raise self._undefined(f"{name} in {scale}", "it would not be read")

    def _sources_not_read(self) -> Iterator[str]:
        for name in self.sources:
            if name in self._fixed and "source" in self.options.scale.absent:
                yield f"{name} is not read: {self.options.scale} has no source"
            elif name in self._fixed and self._is_beta_zero():
                yield f"{name} is not read: beta was 0 when the functor was made"


_OURS = ("__call__", "is_source_needed", "set_k_partition")
_WRITE = "write a formula, a staticmethod; kernels and calls both follow from it"
_OF_THE_SOURCE = ("beta", "scale_c")  # left out with the source if beta is zero
_COMBINE = "combine by epifuse.thread.linear_combination, or derive from epifuse.thread.Functor"


def _parse(formula: FunctionType, given: tuple[tuple[str, Any], ...]) -> Parsed:
    return remembered("formula", formula, lambda: _parsed(formula, given), given, Parsed.is_current)


def _parsed(formula: FunctionType, given: tuple[tuple[str, Any], ...]) -> Parsed:
    parsed = parse(formula, given=dict(given), handed=None)
    if formula.__module__ != formulas.__name__:
        return parsed
    return replace(parsed, graph=replace(parsed.graph, locs={}))  # an operand's fault is on no line of `formulas`
