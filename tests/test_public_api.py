"""The names people hold: documented, listed, pinned, and known to editors that run nothing."""

import ast
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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
import torch
import epifuse as ef

{names}
ef.sum()  # E: Missing positional argument "x"
ef.no_such_name  # E: Module has no attribute "no_such_name"
ef.torch  # E: Module has no attribute "torch"

def epilogue(accum: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    D: torch.Tensor = ef.gelu(accum + bias)
    return D

a = torch.ones(2, 2)
y: torch.Tensor = ef.linear(a, a, epilogue=epilogue, bias=torch.ones(2))
args = ef.GemmArguments(a, a, epilogue=ef.EpilogueArguments.partial(epilogue, {{"bias": torch.ones(2)}}))
explanation = ef.explain(args, cc=90)
kernels: list[ef.Kernel] = ef.get_kernels(args)
name: str = kernels[0].metadata.kernel_name
plan: ef.Plan = explanation.plan  # E: Incompatible types in assignment (expression has type "Plan | None"
ef.get_kernels(args, 90)  # E: Argument 2 to "get_kernels" has incompatible type "int"; expected "Callable
failed: int = ef.precompile(args).failed  # E: Incompatible types in assignment (expression has type "tuple[tuple[
"""
"""A program of a user, with every public name in it, and what a strict type checker says of it."""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program, beside an environment with the package installed: its `py.typed` alone makes it count as typed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    installed = Path(torch.__file__).parents[1]
    (packages / "others.pth").write_text(f"{INIT.parents[1]}\n{installed}\n", encoding="utf-8")
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET.format(names="\n".join(f"ef.{name}" for name in PUBLIC)), encoding="utf-8")
    return file


@pytest.mark.slow
def test_pyright_agrees(program: Path) -> None:
    """It lets a star import under TYPE_CHECKING pass on what a module imports, so `ef.torch` is no error for it."""
    settings = {"venvPath": ".", "venv": "venv", "typeCheckingMode": "strict", "reportUnusedExpression": False}
    (program.parent / "pyrightconfig.json").write_text(json.dumps({**settings, "include": [program.name]}))
    run = [sys.executable, "-m", "pyright", "--outputjson"]
    done = subprocess.run(run, cwd=program.parent, capture_output=True, text=True)
    said = json.loads(done.stdout)["generalDiagnostics"]
    lines = program.read_text(encoding="utf-8").splitlines()
    wanted = {i for i, line in enumerate(lines) if "# E: " in line and not line.startswith("ef.torch")}
    assert {one["range"]["start"]["line"] for one in said if one["severity"] == "error"} == wanted, done.stdout


@pytest.mark.slow
def test_mypy_agrees(program: Path, tmp_path: Path) -> None:
    """PyTorch is left out."""
    file, config = program, tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n[mypy-torch.*,numpy.*,cutlass.*]\nfollow_imports = skip\n")
    options = ["--config-file", str(config), "--cache-dir", os.devnull, "--no-warn-return-any"]
    options += ["--python-executable", str(tmp_path / "venv" / "bin" / "python")]
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    run = [sys.executable, "-m", "mypy", *options, str(file)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=alone)
    said = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    wanted = [line.partition("# E: ")[2] for line in SNIPPET.splitlines() if "# E: " in line]
    assert len(said) == len(wanted), done.stdout + done.stderr
    assert [one for one, start in zip(said, wanted, strict=True) if not one.startswith(start)] == []


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
        (ef.evt.fusion, "LinCombBias", r"did you mean epifuse.evt.fusion.LinCombPerRowBias"),
        (ef, "gelo", r"did you mean epifuse\.gelu"),
        (ef, "quaternion", r"see dir\(epifuse\)"),
    ],
)
def test_a_name_that_is_not_there_says_what_to_write(module: types.ModuleType, name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=rf"epifuse\S* has no '{name}'\n  hint: .*{hint}"):
        getattr(module, name)
    assert not hasattr(module, name)


def test_documented_modules_need_no_import_of_their_own() -> None:
    """README calls `epifuse.debug.to_svg`; what another test imported would be an attribute anyway."""
    assert ef.__getattr__("debug").to_svg.__module__ == "epifuse.tools.debug"


@pytest.mark.parametrize("alias", ef._ALIASES)
def test_type_checkers_find_the_names_of_modules(alias: str) -> None:
    """They run no finder: a stub beside the package says what is found there."""
    stub = INIT.parent / f"{alias.split('.')[1]}.pyi"
    assert stub.read_text(encoding="utf-8") == f"from {ef._ALIASES[alias]} import *\n"
