"""The names people hold: documented, listed, pinned, and known to editors that run nothing."""

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import epifuse as ef
from epifuse.fusion import VOCABULARY

INIT = Path(ef.__file__)
PUBLIC = sorted(ef.__all__)
PINNED = (
    "gemm",
    "linear",
    "get_kernels",
    "precompile",
    "explain",
    "epilogue",
    "reference",
    "GemmArguments",
    "EpilogueArguments",
)


def members(cls: type) -> list[str]:
    """Public methods and properties that the class defines itself."""
    kinds = (types.FunctionType, property, classmethod, staticmethod)
    return [name for name, value in vars(cls).items() if not name.startswith("_") and isinstance(value, kinds)]


def documented(value: object) -> bool:
    text = inspect.getdoc(value) or ""
    # A dataclass without a docstring gets its own signature for one.
    return bool(text.strip()) and not text.startswith(f"{getattr(value, '__name__', ' ')}(")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(ef, name)
    assert documented(value)
    if inspect.isclass(value):
        assert [member for member in members(value) if not documented(getattr(value, member))] == []


def test_an_undocumented_name_would_be_found() -> None:
    @dataclasses.dataclass
    class Bare:
        x: int

        def method(self) -> None: ...

    assert not documented(Bare)
    assert members(Bare) == ["method"]
    assert not documented(Bare.method)


def test_all_is_what_the_package_offers() -> None:
    assert len(set(PUBLIC)) == len(ef.__all__)
    assert set(VOCABULARY) <= set(PUBLIC)
    modules = {name for name, value in vars(ef).items() if inspect.ismodule(value)}
    offered = {name for name in dir(ef) if not name.startswith("_")} - modules - {"TYPE_CHECKING"}
    assert offered == {name for name in PUBLIC if not inspect.ismodule(getattr(ef, name))}


def test_the_vocabulary_is_reached_by_name() -> None:
    assert [name for name, entry in VOCABULARY.items() if getattr(ef, name) is not entry.function] == []


def test_signatures_are_pinned(golden: Callable[[str], None]) -> None:
    """One parameter a line: a change shows, and is asked for by --update-golden."""
    lines = []
    for name in PINNED:
        lines.append(name)
        parameters = inspect.signature(getattr(ef, name)).parameters.values()
        lines += [f"    {parameter.kind.description:<21} {parameter}" for parameter in parameters]
    golden("\n".join(lines))


def test_names_are_pinned(golden: Callable[[str], None]) -> None:
    golden("\n".join(PUBLIC))


# --- what a type checker sees ------------------------------------------------------------------------------------


def star_imports() -> set[str]:
    """The modules __init__.py imports everything from, for type checkers."""
    [block] = [node for node in ast.parse(INIT.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    stars = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    return {str(node.module) for node in stars}


def test_a_type_checker_finds_the_whole_vocabulary() -> None:
    """A star brings every public function of these modules, so that a new one is known with no list to extend."""
    assert star_imports() == {entry.function.__module__ for entry in VOCABULARY.values()}


SNIPPET = """
import epifuse as ef

{names}
ef.sum()  # E: Missing positional argument "x"
ef.no_such_name  # E: Module has no attribute "no_such_name"
ef.torch  # E: Module has no attribute "torch"
"""


@pytest.mark.slow
def test_mypy_agrees(tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET.format(names="\n".join(f"ef.{name}" for name in PUBLIC)), encoding="utf-8")
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {INIT.parents[1]}\nfollow_imports = silent\n", encoding="utf-8")
    options = ["--strict", "--config-file", str(config), "--cache-dir", os.devnull]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, str(file)], capture_output=True, text=True)
    said = [line.partition("error: ")[2] for line in done.stdout.splitlines() if line.startswith(str(file))]
    wanted = [line.partition("# E: ")[2] for line in SNIPPET.splitlines() if "# E: " in line]
    assert [line.partition("  [")[0].partition(" in call")[0] for line in said] == wanted, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (ef, "get_operators", "write epifuse.get_kernels"),
        (ef, "DenseGemmEFC", "write epifuse.DenseGemm"),
        (ef.thread, "LinearCombinationGelu", "write epifuse.thread.LinearCombinationGELU"),
        (ef.thread, "LinearCombinationPlanarComplex", "it needs two accumulators"),
        (ef.thread, "LinearCombinationTanh", r"LinearCombinationGeneric\(activation=epifuse.tanh\)"),
        (ef.evt, "Sm90ScalarReduction", "write epifuse.evt.ScalarReduction"),
        (ef.evt, "Sm90TreeVisitor", "write epifuse.evt.EVT"),
        (ef.evt.functional, "RELU", "write epifuse.evt.functional.relu"),
        (ef.evt.fusion, "LinearCombinationGroupedWgrad", "there is none yet"),
        (ef.evt.fusion, "LinCombBias", r"docs/cutlass_names.md"),
    ],
)
def test_a_name_that_is_not_there_says_what_to_write(module: types.ModuleType, name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=rf"epifuse\S* has no '{name}'\n  hint: .*{hint}"):
        getattr(module, name)
    assert not hasattr(module, name)


def test_a_module_of_the_documentation_needs_no_import_of_its_own() -> None:
    """README calls `epifuse.debug.to_svg`; what another test imported would be an attribute anyway."""
    assert ef.__getattr__("debug").to_svg.__module__ == "epifuse.tools.debug"
