"""Compiling kernels ahead of use, into the store, by several processes."""

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
    """The result of `precompile`, with each kernel by its name and its problem. It is true if nothing failed.

    `compiled` are kernels that were not in the store, `found` those that were, and `failed` the others, each with the
    reason.
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
    """Compile the kernels of these plans that are not in the store.

    `workers` is the number of processes; None takes the shared ones. With `progress`, standard error shows the progress
    if it is a terminal.
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
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()  # a daemon has closed it


def _compiled(kernels: Iterable[_Kernel], workers: int | None, *, progress: bool) -> Mapping[_Kernel, str | None]:
    """For each kernel the reason why it failed, or None."""
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
                future.cancel()  # after an interrupt; it changes nothing of futures that are done
        return failures


def _failure(kernel: _Kernel, future: Future[None]) -> str | None:
    why = failure(future)
    if why is None and not _is_stored(kernel):  # the worker could not store it, and has warned
        return "it was compiled, and the folder that EPIFUSE_CACHE_DIR names cannot keep it"
    return why
