"""Repeated calls: a call that is written like an earlier one, with tensors that look alike, is launched directly.

It is not described again (see `describe`). All that a description depends on is in the key, or the guard checks it on
the tensors. Two kinds of calls are always described: those with numbers, because numbers may change, and those with
destinations, because these may overlap other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import float32, is_grad_enabled
from torch._C import _len_torch_dispatch_stack

from epifuse.base.results import Results
from epifuse.frontend import Parsed
from epifuse.plan.ranks import Fold
from epifuse.pytorch.autograd import Recorded, differentiated
from epifuse.request.alike import are_alike, guard_of
from epifuse.request.checks import PLAIN
from epifuse.request.options import USUAL, Options
from epifuse.request.problem import tf32_allowed
from epifuse.request.signature import Call, Request, describe, make_tuple
from epifuse.runtime.launch import Prepared, Ready, find, find_all, is_full, remember_beside
from epifuse.runtime.run import planned

Tensors = dict[str, torch.Tensor]
Launch = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Written(NamedTuple):
    """A call as its caller wrote it: the `key` that its launches are kept by, and the values `handed` over. These are
    A, B (or the weight) and the values passed by name, in this order."""

    key: Hashable
    handed: tuple[Any, ...]
    b_is_transposed: bool
    """Whether the weight was handed over, whose transpose is B."""


def written(
    a: Any, b: Any, parsed: Parsed, options: Options, by_name: Mapping[str, Any], *, b_is_transposed: bool
) -> Written | None:
    """Return the call as written; None if it always has to be described, as every call under a dispatch mode has to."""
    if type(a) not in PLAIN or type(b) not in PLAIN or _len_torch_dispatch_stack() > 0:
        return None
    asked = () if options is USUAL else options.key
    tf32 = a.dtype is float32 and tf32_allowed()
    try:
        key = (parsed.key, asked, b_is_transposed, is_grad_enabled(), tf32, a.shape, b.shape, *by_name)
    except RuntimeError:  # a nested tensor has no shape
        return None
    return make_tuple(Written, (key, (a, b, *by_name.values()), b_is_transposed))


def run(request: Request, call: Written | None = None, fold: Fold | None = None) -> Tensors:
    """Return the outputs by name, differentiable if an input requires grad. A call like an earlier one only launches.

    `call` is the call as written, None if its launch is not to be kept. `fold` is the fold of leading dims that made
    the request, if any. Raises `UnsupportedError` if no kernel can run it; nothing was written then.
    """
    described = describe(request)
    if (ready := find(described)) is None:
        return differentiated(described) if described.recorded else planned(described)
    if call is not None:
        keep(call, described, ready, fold)
    return ready.launch(described)


def kept_result(call: Written, names: tuple[str, ...]) -> Any:
    """Return the result of `call`, whose outputs have these `names`, by a kept launch; None if no kept one fits."""
    for guard, launch in find_all(call.key):
        if are_alike(guard, call.handed):
            outputs = launch(call.handed)
            return outputs[0] if len(outputs) == 1 else Results(dict(zip(names, outputs, strict=True)))
    return None


def keep(call: Written, described: Call, ready: Ready, fold: Fold | None) -> None:
    """Keep `ready`, which was found for the description of `call`, to launch later calls like this one."""
    (key, handed, b_is_transposed), request, operands = call, described.request, described.tensors
    taken = (request.a, handed[1] if b_is_transposed else request.b, *operands.values())
    if described.numbers or described.infos or not operands.keys().isdisjoint(request.parsed.output_names):
        return
    if len(taken) != len(handed) or is_full(key) or (guard := guard_of(handed)) is None:
        return
    views = [_view(*pair, folded=fold is not None) for pair in zip(handed, taken, strict=True)]
    launch = None if None in views else _launch(ready, tuple(operands), b_is_transposed)
    if launch is not None:
        names = request.parsed.output_names
        remember_beside(key, (guard, launch if fold is None else _folded(launch, views, names, fold.of_any())))


_Shape = tuple[int, ...]


def _view(handed: torch.Tensor, taken: torch.Tensor, *, folded: bool) -> _Shape | None:
    """The shape in which `taken` is a view of all of `handed`: `()` if they are the same tensor, None if it is none."""
    if handed is taken:
        return ()
    same = (
        folded and type(handed) in PLAIN and handed.data_ptr() == taken.data_ptr() and handed.numel() == taken.numel()
    )
    return tuple(taken.shape) if same and handed.view(taken.shape).stride() == taken.stride() else None


def _launch(ready: Ready, names: tuple[str, ...], b_is_transposed: bool) -> Launch | None:
    if isinstance(ready, Recorded):
        return ready.for_transposed_b.run_like_earlier if b_is_transposed else ready.run_like_earlier
    if not (isinstance(ready, Prepared) and ready.is_final):
        return None
    return ready.repeated(names, b_is_transposed=b_is_transposed)


def _folded(launch: Launch, views: Sequence[_Shape | None], names: tuple[str, ...], fold: Fold) -> Launch:
    """Return `launch` for tensors whose leading dims it has to see as one. Its outputs get the leading dims back."""

    def folded(handed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        taken = [tensor.view(shape) if shape else tensor for tensor, shape in zip(handed, views, strict=True)]
        return [*fold.restored(dict(zip(names, launch(taken), strict=True)), {}).values()]

    return folded
