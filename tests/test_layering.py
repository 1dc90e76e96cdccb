"""The arrow of the design, checked: a module imports only from the layers before its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "epifuse"

# The rooms: a room may import from those above it. Within one, no module imports in a circle.
LAYERS = (
    "base",
    "ir",
    "fusion",
    "frontend",
    "request",
    "passes",
    "plan",
    "providers",
    "runtime",
    "kernel",
    "pytorch",
    "api",
    "tools",
    "forms",
    "__init__ __main__",  # the package itself: may import all, so nothing else may import it
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row.split()}

# What only one folder may import.
RESERVED = {"ast": "frontend", "cutlass": "providers/cutedsl"}

MAX_LINES, MAX_KERNEL_LINES = 400, 900


def layer(path: Path, root: Path) -> str:
    """ir/node.py -> ir; errors.py -> errors; __init__.py -> __init__."""
    return path.relative_to(root).with_suffix("").parts[0]


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Each (line, absolute name) that a file imports, wherever in the file it stands."""
    package = ("epifuse", *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                base = ".".join([*base, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{name.name}") for name in names)
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield node.lineno, name


def complaint(own: str, folder: str, imported: str) -> str | None:
    """Why a module of layer `own` in `folder` may not import `imported`, if it may not."""
    top, _, rest = imported.partition(".")
    if home := RESERVED.get(top):
        inside = folder == home or folder.startswith(home + "/")
        return None if inside else f"only {home} may import {top}"
    if top != "epifuse":
        return None
    # `from epifuse import gemm` and `import epifuse` reach for the package itself.
    theirs = rest.split(".")[0] if rest.split(".")[0] in LEVEL else "__init__"
    return f"{own} may not import {theirs}" if LEVEL[theirs] > LEVEL[own] else None


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        own = layer(path, root)
        if own not in LEVEL:
            found.append(f"{where}: {own} is in no layer")
            continue
        for line, imported in imports(path, root):
            if why := complaint(own, where.parent.as_posix(), imported):
                found.append(f"{where}:{line}: {why}")
    return found


def module(path: Path, root: Path) -> str:
    """ir/node.py -> epifuse.ir.node; ir/__init__.py -> epifuse.ir."""
    parts = ("epifuse", *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle(root: Path) -> list[str]:
    """Modules that import each other, wherever in the file, and those that need them."""
    paths = {module(path, root): path for path in sorted(root.rglob("*.py"))}
    needed = {}
    for name, path in paths.items():
        found = {imported for _, imported in imports(path, root)}
        # `from x import y` is an import of the module x, unless y is one.
        needed[name] = {each if each in paths else each.rpartition(".")[0] for each in found} & paths.keys() - {name}
    while leaves := [name for name, found in needed.items() if not found]:
        needed = {name: found - set(leaves) for name, found in needed.items() if found}
    return list(needed)


def too_long(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        limit = MAX_KERNEL_LINES if path.parent.name == "kernels" else MAX_LINES
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            found.append(f"{path.relative_to(root)}: {lines} lines, the limit is {limit}")
    return found


def plant(root: Path, file: str, text: str) -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return root


def test_imports_follow_the_arrow() -> None:
    assert list(SRC.rglob("*.py")), f"no source under {SRC}"
    assert violations(SRC) == []


def test_no_modules_import_each_other() -> None:
    assert circle(SRC) == []


@pytest.mark.parametrize("text", ["from .b import x", "def f():\n    from epifuse.ir import b", "from . import b"])
def test_a_circle_is_found(tmp_path: Path, text: str) -> None:
    plant(tmp_path, "ir/__init__.py", "")
    plant(tmp_path, "ir/b.py", "import epifuse.ir.c")
    plant(tmp_path, "ir/c.py", "from epifuse.ir.a import y")
    assert circle(plant(tmp_path, "ir/a.py", "x = 1")) == []
    assert circle(plant(tmp_path, "ir/a.py", text)) == ["epifuse.ir.a", "epifuse.ir.b", "epifuse.ir.c"]


def test_files_are_short() -> None:
    assert too_long(SRC) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("ir/node.py", "from epifuse.plan import select", "1: ir may not import plan"),
        ("ir/node.py", "import epifuse.plan.select as s", "1: ir may not import plan"),
        ("ir/node.py", "from ..plan import select", "1: ir may not import plan"),
        ("ir/node.py", "from .. import base, plan", "1: ir may not import plan"),
        ("ir/__init__.py", "from ..plan import select", "1: ir may not import plan"),
        ("base/config.py", "from ..ir import node", "1: base may not import ir"),
        ("plan/select.py", "from ..providers.cpu import x", "1: plan may not import providers"),
        ("ir/node.py", "def f():\n    from ..api import g", "2: ir may not import api"),
        ("ir/node.py", "if TYPE_CHECKING:\n    from ..api import g", "2: ir may not import api"),
        ("ir/node.py", "importlib.import_module('epifuse.api')", "1: ir may not import api"),
        ("api.py", "import epifuse", "1: api may not import __init__"),
        ("api.py", "from epifuse import gemm", "1: api may not import __init__"),
        ("passes/prune.py", "import ast", "1: only frontend may import ast"),
        (
            "providers/cpu/run.py",
            "import cutlass.cute as cute",
            "1: only providers/cutedsl may import cutlass",
        ),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, text: str, expected: str) -> None:
    assert violations(plant(tmp_path, file, text)) == [f"{file}:{expected}"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plan/select.py", "from ..ir import node\nfrom . import spec\nimport epifuse.base.errors"),
        ("runtime/arguments.py", "from ..request.problem import Problem\nfrom epifuse.base import errors"),
        ("frontend/python_function.py", "import ast, torch"),
        ("providers/cutedsl/kernels/sm90_gemm.py", "from cutlass import cute"),
        ("__init__.py", "from .api import gemm\nfrom epifuse import errors"),
        ("__main__.py", "from epifuse.cli import main"),
    ],
)
def test_a_downward_import_is_not(tmp_path: Path, file: str, text: str) -> None:
    assert violations(plant(tmp_path, file, text)) == []


def test_a_module_in_no_layer_is_found(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, "helpers.py", "")) == ["helpers.py: helpers is in no layer"]


def test_a_long_file_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "providers/cutedsl/kernels/fits.py", "x = 1\n" * MAX_KERNEL_LINES)
    plant(tmp_path, "ir/long.py", "x = 1\n" * (MAX_LINES + 1))
    assert too_long(tmp_path) == ["ir/long.py: 401 lines, the limit is 400"]
