"""The system's C++ compiler: found once, called once a source, its libraries loaded beside PyTorch's own."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")


@cache
def compiler() -> str | None:
    """Path of g++ or clang++, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


_TRIAL = """
typedef float v __attribute__((vector_size(32)));
extern "C" v Sleef_expf8_u10(v);
extern "C" void epilogue(float* x) { *(v*)x = Sleef_expf8_u10(*(v*)x); }
"""


@cache
def missing() -> str | None:
    """What keeps us from compiling here, found out by compiling a few lines once; None where it works."""
    if compiler() is None:
        return "it needs g++ or clang++ on the PATH"
    try:
        build(_TRIAL)
    except (subprocess.CalledProcessError, OSError, AttributeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"{compiler()} cannot build for PyTorch's libraries: {str(detail)[:200]}"
    return None


@cache
def _folder() -> str:
    # Removed when the process ends, without the warning a TemporaryDirectory gives; a library stays mapped.
    folder = tempfile.mkdtemp(prefix="epifuse-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def build(source: str) -> Callable[..., Any]:
    """The function `epilogue` of `source`. The compiler takes about half a second."""
    path = compiler()
    assert path is not None, "planning has seen a compiler"
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    code, library = Path(_folder(), f"{name}.cpp"), Path(_folder(), f"{name}.so")
    code.write_text(source)
    libraries = Path(torch.__file__).parent / "lib"
    command = [path, *_FLAGS, str(code), "-o", str(library), f"-L{libraries}", "-l:libtorch_cpu.so"]
    subprocess.run(
        [*command, f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed"], check=True, capture_output=True, text=True
    )
    function = ctypes.CDLL(str(library)).epilogue
    function.restype = None
    return function
