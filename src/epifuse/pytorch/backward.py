"""The backward of a fused product, prepared once: what the derivative reads, where it runs, and which gradients it
gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._triton import has_triton

from epifuse.frontend import Parsed
from epifuse.plan.settle import Settled
from epifuse.pytorch.derivative import Derivative, Input, as_it_arrives, derivative_of, gradient_of, inputs_of
from epifuse.pytorch.evaluate import ACCUM, coordinate
from epifuse.pytorch.storing import FLOATS, is_compiled, stored_dtype, stores_first
from epifuse.pytorch.symbols import at_extents
from epifuse.request.options import USUAL, Options
from epifuse.request.problem import Problem, TensorInfo
from epifuse.runtime.arguments import plain
from epifuse.runtime.run import CallSite

Saved = Sequence[Any]
"""Accum, A, B and the operands that are tensors; None for those that the backward does not read."""
Gradients = list[torch.Tensor | None]
_NONE: Mapping[str, Any] = {}
Result = tuple[str, torch.dtype]
"""The name of a value that the derivative computes or hands on, and the dtype of the tensor whose gradient it is."""
Dtypes = Mapping[str, torch.dtype]
"""The dtypes in which computed values leave the derivative, by name of the value."""


class Found(NamedTuple):
    """Where a gradient is found: at `place` among the computed values if it `is_computed`, otherwise among the saved
    tensors and arriving gradients. It still has to be summed over `unsummed_dims`, if any, and viewed in `shape`.
    `dtype` is the dtype that it ends in."""

    is_computed: bool
    place: int
    dtype: torch.dtype
    unsummed_dims: tuple[int, ...]
    shape: tuple[int, ...]

    def among(self, made: Saved, values: Saved) -> torch.Tensor:
        """Return the gradient. `made` are the computed values, `values` the saved tensors and arriving gradients."""
        value: torch.Tensor = (made if self.is_computed else values)[self.place]
        if self.unsummed_dims:
            value = value.sum(self.unsummed_dims).view(self.shape)
        return value if value.dtype is self.dtype else value.to(self.dtype)


class Recording(NamedTuple):
    """What autograd records of the calls of one signature.

    `tensors` are the names of the operands that are tensors. `wanted` are those with gradients, and ACCUM if A or B has
    one; `needs` says which of A and B. If it is `b_is_transposed`, the transpose of B is handed over and saved.
    """

    settled: Settled
    parsed: Parsed
    options: Options
    tensors: tuple[str, ...]
    wanted: tuple[str, ...]
    needs: tuple[bool, bool]
    b_is_transposed: bool = False


class Launch(NamedTuple):
    """The derivative as an epilogue, launched at a `CallSite`.

    It reads the tensors at `positions` among the saved tensors followed by the arriving gradients. Without `product`
    the first two are A and B. Otherwise no one reads the product of A and B: `product` makes an A and a transposed B
    that are as short along K as kernels allow.
    """

    call_site: CallSite
    positions: tuple[int, ...]
    product: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None

    def tensors(self, values: Saved) -> list[torch.Tensor]:
        """Return A, B and the operands of the launch, from the saved tensors and arriving gradients."""
        given = [values[position] for position in self.positions]
        if self.product is None:
            return given
        a, b = self.product()
        return [a, b.mT, *given]


class Backward(NamedTuple):
    """How the gradients of a recorded call are computed when the gradients of certain outputs arrive.

    `with_product` computes the product once more, with the derivative as its epilogue. `without_product` is the launch
    that reads a stored accum, or needs no accum. `repeats` says whether both read only saved tensors and arriving
    gradients. `product` computes accum alone where it is not stored and `with_product` does not run, and `unfused` is
    the derivative run by PyTorch.

    `inputs` are the arguments of the derivative. `names` are the names of its tensors: first those at `positions` among
    the saved tensors and arriving gradients, then the `coordinates`. It also reads `numbers`, and as an epilogue
    `counts`, which follow from extents. `results` are the gradients of operands, each with its position among A, B and
    the operands. `above` is the gradient of accum, from which `of_a` and `of_b` compute those of A and B that are asked
    for. `converts` says whether an output has 8 bits: then its gradient is converted first.
    """

    problem: Problem
    derivative: Derivative
    with_product: Launch | None
    without_product: Launch | None
    repeats: bool
    product: CallSite
    unfused: Callable[..., Sequence[torch.Tensor]]
    inputs: tuple[Input, ...]
    names: tuple[str, ...]
    positions: tuple[int, ...]
    numbers: tuple[str, ...]
    coordinates: tuple[Input, ...]
    counts: Mapping[str, float]
    results: tuple[tuple[int, Found], ...]
    above: Found | None
    of_a: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    of_b: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    converts: bool

    @staticmethod
    def of(recording: Recording, arriving: tuple[str, ...]) -> Backward:
        """The backward for gradients that arrive for the outputs named in `arriving`."""
        settled, _, options, tensors, wanted, needs, b_is_transposed = recording
        problem, graph = settled.problem, settled.structure.graph
        derivative = derivative_of(settled, wanted, arriving)
        outputs = [gradient_of(output.name) for output in graph.outputs]
        places = {
            name: place for place, name in enumerate((ACCUM, "A", "B", *tensors, *outputs)) if place not in (1, 2)
        }
        indices = {coordinate(node) for node in graph.nodes if node.op == "index"}
        known = {each.name: each for each in inputs_of(settled, arriving, problem.extents)}
        names = [name for name in (*derivative.inputs, *derivative.handed) if name != ACCUM]
        counts = {name: float(at_extents(size, problem.extents)) for name, size in derivative.extents.items()}
        found = dict(_results(derivative, problem))
        above = found.pop(ACCUM, None)
        asked = options.constraints
        alike = Options(
            options.accumulator_type, asked.precision, asked.fast_math, asked.allow_recompute, tune=asked.tune,
            fast_accum=asked.fast_accum,
        )  # fmt: skip
        held = stored_dtype(problem, derivative) if problem.accumulator in FLOATS else None
        product_options = alike._replace(out_dtypes=held, fallback=options.fallback)
        counted = tuple(known[name] for name in names if name in indices)
        numbers = tuple(name for name in names if name not in places and name not in indices)
        reads = [name for name in names if name in places]
        positions, names = tuple(places[name] for name in reads), [*reads, *(each.name for each in counted)]
        shapes = {name: info.shape for name, info in problem.operands if isinstance(info, TensorInfo)}
        dtypes = _dtypes(derivative, [*found.values(), *([above] if above else [])], problem)

        def where(of: str, result: Result) -> Found:
            name, dtype = result
            computed = name in derivative.computed
            place = derivative.computed.index(name) if computed else places[name]
            return Found(computed, place, dtype, derivative.unsummed_dims.get(name, ()), shapes.get(of, ()))

        return Backward(
            problem,
            derivative,
            None
            if stores_first(problem, derivative)
            else _launch_with_product(derivative, dtypes, alike, positions, names, b_is_transposed=b_is_transposed),
            _launch_without_product(derivative, dtypes, alike, positions, names, problem),
            not (numbers or counted or counts),
            CallSite(plain(), product_options, b_is_transposed=b_is_transposed),
            _unfused(derivative, dtypes, problem),
            tuple(known[name] for name in derivative.inputs),
            tuple(names),
            positions,
            numbers,
            counted,
            counts,
            tuple((places[name] - 1, where(name, result)) for name, result in found.items()),
            above and where(ACCUM, above),
            _of_a(problem, b_is_transposed=b_is_transposed) if needs[0] else None,
            _of_b(problem, b_is_transposed=b_is_transposed) if needs[1] else None,
            any(as_it_arrives(dtype, problem) is not dtype for _, dtype in problem.dtypes),
        )

    def launch(self, accum: torch.Tensor | None) -> Launch | None:
        """The launch that computes the derivative, if any does. `accum` is None if the forward did not store it."""
        again = accum is None and self.derivative.needs_product
        return (self.with_product if again else None) or self.without_product

    def gradients(self, saved: Saved, numbers: Mapping[str, Any], arriving: Saved, launch: Launch | None) -> Gradients:
        """Return the gradients of A, B and each operand; None for one that is not asked for. `launch` computes them;
        if it is None, PyTorch does. Raises the errors of `run`."""
        if self.converts:
            arriving = [each if each is None else each.to(as_it_arrives(each.dtype, self.problem)) for each in arriving]
        multiplies = launch is not None and launch is self.with_product
        if saved[0] is None and self.derivative.needs_product and not multiplies:
            saved = (*self.product.run(saved[1:3], _NONE), *saved[1:])
        values = (*saved, *arriving)
        made: Sequence[torch.Tensor] | None = None
        if launch is not None and self.repeats:
            made = launch.call_site.run_if_alike(launch.tensors(values), _NONE)
        if made is None:
            values = (*saved, *map(_dense, arriving))
            made = self._computed(values, numbers, launch)
        found: Gradients = [None] * (len(saved) - 1)
        for position, each in self.results:
            found[position] = each.among(made, values)
        if self.above is not None:
            above = self.above.among(made, values)
            if self.of_a is not None:
                found[0] = self.of_a(above, saved[2])
            if self.of_b is not None:
                found[1] = self.of_b(above, saved[1])
        return found

    def _computed(self, values: Saved, numbers: Mapping[str, Any], launch: Launch | None) -> Sequence[torch.Tensor]:
        """Return the values that the derivative computes, by `launch` or by PyTorch."""
        derivative, problem, accum = self.derivative, self.problem, values[0]
        counted = [torch.arange(count, dtype=dtype, device=problem.a.device) for _, (count,), dtype in self.coordinates]
        read = {name: numbers[name] for name in self.numbers}
        if launch is not None:
            return launch.call_site.run((*launch.tensors(values), *counted), {**read, **self.counts})
        if not derivative.computed:
            return ()
        tensors = (*[values[position] for position in self.positions], *counted)
        given, keeps = {**dict(zip(self.names, tensors, strict=True)), **read, ACCUM: accum}, derivative.widens
        arguments = [_as_tensor(given[each.name], each, problem, keeps=keeps) for each in self.inputs]
        return self.unfused(*arguments, *(problem.extents[axis] for axis in derivative.axes))


def _launch_with_product(
    derivative: Derivative,
    dtypes: Dtypes,
    options: Options,
    positions: tuple[int, ...],
    names: Sequence[str],
    *,
    b_is_transposed: bool,
) -> Launch | None:
    """The launch that computes the product again; None if the derivative does not read it or has no such epilogue."""
    if derivative.with_product is None:
        return None
    parsed, options = _storing(derivative.with_product, dtypes), USUAL if options == USUAL else options
    return Launch(CallSite(parsed, options, tuple(names), b_is_transposed=b_is_transposed), (1, 2, *positions))


def _launch_without_product(
    derivative: Derivative,
    dtypes: Dtypes,
    options: Options,
    positions: tuple[int, ...],
    names: Sequence[str],
    problem: Problem,
) -> Launch | None:
    """The launch without the product. None if the derivative has no such epilogue, or if PyTorch, possibly by Inductor,
    is about as fast."""
    if derivative.without_product is None or not derivative.traffic.pays_at_once(problem):
        return None
    if is_compiled(problem) and has_triton() and derivative.traffic.suits_inductor:
        return None
    options = options._replace(accumulator_type=None)
    if problem.a.dtype == torch.float32:  # full precision takes three products, and nobody reads their sum
        options = options._replace(precision="tf32")
    parsed, options = _storing(derivative.without_product, dtypes), USUAL if options == USUAL else options
    needs = derivative.needs_product
    place = CallSite(parsed, options, ((ACCUM,) * needs + tuple(names)), b_is_transposed=False)
    return Launch(place, ((0,) * needs + positions), _maker_of_unread_product(problem))


def _maker_of_unread_product(problem: Problem) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that makes A and the transpose of B with rows of 16 bytes, as a GPU's copies of tiles need.

    On a CPU their dtype is that which the epilogue computes in: some CPUs multiply such short rows of bfloat16 slowly.
    """
    extents, device = problem.extents, torch.device(problem.a.device)
    dtype = problem.float_dtype if device.type == "cpu" else problem.a.dtype
    lead = (extents["l"],) if problem.batched else ()
    of_a, of_b = ((*lead, extents[axis], 16 // dtype.itemsize) for axis in "mn")
    return lambda: (torch.empty(of_a, dtype=dtype, device=device), torch.empty(of_b, dtype=dtype, device=device))


def _unfused(derivative: Derivative, dtypes: Dtypes, problem: Problem) -> Callable[..., Sequence[torch.Tensor]]:
    """The derivative run by PyTorch: compiled by Inductor, or one operation at a time."""
    if is_compiled(problem) and derivative.traffic.pays_at_once(problem):
        return derivative.by_inductor(tuple(dtypes[name] for name in derivative.computed))
    return derivative.module.forward


def _of_a(problem: Problem, *, b_is_transposed: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function of accum's gradient and B that computes the gradient of A. It has the layout of A, so that no
    one copies it to match. A B with fewer bits than A is converted, as in the forward product."""

    def of_a(above: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b = b if b.dtype is above.dtype else b.to(above.dtype)
        weight = b if b_is_transposed else b.mT
        if problem.batched:
            return _times(above, weight, problem.a.shape)
        return weight.t().mm(above.t()).t() if upright else above.mm(weight)

    upright = _is_upright(problem.a)
    return of_a


def _of_b(problem: Problem, *, b_is_transposed: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function of accum's gradient and A that computes the gradient of B, or of its transpose if
    `b_is_transposed`."""

    def of_b(above: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        if problem.batched:
            return _times(above.mT, a, shape) if b_is_transposed else _times(a.mT, above, shape)
        found = above.t().mm(a) if upright else a.t().mm(above)
        return found if upright is b_is_transposed else found.t()

    upright = _is_upright(problem.b)
    shape = problem.b.shape[::-1] if b_is_transposed else problem.b.shape
    return of_b


def _results(derivative: Derivative, problem: Problem) -> Iterable[tuple[str, Result]]:
    """Yield each input that has a gradient, with its result, in the derivative's order."""
    dtypes = {name: info.dtype for name, info in problem.operands if isinstance(info, TensorInfo)}
    for name, result in derivative.results.items():
        if result is not None:
            yield name, (result, problem.a.dtype if name == ACCUM else dtypes[name])


def _dtypes(derivative: Derivative, results: Iterable[Result], problem: Problem) -> Dtypes:
    """The dtypes of computed values: the widest one if a value is several gradients, and the dtype that sums are
    computed in if a value still has to be summed."""
    found: dict[str, torch.dtype] = {}
    for name, dtype in results:
        if name in derivative.computed and found.get(name, dtype).itemsize <= dtype.itemsize:
            found[name] = dtype
    return {**found, **dict.fromkeys(derivative.unsummed_dims, problem.float_dtype)}


def _storing(parsed: Parsed, dtypes: Dtypes) -> Parsed:
    """The derivative as an epilogue whose results are stored in these dtypes."""
    return parsed.changed(dtypes=dtypes, key=f"{parsed.key} {dtypes}")


def _is_upright(info: TensorInfo) -> bool:
    """Whether a matrix is stored column by column, as the transposed weight of a linear layer is."""
    return info.strides[0] == 1 and info.strides[1] == info.shape[0]


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient with strides that kernels can read. The gradient of a sum is an expanded number, with strides of 0."""
    if gradient is None:
        return None
    strides = gradient.stride()
    return gradient if 1 in strides and 0 not in strides else gradient.contiguous()


def _as_tensor(value: Any, each: Input, problem: Problem, *, keeps: bool) -> torch.Tensor:
    """An argument of the module. A number becomes a tensor. Accum is converted to the dtype that it was computed in,
    unless it `keeps` the one that it was stored in."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=each.dtype, device=problem.a.device)
    return value if keeps or each.name != ACCUM else value.to(each.dtype)


def _times(x: torch.Tensor, y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x @ y in `shape`. It is summed over the batches if the shape has no batch dim, or 1, and x and y have several."""
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]  # untyped
    if lead == shape[:-2]:
        return x @ y
    return (x.transpose(0, 1).reshape(x.shape[1], -1) @ y.reshape(-1, y.shape[2])).view(shape)
