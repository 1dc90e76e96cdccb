"""Autograd for fused products: one function for every way to write an epilogue.

    forward     the ordinary fused launch
    backward    dAccum and the gradient of every operand, see `derivative`; dA = dAccum @ B^T; dB = A^T @ dAccum

The derivative needs accum again, mostly. It is computed again, in one fused launch that gives all of these gradients;
or the forward stores it, and one launch reads it, with no product. What no kernel carries PyTorch runs. Accum is stored
in A's dtype, or the accumulator's where A has 8 bits, but in float32 where the derivative has a step along accum +
bias: on the other side of zero relu has another gradient.

What the calls of one signature need is found by it, as a prepared launch is; their launches, forward and backward, are
prepared calls too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import is_not
from typing import Any

import torch
from torch._C import _is_any_autocast_enabled

from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import (
    ArgumentError,
    ArgumentTypeError,
    EpifuseError,
    EpilogueTypeError,
    UnsupportedError,
    fail,
)
from epifuse.frontend import Parsed
from epifuse.frontend.fx.reading import GRAPH_FILE
from epifuse.frontend.names import NOTHING
from epifuse.frontend.remembered import remembered
from epifuse.ir import Graph, Node, Output
from epifuse.plan.settle import Settled, settle
from epifuse.pytorch.backward import FLOATS, Backward, Gradients, Recording, Saved, is_compiled, pays_to_store
from epifuse.pytorch.evaluate import ACCUM
from epifuse.request.options import USUAL, Options
from epifuse.request.scaled import are_scaled
from epifuse.request.signature import Call, Request, describe, looked_at
from epifuse.runtime.launch import Allocated, Repeat, final, remember, require_data
from epifuse.runtime.numbers import scalars
from epifuse.runtime.run import execute

Tensors = dict[str, torch.Tensor]
_NONE: Mapping[str, Any] = {}
_ARRIVES = partial(is_not, None)


def differentiated(call: Call) -> Tensors:
    """The outputs by name, in autograd's graph, of a call that was not seen before.

    Raises `EpifuseError` for what has no gradient, and as `planned` does.
    """
    _check(call)
    require_data(call)
    call = looked_at(call)
    recorded = Recorded.of(call)
    outputs = recorded.launch(call)
    remember(call, recorded)
    return outputs


def _check(call: Call) -> None:
    """Raise for what autograd does not record."""
    request = call.request
    outputs, options = request.parsed.output_names, request.options
    options.check()
    if options.accumulated:
        raise fail("grad_accumulate", None, name=options.accumulated[0])
    written = [name for name in outputs if name in call.tensors]
    if written:
        raise fail("grad_out", None, name=written[0])
    if request.parsed.graph.effects:
        raise fail("grad_print", request.parsed.graph.loc(request.parsed.graph.effects[0]))
    if are_scaled(request.given):
        raise fail("scaled_where", None, what="an input that requires grad", hint=_NO_GRADIENT)
    inputs = (request.a, request.b, *call.tensors.values())
    names = (*request.names, *call.tensors)
    for position in call.recorded:
        if (dtype := inputs[position].dtype) not in FLOATS:
            raise fail("grad_dtype", None, name=names[position], dtype=dtype)


_NO_GRADIENT = "use torch.no_grad(), or .detach() what requires it"


def _refuse_inference(call: Call) -> None:
    """Raise where autograd could not keep an input: asked once it failed, for each launch would pay for asking."""
    request = call.request
    named = {**dict(zip(request.names, (request.a, request.b), strict=True)), **call.tensors}
    for name, tensor in named.items():
        if tensor.is_inference():
            raise fail("grad_inference", None, name=name)


# --- PyTorch's part ---------------------------------------------------------------------------------------------------


class _Epilogue(torch.autograd.Function):
    """A fused product. Grad mode is off in both directions, but where a graph of the backward is asked for."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, call: Call | None, *tensors: torch.Tensor) -> Any:
        outputs = recorded.forward(call, tensors)
        accum = outputs.pop() if len(outputs) > len(recorded.names) else None
        ctx.recorded, ctx.numbers = recorded, recorded.numbers(call)
        ctx.of_leaves = [(base := tensor._base) is not None and base.is_leaf for tensor in tensors]
        ctx.save_for_backward(accum, *recorded.kept(tensors, accum))
        if fixed := recorded.without_gradient:
            named = zip(recorded.names, outputs, strict=True)
            ctx.mark_non_differentiable(*[output for name, output in named if name in fixed])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @outside_graph  # compiled autograd traces it
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        recorded, saved = ctx.recorded, ctx.saved_tensors
        if not (torch.is_grad_enabled() or _is_any_autocast_enabled()):
            found = recorded.gradients(saved, ctx.numbers, gradients)
            return None, None, *_apart(found, gradients, ctx.of_leaves)
        with torch.no_grad(), torch.autocast(recorded.device, enabled=False):  # the forward cast what is to be cast
            found = _apart(recorded.gradients(saved, ctx.numbers, gradients), gradients, ctx.of_leaves)
        if torch.is_grad_enabled():
            once: Any = _Once.apply
            found = once(len(found), *found, *saved, *gradients)
        return None, None, *found


def _apart(found: Gradients, arriving: Saved, of_leaves: Sequence[bool]) -> Gradients:
    """The gradients `found`, where that of a view of a leaf is copied if it is also another one, or one that arrives.
    The operands of a sum all get the tensor that arrives.

    A leaf takes over a gradient that nobody else holds, and adds to it in place. Behind a view, as leading dims that
    are folded, each gradient is a tensor of its own, and autograd does not see that they share memory. What is no leaf
    hands its gradient on, which takes no copy.
    """
    if True not in of_leaves:
        return found
    held = [*map(id, (*arriving, *found))]
    return [
        value.clone() if of_leaf and value is not None and held.count(id(value)) > 1 else value
        for value, of_leaf in zip(found, of_leaves, strict=True)
    ]


_apply: Any = super(torch.autograd.Function, _Epilogue).apply
"""What `Function.apply` calls after two microseconds of looking for transforms, inside which no call comes here."""


class _Once(torch.autograd.Function):
    """Gradients, which have none themselves: the first `count` of the arguments, from the others."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> Any:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise fail("grad_twice", None)


# --- the calls of one signature ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorded:
    """What the calls of one signature need that autograd records.

    `refused` says why no kernel computes the derivative beside the product, and `stores` is whether the forward stores
    accum, as `stored`; a launch that is refused changes these two. `reads_accum` is whether the derivative does. Saved
    are the inputs that `keeps` marks, or accum and those that `keeps_beside_accum` marks.
    """

    recording: Recording
    without_gradient: tuple[str, ...]
    refused: str | None = None
    reads_accum: bool = False
    stores: bool = False
    stored: torch.dtype = torch.float32
    keeps: tuple[bool, ...] = ()
    keeps_beside_accum: tuple[bool, ...] = ()
    backwards: dict[tuple[bool, ...], Backward] = field(default_factory=dict)
    repeat: Repeat | None = None
    """What the forward launches, once no better kernel is being compiled."""
    outputs: tuple[Allocated, ...] = ()
    """None of what a call hands over is written."""

    @staticmethod
    def of(call: Call) -> Recorded:
        """Raises as settling the call does."""
        request, settled, tensors = call.request, settle(call), tuple(call.tensors)
        problem = settled.problem
        product = (ACCUM,) if call.recorded[0] < 2 and problem.accumulator in FLOATS else ()
        wanted = (*product, *(tensors[position - 2] for position in call.recorded if position > 1))
        parsed = request.parsed.bound(NOTHING, {})  # what is remembered keeps no object of a person alive
        needs = 0 in call.recorded, 1 in call.recorded
        leaves = {*wanted} if product else {*wanted} - {ACCUM}
        whole = {name for name, dtype in problem.dtypes if not dtype.is_floating_point}
        fixed = tuple(name for name in parsed.output_names if name in whole | _constant_outputs(leaves, settled))
        made = Recorded(Recording(settled, parsed, request.options, tensors, wanted, needs), fixed)
        made._choose()
        return made

    @cached_property
    def turned(self) -> Recorded:
        """The same for calls that hand over the weight in place of B, its transpose: autograd records no transpose."""
        return replace(self, recording=self.recording._replace(turned=True), backwards={}, repeat=None)

    def _choose(self) -> None:
        """What to save."""
        all_arrive = tuple(name not in self.without_gradient for name in self.names)
        derivative, save = self._backward(all_arrive).derivative, self.recording.options.save
        self.reads_accum = again = derivative.needs_product
        if derivative.refused is not None:
            self.refused = derivative.refused
            self._tell(self.refused)
        problem = self.recording.settled.problem
        usual = problem.a.dtype if problem.a.dtype in FLOATS else problem.accumulator  # in 8 bits sums saturate
        self.stored = problem.float_dtype if derivative.decides else usual
        pays = save == "auto" and (self.refused is not None or pays_to_store(problem, derivative, self.stored.itemsize))
        self.stores = again and (pays or save == "preactivation")
        read = {*derivative.inputs, *derivative.handed}
        operands = tuple(name in read for name in self.recording.tensors)
        needs_a, needs_b = self.recording.needs
        self.keeps_beside_accum = (needs_b, needs_a, *operands)
        self.keeps = (needs_b or again, needs_a or again, *operands)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the outputs."""
        return self.recording.parsed.output_names

    @cached_property
    def computes(self) -> bool:
        """Whether the host computes numbers, which may be those of extents alone."""
        return bool(self.recording.settled.structure.graph.hosts)

    @property
    def device(self) -> str:
        """What kind of device it runs on."""
        return self.recording.settled.problem.a.device.partition(":")[0]

    def _refuse(self, reason: str) -> None:
        """From now on PyTorch runs the derivative; said once."""
        self.refused, self.repeat = reason, None
        self.stores = self.stores or (self.reads_accum and self.recording.options.save == "auto")
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Warn, once of an epilogue and a reason, whatever the numbers in it are: Python's own record of what was told
        is lost where filters change, as they do in `torch.compile`."""
        parsed = self.recording.parsed
        how = "compiled by Inductor" if is_compiled(self.recording.settled.problem) else "one operation at a time"
        text = f"PyTorch runs the derivative of {parsed.name} unfused, {how}: {reason}"
        told = re.sub(r"\d+", "", text)
        remembered("told", parsed.key, lambda: warnings.warn(text, stacklevel=4) or True, told)

    def launch(self, call: Call) -> Tensors:
        """Run, recorded by autograd; the outputs by name."""
        request = call.request
        weight = request.weight
        b, recorded = (request.b, self) if weight is None else (weight, self.turned)
        try:
            outputs = _apply(recorded, call, request.a, b, *call.tensors.values())
        except RuntimeError:
            _refuse_inference(call)
            raise
        return dict(zip(self.names, outputs, strict=True))

    def again(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run, recorded by autograd, for tensors that look as those of a call did; the outputs in order."""
        return _apply(self, None, *tensors)  # type: ignore[no-any-return]  # a tuple of tensors

    def forward(self, call: Call | None, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in order, then accum where it is stored."""
        if self.repeat is not None:
            return self.repeat(tensors, _NONE if call is None else call.numbers)
        if call is None:
            _, parsed, options, names, _, _, turned = self.recording
            a, b, *operands = tensors
            given = dict(zip(names, operands, strict=True))
            call = describe(Request(a, b.t() if turned else b, parsed, given, options))
        return self._prepare(call)

    def _prepare(self, call: Call) -> list[torch.Tensor]:
        """Run as a call that nothing records."""
        request, signature, options = call.request, call.signature, call.request.options
        if call.recorded:
            signature = signature[:-1]
        if self.stores:
            parsed, options = self._storing
            request = request._replace(parsed=parsed, options=options)
            signature = (parsed.key, () if options is USUAL else options.key, *signature[2:])
        call = call._replace(request=request, signature=signature, recorded=())
        outputs = execute(call)
        if (prepared := final(call)) is not None:
            self.repeat = prepared.repeated(self.recording.tensors, turned=self.recording.turned)
        return [*outputs.values()]

    def kept(self, tensors: Saved, accum: torch.Tensor | None) -> Saved:
        """The inputs, and None in place of those that the backward does not read."""
        keeps = self.keeps if accum is None else self.keeps_beside_accum
        if False not in keeps:
            return tensors
        return [tensor if kept else None for tensor, kept in zip(tensors, keeps, strict=True)]

    @cached_property
    def _storing(self) -> tuple[Parsed, Options]:
        """The epilogue that also stores accum, and its options."""
        parsed, options, dtype = self.recording.parsed, self.recording.options, self.stored
        graph = remembered("storing", parsed.key, lambda: _with_accum(parsed.graph))
        chosen = options.out_dtypes
        if isinstance(chosen, torch.dtype):
            options = options._replace(out_dtypes=dict.fromkeys(parsed.output_names, chosen))
        dtypes, key = {**parsed.dtypes, ACCUM: dtype}, f"storing {dtype} {parsed.key}"
        names = (*parsed.output_names, ACCUM)
        return parsed.changed(graph=graph, dtypes=dtypes, key=key, output_names=names), options

    def numbers(self, call: Call | None) -> Mapping[str, Any]:
        """Every number the epilogue reads, as it is now."""
        given = _NONE if call is None else call.numbers
        if not given and not self.computes:
            return _NONE
        problem, structure = self.recording.settled
        return scalars(structure.graph, problem, given)

    def gradients(self, saved: Saved, numbers: Mapping[str, Any], arriving: Saved) -> Gradients:
        """Of A, B and each operand, None where none is asked for."""
        arrive = tuple(map(_ARRIVES, arriving))
        if True not in arrive:
            return [None] * (2 + len(self.recording.tensors))
        backward = self.backwards.get(arrive) or self._backward(arrive)
        if self.refused is None and (launch := backward.launch(saved[0])) is not None:
            try:
                return backward.gradients(saved, numbers, arriving, launch)
            except ArgumentTypeError as error:
                if error.key != "transformed":  # as for a Jacobian: this once PyTorch batches the derivative
                    raise
            except (UnsupportedError, EpilogueTypeError, ArgumentError) as error:
                self._refuse(_without_hint(error))
        return backward.gradients(saved, numbers, arriving, None)

    def _backward(self, arrive: tuple[bool, ...]) -> Backward:
        """Where the gradients of the outputs that `arrive` marks arrive."""
        arriving = tuple(name for name, arrives in zip(self.names, arrive, strict=True) if arrives)
        return self.backwards.setdefault(arrive, Backward.of(self.recording, arriving))


def _constant_outputs(wanted: Collection[str], settled: Settled) -> set[str]:
    """Outputs that have no derivative by any of `wanted`, which are accum or operands: they do not depend on them, or
    only through integers and masks."""
    graph, varies = settled.structure.graph, dict[Node, bool]()
    for node in graph.nodes:
        if node.op in ("accum", "load"):
            own = (ACCUM if node.op == "accum" else node.attr.name) in wanted
        else:
            own = any(varies[arg] for arg in node.args)
        varies[node] = own and graph.types[node].kind == "float"
    return {output.name for output in graph.outputs if not varies[output.node]}


def _with_accum(graph: Graph) -> Graph:
    # Where no output depends on it, the derivative may still read its extents.
    accum = next((node for node in graph.nodes if node.op == "accum"), Node("accum"))
    return replace(graph, outputs=(*graph.outputs, Output(ACCUM, accum)))


def _without_hint(error: EpifuseError) -> str:
    """What it says but for the hint, and for a place in the graph that PyTorch made: the user wrote no such graph, and
    its shapes are not those of the user's lines."""
    text = str(error).partition("\n  hint: ")[0]
    told = text.replace(f"\n{error.loc}", "") if error.loc is not None and error.loc.file == GRAPH_FILE else text
    return f"it is no epilogue of one product, as {told}" if isinstance(error, EpilogueTypeError) else told
