"""From a kernel's text to the function that launches it: from memory, from disk, else compiled. Imports no cutlass.

The function always comes from the stored file, even right after it was compiled, so there is only one way to load it.
A kernel's library names the two libraries that it calls, CuTe DSL's runtime and tvm-ffi's, but not their folders, so
that it still works after the environment has moved. This module loads these two first, from where they are now.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from epifuse.base import store
from epifuse.base.errors import EpifuseError, fail
from epifuse.base.loaded import is_loaded as is_in_memory
from epifuse.base.loaded import loaded

if torch.version.cuda is not None:
    # Every launch needs it. In a process that finds its kernel on disk, this import would be most of the time to the
    # first result.
    with suppress(ImportError):  # optional: planning does not need it, and a call says that it is missing
        importlib.import_module("tvm_ffi")

OPTIONS = "--enable-tvm-ffi"
_NAME = "kernel"  # the name of the function in the file
_LIBRARY, _OBJECT = ".so", ".o"


def function(text: str, name: str = "a kernel") -> Callable[..., Any]:
    """The raw tvm-ffi function of a kernel, which launches it on torch's current stream. One thread loads it for all.

    A call takes 0.12 us, where the DSL's wrapper for keyword arguments takes 0.37 us. `name` names the kernel in
    messages. Raises `UnsupportedError` if the kernel is not compiled yet and EPIFUSE_NO_COMPILE is 1.
    """
    return loaded(OPTIONS, text, lambda: load(stored(text, name)))


def is_loaded(text: str) -> bool:
    """Whether `function` would return at once."""
    return is_in_memory(OPTIONS, text)


# --- on disk ---------------------------------------------------------------------------------------------------------


def key_of(text: str) -> str:
    """The key of a kernel on disk, made of its text and the compiler's version. Raises if that version is unknown."""
    # Variables of the DSL change what it compiles, or where it writes. The latter cost no more than a second copy.
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("CUTE_DSL_"))
    return store.key_of("cutedsl", text, OPTIONS, *compiler(), *variables)


def find(text: str) -> Path | None:
    """The stored kernel of this text, or None."""
    key = key_of(text)
    return store.find(key, _LIBRARY) or store.find(key, _OBJECT)


def stored(text: str, name: str = "a kernel") -> Path:
    """The stored kernel of this text, compiled if there is none: a library, or an object file if there is no linker."""
    if (path := find(text)) is not None:
        return path
    key = key_of(text)
    if (linker := _linker()) is not None:
        try:
            return store.fetch(key, _LIBRARY, lambda path: _make_library(text, linker, path), name)
        except _CannotLinkError as error:
            warnings.warn(f"{linker} could not link a compiled kernel: {error}", stacklevel=2)
    return store.fetch(key, _OBJECT, lambda path: _make_object(text, path), name)


class _CannotLinkError(Exception):
    """The C compiler is there, but cannot link the kernel."""


def _make_object(text: str, path: Path) -> None:
    try:
        from epifuse.providers.cutedsl.compile import export
    except ImportError as error:
        raise _not_installed() from error
    export(text, OPTIONS, _NAME, path)


def _make_library(text: str, linker: str, path: Path) -> None:
    import tvm_ffi

    compiled = path.with_suffix(_OBJECT)
    _make_object(text, compiled)
    libraries = (str(runtime_library()), tvm_ffi.libinfo.find_libtvm_ffi())
    # Symbols are bound inside the file, because other kernels have symbols of the same names.
    command = [linker, "-shared", "-Wl,-Bsymbolic", "-o", str(path), str(compiled), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _CannotLinkError(done.stderr.strip()[-400:])


@cache
def _linker() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


# --- what compiles, and what is needed to run -------------------------------------------------------------------------

_RUNTIME = "cu[0-9]*/lib/libcute_dsl_runtime.so"
_NEEDED = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_PARTS = ("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu{}")


@cache
def compiler() -> tuple[str, ...]:
    """The compiler's packages with their versions, and the size of the runtime library that belongs to it."""
    library = runtime_library()
    toolkit = library.parent.parent.name.removeprefix("cu")
    found = [f"{name} {_version(name)}" for name in _NEEDED]
    for name in (part.format(toolkit) for part in _PARTS):  # which of them there are depends on the version
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return (*found, f"cu{toolkit} {library.stat().st_size}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise fail("no_version", None, package=package) from error


@cache
def runtime_library() -> Path:
    """CuTe DSL's runtime library for the newest CUDA that the driver knows, which `import cutlass` chooses as well."""
    spec = importlib.util.find_spec("cutlass")
    places = spec.submodule_search_locations if spec else None
    home = (
        next((home for home in Path(places[0]).parents if home.name == "nvidia_cutlass_dsl"), None) if places else None
    )
    of_cuda = {int(path.parts[-3][2:]): path for path in home.glob(_RUNTIME)} if home else {}
    newest = cuda_of_the_driver()
    if fitting := [number for number in of_cuda if newest is None or number <= newest]:
        return of_cuda[max(fitting)]
    raise too_old(newest, of_cuda) if of_cuda else _not_installed()


def lacking() -> str | None:
    """A message about what is missing to compile and run a kernel, or None."""
    try:
        compiler()
    except EpifuseError as error:
        return str(error)
    return None


def too_old(newest: int | None, known: Iterable[int]) -> EpifuseError:
    """The error that the driver is too old for the runtime libraries that are installed."""
    return fail("old_driver", None, newest=newest, known=" and ".join(map(str, sorted(known))))


def _not_installed() -> EpifuseError:
    return fail("missing_package", None, what="a kernel for GPUs", package="nvidia-cutlass-dsl", extra="cuda")


def cuda_of_the_driver() -> int | None:
    """The major version of CUDA that the driver knows; None if there is no driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if failed else number.value // 1000


def load(path: Path) -> Callable[..., Any]:
    """The function in a stored file. A library stays in memory until the process ends: a CUDA graph may hold it."""
    if path.suffix == _OBJECT:
        _warn_of_objects()
        from epifuse.providers.cutedsl.compile import load_object

        found: Callable[..., Any] = load_object(path, _NAME)
        return found
    _preload()
    import tvm_ffi

    found = tvm_ffi.load_module(str(path))[_NAME]
    return found


@cache
def _warn_of_objects() -> None:
    warnings.warn(
        "compiled kernels were stored without a C compiler (cc, gcc or clang on the PATH) that links them, so each "
        "process imports CuTe DSL's compiler to load them, which takes seconds",
        stacklevel=2,
    )


@cache
def _preload() -> ctypes.CDLL:
    """Load CuTe DSL's runtime library. A library that needs it then finds it by name, whatever folder it is in."""
    return ctypes.CDLL(str(runtime_library()))
