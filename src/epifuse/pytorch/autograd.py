"""Autograd for fused products: one `autograd.Function` for every way to write an epilogue.

    forward     the ordinary fused launch
    backward    dAccum and the gradient of every operand, see `derivative`; dA = dAccum @ B^T; dB = A^T @ dAccum

Most derivatives read accum. Either the backward computes accum again, in one fused launch that also gives all of these
gradients; or the forward stores it, and one backward launch reads it without a product. PyTorch runs a derivative that
no kernel can run. Accum is stored in A's dtype, or in the accumulator's dtype if A has 8 bits. It is stored in float32
if the derivative has a step along a value such as accum + bias: rounding might move the value across zero, where relu
has another gradient.

A `Recorded` has what the calls of one signature need, and is found by the signature, as a prepared launch is. Its
launches, forward and backward, are prepared calls, too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from epifuse.base.lazy import cached_property
from epifuse.frontend import Parsed
from epifuse.frontend.fx.reading import GRAPH_FILE
from epifuse.frontend.names import NOTHING
from epifuse.frontend.remembered import remembered
from epifuse.ir import Graph, Node, Output
from epifuse.plan.settle import Settled, settle
from epifuse.pytorch.backward import Backward, Gradients, Recording, Saved
from epifuse.pytorch.evaluate import ACCUM
from epifuse.pytorch.storing import FLOATS, is_compiled, pays_to_store, stored_dtype
from epifuse.request.options import USUAL, Options
from epifuse.request.scaled import are_scaled
from epifuse.request.signature import Call, Request, describe, with_infos
from epifuse.runtime.launch import OutputInfo, Repeat, final, remember, require_data
from epifuse.runtime.numbers import scalars
from epifuse.runtime.run import execute

Tensors = dict[str, torch.Tensor]
_NONE: Mapping[str, Any] = {}
_ARRIVES = partial(is_not, None)


def differentiated(call: Call) -> Tensors:
    """Run a call that was not seen before, recorded by autograd, and return its outputs by name.

    Raises `EpifuseError` for a call that has no gradient, and the errors of `planned`.
    """
    _check(call)
    require_data(call)
    call = with_infos(call)
    recorded = Recorded.of(call)
    outputs = recorded.launch(call)
    remember(call, recorded)
    return outputs


def _check(call: Call) -> None:
    """Raise if autograd cannot record the call."""
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
    """Raise if autograd could not save an input. Asked only after a failure, since asking costs time at each launch."""
    request = call.request
    named = {**dict(zip(request.names, (request.a, request.b), strict=True)), **call.tensors}
    for name, tensor in named.items():
        if tensor.is_inference():
            raise fail("grad_inference", None, name=name)


# --- PyTorch's part ---------------------------------------------------------------------------------------------------


class _Epilogue(torch.autograd.Function):
    """A fused product. Grad mode is off in forward and backward, except in a backward with `create_graph=True`."""

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
    @outside_graph  # compiled autograd would trace it
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        recorded, saved = ctx.recorded, ctx.saved_tensors
        if not (torch.is_grad_enabled() or _is_any_autocast_enabled()):
            found = recorded.gradients(saved, ctx.numbers, gradients)
            return None, None, *_copy_shared(found, gradients, ctx.of_leaves)
        with torch.no_grad(), torch.autocast(recorded.device, enabled=False):  # autocast acted before the forward
            found = _copy_shared(recorded.gradients(saved, ctx.numbers, gradients), gradients, ctx.of_leaves)
        if torch.is_grad_enabled():
            once: Any = _Once.apply
            found = once(len(found), *found, *saved, *gradients)
        return None, None, *found


def _copy_shared(found: Gradients, arriving: Saved, of_leaves: Sequence[bool]) -> Gradients:
    """Return the gradients `found`. One that goes to a view of a leaf is copied if it is also another one or arrives.

    For example, all operands of a sum get the very tensor that arrives. A leaf takes over a gradient that nobody else
    holds, and adds to it in place. Behind a view, such as one that folds leading dims, each gradient is a tensor object
    of its own, and autograd does not see that two share memory. An input that is no leaf hands its gradient on, which
    takes no copy. `of_leaves` marks the inputs that are views of leaves.
    """
    if True not in of_leaves:
        return found
    held = [*map(id, (*arriving, *found))]
    return [
        value.clone() if of_leaf and value is not None and held.count(id(value)) > 1 else value
        for value, of_leaf in zip(found, of_leaves, strict=True)
    ]


_apply: Any = super(torch.autograd.Function, _Epilogue).apply
"""What `Function.apply` calls, after it looked for transforms for 2 us. Calls inside a transform do not get here."""


class _Once(torch.autograd.Function):
    """Gives gradients, the first `count` tensors, a node in autograd's graph, which raises if they are differentiated.
    The other tensors are those that the gradients were computed from."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> Any:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise fail("grad_twice", None)


# --- the calls of one signature ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorded:
    """What the calls of one signature need when autograd records them.

    `without_gradient` names the outputs that have no gradient. `refused` says why no kernel computes the derivative.
    `stores` is whether the forward stores accum, and `stored` in which dtype. A backward launch that is refused sets
    `refused` and may set `stores`. `reads_accum` is whether the derivative reads accum. The inputs that `keeps` marks
    are saved; if accum is stored, it is saved with those that `keeps_beside_accum` marks.
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
    """The forward's prepared launch; None until it ran once with no better kernel being compiled."""
    outputs: tuple[OutputInfo, ...] = ()
    """Empty, because a recorded call writes to none of its arguments."""

    @staticmethod
    def of(call: Call) -> Recorded:
        """Make what calls like this one need. Raises the errors of `settle`."""
        request, settled, tensors = call.request, settle(call), tuple(call.tensors)
        problem = settled.problem
        product = (ACCUM,) if call.recorded[0] < 2 and problem.accumulator in FLOATS else ()
        wanted = (*product, *(tensors[position - 2] for position in call.recorded if position > 1))
        parsed = request.parsed.bound(NOTHING, {})  # what is kept must not keep objects of the user alive
        needs = 0 in call.recorded, 1 in call.recorded
        leaves = {*wanted} if product else {*wanted} - {ACCUM}
        whole = {name for name, dtype in problem.dtypes if not dtype.is_floating_point}
        fixed = tuple(name for name in parsed.output_names if name in whole | _constant_outputs(leaves, settled))
        made = Recorded(Recording(settled, parsed, request.options, tensors, wanted, needs), fixed)
        made._choose()
        return made

    @cached_property
    def for_transposed_b(self) -> Recorded:
        """The same for calls that hand over the weight in place of B, its transpose. Autograd records no transpose."""
        return replace(self, recording=self.recording._replace(b_is_transposed=True), backwards={}, repeat=None)

    def _choose(self) -> None:
        """Decide whether the forward stores accum, and which inputs are saved."""
        all_arrive = tuple(name not in self.without_gradient for name in self.names)
        derivative, save = self._backward(all_arrive).derivative, self.recording.options.save
        self.reads_accum = again = derivative.needs_product
        if derivative.refused is not None:
            self.refused = derivative.refused
            self._warn_unfused(self.refused)
        problem = self.recording.settled.problem
        self.stored = stored_dtype(problem, derivative)
        pays = save == "auto" and (self.refused is not None or pays_to_store(problem, derivative))
        self.stores = again and (pays or save == "preactivation")
        read = {*derivative.inputs, *derivative.handed}
        operands = tuple(name in read for name in self.recording.tensors)
        needs_a, needs_b = self.recording.needs
        self.keeps_beside_accum = (needs_b, needs_a, *operands)
        self.keeps = (needs_b or again, needs_a or again, *operands)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self.recording.parsed.output_names

    @cached_property
    def computes(self) -> bool:
        """Whether the host computes numbers for the epilogue, possibly from extents alone."""
        return bool(self.recording.settled.structure.graph.hosts)

    @property
    def device(self) -> str:
        """The type of the device that calls run on, such as "cuda"."""
        return self.recording.settled.problem.a.device.partition(":")[0]

    def _refuse(self, reason: str) -> None:
        """Let PyTorch run the derivative from now on, and warn of it."""
        self.refused, self.repeat = reason, None
        self.stores = self.stores or (self.reads_accum and self.recording.options.save == "auto")
        self._warn_unfused(reason)

    def _warn_unfused(self, reason: str) -> None:
        """Warn that PyTorch runs the derivative, once for each epilogue and reason; numbers in a reason do not count.
        Python's own record of warnings does not serve: it is lost when filters change, as in `torch.compile`."""
        parsed = self.recording.parsed
        how = "compiled by Inductor" if is_compiled(self.recording.settled.problem) else "one operation at a time"
        text = f"PyTorch runs the derivative of {parsed.name} unfused, {how}: {reason}"
        told = re.sub(r"\d+", "", text)
        remembered("told", parsed.key, lambda: warnings.warn(text, stacklevel=4) or True, told)

    def launch(self, call: Call) -> Tensors:
        """Run `call` recorded by autograd, and return the outputs by name."""
        request = call.request
        weight = request.weight
        b, recorded = (request.b, self) if weight is None else (weight, self.for_transposed_b)
        try:
            outputs = _apply(recorded, call, request.a, b, *call.tensors.values())
        except RuntimeError:
            _refuse_inference(call)
            raise
        return dict(zip(self.names, outputs, strict=True))

    def run_like_earlier(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run recorded by autograd, and return the outputs in order. `tensors` look like those of an earlier call."""
        return _apply(self, None, *tensors)  # type: ignore[no-any-return]  # a tuple of tensors

    def forward(self, call: Call | None, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs in order, then accum if it is stored. `call` is None for one that was not described."""
        if self.repeat is not None:
            return self.repeat(tensors, _NONE if call is None else call.numbers)
        if call is None:
            _, parsed, options, names, _, _, b_is_transposed = self.recording
            a, b, *operands = tensors
            given = dict(zip(names, operands, strict=True))
            call = describe(Request(a, b.t() if b_is_transposed else b, parsed, given, options))
        return self._prepare(call)

    def _prepare(self, call: Call) -> list[torch.Tensor]:
        """Run the forward as a call that autograd does not record, and set `repeat` once its launch is final."""
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
            self.repeat = prepared.repeated(self.recording.tensors, b_is_transposed=self.recording.b_is_transposed)
        return [*outputs.values()]

    def kept(self, tensors: Saved, accum: torch.Tensor | None) -> Saved:
        """The inputs, with None for those that the backward does not read. `accum` is None if it is not stored."""
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
        """Every number that the epilogue reads, by name, with its present value."""
        given = _NONE if call is None else call.numbers
        if not given and not self.computes:
            return _NONE
        problem, structure = self.recording.settled
        return scalars(structure.graph, problem, given)

    def gradients(self, saved: Saved, numbers: Mapping[str, Any], arriving: Saved) -> Gradients:
        """Return the gradients of A, B and each operand; None for one that is not asked for or is zero."""
        arrive = tuple(map(_ARRIVES, arriving))
        if True not in arrive:
            return [None] * (2 + len(self.recording.tensors))
        backward = self.backwards.get(arrive) or self._backward(arrive)
        if self.refused is None and (launch := backward.launch(saved[0])) is not None:
            try:
                return backward.gradients(saved, numbers, arriving, launch)
            except ArgumentTypeError as error:
                if error.key != "transformed":  # inside vmap, as for a Jacobian: PyTorch runs it, this time only
                    raise
            except (UnsupportedError, EpilogueTypeError, ArgumentError) as error:
                self._refuse(_without_hint(error))
        return backward.gradients(saved, numbers, arriving, None)

    def _backward(self, arrive: tuple[bool, ...]) -> Backward:
        """The backward for gradients that arrive for the outputs which `arrive` marks."""
        arriving = tuple(name for name, arrives in zip(self.names, arrive, strict=True) if arrives)
        return self.backwards.setdefault(arrive, Backward.of(self.recording, arriving))


def _constant_outputs(wanted: Collection[str], settled: Settled) -> set[str]:
    """The outputs that have no derivative with respect to any of `wanted` (accum and operands by name). They do not
    depend on these, or only through integers and masks."""
    graph, varies = settled.structure.graph, dict[Node, bool]()
    for node in graph.nodes:
        if node.op in ("accum", "load"):
            own = (ACCUM if node.op == "accum" else node.attr.name) in wanted
        else:
            own = any(varies[arg] for arg in node.args)
        varies[node] = own and graph.types[node].kind == "float"
    return {output.name for output in graph.outputs if not varies[output.node]}


def _with_accum(graph: Graph) -> Graph:
    # The graph has no accum if no output depends on it. The derivative may still read the extents of accum.
    accum = next((node for node in graph.nodes if node.op == "accum"), Node("accum"))
    return replace(graph, outputs=(*graph.outputs, Output(ACCUM, accum)))


def _without_hint(error: EpifuseError) -> str:
    """The error's text without its hint, and without a place in a graph that PyTorch made: the user did not write that
    graph, and its shapes are not those of the user's lines."""
    text = str(error).partition("\n  hint: ")[0]
    told = text.replace(f"\n{error.loc}", "") if error.loc is not None and error.loc.file == GRAPH_FILE else text
    return f"it is no epilogue of one product, as {told}" if isinstance(error, EpilogueTypeError) else told
