"""The system's C++ compiler. It is called once for each source. Its libraries are kept in the store, and are loaded
beside PyTorch's own."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from epifuse.base import store
from epifuse.base.loaded import is_loaded as is_in_memory
from epifuse.base.loaded import loaded

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_CPU = Path("/proc/cpuinfo")
_LIBRARY = ".so"

Command = tuple[str, ...]
"""The path of a compiler, and arguments that go with it."""

_LOOPS = "loops of the CPU"
_failures: dict[Command, str] = {}  # the messages of compilers that failed: shown once, then planning avoids the loop


class BuildError(Exception):
    """The compiler is missing, or failed with this message. Another kernel runs instead, so no user sees this error."""


def missing() -> str | None:
    """Why nothing can be compiled here, or None. It starts no compiler, so a first build may still fail."""
    if sys.platform != "linux":
        return f"it is built for Linux, and this is {sys.platform}"
    try:
        return _failures.get(_compiler())
    except BuildError as error:
        return str(error)


def build(source: str) -> Callable[..., Any]:
    """The function `epilogue` of `source`. If the store does not have it, the compiler takes about half a second.

    Raises `BuildError`, and warns the first time, if the compiler fails or its library cannot be loaded.
    """
    return loaded(_LOOPS, source, lambda: _load(source))


def _load(source: str) -> Callable[..., Any]:
    command = _compiler()
    try:
        function = ctypes.CDLL(str(stored(source))).epilogue
    except (BuildError, OSError, AttributeError) as error:
        _warn_once(command, str(error))
        raise BuildError(_failures[command]) from error
    function.restype = None
    return function


def is_loaded(source: str) -> bool:
    """Whether `build` would answer at once."""
    return is_in_memory(_LOOPS, source)


def is_stored(source: str) -> bool:
    """Whether `build` would find the library of `source` in the store. False if the compiler does not run."""
    with suppress(BuildError):
        return store.find(_key(_compiler(), source), _LIBRARY) is not None
    return False


def stored(source: str) -> Path:
    """The library of `source`. It is built if the store does not have it. Raises `BuildError`."""
    command = _compiler()
    return store.fetch(_key(command, source), _LIBRARY, partial(_compile, command, source), "the kernel cpu_native")


def _compiler() -> Command:
    return _found(os.environ.get("CXX"), os.environ.get("PATH"))


@cache  # each planning asks, and a search of a long PATH takes time
def _found(chosen: str | None, path: str | None) -> Command:
    """The command in CXX, arguments included, or g++ or clang++ if CXX is not set. Raises `BuildError`."""
    try:
        candidates = [shlex.split(chosen)] if chosen else [["g++"], ["clang++"]]
    except ValueError as error:
        raise BuildError(f"CXX={chosen!r} is not a command: {error}") from error
    for name, *arguments in filter(None, candidates):
        if (program := shutil.which(name, path=path)) is not None:
            return program, *arguments
    if chosen:
        raise BuildError(f"CXX={chosen!r} names no program on the PATH")
    raise BuildError("it needs g++ or clang++ on the PATH")


def _key(command: Command, source: str) -> str:
    return store.key_of("cpu loop", source, *command, *_arguments(), *_origin(command))


@cache
def _origin(command: Command) -> tuple[str, ...]:
    """What else decides the code: the compiler's version, the instructions of this CPU (-march=native), and PyTorch."""
    try:
        with _CPU.open(encoding="utf-8") as lines:
            instructions = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration) as error:
        raise BuildError(f"{_CPU} does not say which instructions this CPU has") from error
    return _run([*command, "--version"], ""), instructions, torch.__version__, torch.version.git_version


def _arguments() -> Command:
    libraries = Path(torch.__file__).parent / "lib"
    return *_FLAGS, f"-L{libraries}", f"-Wl,-rpath,{libraries}"


def _compile(command: Command, source: str, library: Path) -> None:
    linked = ("-l:libtorch_cpu.so", "-Wl,--no-as-needed")
    _run([*command, *_arguments(), "-x", "c++", "-", "-x", "none", "-o", str(library), *linked], source)


def _run(command: list[str], text: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", input=text)
    except subprocess.CalledProcessError as error:
        raise BuildError(error.stderr.strip()[:400] or str(error)) from error
    except OSError as error:
        raise BuildError(str(error)) from error
    return done.stdout


def _warn_once(command: Command, why: str) -> None:
    failure = f"{shlex.join(command)} cannot build for PyTorch's libraries: {why}"
    if _failures.setdefault(command, failure) is failure:
        warnings.warn(
            f"{failure}\nEpilogues run by PyTorch's own operations instead, which is slower. "
            "Set CXX to a C++ compiler that works, or install g++",
            stacklevel=2,
        )
