"""Launching: numbers read again, host expressions evaluated, operands bound, then the runner's step.

A prepared call is all of it that neither addresses nor numbers change. It is found again by the call's signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._C import _len_torch_dispatch_stack
from torch.autograd import profiler
from torch.autograd.graph import increment_version

from epifuse import providers
from epifuse.base.cache import LRU
from epifuse.base.errors import fail
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


class Allocated(NamedTuple):
    """What an output is that is not given."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_NONE: Mapping[str, Any] = {}
Repeat = Callable[..., list[torch.Tensor]]
"""Runs for A, B and operands in a sequence, and numbers by name."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that launching needs and that neither addresses nor numbers change: one serves every call of a signature.

    `outputs` are in the order of the return statement. Where it `is_final`, no better kernel is being compiled.
    """

    plan: Plan
    runner: Runner
    kinds: Mapping[str, Kind]
    outputs: tuple[Allocated, ...]
    accumulates: bool
    is_final: bool = True

    @staticmethod
    def of(plan: Plan, *, is_final: bool = True) -> Prepared:
        """Built. Raises `UnsupportedError` where what builds it is missing."""
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
        """A function that only launches. Nothing is written yet."""
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
        """The runner's step, which adds to what the outputs hold."""
        graph, problem = self.plan.graph, self.plan.problem

        def bound() -> Step:
            return self.runner(a, b, {**operands, **old_contents(graph, problem, outputs)}, outputs)

        if self._copies_old:
            return lambda: bound()()  # each launch copies what it is to be added onto
        return bound()

    @cached_property
    def _copies_old(self) -> bool:
        graph, problem = self.plan.graph, self.plan.problem
        onto = dict(problem.accumulated)
        return any(is_written_again(output, graph, problem) for output in graph.outputs if output.name in onto)

    def launch(self, call: Call) -> dict[str, torch.Tensor]:
        """Run; the outputs by name."""
        return self.run(call.request.a, call.request.b, call.tensors, call.numbers)

    def run(
        self, a: torch.Tensor, b: torch.Tensor, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any] = _NONE
    ) -> dict[str, torch.Tensor]:
        """Run for values that are laid out as those of the call it was prepared for; the outputs by name.

        A profile shows it by the name of the kernel, and so does NVTX under `torch.autograd.profiler.emit_nvtx`.
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

    def repeated(self, names: tuple[str, ...], *, turned: bool = False) -> Repeat:
        """What runs again for A, B and operands of these names: the outputs in order, none of which is handed over.

        Where it is `turned`, the transpose of B is handed over.
        """
        quick = None
        if not (self.kinds or self.accumulates) and hasattr(self.runner, "quick"):
            quick = self.runner.quick(names, self.outputs, turned=turned)

        def run(tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any] = _NONE) -> list[torch.Tensor]:
            if quick is None or profiler._is_profiler_enabled or _len_torch_dispatch_stack():
                a, b, *operands = tensors
                b = b.t() if turned else b
                return [*self.run(a, b, dict(zip(names, operands, strict=True)), numbers).values()]
            try:
                return quick(tensors)  # type: ignore[no-any-return]  # tensors
            except OURS:
                raise
            except Exception as error:
                raise explained(error, self.plan) from error

        return run


def outputs_of(graph: Graph, problem: Problem) -> tuple[Allocated, ...]:
    """What each output is, in the order of the return statement."""
    dtypes, device, extents = dict(problem.dtypes), torch.device(problem.a.device), problem.extents
    shapes = [(output.name, shape_of(output.dims or (), extents)) for output in graph.outputs]
    return tuple([Allocated(name, shape, dense(shape), dtypes[name], device) for name, shape in shapes])


def destinations(outputs: Iterable[Allocated], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs by name: those given, and new ones for the others."""
    found = {}
    for name, shape, strides, dtype, device in outputs:
        tensor = given.get(name)
        if tensor is None:
            tensor = empty(shape, strides, dtype, device)
            if type(tensor) is not torch.Tensor:  # in a mode of torch whose tensors only describe
                raise fail("no_data", None, name=name)
        found[name] = tensor
    return found


def require_data(call: Call) -> None:
    """Raise `ArgumentError` for a tensor that only describes one."""
    if None not in call.addresses:
        return
    position = call.addresses.index(None)
    raise fail("no_data", None, name=(*call.request.names, *call.tensors)[position])


def require_unrecorded(call: Call) -> None:
    """Raise `ArgumentError` where an input requires grad and grad mode is on: nothing would record the launch."""
    if torch.is_grad_enabled():
        tensors = (call.request.a, call.request.b, *call.tensors.values())
        for name, tensor in zip((*call.request.names, *call.tensors), tensors, strict=True):
            if tensor.requires_grad:
                raise fail("requires_grad", None, name=name)


# --- calls seen before ------------------------------------------------------------------------------------------------


class Ready(Protocol):
    """A prepared call: it can launch every call that has the same signature."""

    @property
    def outputs(self) -> tuple[Allocated, ...]:
        """All outputs, including those for which a call passes a destination."""
        ...

    def launch(self, call: Call) -> dict[str, torch.Tensor]:
        """Run; the outputs by name."""
        ...


_Entry = tuple[Ready, tuple[int, ...], tuple[int, ...]]
_PREPARED: LRU[Hashable, Any] = LRU(1024)
"""By signature: a prepared call, where the outputs given stand among its tensors, and the bytes each tensor reaches.

Where an output given and another tensor lie within each other's reach, their distances are part of the key.
By how a call was written, see `pytorch.again`: what its tensors looked like, and what launches it. By the signature
without the number of rows, see `rows`: what chooses a kernel by it, and the calls prepared for some number.
"""


_MOST_ALIKE = 4
"""Kinds of tensors of one shape that a call may come with: frozen and trained layers, other strides."""


def find_all(key: Hashable) -> tuple[Any, ...]:
    """What `remember_beside` kept for `key`, the newest first."""
    try:
        return _PREPARED.get(key) or ()
    except TypeError:  # an option of a type that cannot be right
        return ()


def remember_beside(key: Hashable, known: Any) -> None:
    """Keep what serves some calls of this key, beside what serves others."""
    others = find_all(key)
    _PREPARED.drop(key, others)
    _PREPARED.put(key, (known, *others))


def is_full(key: Hashable) -> bool:
    """Whether nothing further is kept for `key`: ever more kinds of tensors would make each call pay for keeping."""
    return len(find_all(key)) == _MOST_ALIKE


def find(call: Call) -> Ready | None:
    """The prepared call of an earlier, equal call, which was checked and planned; None if there is none."""
    try:
        known: _Entry | None = _PREPARED.get(call.signature)
    except TypeError:  # an option of a type that cannot be right
        return None
    if known is not None and known[1] and (near := _distances(known[1], known[2], call.addresses)):
        known = _PREPARED.get((call.signature, near))
    return None if known is None else known[0]


def final(call: Call) -> Prepared | None:
    """The prepared call that serves every call like this one from now on, if no better kernel is being compiled."""
    known = find(call)
    return known if isinstance(known, Prepared) and known.is_final else None


def remember(call: Call, prepared: Ready, until: Future[Any] | None = None) -> None:
    """Keep what serves a call that was checked and planned, for good or `until` something is done."""
    names = {output.name for output in prepared.outputs}
    written = tuple(index for index, name in enumerate(call.tensors, start=2) if name in names)
    sizes = tuple(map(reach, call.infos)) if written else ()
    entry, keys = (prepared, written, sizes), [call.signature]
    if near := _distances(written, sizes, call.addresses):
        keys.append((call.signature, near))
    try:
        for key in keys:
            _PREPARED.put(key, entry)
    except TypeError:  # an option that is no key, as a list of names
        return
    if until is not None:
        for key in keys:
            until.add_done_callback(partial(_forget, key, entry))


def _forget(key: Hashable, entry: _Entry, _: Future[Any]) -> None:
    _PREPARED.drop(key, entry)


def _counted(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose changes autograd counts: one that was saved, and written since, is then an error in the backward."""
    return [output for output in outputs if not output.is_inference()]


def _distances(written: tuple[int, ...], sizes: tuple[int, ...], addresses: list[int | None]) -> tuple[int, ...]:
    """How far each output is from each tensor within reach that starts elsewhere; mostly there is none."""
    found: list[int] = []
    for i in written:
        for j, address in enumerate(addresses):
            distance = (address or 0) - (addresses[i] or 0)
            if distance and -sizes[j] < distance < sizes[i]:
                found += i, j, distance
    return tuple(found)
