"""What is distributed: an sdist that builds, and a wheel that works in an environment of its own."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import epifuse as ef
from tests.test_docs import ROOT

OUTSIDE = ("pyproject.toml", "README.md", "LICENSE")
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


def build(what: str, source: Path, into: Path) -> Path:
    """Without isolation: nothing is downloaded."""
    run(source, sys.executable, "-c", BUILD, what, str(into))
    (made,) = into.iterdir()
    return made


def run(folder: Path, *command: str) -> str:
    """In an environment without the source on its path."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


USED = """
import importlib.metadata
import runpy
import sys
import torch
import epifuse as ef

print(ef.__file__, ef.gemm(torch.ones(2, 3), torch.ones(3, 2), epilogue=ef.relu).sum().item())
print([point.value for point in importlib.metadata.distribution("epifuse").entry_points])
sys.argv = ["epifuse", "version"]
runpy.run_module("epifuse", run_name="__main__")
"""
"""Imports it, computes, and is `python -m epifuse` in the end."""


@pytest.mark.slow
def test_the_sdist_builds_a_wheel_that_works_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src" / "epifuse", source / "src" / "epifuse", ignore=shutil.ignore_patterns("__pycache__"))
    for name in OUTSIDE:
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("build_sdist", source, into := tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build("build_wheel", tmp_path / f"epifuse-{ef.__version__}", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith("epifuse-")}
    sources = (path for suffix in ("py", "pyi") for path in (ROOT / "src" / "epifuse").rglob(f"*.{suffix}"))
    files = {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert packed == files | {"epifuse/py.typed"}
    assert [path.suffix for path in into.iterdir()] == [".gz"]

    environment = tmp_path / "venv"
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", str(environment))
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]))  # PyTorch, as it is installed here
    python = str(environment / "bin" / "python")
    quiet = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run(tmp_path, sys.executable, "-m", "pip", "--python", python, "install", *quiet, str(wheel))
    (tmp_path / "program.py").write_text(USED)
    where, points, version = run(tmp_path, python, "program.py").splitlines()
    assert where == f"{packages / 'epifuse' / '__init__.py'} 12.0"
    assert points == "['epifuse.__main__:main', 'epifuse.pytorch.compiling:backend']"
    assert version == ef.__version__
    told = run(tmp_path, str(environment / "bin" / "epifuse"), "doctor")
    assert f"epifuse {ef.__version__}, in {packages}" in " ".join(told.split())
    assert "cpu_panel" in told


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ef.__version__
    assert {"cff-version", "message", "title", "authors", "license", "abstract", "type"} <= set(citation)
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")
    ]
    assert headings[0].startswith(f"## {ef.__version__}")
