"""Kernels compiled ahead: into the store, by several processes, before anything runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass

from epifuse import providers
from epifuse.base.errors import UnsupportedError
from epifuse.plan import Plan
from epifuse.runtime.workers import WORKERS, Workers, failure


@dataclass(frozen=True)
class Precompiled:
    """What `precompile` did, each kernel by name and problem: true where nothing failed.

    `compiled` are kernels that were not in the store, `found` those that were, `failed` the others, each with why.
    """

    compiled: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        counts = f"compiled {_counted(self.compiled)}, found {len(self.found)} in the store"
        if not self.failed:
            return counts
        return "\n".join([f"{counts}, {len(self.failed)} failed:", *(f"  {name}: {why}" for name, why in self.failed)])


def _counted(names: tuple[str, ...]) -> str:
    return f"{len(names)} {'kernel' if len(names) == 1 else 'kernels'}"


_Kernel = tuple[str, str]  # provider and text


def compile_ahead(plans: Iterable[Plan], workers: int | None, *, progress: bool) -> Precompiled:
    """Have the kernels of these plans in the store, compiled by `workers` processes, None being as many as usual.

    Where `progress` is asked for and somebody watches standard error, it is told there.
    """
    names: dict[_Kernel, str] = {}
    failed = []
    for plan in plans:
        name = f"{plan.spec.name}, {plan.problem.describe()}"
        try:
            for text in providers.load(plan.spec.provider).kernels(plan):
                names.setdefault((plan.spec.provider, text), name)
        except UnsupportedError as error:
            failed.append((name, str(error)))
    found = [kernel for kernel in names if _is_stored(kernel)]
    missing = [kernel for kernel in names if kernel not in found]
    failures = _compiled(missing, workers, progress=progress and is_watched())
    return Precompiled(
        tuple(names[kernel] for kernel in missing if failures[kernel] is None),
        tuple(names[kernel] for kernel in found),
        (*failed, *((names[kernel], why) for kernel, why in failures.items() if why is not None)),
    )


def _is_stored(kernel: _Kernel) -> bool:
    provider, text = kernel
    return providers.load(provider).is_stored(text)


def is_watched() -> bool:
    """Whether somebody sees what is told on standard error."""
    return sys.stderr is not None and sys.stderr.isatty()  # a daemon has closed it


def _compiled(kernels: Iterable[_Kernel], workers: int | None, *, progress: bool) -> Mapping[_Kernel, str | None]:
    """Why each kernel failed, or None."""
    with nullcontext(WORKERS) if workers is None else closing(Workers(workers)) as pool:
        futures = {kernel: pool.submit(*kernel) for kernel in kernels}
        failures: dict[_Kernel, str | None] = {}
        try:
            for kernel, future in futures.items():
                failures[kernel] = _failure(kernel, future)
                if progress:
                    sys.stderr.write(f"compiled {len(failures)} of {len(futures)} kernels\n")
        finally:
            for future in futures.values():
                future.cancel()  # where this was interrupted; what is over stays as it is
        return failures


def _failure(kernel: _Kernel, future: Future[None]) -> str | None:
    why = failure(future)
    if why is None and not _is_stored(kernel):  # the worker has warned, and kept it to itself
        return "it was compiled, and the folder that EPIFUSE_CACHE_DIR names cannot keep it"
    return why
