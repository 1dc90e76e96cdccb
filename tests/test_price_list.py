"""What a row of CONTRIBUTING's price list says is enough; shown on a copy of the package."""

import os
import re
import subprocess
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from processes import run_python

import epifuse

TESTS = Path(__file__).parent
CONFORMANCE = ("test_vocabulary.py", "test_kinds.py", "test_meanings.py")

ACTIVATION = '''

def price_list_bump(x: Value) -> Value:
    """x / (1 + x^2), an activation that only this test knows."""
    return x / (1.0 + x * x)
'''
BAD_ACTIVATION = ACTIVATION.replace("return x / (1.0 + x * x)", "return (1.0 + exp(50.0 * x)) - exp(50.0 * x)")
PRIMITIVE = '''

@primitive("floating", commutative=False, error="amplified", costly=True, may_fail=False)
def sinh(x: Value) -> Value:
    """The hyperbolic sine, a primitive that only this test knows."""
    return torch.sinh(x)

'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's source that a test may change."""
    source = Path(epifuse.__file__).parent
    return copytree(source, tmp_path / "src" / "epifuse", ignore=ignore_patterns("__pycache__"))


def python(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # a package may be installed there
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return run_python(*arguments, env=environment, cwd=package.parent)


def conformance(package: Path, name: str) -> str:
    """What the conformance suite, run on the copy, says of one row and of the tables."""
    files = [str(TESTS / "conformance" / file) for file in CONFORMANCE]
    select = f"{name} or test_every_primitive_has_a_row"
    options = ("-q", "-rA", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml"), "-k", select)
    return python(package, "-m", "pytest", *options, *files).stdout


def outcomes(report: str, outcome: str, name: str) -> set[str]:
    """Tests with this outcome whose parameters hold `name`."""
    return set(re.findall(rf"^{outcome} \S*::(\w+)\[\S*{name}\S*\]", report, re.MULTILINE))


def insert(path: Path, before: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before), encoding="utf-8")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").rstrip() + "\n" + text, encoding="utf-8")


def test_the_copy_is_what_runs(package: Path) -> None:
    append(package / "fusion" / "activation.py", ACTIVATION)
    shown = python(package, "-c", "import epifuse; print(epifuse.__file__, epifuse.price_list_bump(3.0))")
    assert shown.stdout.strip() == f"{package / '__init__.py'} {0.3}"


def test_an_activation_is_one_function(package: Path) -> None:
    append(package / "fusion" / "activation.py", ACTIVATION)
    report = conformance(package, "price_list_bump")
    wanted = {"test_row", "test_elementwise", "test_float32_agrees_with_float64"}
    assert wanted <= outcomes(report, "PASSED", "price_list_bump"), report
    assert not outcomes(report, "FAILED", ""), report
    page = python(package, "-m", "epifuse", "docs").stdout
    assert "price_list_bump" in page
    assert "an activation that only this test knows" in page


def test_a_bad_activation_is_found(package: Path) -> None:
    """Else the test above would show nothing: this formula loses every digit in float32."""
    append(package / "fusion" / "activation.py", BAD_ACTIVATION)
    assert outcomes(conformance(package, "price_list_bump"), "FAILED", "price_list_bump")


def test_a_primitive_is_one_row_plus_one_a_provider(package: Path) -> None:
    marker = "# --- rounding ---"
    insert(package / "fusion" / "primitives.py", marker, PRIMITIVE.lstrip())
    report = conformance(package, "sinh")
    assert "test_every_primitive_has_a_row" in report
    missing = re.findall(r"neither a row in providers/(\w+)/primitives\.py nor refused by name: \['sinh'\]", report)
    # A set, since pytest repeats the whole message in its summary where the environment names a CI.
    assert set(missing) == {"cpu"}, report  # and for GPUs it is refused by name
    assert re.search("^FAILED .*test_every_primitive_has_a_row_of_costs", report, re.MULTILINE), report

    rows = {"cpu/primitives.py": "torch.sinh", "cutedsl/primitives.py": "each", "cutedsl/costs.py": "_SOME"}
    for file, row in rows.items():
        table = package / "providers" / file
        text = table.read_text(encoding="utf-8")
        head = re.search(r"^PRIMITIVE\w*: .*= \{\n", text, re.MULTILINE)
        assert head is not None
        table.write_text(text.replace(head[0], f'{head[0]}    "sinh": {row},\n'), encoding="utf-8")
    report = conformance(package, "sinh")
    assert {"test_row", "test_elementwise"} <= outcomes(report, "PASSED", "sinh"), report
    assert "FAILED" not in report
    assert "sinh" in python(package, "-m", "epifuse", "docs").stdout


ACCESS = '''
"""Row vectors that every thread reads from memory where its values need them: a way that only this test knows."""

import cutlass

from epifuse.providers.cutedsl import device_math as dm
from epifuse.providers.cutedsl.kernels.accesses.lifecycle import Loads


class Unshared(Loads):
    def visit(self, i, like, spot, tile, team):
        vector, shape = team.given.tensors[i], team.given.shape
        values = [vector[0, cutlass.min(column, shape[1] - 1), tile.place.l] for column in spot.columns]
        return dm.fragment(values, team.shape, vector.element_type).to(self.scene.held(i))
'''
WAY = """    "unshared": Way(lambda use: not use.leaves and use.axes == frozenset("n"), "by every thread, from memory"),
"""
PROGRAM = """
import sys
import torch
import epifuse as ef


def bias_gelu(accum, bias):
    return ef.gelu(accum + bias)


device = sys.argv[1]
a, b, bias = (torch.randn(*shape, device=device).bfloat16() for shape in ((300, 256), (256, 520), (520,)))
args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(bias_gelu, bias=bias, D=torch.empty_like(a @ b)))
kernel = ef.get_kernels(args, cc=90)[0]
print(dict(kernel.plan.allocation.transports)["bias"])
kernel.compile(args)
if device == "cuda":
    kernel.run(args)
    expected = torch.nn.functional.gelu((a.double() @ b.double()) + bias.double())
    print((args.epilogue.tensors["D"].double() - expected).abs().max().item() < 0.25)
print("compiled")
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_access_is_one_class_and_its_rows(package: Path, device: str) -> None:
    pytest.importorskip("cutlass")
    cutedsl = package / "providers" / "cutedsl"
    (cutedsl / "kernels" / "accesses" / "unshared.py").write_text(ACCESS, encoding="utf-8")
    insert(cutedsl / "ways.py", '    "row": Way(', WAY)
    registry = cutedsl / "kernels" / "accesses" / "__init__.py"
    insert(registry, "LOADS: Mapping", "from epifuse.providers.cutedsl.kernels.accesses.unshared import Unshared\n\n")
    insert(registry, '    "row": Vectors,\n', '    "unshared": Unshared,\n')
    program = package.parent / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ran = python(package, str(program), device)
    said = ["by every thread, from memory", *(["True"] if device == "cuda" else []), "compiled"]
    assert ran.stdout.splitlines() == said, ran.stderr
