"""Launching a planned call: read numbers again, evaluate host expressions, bind operands, then run the runner's step.

A *prepared call* holds all that does not depend on addresses and numbers. It is found again by the call's signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._C import _len_torch_dispatch_stack
from torch.autograd import profiler
from torch.autograd.graph import increment_version

from epifuse import providers
from epifuse.base.cache import LRU
from epifuse.base.errors import fail
from epifuse.base.lazy import cached_property
from epifuse.base.memory import empty
from epifuse.ir import Graph, Kind
from epifuse.ir.types import shape_of
from epifuse.plan import Plan
from epifuse.plan.destinations import reach
from epifuse.plan.settle import is_written_again, old_contents
from epifuse.providers import WORKSPACE, Runner, Step
from epifuse.request.problem import Problem, dense
from epifuse.request.signature import Call
from epifuse.runtime.failures import OURS, explained
from epifuse.runtime.numbers import kinds_of, numbers_of


class OutputInfo(NamedTuple):
    """What is needed to allocate an output."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_NONE: Mapping[str, Any] = {}
Repeat = Callable[..., list[torch.Tensor]]
"""Launches again. Takes a sequence of A, B and operands, and numbers by name. Returns the outputs in order."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared call. It serves every call with the same signature, whatever the addresses and the numbers are.

    `outputs` are in the order of the return statement. If `is_final`, no better kernel is being compiled.
    """

    plan: Plan
    runner: Runner
    kinds: Mapping[str, Kind]
    outputs: tuple[OutputInfo, ...]
    accumulates: bool
    is_final: bool = True

    @staticmethod
    def of(plan: Plan, *, is_final: bool = True) -> Prepared:
        """Build the kernel of `plan`. Raises `UnsupportedError` if the package that builds it is missing."""
        graph, problem = plan.graph, plan.problem
        return Prepared(
            plan,
            providers.load(plan.spec.provider).build(plan),
            kinds_of(graph, problem),
            outputs_of(graph, problem),
            bool(problem.accumulated),
            is_final,
        )

    def bind(self, call: Call, outputs: Mapping[str, torch.Tensor], workspace: torch.Tensor | None = None) -> Step:
        """Bind a call's tensors and numbers. Returns a function that launches; nothing is written until it runs."""
        plan, further = self.plan, {} if workspace is None else {WORKSPACE: workspace}
        try:
            step = self._step(call.request.a, call.request.b, {**call.tensors, **further}, call.numbers, outputs)
        except OURS:
            raise
        except Exception as error:
            raise explained(error, plan) from error
        counted = _counted(outputs.values())

        def run() -> None:
            try:
                step()
                increment_version(counted)
            except OURS:
                raise
            except Exception as error:
                raise explained(error, plan) from error

        return run

    def _step(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        operands: Mapping[str, Any],
        numbers: Mapping[str, Any],
        outputs: Mapping[str, torch.Tensor],
    ) -> Step:
        if self.kinds:
            operands = {**operands, **numbers_of(self.plan.graph, self.plan.problem, self.kinds, numbers)}
        bind = self._onto_old if self.accumulates else self.runner
        return bind(a, b, operands, outputs)

    def _onto_old(
        self, a: torch.Tensor, b: torch.Tensor, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Step:
        """The runner's step for outputs of which some are added onto what their destinations hold."""
        graph, problem = self.plan.graph, self.plan.problem

        def bound() -> Step:
            return self.runner(a, b, {**operands, **old_contents(graph, problem, outputs)}, outputs)

        if self._copies_old:
            return lambda: bound()()  # each launch copies the old contents first
        return bound()

    @cached_property
    def _copies_old(self) -> bool:
        graph, problem = self.plan.graph, self.plan.problem
        onto = dict(problem.accumulated)
        return any(is_written_again(output, graph, problem) for output in graph.outputs if output.name in onto)

    def launch(self, call: Call) -> dict[str, torch.Tensor]:
        """Run the call. Returns the outputs by name."""
        return self.run(call.request.a, call.request.b, call.tensors, call.numbers)

    def run(
        self, a: torch.Tensor, b: torch.Tensor, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any] = _NONE
    ) -> dict[str, torch.Tensor]:
        """Run for tensors that are laid out like those of the call it was prepared for. Returns the outputs by name.

        A profile shows the launch under the kernel's name, and so does NVTX in `torch.autograd.profiler.emit_nvtx`.
        """
        outputs = destinations(self.outputs, tensors)
        try:
            step = self._step(a, b, tensors, numbers, outputs)
            if profiler._is_profiler_enabled:
                with profiler.record_function(f"epifuse::{self.plan.spec.name}"):
                    step()
            else:
                step()
            given = [output for name, output in outputs.items() if name in tensors]
            if given:
                increment_version(_counted(given))
        except OURS:
            raise
        except Exception as error:
            raise explained(error, self.plan) from error
        return outputs

    def repeated(self, names: tuple[str, ...], *, b_is_transposed: bool = False) -> Repeat:
        """A function that launches again for A, B and operands of these `names`. It allocates all outputs.

        If `b_is_transposed`, it takes the transpose of B in place of B.
        """
        quick = None
        if not (self.kinds or self.accumulates) and hasattr(self.runner, "quick"):
            quick = self.runner.quick(names, self.outputs, b_is_transposed=b_is_transposed)

        def run(tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any] = _NONE) -> list[torch.Tensor]:
            if quick is None or profiler._is_profiler_enabled or _len_torch_dispatch_stack():
                a, b, *operands = tensors
                b = b.t() if b_is_transposed else b
                return [*self.run(a, b, dict(zip(names, operands, strict=True)), numbers).values()]
            try:
                return quick(tensors)  # type: ignore[no-any-return]  # tensors
            except OURS:
                raise
            except Exception as error:
                raise explained(error, self.plan) from error

        return run


def outputs_of(graph: Graph, problem: Problem) -> tuple[OutputInfo, ...]:
    """The shape, strides, dtype and device of each output, in the order of the return statement."""
    dtypes, device, extents = dict(problem.dtypes), torch.device(problem.a.device), problem.extents
    shapes = [(output.name, shape_of(output.dims or (), extents)) for output in graph.outputs]
    return tuple([OutputInfo(name, shape, dense(shape), dtypes[name], device) for name, shape in shapes])


def destinations(outputs: Iterable[OutputInfo], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs by name: the destinations given, and new tensors for the others."""
    found = {}
    for name, shape, strides, dtype, device in outputs:
        tensor = given.get(name)
        if tensor is None:
            tensor = empty(shape, strides, dtype, device)
            if type(tensor) is not torch.Tensor:  # a mode of torch is on that makes fake tensors
                raise fail("no_data", None, name=name)
        found[name] = tensor
    return found


def require_data(call: Call) -> None:
    """Raise `ArgumentError` if a tensor of the call has no data, as a fake or meta tensor."""
    if None not in call.addresses:
        return
    position = call.addresses.index(None)
    raise fail("no_data", None, name=(*call.request.names, *call.tensors)[position])


def require_unrecorded(call: Call) -> None:
    """Raise `ArgumentError` if grad mode is on and an input requires grad: autograd would not record the launch."""
    if torch.is_grad_enabled():
        tensors = (call.request.a, call.request.b, *call.tensors.values())
        for name, tensor in zip((*call.request.names, *call.tensors), tensors, strict=True):
            if tensor.requires_grad:
                raise fail("requires_grad", None, name=name)


# --- calls seen before ------------------------------------------------------------------------------------------------


class Ready(Protocol):
    """Something that can launch every call with the same signature, as a prepared call does."""

    @property
    def outputs(self) -> tuple[OutputInfo, ...]:
        """All outputs, including those for which a call passes a destination."""
        ...

    def launch(self, call: Call) -> dict[str, torch.Tensor]:
        """Run the call. Returns the outputs by name."""
        ...


_Entry = tuple[Ready, tuple[int, ...], tuple[int, ...]]
_PREPARED: LRU[Hashable, Any] = LRU(1024)
"""A cache with three kinds of keys.

- The signature of a call: a prepared call, the positions of given outputs among the tensors, and the bytes from the
  first to the last element of each tensor. If a given output and another tensor may overlap, the key also holds the
  distances of their addresses.
- How a call was written, see `pytorch.kept_calls`: what its tensors looked like, and the function that launches it.
- The signature without the number of rows, see `rows`: the answers that give the best kernel for a number of rows, and
  calls that were prepared for some numbers.
"""


_MOST_ALIKE = 4
"""How many entries `remember_beside` keeps for a key: calls of frozen and of trained layers, or of other strides."""


def find_all(key: Hashable) -> tuple[Any, ...]:
    """The entries that `remember_beside` kept for `key`, the newest first."""
    try:
        return _PREPARED.get(key) or ()
    except TypeError:  # an option is not hashable, so it is of a wrong type
        return ()


def remember_beside(key: Hashable, known: Any) -> None:
    """Keep `known`, which serves some calls of this key, in addition to what serves other calls of it."""
    others = find_all(key)
    _PREPARED.drop(key, others)
    _PREPARED.put(key, (known, *others))


def is_full(key: Hashable) -> bool:
    """Whether `key` has as many entries as it may have. With no limit each call might pay for keeping a new one."""
    return len(find_all(key)) == _MOST_ALIKE


def find(call: Call) -> Ready | None:
    """The prepared call of an earlier call with the same signature; None if there is none."""
    try:
        known: _Entry | None = _PREPARED.get(call.signature)
    except TypeError:  # an option is not hashable, so it is of a wrong type
        return None
    if known is not None and known[1] and (near := _distances(known[1], known[2], call.addresses)):
        known = _PREPARED.get((call.signature, near))
    return None if known is None else known[0]


def final(call: Call) -> Prepared | None:
    """The prepared call for all further calls like this one; None if none is kept, or while a better kernel is being
    compiled."""
    known = find(call)
    return known if isinstance(known, Prepared) and known.is_final else None


def remember(call: Call, prepared: Ready, until: Future[Any] | None = None) -> None:
    """Keep `prepared` for calls with the signature of `call`, for good or until the future `until` is done."""
    names = {output.name for output in prepared.outputs}
    written = tuple(index for index, name in enumerate(call.tensors, start=2) if name in names)
    sizes = tuple(map(reach, call.infos)) if written else ()
    entry, keys = (prepared, written, sizes), [call.signature]
    if near := _distances(written, sizes, call.addresses):
        keys.append((call.signature, near))
    try:
        for key in keys:
            _PREPARED.put(key, entry)
    except TypeError:  # an option is not hashable, for example a list of names
        return
    if until is not None:
        for key in keys:
            until.add_done_callback(partial(_forget, key, entry))


def _forget(key: Hashable, entry: _Entry, _: Future[Any]) -> None:
    _PREPARED.drop(key, entry)


def _counted(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs that have a version counter, that is all but inference tensors.

    Once it is incremented, autograd raises an error if it saved the tensor before the launch and needs it.
    """
    return [output for output in outputs if not output.is_inference()]


def _distances(written: tuple[int, ...], sizes: tuple[int, ...], addresses: list[int | None]) -> tuple[int, ...]:
    """The distances between given outputs and the tensors that may overlap them, each behind the two positions.

    Tensors that start at the same address are left out. Usually the result is empty.
    """
    found: list[int] = []
    for i in written:
        for j, address in enumerate(addresses):
            distance = (address or 0) - (addresses[i] or 0)
            if distance and -sizes[j] < distance < sizes[i]:
                found += i, j, distance
    return tuple(found)
