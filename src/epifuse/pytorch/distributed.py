"""A call with DTensors: each process computes its part of the product and of the epilogue, see `split`.

DTensors get other placements by `redistribute`, which has a gradient. In between, each process makes an ordinary call
with plain tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from epifuse.base.errors import fail, kind_of
from epifuse.frontend.remembered import remembered
from epifuse.pytorch.aten import Reduced
from epifuse.pytorch.split import SUM, Along, K, Unsplit, along, chosen, split_dim_of_input
from epifuse.request.problem import dense
from epifuse.request.scaled import are_scaled
from epifuse.request.signature import Request
from epifuse.request.transports import Hint


class Compute(Protocol):
    """A call with plain tensors. `reduced` returns the whole accum for the part that this process has computed."""

    def __call__(self, request: Request, form: str, reduced: Reduced | None = None) -> dict[str, torch.Tensor]: ...


def is_distributed(*values: Any) -> bool:
    """Whether one of the values is a DTensor, or a tensor that a collective operation may still be writing."""
    return any(map(_is_dtensor, values)) or any(map(_is_awaited, values))


def _is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing takes a second; before, no DTensor exists
    return module is not None and isinstance(value, module.DTensor)


def _is_awaited(value: Any) -> bool:
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(value, module.AsyncCollectiveTensor)


def awaited(request: Request) -> Request:
    """Wait for the collective operations whose results the request takes, and return it with their plain tensors."""
    given = {name: _plain(value) for name, value in request.given.items()}
    return request._replace(a=_plain(request.a), b=_plain(request.b), given=given)


def _plain(value: Any) -> Any:
    return value.wait() if _is_awaited(value) else value


def distributed(
    request: Request, form: str, compute: Compute, described: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    """Return the outputs by name, DTensors if A and B are. `compute` makes a call with plain tensors. `described`
    checks a call by its shapes and dtypes, and returns the dtypes of its outputs.

    Raises `ArgumentError` for DTensors beside other tensors or of several meshes, `UnsupportedError` for a call that
    does not support DTensors, and the errors of the call with plain tensors.
    """
    request = awaited(request._replace(given={**request.parsed.defaults, **request.given}))
    if not any(map(_is_dtensor, (request.a, request.b, *request.given.values()))):
        return compute(request, form)
    from torch.distributed.tensor import DTensor

    _check(request)
    mesh, accum = request.a.device_mesh, _accum_shape(request)
    split = _split(request, form, accum, described)
    tensors = {name: value for name, value in request.given.items() if isinstance(value, DTensor)}
    a = _local(request.a, [split_dim_of_input(request.a.shape, each.dim, -1) for each in split], split)
    b = _local(request.b, [split_dim_of_input(request.b.shape, each.dim, -2) for each in split], split)
    given = {name: _local(value, [each.operands[name] for each in split], split) for name, value in tensors.items()}
    uneven = any(isinstance(each.dim, int) and accum[each.dim] % mesh.size(i) for i, each in enumerate(split))
    options = request.options
    if uneven and options.fallback is None:  # if one process refused, the others would wait for it
        options = options._replace(fallback="torch")
    request = request._replace(a=a, b=b, given={**request.given, **given}, options=options)
    summed = [each.dim == K for each in split]
    made = compute(request, form, (lambda part: _all_reduced(part, mesh, summed)) if any(summed) else None)
    return {
        name: _whole(value, mesh, [each.outputs[name] for each in split], split, accum) for name, value in made.items()
    }


def _check(request: Request) -> None:
    outputs, options = request.parsed.output_names, request.options
    written = [name for name in outputs if request.given.get(name) is not None]
    if written or options.accumulated:
        raise fail("distributed_option", None, what="out= and accumulate=")
    if are_scaled(request.given):
        raise fail("distributed_option", None, what="block scales")
    if request.parsed.graph.effects:
        raise fail("distributed_option", request.parsed.graph.loc(request.parsed.graph.effects[0]), what="debug_print")
    named = {**dict(zip(request.names, (request.a, request.b), strict=True)), **request.given}
    meshes = {name: value.device_mesh for name, value in named.items() if _is_dtensor(value)}
    first = next(iter(meshes))
    if meshes[first].get_coordinate() is None:
        raise fail("distributed_outside", None, name=first)
    for name, value in named.items():
        if isinstance(value, Hint):
            raise fail("distributed_option", None, what="transport hints")
        if name in meshes and meshes[name] != meshes[first]:
            raise fail("distributed_meshes", None, name=name, first=first)
        is_number = not isinstance(value, torch.Tensor) or (value.dim() == 0 and not value.requires_grad)
        if name not in meshes and (name in request.names or not is_number):
            raise fail("distributed_beside", None, name=name, type=kind_of(value), first=first)


def _accum_shape(request: Request) -> tuple[int, ...]:
    a, b = request.a, request.b
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]  # untyped
    return (*lead, *a.shape[-2:-1], b.shape[-1])


# --- what to split ----------------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A DTensor as the choice of a split sees it. `dims` has for each dim of the mesh the tensor's dim that is split
    along it, counted from the end, or None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int | None, ...]


def _seen(tensor: Any) -> _Tensor:
    from torch.distributed.tensor import Shard

    dims = [each.dim % tensor.dim() - tensor.dim() if type(each) is Shard else None for each in tensor.placements]
    return _Tensor(tuple(map(_hint, tensor.shape)), tensor.dtype, tuple(dims))


def _hint(extent: Any) -> int:
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else int(extent)


def _split(request: Request, form: str, accum: tuple[int, ...], described: Callable[..., Any]) -> tuple[Along, ...]:
    """The split for each dim of the mesh. All processes choose the same, because all see the same shapes."""
    parsed, given = request.parsed, request.given
    a, b = _seen(request.a), _seen(request.b)
    operands = {name: _seen(value) for name, value in given.items() if _is_dtensor(value)}
    accum = tuple(map(_hint, accum))

    def make() -> tuple[Along, ...]:
        dtypes = described(_shown(request, (a, b, *operands.values())), form)
        shapes = {name: each.shape for name, each in operands.items()}
        found = []
        for of_a, of_b in zip(a.dims, b.dims, strict=True):
            dim = chosen(of_a, of_b, (request.a.numel(), request.b.numel()))
            try:
                found.append(along(parsed, dim, accum, shapes, dtypes))
            except Unsplit as reason:
                warnings.warn(f"each process computes the whole of {parsed.name}: {reason}", stacklevel=2)
                found.append(along(parsed, None, accum, shapes, dtypes))
        return tuple(found)

    kinds = tuple((name, type(value)) for name, value in given.items() if name not in operands)
    return remembered("split", parsed.key, make, (form, a, b, *operands.items(), *kinds, request.options.key))


def _shown(request: Request, seen: tuple[_Tensor, ...]) -> Request:
    """The request with tensors without data, in the shapes of the whole tensors, in place of DTensors."""
    a, b, *rest = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in seen)
    operands = [name for name, value in request.given.items() if _is_dtensor(value)]
    return request._replace(a=a, b=b, given={**request.given, **dict(zip(operands, rest, strict=True))})


# --- from whole to parts and back -------------------------------------------------------------------------------------


def _local(tensor: Any, dims: list[int | None], split: tuple[Along, ...]) -> Any:
    """The part of a DTensor that this process takes. `dims` has for each dim of the mesh the tensor's dim to split, or
    None. If every process takes the whole tensor, and computes a part of the result from it, the gradients that the
    processes compute are summands of the tensor's gradient: `Partial`."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements, gradients = [], []
    for dim, each in zip(dims, split, strict=True):
        placements.append(Replicate() if dim is None else Shard(tensor.dim() + dim))
        parts = dim is None and isinstance(each.dim, int)
        gradients.append(Partial() if parts else placements[-1])
    # Needed even if nothing moves: its backward gives the gradient the placements of the tensor.
    return _plain(tensor.redistribute(placements=placements).to_local(grad_placements=gradients))


def _whole(
    part: torch.Tensor, mesh: Any, dims: list[int | str | None], split: tuple[Along, ...], accum: tuple[int, ...]
) -> Any:
    """The DTensor that `part` is this process's part of; `dims` are the split dims as in `_local`, or SUM."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements: list[Any] = []
    shape = list(part.shape)
    for dim, each in zip(dims, split, strict=True):
        if isinstance(dim, int) and isinstance(each.dim, int):
            placements.append(Shard(part.dim() + dim))
            shape[dim] = accum[each.dim]
        else:
            placements.append(Partial() if dim == SUM else Replicate())
    stride = dense(tuple(shape))
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _all_reduced(part: torch.Tensor, mesh: Any, summed: list[bool]) -> Any:
    """The sum of the parts along the mesh dims that `summed` marks. The gradient of each part is that of the sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if each else Replicate() for each in summed]
    whole = [Replicate()] * len(summed)
    summed_up = DTensor.from_local(part, mesh, placements, run_check=False).redistribute(placements=whole)
    return _plain(summed_up.to_local(grad_placements=whole))
