"""Measuring what fusing a product gains: the time of Inductor alone beside that of each kernel that could fuse it.

All of them compute the same region of the graph (see `region`). Inductor compiles it, once as it is and once with each
kernel in it, and it runs on random values of its shapes. The times are kept on disk.
"""

from __future__ import annotations

import json
import platform
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._python_dispatch import _disable_current_modes

from epifuse.base import store
from epifuse.base.config import CONFIG
from epifuse.frontend.fx import Numerics, value_of
from epifuse.pytorch import sites
from epifuse.pytorch.leaves import encoded
from epifuse.pytorch.region import Copied, Region, region_of, text_of
from epifuse.pytorch.report import Times
from epifuse.pytorch.sized import Sized
from epifuse.runtime.precompile import compile_ahead
from epifuse.runtime.timing import interleaved, random_like

_NOTHING = nullcontext()


class Measured(NamedTuple):
    """Seconds that a region takes: `apart` by Inductor alone, `fused` with each of the kernels."""

    apart: float
    fused: tuple[float, ...]


class NotMeasured(NamedTuple):
    """The reason why nothing could be measured."""

    reason: str


def find(product: FxNode, known: sites.Known, numerics: Numerics) -> tuple[sites.Fused | sites.Unfused, Times | None]:
    """The fastest way to compute `product` with what is around it, and its times.

    If nothing can be measured, the prediction decides, and the times are None.
    """
    found = sites.every(product, known, numerics)
    if isinstance(found, sites.Unfused):
        return found, None
    times = measured(product, found)
    if isinstance(times, NotMeasured):
        _warn(times.reason)
        return sites.find(product, known, numerics, predicted=True), None
    best = min(range(len(found)), key=times.fused.__getitem__)
    own = Times(times.fused[best], times.apart)
    if own.fused < own.apart:
        return found[best], own
    return sites.Unfused(f"fused it takes {own.fused * 1e6:.3g} us, and apart {own.apart * 1e6:.3g} us"), own


def _warn(reason: str) -> None:
    warnings.warn(
        f"a product could not be measured, so a prediction decides whether it is fused: {reason}", stacklevel=2
    )


def measured(product: FxNode, found: Sequence[sites.Fused]) -> Measured | NotMeasured:
    """The times of the ways `found` to fuse `product`: read from disk, or measured now and stored."""
    region = region_of(product, [each.cone for each in found])
    if region is None:
        return NotMeasured("what stands around it has sizes that are symbols")
    device = value_of(product).device
    key = store.key_of("times of a site", *_described(region, found), *_versions(device))
    if (path := store.find(key, ".json")) is not None:
        apart, *fused = json.loads(path.read_text(encoding="utf-8"))
        return Measured(apart, tuple(fused))
    if CONFIG.no_compile:
        return NotMeasured("EPIFUSE_NO_COMPILE is 1, and it was not measured before")
    try:
        taken = timed(region, found)
    except Exception as error:  # a compiler failed, or the device is full: the prediction decides
        return NotMeasured(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    medians = [statistics.median(each) for each in taken]

    def write(path: Path) -> None:
        path.write_text(json.dumps(medians), encoding="utf-8")

    store.fetch(key, ".json", write, kernel="the times of a site")
    return Measured(medians[0], tuple(medians[1:]))


def timed(
    region: Region, found: Sequence[sites.Fused], alone: AbstractContextManager[Any] = _NOTHING
) -> list[list[float]]:
    """Seconds in each round, first of Inductor alone, then of each kernel in `found`.

    `alone` is a context that is entered while the calls are timed.
    """
    plain = Copied.of(region)
    product = next(iter(found)).cone.product
    value: Any = value_of(product)
    with _apart_from_what_is_compiled(value.fake_mode):
        with ThreadPoolExecutor(1) as beside:  # kernels are compiled while Inductor compiles
            beside.submit(compile_ahead, [each.plan for each in found], None, progress=False)
            modules = [plain.module(), *(_replaced(region, each) for each in found)]
            compiled = [_compiled(module, [value_of(node) for node in region.inputs]) for module in modules]
        with torch.no_grad(), _disable_current_modes(), alone:
            given = [random_like(value_of(node)) for node in region.inputs]
            return interleaved([_call(each, given) for each in compiled], value.device)


def _replaced(region: Region, fused: sites.Fused) -> GraphModule:
    from torch._inductor.pattern_matcher import stable_topological_sort

    copied = Copied.of(region)
    made, form = copied.made, fused.form
    form = form._replace(
        operands=tuple(each._replace(node=made[each.node]) for each in form.operands),
        outputs=tuple(made[node] for node in form.outputs),
    )
    if sites.replace(copied.graph, fused._replace(cone=copied.cone(fused.cone), form=form), Sized()):
        stable_topological_sort(copied.graph)
    copied.graph.eliminate_dead_code()
    return copied.module()


def _compiled(module: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    from torch._inductor.compile_fx import compile_fx_inner

    made: Any = compile_fx_inner(module, inputs)
    return made  # type: ignore[no-any-return]  # a function of a list


def _call(compiled: Callable[[list[Any]], Any], given: Sequence[Any]) -> Callable[[], Any]:
    return lambda: compiled(list(given))  # a new list, because compiled code empties it


@contextmanager
def _apart_from_what_is_compiled(fake_mode: Any) -> Iterator[None]:
    """Use the compiler's own configuration, but without our pass and CUDA graphs, in a tracing context of its own.

    Nothing of the graph that is being compiled around it is seen or changed.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config

    changes = {
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
        "triton.cudagraphs": False,
        # Inductor's cache collects the kernels of one graph at a time. It is collecting those of the outer graph now.
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
    }
    with config.patch(changes), tracing(TracingContext(fake_mode)):
        yield


def _described(region: Region, found: Sequence[sites.Fused]) -> Iterator[str]:
    """Yield texts for the cache key that describe the region and the kernels. They are the same in every process."""
    yield text_of(Copied.of(region).graph)
    number = {node: index for index, node in enumerate((*region.inputs, *region.body))}
    for fused in found:
        form = fused.form
        nodes = ([number[each.node] for each in form.operands], [number[node] for node in form.outputs])
        yield f"{fused.plan.spec.name} {encoded(form.graph, form.values)} {nodes}"


_OPTIONS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


def _versions(device: torch.device) -> Iterator[str]:
    """Yield texts of what else the times depend on: the device, the compilers' versions and Inductor's options."""
    from torch._inductor import config

    yield torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor()} {_threads()}"
    yield torch.__version__
    for package in ("triton", "nvidia-cutlass-dsl"):
        try:
            yield metadata.version(package)
        except metadata.PackageNotFoundError:
            yield ""
    yield str([getattr(config, name, None) for name in _OPTIONS])


def _threads() -> str:
    return f"{torch.get_num_threads()} threads"
