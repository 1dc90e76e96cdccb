"""`ef.compile`: PyTorch's compiler with a pass that gives each product the operations around it as an epilogue."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from epifuse.base.errors import fail, kind_of
from epifuse.pytorch import leaves  # registers the operators that a graph in PyTorch's cache may hold
from epifuse.pytorch.direct import register
from epifuse.pytorch.report import Report, Row
from epifuse.runtime.background import prepare

if TYPE_CHECKING:
    from epifuse.pytorch.fuse import Fuse

__all__ = ["backend", "compile", "leaves", "report"]

_REPORT = "__epifuse_report__"
_HOOK = "post_grad_custom_pre_pass"
_JOINT = "joint_custom_post_pass"
_FIRST = "pre_grad_custom_pass"
_CHOICES = {"numerics": ("float32", "torch"), "sites": ("predicted", "all", "none"), "masks": ("stored", "drawn")}


def compile(  # noqa: A001 - as torch.compile, which it stands for
    model: Any = None,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    numerics: str = "float32",
    sites: str = "predicted",
    leave: Callable[[Row], bool] | None = None,
    measure: bool = False,
    masks: str = "stored",
) -> Any:
    """`torch.compile(model)` in which products take the operations around them in as epilogues, forward and backward.

    `model` is a module or a function; without it the result is a decorator. `mode`, `dynamic`, `fullgraph` and
    `options` are those of torch.compile. Between the operations of one epilogue values stay float32;
    `numerics="torch"` rounds them where PyTorch does. `sites` says which products get an epilogue: those *predicted* to
    save time, *all* that can have one, or *none*. `leave` is a function of a product's row of the report; products for
    which it is true are left alone. With `measure=True` each product is measured with and without its epilogue while
    the model is compiled, in place of the prediction; the times are kept on disk. With `masks="stored"` the backward
    pass reads the stored masks of dropout. With `masks="drawn"` it draws them again from their seeds, which saves their
    memory, and takes longer unless a product hides the drawing. A constant mask of `scaled_dot_product_attention` that
    holds only True is left out. `report` tells what became of each product. Equal models with equal options share
    their graphs, which are then in the report of the first one only. Raises `ArgumentError` for a wrong option.
    """
    chosen: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "fullgraph": fullgraph, "options": options}
    chosen |= {"numerics": numerics, "sites": sites, "leave": leave, "measure": measure, "masks": masks}
    again = partial(compile, **chosen)
    if model is None:
        return again
    if not callable(model) or isinstance(model, type):
        raise fail("wrong_arguments", None, function="compile", want="a module or a function", type=kind_of(model))
    for name, value in {"numerics": numerics, "sites": sites, "masks": masks}.items():
        if value not in _CHOICES[name]:
            want = " or ".join(map(repr, _CHOICES[name]))
            raise fail("option", None, name=name, want=want, value=value)
    if not isinstance(measure, bool) or (measure and sites != "predicted"):
        want = "True beside sites='predicted', or False"
        raise fail("option", None, name="measure", want=want, value=measure)
    if not (leave is None or callable(leave)):
        raise fail("option", None, name="leave", want="a function of a row of the report, or None", value=leave)
    if not isinstance(options, (Mapping, type(None))) or (mode is not None and options is not None):
        want = "a mapping of Inductor's options, or None, which it is beside mode"
        raise fail("option", None, name="options", want=want, value=options)
    from epifuse.pytorch.fuse import Fuse  # takes a second, because it imports PyTorch's compiler

    fuse = Fuse(numerics, sites, leave, measure=measure)  # type: ignore[arg-type]  # checked above
    patches = _patches(fuse, mode, options)
    if masks == "drawn" and _HOOK in patches:
        from epifuse.pytorch.masks import DrawAgain

        patches[_JOINT] = _behind(patches.get(_JOINT), DrawAgain())
    compiled: Any = torch.compile(model, dynamic=dynamic, fullgraph=fullgraph, options=patches)
    # A copy that PyTorch makes would have the pass, but not the report.
    vars(compiled).update({_REPORT: fuse.report, "__reduce_ex__": lambda protocol: (again, (model,))})
    return compiled


def backend(
    module: torch.fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="epifuse")`. Dynamo finds it by its entry point."""
    from torch._inductor.compile_fx import compile_fx

    from epifuse.pytorch.fuse import Fuse

    made: Any = compile_fx(module, inputs, config_patches=_patches(Fuse(), mode, options))
    return made  # type: ignore[no-any-return]  # a function, as no option asks for text


def report(model: Any) -> Report:
    """Return what became of each product of a compiled model: what its epilogue took in, and why it took no more.

    The report is empty until the model ran, and if PyTorch found the model's graphs on disk, or compiled for an equal
    model. Raises `ArgumentError` for a model that does not come from `compile`.
    """
    found = getattr(model, "__dict__", {}).get(_REPORT)
    if not isinstance(found, Report):
        raise fail("not_compiled", None, type=kind_of(model))
    return found


def _patches(fuse: Fuse, mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's options: those of the mode, the given ones, and epifuse's passes behind those that are set already."""
    from torch._inductor import config, list_mode_options

    given = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    if not hasattr(config, _HOOK):
        why = "this version of PyTorch's compiler has no place for its pass"
        warnings.warn(f"epifuse fuses nothing: {why}", stacklevel=3)
        return given
    register()
    prepare()  # in the background: a model's first graph is traced for seconds before kernels are compiled
    from epifuse.pytorch.attention import LeaveOutFullMasks

    for name, ours in ((_HOOK, fuse), (_FIRST, LeaveOutFullMasks())):
        given[name] = _behind(given.get(name, getattr(config, name, None)), ours)
    return given


def _behind(before: Any, ours: Any) -> Any:
    """The value for a hook of Inductor: the pass `ours`, behind the passes that the hook holds before."""
    from epifuse.pytorch.fuse import Passes

    several = [*before] if isinstance(before, (list, tuple)) else [] if before is None else [before]
    return Passes((*several, ours)) if several else ours
