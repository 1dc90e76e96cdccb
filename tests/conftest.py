"""For all tests: the fixtures `golden`, `seed` and `compiled_anew`, sweeps, and the rule that skips GPU tests."""

import dataclasses
import functools
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
NO_GPU = "no CUDA device"
NOT_HOPPER = "no Hopper GPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew")
    parser.addoption("--whole-sweeps", action="store_true", help="all cases of sweeps, as `make sweep` does")
    parser.addoption("--schedule", help="GPU tests ask for this kernel: multistage (mma.sync) or tcgen05; on any GPU")


# A new folder, because kernels that an earlier run compiled would hide that the compiler is broken. The workers of a
# run share it. It is set here and not later, because a conftest in a subfolder may import epifuse, which reads it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["EPIFUSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="epifuse-tests-")

# Inductor takes 13 s to make its precompiled header, once for each folder of its cache. A kernel of two lines takes 6 s
# to compile with the header and without it (g++ 12, PyTorch 2.13).
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# CuTe DSL asks the machine's GPU which operations exist, whatever a kernel is compiled for. Without a GPU it assumes
# Blackwell, which has all of them. Hopper, the GPU that most tests are for, does not have all.
if not torch.cuda.is_available():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.add_cleanup(lambda: shutil.rmtree(os.environ["EPIFUSE_CACHE_DIR"], ignore_errors=True))
    if (schedule := config.getoption("--schedule")) is not None:
        ask_for(schedule)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores already
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes that workers start share them too


def ask_for(schedule: str) -> None:
    """Make this schedule the default of `Constraints`: each product asks for it unless the test names another."""
    from epifuse.request.problem import Constraints

    names = [field.name for field in dataclasses.fields(Constraints)]
    defaults = list(Constraints.__init__.__defaults__ or ())
    defaults[names.index("schedule")] = schedule
    Constraints.__init__.__defaults__ = tuple(defaults)


@functools.cache
def lacking() -> str | None:
    """What this machine lacks for tests marked `gpu`, or None. All kernels for GPUs are built for sm_90a."""
    if not torch.cuda.is_available():
        return NO_GPU
    return None if torch.cuda.get_device_capability() == (9, 0) else NOT_HOPPER


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = lacking() if item.get_closest_marker("gpu") else None
    if reason is not None and not (reason == NOT_HOPPER and item.config.getoption("--schedule")):
        # This machine cannot run the kernel. No other reason skips a GPU test, and the summary counts these tests. On a
        # Hopper GPU a refusal or a wrong result is a failure.
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    for reason in (NO_GPU, NOT_HOPPER):
        count = sum(str(report.longrepr[-1]).endswith(reason) for report in skipped)
        if count:
            terminalreporter.write_line(f"{count} gpu tests skipped: {reason}", yellow=True)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Give a test the same random numbers whatever ran before it. Return the seed, for a generator."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    np.random.seed(value)
    return value


def golden_file(item: pytest.Item) -> Path:
    """The file that a test with the fixture `golden` compares its text with."""
    test = ".".join(item.nodeid.split("::")[1:])
    return GOLDEN / item.path.stem / (re.sub(r"[^\w.-]+", "_", test).strip("_") + ".txt")


def leave_out_of_sweeps(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a part of the cases of each test marked `sweep`, so that each value of each parameter is met.

    If the mark names parameters, only their values count. GPU tests keep all cases, and so do runs that name a test.
    """
    if config.getoption("--whole-sweeps") or any("::" in argument for argument in config.args):
        return
    sweeps: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("gpu"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for cases in sweeps.values() for item in {*cases} - {*met_by(cases)}}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])


def met_by(cases: list[Any]) -> list[Any]:
    """Cases that together have each value of each parameter that counts. Ties are broken by a hash of the name."""
    named = cases[0].get_closest_marker("sweep").args or cases[0].callspec.params.keys()
    values = {case: {(name, told_apart(case.callspec.params[name])) for name in named} for case in cases}
    ordered = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    missing, found = set().union(*values.values()), []
    while missing:
        found.append(max(ordered, key=lambda case: len(values[case] & missing)))
        missing -= values[found[-1]]
    return found


def told_apart(value: Any) -> Any:
    """A key that is equal for simple values with the same text; other objects are equal only to themselves."""
    return repr(value) if isinstance(value, (str, int, float, tuple)) else id(value)


@pytest.fixture
def whole_sweeps(request: pytest.FixtureRequest) -> bool:
    """Whether a test that loops over cases has to take all of them."""
    return bool(request.config.getoption("--whole-sweeps"))


STALE = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find golden files that no collected test is compared with; tests/test_golden.py reads the result."""
    leave_out_of_sweeps(config, items)
    if any("::" in argument for argument in config.args):
        return  # only parts of files are collected
    used = {golden_file(item) for item in items if "golden" in getattr(item, "fixturenames", ())}
    there = (path for stem in {item.path.stem for item in items} for path in (GOLDEN / stem).glob("*"))
    config.stash[STALE] = sorted(path.relative_to(GOLDEN).as_posix() for path in {*there} - used)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)` compares with tests/golden/<file>/<test>.txt; --update-golden writes it."""
    path = golden_file(request.node)

    def compare(text: str) -> None:
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists():
            pytest.fail(f"{path} is missing; pytest --update-golden writes it", pytrace=False)
        else:
            assert text == path.read_text(encoding="utf-8"), f"differs from {path}"

    return compare


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Run a test without graphs that were compiled before, in this process or on disk. If PyTorch finds a graph again,
    epifuse's pass does not run."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    torch.compiler.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()
