"""`epifuse::gemm`, a product and its epilogue as one composite operator of PyTorch.

Dynamo and torch.export keep it as one node. AOTAutograd, make_fx, FakeTensors and vmap see the ATen operations it is
made of. On tensors with data the fused kernel runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from epifuse.base.autocast import followed
from epifuse.base.errors import EpifuseError, fail
from epifuse.base.results import Results
from epifuse.plan.ranks import Fold, fold_gemm, fold_linear
from epifuse.pytorch.aten import Reduced, dtypes_of, is_traced, traced
from epifuse.pytorch.distributed import distributed, is_distributed
from epifuse.pytorch.kept_calls import run
from epifuse.pytorch.spec import Spec, decoded, encoded
from epifuse.request.checks import host_number
from epifuse.request.signature import Request, everything_given, wants_gradient
from epifuse.request.transports import without_hints

NAMES = {"gemm": ("A", "B"), "linear": ("x", "weight")}
"""The names of A and B in error messages, by entry point."""

SCHEMA = "gemm(Tensor a, Tensor b, Tensor[] operands, Scalar[]? numbers, str spec) -> Tensor[]"


def operator(a: Any, b: Any, operands: Sequence[Any], numbers: Sequence[Any] | None, spec: str) -> list[torch.Tensor]:
    """Call the operator. Returns the outputs in the order of the return statement.

    No numbers are passed as None, because PyTorch cannot save a program with an empty list of numbers.
    """
    if torch._C._get_tracing_state() is not None:  # torch.jit cannot record a list of numbers
        return _composite(a, b, operands, numbers, spec)
    return torch.ops.epifuse.gemm.default(a, b, operands, numbers or None, spec)  # type: ignore[no-any-return]


def recorded(request: Request, error: EpifuseError | None = None) -> dict[str, torch.Tensor]:
    """The outputs of a request by name, for DTensors, or as one node where PyTorch traces outside of Dynamo.

    Destinations are written. If nothing traces and no tensor is a DTensor, the `error` of an earlier launch is raised.
    """
    tensors = request.a, request.b, *request.given.values()
    elsewhere = is_distributed(*tensors)
    if error is not None and not elsewhere and not is_traced(*tensors):
        try:
            raise error
        finally:
            del error  # its traceback has this frame: together they would keep all tensors of the call alive
    try:
        return computed(request) if elsewhere else _recorded(request)
    except EpifuseError as other:
        raise other from None
    except AssertionError as other:
        if "convert all Tensors to FakeTensors" in str(other):
            raise fail("fake_beside_real", None) from other
        raise


def _recorded(request: Request) -> dict[str, torch.Tensor]:
    given, names, options = everything_given(request), request.parsed.output_names, request.options
    given, accumulate, _ = without_hints(given, names)
    options = options._replace(accumulate=tuple(dict.fromkeys((*accumulate, *options.accumulated))))
    written = {name: given[name] for name in names if given.get(name) is not None}
    handed = {n: value for n, value in given.items() if n not in names or n in options.accumulate}
    tensors = {name: value for name, value in handed.items() if isinstance(value, torch.Tensor)}
    numbers = {name: _number(name, value) for name, value in handed.items() if name not in tensors}
    for (first, one), (second, other) in itertools.combinations(written.items(), 2):
        if one is other:
            raise fail("overlap", None, first=first, second=second)
    dtypes = chosen_dtypes(options.out_dtypes, names) | {name: value.dtype for name, value in written.items()}
    spec = Spec(request.parsed, tuple(tensors), tuple(numbers), options._replace(out_dtypes=dtypes), request.names)
    made = operator(request.a, request.b, [*tensors.values()], [*numbers.values()], encoded(spec))
    return {name: _stored(name, value, written.get(name)) for name, value in zip(names, made, strict=True)}


def _number(name: str, value: Any) -> Any:
    """The number `value` in a form that an operator takes. Raises `ArgumentError` if it is not a number."""
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return value if symbolic else host_number(name, value).value


def _stored(name: str, value: torch.Tensor, destination: torch.Tensor | None) -> torch.Tensor:
    if destination is None:
        return value
    if not same_elements(value, destination):
        raise fail("output_shape", None, name=name, want=tuple(value.shape), shape=tuple(destination.shape))
    return destination.copy_(value.view(destination.shape))


def same_elements(value: torch.Tensor, destination: torch.Tensor) -> bool:
    """Whether the two shapes are equal, apart from dims of extent 1."""
    return [extent for extent in value.shape if extent != 1] == [extent for extent in destination.shape if extent != 1]


def chosen_dtypes(asked: Any, names: Sequence[str]) -> dict[str, Any]:
    """The dtypes asked for, by output name. `asked` is one dtype for all outputs, a mapping by name, or None.

    Raises `ArgumentError` for anything else.
    """
    if not isinstance(asked, (torch.dtype, Mapping, type(None))):
        raise fail("option", None, name="out_dtypes", want="a torch dtype, or dtypes by name", value=asked)
    return dict.fromkeys(names, asked) if isinstance(asked, torch.dtype) else dict(asked or {})


# --- kernels ---------------------------------------------------------------------------------------------------------


def _composite(
    a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor], numbers: Sequence[Any] | None, spec: str
) -> list[torch.Tensor]:
    call = decoded(spec)
    given = dict(zip((*call.tensors, *call.numbers), (*operands, *(numbers or ())), strict=True))
    outputs = computed(Request(a, b, call.parsed, given, call.options, call.names), call.form)
    return [outputs[name] for name in call.parsed.output_names]


def computed(request: Request, form: str = "", reduced: Reduced | None = None) -> dict[str, torch.Tensor]:
    """The outputs of a request by name: of DTensors, by ATen operations where PyTorch traces, or by a fused kernel.

    `form` says how leading dims are folded, as in a `Spec`. `reduced` is given where this process has only a part of
    accum, and makes the whole from that part; then PyTorch computes the product and its epilogue.
    """
    tensors = request.a, request.b, *request.given.values()
    if is_distributed(*tensors):
        return distributed(request, form, computed, _checked)
    request, fold = _folded(request, form)
    if reduced is not None or is_traced(*tensors):
        outputs = traced(request, reduced)
    else:
        outputs = run(request if wants_gradient(*tensors) else _with_copies(request))
    return outputs if fold is None else fold.restored(outputs, {})


def _folded(request: Request, form: str) -> tuple[Request, Fold | None]:
    if form == "linear" and request.a.dim() != 2:
        return fold_linear(request)
    if form == "gemm" and (request.a.dim() > 3 or request.b.dim() > 3):
        return fold_gemm(request)
    return request, None


def _checked(request: Request, form: str) -> dict[str, torch.dtype]:
    """The dtypes of the outputs by name. Raises what the call itself would raise for shapes, dtypes and kinds."""
    return dtypes_of(_folded(request, form)[0])


def _with_copies(request: Request) -> Request:
    """The request with copies of the tensors that are accumulated onto.

    The operator's schema declares no mutation, so the operator must not write its arguments.
    """
    held = {name: request.given[name].clone() for name in request.options.accumulated}
    return request._replace(given={**request.given, **held}) if held else request


def _autocast(
    a: torch.Tensor, b: torch.Tensor, operands: Sequence[torch.Tensor], numbers: Sequence[Any] | None, spec: str
) -> list[torch.Tensor]:
    """Run the operator under autocast: A, B and the bias of a linear layer are cast, and nothing inside it."""
    call = decoded(spec)
    a, b = followed(a, b)
    held = [
        followed(value)[0] if name in call.cast else value for name, value in zip(call.tensors, operands, strict=True)
    ]
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(a, b, held, numbers, spec)


_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _define() -> Any:
    library: Any = torch.library.Library("epifuse", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped
    library.define(SCHEMA)
    library.impl("gemm", _composite, "CompositeImplicitAutograd")
    library.impl("gemm", _composite, "FuncTorchBatchedDecomposition")  # vmap has no rule of its own for this operator
    for key in _AUTOCAST_KEYS:
        library.impl("gemm", _autocast, key)
    return library


LIBRARY = _define()
"""The operator stays registered as long as this object exists."""


def _register_results() -> None:
    """Register `Results` as a pytree, so that functions that return several outputs can be vmapped and exported."""
    pytree.register_pytree_node(
        Results,
        lambda results: (list(results), list(results.keys())),
        lambda tensors, names: Results(dict(zip(names, tensors, strict=True))),
        serialized_type_name="epifuse.Results",
        to_dumpable_context=lambda names: names,
        from_dumpable_context=lambda names: names,
    )


_register_results()
