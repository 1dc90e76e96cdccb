"""A Hopper kernel as text and as a file: written and read back, compiled, stored, loaded by other processes."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import test_random, test_vocabulary
from gpu.harness import Machine
from hopper import arguments

import epifuse as ef
from epifuse.base import store
from epifuse.base.cache import forget
from epifuse.base.errors import UnsupportedError
from epifuse.plan import Plan
from epifuse.providers.cutedsl import load
from epifuse.providers.cutedsl.kernel_text import KernelSource, read, written
from epifuse.runtime.arguments import GemmArguments
from tests import test_sm90_compile, test_sm90_designs, test_sm90_stores
from tests.test_sm90_compile import softmax

pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")

SITE = Path(sysconfig.get_paths()["purelib"])
SRC = Path(ef.__file__).parents[1]


def sources(plan: Plan) -> Iterator[KernelSource]:
    """What is compiled for a plan: one kernel, or one a launch."""
    if plan.allocation.launches:
        for part in plan.allocation.launches:
            yield from sources(part)
        return
    yield plan.allocation.program.source


def text_of(args: GemmArguments, number: int = 0) -> str:
    return written(next(sources(ef.get_kernels(args, cc=90)[number].plan)))


# --- text ------------------------------------------------------------------------------------------------------------


def handed(name: str) -> list[GemmArguments]:
    if name == "written for tests":
        return [
            *test_sm90_compile.CASES.values(),
            *test_sm90_designs.CROWDED.values(),
            *test_sm90_stores.CASES.values(),
        ]
    if name == "vocabulary":
        return [vocabulary(number) for number in range(0, len(test_vocabulary.KERNELS), 6)]
    cases = [test_random.taken(turn) for turn in range(6)]
    return [test_random.arguments(made, test_random.check.draw(made.case), {}, "cpu") for made in cases]


def vocabulary(number: int) -> GemmArguments:
    rows, part = test_vocabulary.KERNELS[number]
    given = test_vocabulary.data(Machine("cpu"), number, rows)
    operands = {name: given[name] for name in test_vocabulary.operands_of(rows, part)}
    l, m, n, k = test_vocabulary.L, test_vocabulary.M, test_vocabulary.N, test_vocabulary.K
    a, b = torch.empty(l, m, k, dtype=torch.float16), torch.empty(l, k, n, dtype=torch.float16)
    epilogue = ef.EpilogueArguments.partial(test_vocabulary.source_of(rows, part), operands)
    return GemmArguments(a, b, epilogue=epilogue)


@pytest.mark.parametrize("name", ["written for tests", "vocabulary", "random"])
def test_a_text_is_read_back_as_it_was_written(name: str) -> None:
    texts = set()
    for args in handed(name):
        for kernel in ef.get_kernels(args, cc=90, limit=2):
            for source in sources(kernel.plan):
                text = written(source)
                assert written(read(text)) == text
                assert "\n" not in text
                texts.add(text)
    assert len(texts) > 5


def with_constant(number: float) -> KernelSource:
    """A kernel that adds a constant, which is this one whatever the language makes of it."""
    args = arguments(lambda accum: accum * 1.5)
    source = next(sources(ef.get_kernels(args, cc=90)[0].plan))
    text = written(source).replace(json.dumps({"float": (1.5).hex()}, separators=(",", ":")), "NUMBER")
    assert "NUMBER" in text
    return read(text.replace("NUMBER", json.dumps({"float": number.hex()})))


@pytest.mark.parametrize("number", [0.1, 1e-45, 3.4e38, -0.0, float("inf"), float("-inf"), float("nan")])
def test_numbers_are_exact(number: float) -> None:
    source = with_constant(number)
    again = read(written(source))
    values = [[repr(node.attr) for node in one.program.graph.nodes if node.op == "const"] for one in (source, again)]
    assert values == [[repr(number)]] * 2


def test_names_extents_and_raster_are_not_in_a_text() -> None:
    def one(accum: Any, C: Any) -> Any:
        D = accum + C
        return D

    def other(accum: Any, residual: Any) -> Any:
        D = accum + residual
        return D

    texts = {
        text_of(arguments(one, C=torch.empty(512, 512))),
        text_of(arguments(other, residual=torch.empty(512, 512))),
        text_of(arguments(one, m=500, C=torch.empty(500, 512))),
    }
    assert len(texts) == 1


def test_what_differs_in_code_differs_in_its_text() -> None:
    half = torch.empty(512, 512, dtype=torch.bfloat16)
    plain = lambda accum, C: accum + C  # noqa: E731 - an epilogue is often written so
    different = [
        arguments(plain, C=torch.empty(512, 512)),
        arguments(plain, C=half),
        arguments(plain, C=half.t()),
        arguments(plain, C=half, b_transposed=False),
        arguments(plain, C=half, dtype=torch.float16),
        arguments(plain, C=half[0]),
        arguments(lambda accum, C: accum - C, C=half),
        arguments(lambda accum, C: C - accum, C=half),
        arguments(lambda accum, C: accum + C * 2.0, C=half),
        arguments(lambda accum, C: accum + C * 3.0, C=half),
    ]
    assert len(set(map(text_of, different))) == len(different)


COMPILED = {
    "gelu": test_sm90_compile.CASES["bias gelu"],
    "softmax": arguments(softmax),
    "sums": arguments(test_sm90_compile.column_sums, bias=torch.empty(512)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_read_back_compiles_to_the_same_code(name: str, tmp_path: Path) -> None:
    from epifuse.providers.cutedsl.compile import _compile

    source = next(sources(ef.get_kernels(COMPILED[name], cc=90)[0].plan))
    options = f"{load.OPTIONS} --keep-ptx --dump-dir={tmp_path}"
    direct, again = (_compile(one, options).__ptx__ for one in (source, read(written(source))))
    assert instructions(direct) == instructions(again)


def instructions(ptx: str) -> str:
    """Without comments, and without the name of the kernel, which holds the address of a Python object."""
    return re.sub(r"//.*", "", re.sub(r"kernel_[\w$]+", "kernel", ptx))


# --- files -----------------------------------------------------------------------------------------------------------

PROBE = """
import sys, time, torch, epifuse
from epifuse.providers.cutedsl import load
begun = time.perf_counter()
function = load.function(sys.stdin.read())
took = time.perf_counter() - begun
assert "cutlass" not in sys.modules
try:
    function(1)
except TypeError as error:
    print(error)
print(load.runtime_library(), file=sys.stderr)
print(f"{1e3 * took:.0f} ms to load", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def text() -> str:
    """Of a kernel that is in the store."""
    text = text_of(COMPILED["softmax"])
    assert load.stored(text).suffix == ".so"
    return text


def in_a_new_process(program: str, text: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(
        command, input=text, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_another_process_loads_a_kernel_without_the_compiler(text: str) -> None:
    done = in_a_new_process(PROBE, text, EPIFUSE_NO_COMPILE="1")
    assert done.returncode == 0, done.stderr
    assert "Expects 9 parameters" in done.stdout
    assert "workspaces: Tuple[]" in done.stdout


def test_a_stored_kernel_is_found_when_the_environment_moves(text: str, tmp_path: Path) -> None:
    """No path of the installation is in its key or in the file."""
    (tmp_path / "moved").symlink_to(SITE)
    packages = tmp_path / "moved"
    path = os.pathsep.join(map(str, (SRC, packages / "nvidia_cutlass_dsl" / "dsl_packages", packages)))
    done = in_a_new_process(PROBE, text, "-S", PYTHONPATH=path, EPIFUSE_NO_COMPILE="1")
    assert done.returncode == 0, done.stderr
    assert "Expects 9 parameters" in done.stdout
    assert f"{packages}/" in done.stderr
    content = load.stored(text).read_bytes()
    assert str(SITE).encode() not in content
    assert str(SRC).encode() not in content


def test_a_stored_kernel_checks_its_arguments(text: str) -> None:
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        load.function(text)(torch.empty(2, 2), torch.empty(2, 2), [], [], [torch.empty(2, 2)], [], 1, 1, 1)


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store without files, and nothing loaded."""
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, cache_dir=tmp_path / "store"))
    forget()
    return tmp_path / "store"


def test_without_a_linker_objects_are_stored_with_one_note(
    text: str, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_linker", lambda: None)
    load._warn_of_objects.cache_clear()
    path = load.stored(text)
    assert path.suffix == ".o"
    with pytest.warns(UserWarning, match="without a C compiler"):
        load.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function = load.load(load.stored(text))
    with pytest.raises(TypeError, match="Expects 9 parameters"):
        function(1)


def test_a_linker_that_fails_is_no_linker(
    text: str, empty_store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no libc >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(load, "_linker", lambda: str(broken))
    with pytest.warns(UserWarning, match="no libc"):
        path = load.stored(text)
    assert path.suffix == ".o"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load.stored(text) == path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts whose kernels are looked for on disk from here on, which takes a while and fails for "wrong"."""
    met: list[str] = []

    def slowly(text: str, _: str) -> Path:
        met.append(text)
        time.sleep(0.1)
        if text == "wrong":
            raise OSError("no kernel")
        return Path(text)

    monkeypatch.setattr(load, "stored", slowly)
    monkeypatch.setattr(load, "load", lambda path: path)
    yield met
    forget()


def test_one_thread_loads_a_kernel_for_all(asked: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(load.function, ["text"] * 8))
    assert found == [Path("text")] * 8
    assert asked == ["text"]
    assert load.is_loaded("text")


def test_what_failed_is_tried_again(asked: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="no kernel"):
            load.function("wrong")
    assert asked == ["wrong", "wrong"]
    assert not load.is_loaded("wrong")


def test_where_nothing_may_be_compiled_the_kernel_is_named(empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CONFIG", replace(store.CONFIG, no_compile=True))
    with pytest.raises(UnsupportedError, match="sm90_gemm_64x64_pingpong_2x1 is not compiled"):
        load.function(text_of(COMPILED["gelu"]), "sm90_gemm_64x64_pingpong_2x1")


def test_another_compiler_version_does_not_find_the_kernel(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load.find(text) is not None
    monkeypatch.setattr(load, "compiler", lambda: ("nvidia-cutlass-dsl 0",))
    assert load.find(text) is None


def test_a_variable_of_the_compiler_is_part_of_the_key(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert load.find(text) is None
