"""A kernel compiled for a GPU that is not there, and what its machine code must not have: faults, each by name."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from epifuse.providers.cutedsl import load


class Compiled(NamedTuple):
    """PTX of a kernel and of those behind it, the bytes that each of them spills, and the shared memory of the largest
    launch."""

    ptx: str
    spilled: list[int]
    shared: int


REMARKS = " remarks{ptx}"
"""The option that makes the compiler say on stderr how many bytes each kernel spills."""


def no_locations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With remarks CuTe DSL also looks for the line of Python of each operation. That is two fifths of the time that
    a kernel takes to compile, and no test reads it. Where CuTe DSL has another name for it, the tests are slower."""
    from cutlass.base_dsl import dsl

    monkeypatch.setattr(dsl, "_set_enable_frame_filtering", lambda enable: None, raising=False)


def no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the kernel and the host's code that launches it CuTe DSL writes the function by which tvm-ffi calls them:
    a fifth of the time, for what is only read. Kernels that are stored have it, and tests of what is stored call it.
    Where CuTe DSL has another name for it, the tests are slower."""
    from cutlass.base_dsl import tvm_ffi_builder

    monkeypatch.setattr(tvm_ffi_builder, "attach_ffi_func", lambda *_, **__: None, raising=False)


def disassembled(text: str, folder: Path) -> str:
    """The machine code of a kernel's text, which ptxas orders anew."""
    from epilogue_instructions import disassembled as of_file

    from epifuse.providers.cutedsl.compile import compile_text

    with pytest.MonkeyPatch.context() as monkeypatch:
        no_entry(monkeypatch)
        compile_text(text, f"{load.OPTIONS} --keep-cubin --dump-dir={folder}")
    (cubin,) = folder.glob("*.cubin")
    return of_file(cubin)


def reported(text: str, folder: Path) -> Any:
    """The function that a kernel's text compiles to, with its PTX. The compiler's report is on stderr."""
    from epifuse.providers.cutedsl.compile import compile_text

    with pytest.MonkeyPatch.context() as monkeypatch:
        no_locations(monkeypatch)
        no_entry(monkeypatch)
        return compile_text(text, f"{load.OPTIONS}{REMARKS} --keep-ptx --dump-dir={folder}")


@pytest.fixture
def compiled(tmp_path, capfd):
    """What compiles a kernel, or another text."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

    def compile_(kernel, text=None):
        function = reported(text or kernel.plan.allocation.program.text, tmp_path)
        return Compiled(function.__ptx__, spills(capfd.readouterr().err), shared_memory(str(function.ir_module)))

    return compile_


def spills(report):
    """Bytes that each kernel of the compiler's report spills; it wraps its lines anywhere."""
    return [int(count) for count in re.findall(r"(\d+) bytes spill stores", " ".join(report.split()))]


def shared_memory(host):
    """Bytes of shared memory of the largest launch, as the host's code says: behind its grid and its block."""
    config = r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\].*struct<\(array<3 x i32>, array<3 x i32>, i64,"
    found = [0]
    for function in host.split("llvm.func "):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        stored = {place: value for value, place in re.findall(r"llvm\.store (%\w+), (%\w+) : i64", function)}
        found += [int(constants[stored[place]]) for place in re.findall(config, function)]
    return max(found)


def instructions(ptx, name):
    """Lines of an instruction, without what they are predicated on."""
    return re.findall(rf"^\s*(?:@!?%p\d+ )?({re.escape(name)}.*)$", ptx, re.MULTILINE)


def faults(made, product, room, *, may_spill=False):
    """Registers that spill, products by another instruction than `product`, shared memory beyond `room` bytes."""
    family = ".".join(product.split(".")[:2])
    products = {line.split()[0] for line in instructions(made.ptx, family)}
    found = []
    if not made.spilled or (any(made.spilled) and not may_spill):
        found.append(f"spilled: {made.spilled} bytes")
    if products != {product}:
        found.append(f"products: {sorted(products)}")
    if not 0 < made.shared <= room:
        found.append(f"shared memory: {made.shared} of {room} bytes")
    return found
