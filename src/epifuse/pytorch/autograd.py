"""Autograd for fused products: one function for every way to write an epilogue.

    forward     the ordinary fused launch
    backward    dAccum and the gradient of every operand, see `derivative`; dA = dAccum @ B^T; dB = A^T @ dAccum

The derivative needs accum again, mostly. It is computed again, in one fused launch that gives all of these gradients;
or the forward stores it, rounded to A's dtype, and PyTorch runs the derivative on it, one operation at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import ArgumentError, EpilogueTypeError, UnsupportedError, fail
from epifuse.frontend import Parsed
from epifuse.frontend.names import NOTHING
from epifuse.frontend.remembered import remembered
from epifuse.ir import Graph, Output
from epifuse.plan.settle import Settled, settle
from epifuse.pytorch.derivative import Derivative, Input, derive, gradient_of, inputs_of
from epifuse.pytorch.evaluate import ACCUM
from epifuse.request.options import Options
from epifuse.request.problem import Problem, TensorInfo
from epifuse.request.signature import Call, Request, describe, unhinted, with_care
from epifuse.runtime.arguments import plain
from epifuse.runtime.launch import require_data, scalars
from epifuse.runtime.run import execute, run

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What has a gradient."""

Tensors = dict[str, torch.Tensor]


def differentiated(request: Request) -> Tensors:
    """The outputs by name, in autograd's graph. Raises `EpifuseError` for what has no gradient, and as `run` does."""
    request = unhinted(request, {**request.parsed.defaults, **request.given})
    _check(request)
    given = {name: _loaded(value, request) for name, value in request.given.items()}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    request = request._replace(given=given)
    apply: Any = _Epilogue.apply
    outputs = apply(request, tuple(tensors), request.a, request.b, *tensors.values())
    return dict(zip(request.parsed.output_names, outputs, strict=True))


def _check(request: Request) -> None:
    """Raise for what autograd does not record."""
    outputs, options = request.parsed.output_names, request.options
    options.check()
    if options.accumulated:
        raise fail("grad_accumulate", None, name=options.accumulated[0])
    written = [name for name in outputs if request.given.get(name) is not None]
    if written:
        raise fail("grad_out", None, name=written[0])
    if request.parsed.graph.effects:
        raise fail("grad_print", request.parsed.graph.loc(request.parsed.graph.effects[0]))
    named = dict(zip(request.names, (request.a, request.b), strict=True))
    for name, value in {**named, **request.given}.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and value.dtype not in FLOATS:
            raise fail("grad_dtype", None, name=name, dtype=value.dtype)


def _loaded(value: Any, request: Request) -> Any:
    """A number that requires grad as a tensor that the kernel loads, since no gradient flows through the host."""
    if not (isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu):
        return value
    if not value.requires_grad:
        return value.item()
    wide = torch.float64 if request.a.dtype == torch.float64 else torch.float32
    return value.reshape(1).to(request.a.device, wide)


class _Epilogue(torch.autograd.Function):
    """A fused product. Grad mode is off in both directions, but where a graph of the backward is asked for."""

    @staticmethod
    def forward(ctx: Any, request: Request, names: tuple[str, ...], *tensors: torch.Tensor) -> Any:
        call, needed = describe(request), ctx.needs_input_grad[2:]
        require_data(call)
        backward = _backward_of(call, names, needed)
        stores = backward.stores
        outputs = run(_storing(request)) if stores else execute(call)
        accum = outputs.pop(ACCUM) if stores else None
        ctx.backward_of, ctx.names = backward, names
        problem, structure = backward.settled
        ctx.numbers = scalars(structure.graph, problem, call.numbers) if call.numbers else {}
        a, b, *operands = tensors
        again = backward.derivative.needs_product and not stores
        kept = [value if name in backward.reads else None for name, value in zip(names, operands, strict=True)]
        ctx.save_for_backward(accum, a if again or needed[1] else None, b if again or needed[0] else None, *kept)
        ctx.mark_non_differentiable(*(value for value in outputs.values() if value.dtype not in FLOATS))
        ctx.set_materialize_grads(False)
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad(), _as_they_are(ctx.backward_of.settled.problem):
            found = _gradients(ctx, saved, gradients)
        if torch.is_grad_enabled():
            once: Any = _Once.apply
            found = once(len(found), *found, *saved, *gradients)
        return None, None, *found


def _as_they_are(problem: Problem) -> AbstractContextManager[Any]:
    """Without autocast: the forward has cast what is to be cast."""
    if not torch._C._is_any_autocast_enabled():  # the switch takes ten microseconds
        return nullcontext()
    return torch.autocast(problem.a.device.partition(":")[0], enabled=False)


class _Once(torch.autograd.Function):
    """Gradients, which have none themselves: the first `count` of the arguments, from the others."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> Any:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise fail("grad_twice", None)


# --- what a call needs for its backward -------------------------------------------------------------------------------


@dataclass(eq=False)
class Backward:
    """What the backward of the calls of one signature needs.

    `wanted` are the operands with gradients, and ACCUM for A and B; `outputs` those with gradients; `reads` the names
    of what the derivative reads. `dtypes` are those of the gradients. `refused` says why no kernel computes the
    derivative beside the product. `stores` is whether the forward stores accum; a refusal may change both.
    """

    settled: Settled
    parsed: Parsed
    options: Options
    wanted: tuple[str, ...]
    outputs: tuple[str, ...]
    derivative: Derivative
    reads: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    refused: str | None
    stores: bool

    def refuse(self, reason: str) -> None:
        """From now on PyTorch runs the derivative; said once."""
        self.refused = reason
        self.stores = self.stores or self.options.save == "auto"
        _tell(self.parsed, reason)


def _backward_of(call: Call, names: tuple[str, ...], needed: tuple[bool, ...]) -> Backward:
    """Found by the call's signature. Raises as settling the call does."""
    try:
        hash(call.signature)
    except TypeError:  # an option of a type that cannot be right
        return _made(call.request, names, needed)
    further = call.signature, needed
    return remembered("backward", call.request.parsed.key, lambda: _made(call.request, names, needed), further)


def _made(request: Request, names: tuple[str, ...], needed: tuple[bool, ...]) -> Backward:
    parsed, options, settled = request.parsed, request.options, settle(with_care(request))
    problem = settled.problem
    product = (ACCUM,) if any(needed[:2]) and problem.accumulator in FLOATS else ()
    wanted = (*product, *(name for name, each in zip(names, needed[2:], strict=True) if each))
    outputs = tuple(name for name, dtype in problem.dtypes if dtype in FLOATS)
    derivative = _derivative(parsed, settled, wanted, outputs)
    reads = frozenset(each.name for each in (*derivative.inputs, *derivative.handed))
    dtypes = {name: info.dtype for name, info in problem.operands if isinstance(info, TensorInfo)}
    dtypes[ACCUM] = problem.a.dtype
    refused, again = derivative.refused, options.save == "recompute" or not derivative.needs_product
    stores = not again and (options.save == "preactivation" or refused is not None or _pays(settled, derivative))
    parsed = parsed.bound(NOTHING, {})  # what is remembered keeps no object of a person alive
    return Backward(settled, parsed, options, wanted, outputs, derivative, reads, dtypes, refused, stores)


def _derivative(parsed: Parsed, settled: Settled, wanted: tuple[str, ...], arriving: tuple[str, ...]) -> Derivative:
    def make() -> Derivative:
        derivative = derive(settled, wanted, arriving)
        if derivative.refused:
            _tell(parsed, derivative.refused)
        return derivative

    problem = settled.problem
    key = wanted, inputs_of(settled, arriving), problem.a.dtype, problem.a.device, problem.constraints
    return remembered("derivative", parsed.key, make, key)


def _tell(parsed: Parsed, reason: str) -> None:
    text = f"PyTorch runs the derivative of {parsed.name} unfused, one operation at a time: {reason}"
    warnings.warn(text, stacklevel=2)


def _pays(settled: Settled, derivative: Derivative) -> bool:
    """Whether storing accum takes less time than computing it again.

    Again: 2 L M N K operations more. Stored: it is written and read, and PyTorch's operations write and read what lies
    between them, which a fused launch does not.
    """
    problem = settled.problem
    extents = problem.extents
    elements = extents["l"] * extents["m"] * extents["n"]
    stored = 2 * elements * problem.a.dtype.itemsize + derivative.bytes_by_operations - derivative.bytes_fused
    narrow = problem.a.dtype.itemsize == 2
    return 2 * elements * extents["k"] > stored * _OPERATIONS_A_BYTE[problem.target.device, narrow]


_OPERATIONS_A_BYTE = {("cuda", True): 165, ("cuda", False): 80, ("cpu", True): 10, ("cpu", False): 10}
"""Operations of a product while memory moves one byte, of 16-bit floats and of others. An H200: 790 TFLOPS and
4.8 TB/s, half of that in tf32. A few cores: 200 GFLOPS and 20 GB/s."""


def _storing(request: Request) -> Request:
    """The request whose epilogue also stores accum, in A's dtype."""
    parsed, options = request.parsed, request.options
    graph = remembered("storing", parsed.key, lambda: _with_accum(parsed.graph))
    dtypes, key = {**parsed.dtypes, ACCUM: request.a.dtype}, f"storing {request.a.dtype} {parsed.key}"
    chosen = options.out_dtypes
    if isinstance(chosen, torch.dtype):
        options = options._replace(out_dtypes=dict.fromkeys(parsed.output_names, chosen))
    names = (*parsed.output_names, ACCUM)
    return request._replace(
        parsed=parsed.changed(graph=graph, dtypes=dtypes, key=key, output_names=names), options=options
    )


def _with_accum(graph: Graph) -> Graph:
    accum = next(node for node in graph.nodes if node.op == "accum")
    return replace(graph, outputs=(*graph.outputs, Output(ACCUM, accum)))


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradients(ctx: Any, saved: tuple[Any, ...], gradients: tuple[torch.Tensor | None, ...]) -> list[Any]:
    """Of A, B and each operand, None where none is asked for."""
    backward: Backward = ctx.backward_of
    problem, names = backward.settled.problem, backward.parsed.output_names
    arriving = {name: value for name, value in zip(names, gradients, strict=True) if value is not None}
    if not arriving:
        return [None] * (2 + len(ctx.names))
    derivative = backward.derivative
    if tuple(arriving) != backward.outputs:
        derivative = _derivative(backward.parsed, backward.settled, backward.wanted, tuple(arriving))
    accum, a, b, *operands = saved
    known = {ACCUM: accum, **dict(zip(ctx.names, operands, strict=True)), **ctx.numbers}
    known |= {gradient_of(name): _dense(value) for name, value in arriving.items()}
    given = {each.name: _given(each, known, problem) for each in (*derivative.inputs, *derivative.handed)}
    made = _computed(_Work(backward, derivative, given, a, b)) if derivative.computed else {}
    found: dict[str, torch.Tensor] = {}
    for name, result in derivative.results.items():
        if result is not None:
            found[name] = (made[result] if result in made else given[result]).to(backward.dtypes[name])
    above = found.get(ACCUM)
    needs_a, needs_b = ctx.needs_input_grad[2:4]
    of_a = _times(above, b.mT, problem.a.shape) if needs_a and above is not None else None
    of_b = _times(a.mT, above, problem.b.shape) if needs_b and above is not None else None
    return [of_a, of_b, *(found.get(name) for name in ctx.names)]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as kernels read it: that of a sum is one number in the shape of many."""
    return gradient if 1 in gradient.stride() and 0 not in gradient.stride() else gradient.contiguous()


def _given(each: Input, known: Mapping[str, Any], problem: Problem) -> Any:
    """A tensor or a number; what is not known by name is a coordinate."""
    if each.name in known:
        return known[each.name]
    return torch.arange(*each.shape, dtype=each.dtype, device=problem.a.device)


class _Work(NamedTuple):
    """A derivative and its arguments, and A and B where accum is computed again."""

    backward: Backward
    derivative: Derivative
    given: Mapping[str, Any]
    a: Any
    b: Any


def _computed(work: _Work) -> Mapping[str, torch.Tensor]:
    """What the derivative computes, by name."""
    backward, derivative, given = work.backward, work.derivative, work.given
    problem = backward.settled.problem
    if derivative.needs_product and given[ACCUM] is None:
        if backward.refused is None and derivative.parsed is not None:
            try:
                return _fused(work, derivative.parsed)
            except (UnsupportedError, EpilogueTypeError, ArgumentError) as error:
                backward.refuse(str(error))
        wide = problem.float_dtype if problem.accumulator in FLOATS else None
        request = Request(work.a, work.b, plain(), {}, _alike(backward.options, wide))
        given = {**given, ACCUM: next(iter(run(request).values()))}
    values = [_as_tensor(given[each.name], each, problem) for each in derivative.inputs]
    return dict(zip(derivative.computed, derivative.module(*values), strict=True))


def _fused(work: _Work, parsed: Parsed) -> Mapping[str, torch.Tensor]:
    """The derivative as the epilogue of the product, which is computed again."""
    results, dtypes = work.derivative.results, work.backward.dtypes
    chosen = {result: dtypes[name] for name, result in results.items() if result in work.derivative.computed}
    given = {name: value for name, value in work.given.items() if name != ACCUM}
    return run(Request(work.a, work.b, parsed, given, _alike(work.backward.options, chosen)))


def _alike(options: Options, dtypes: Any) -> Options:
    """Options that compute the same accum."""
    kept = Options(options.accumulator_type, options.precision, options.fast_math, options.allow_recompute)
    return kept._replace(out_dtypes=dtypes, fallback=None if isinstance(dtypes, dict) else options.fallback)


def _as_tensor(value: Any, each: Input, problem: Problem) -> torch.Tensor:
    """An argument of the module: numbers are tensors there, and a stored accum is as wide as it was computed."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=each.dtype, device=problem.a.device)
    return value.to(each.dtype) if each.name == ACCUM else value


def _times(x: torch.Tensor, y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x @ y in this shape: summed over the batches where it has none, or one, and they have several."""
    lead = (x if x.dim() > y.dim() else y).shape[:-2]
    return x @ y if lead == shape[:-2] else torch.einsum("lij,ljk->ik", x, y).reshape(shape)
