"""A call that is written as an earlier one, at tensors that look alike: launched without being described.

What a description depends on is in the key, or the guard asks it of the tensors. Calls with numbers, which may change,
and with destinations, which may overlap other tensors, are always described.
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
from epifuse.request.signature import Call, Request, describe, new
from epifuse.runtime.launch import Prepared, Ready, find, find_all, is_full, remember_beside
from epifuse.runtime.run import planned

Tensors = dict[str, torch.Tensor]
Launch = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Written(NamedTuple):
    """A call as it was written: what it is found by, A and B (or the weight) and what was handed over by name."""

    key: Hashable
    handed: tuple[Any, ...]
    turned: bool
    """Whether B is the weight's transpose."""


def written(
    a: Any, b: Any, parsed: Parsed, options: Options, by_name: Mapping[str, Any], *, turned: bool
) -> Written | None:
    """None for a call that is always described, as all are that a mode of PyTorch sees."""
    if type(a) not in PLAIN or type(b) not in PLAIN or _len_torch_dispatch_stack() > 0:
        return None
    asked = () if options is USUAL else options.key
    tf32 = a.dtype is float32 and tf32_allowed()
    try:
        key = (parsed.key, asked, turned, is_grad_enabled(), tf32, a.shape, b.shape, *by_name)
    except RuntimeError:  # a nested tensor has no shape
        return None
    return new(Written, (key, (a, b, *by_name.values()), turned))


def run(request: Request, call: Written | None = None, fold: Fold | None = None) -> Tensors:
    """The outputs by name, differentiable where an input requires grad. A call like an earlier one is only launched.

    `call` is how it was written, `fold` what made the request of it. Raises `UnsupportedError` where no kernel can run
    it, before anything is written.
    """
    described = describe(request)
    if (ready := find(described)) is None:
        return differentiated(described) if described.recorded else planned(described)
    if call is not None:
        keep(call, described, ready, fold)
    return ready.launch(described)


def again(call: Written, names: tuple[str, ...]) -> Any:
    """What a call returns whose outputs have these names, if it is like one that was kept."""
    for guard, launch in find_all(call.key):
        if are_alike(guard, call.handed):
            outputs = launch(call.handed)
            return outputs[0] if len(outputs) == 1 else Results(dict(zip(names, outputs, strict=True)))
    return None


def keep(call: Written, described: Call, ready: Ready, fold: Fold | None) -> None:
    """Have the next call like this one launched by what was found for its description."""
    (key, handed, turned), request, operands = call, described.request, described.tensors
    taken = (request.a, handed[1] if turned else request.b, *operands.values())
    if described.numbers or described.infos or not operands.keys().isdisjoint(request.parsed.output_names):
        return
    if len(taken) != len(handed) or is_full(key) or (guard := guard_of(handed)) is None:
        return
    views = [_view(*pair, folded=fold is not None) for pair in zip(handed, taken, strict=True)]
    launch = None if None in views else _launch(ready, tuple(operands), turned)
    if launch is not None:
        names = request.parsed.output_names
        remember_beside(key, (guard, launch if fold is None else _folded(launch, views, names, fold.of_any())))


_Shape = tuple[int, ...]


def _view(handed: torch.Tensor, taken: torch.Tensor, *, folded: bool) -> _Shape | None:
    """The shape in which `taken` is a view of `handed`: empty if both are one tensor, None if it is no such view."""
    if handed is taken:
        return ()
    same = (
        folded and type(handed) in PLAIN and handed.data_ptr() == taken.data_ptr() and handed.numel() == taken.numel()
    )
    return tuple(taken.shape) if same and handed.view(taken.shape).stride() == taken.stride() else None


def _launch(ready: Ready, names: tuple[str, ...], turned: bool) -> Launch | None:
    if isinstance(ready, Recorded):
        return ready.turned.again if turned else ready.again
    if not (isinstance(ready, Prepared) and ready.is_final):
        return None
    return ready.repeated(names, turned=turned)


def _folded(launch: Launch, views: Sequence[_Shape | None], names: tuple[str, ...], fold: Fold) -> Launch:
    """The launch with leading dims seen as one."""

    def folded(handed: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        taken = [tensor.view(shape) if shape else tensor for tensor, shape in zip(handed, views, strict=True)]
        return [*fold.restored(dict(zip(names, launch(taken), strict=True)), {}).values()]

    return folded
