"""The record of a GPU model: planning asks it, the driver's word comes before it, and nothing else knows a card."""

import io
import re
import tokenize
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper import arguments

import epifuse as ef
from epifuse.base import target
from epifuse.base.processors import CPU, DEFAULT, GPUS, Processor, model_of
from epifuse.base.target import TARGETS, target_of
from epifuse.plan import settle

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "epifuse"


def code(path: Path) -> str:
    """A file without its comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return " ".join(token.string for token in tokens if token.type not in (tokenize.COMMENT, tokenize.STRING))


def test_the_number_of_multiprocessors_stands_in_one_line() -> None:
    count = str(GPUS[DEFAULT].multiprocessors)
    found = {path.relative_to(SRC).as_posix(): code(path).split().count(count) for path in SRC.rglob("*.py")}
    assert {name: times for name, times in found.items() if times} == {"base/processors.py": 1}


def test_no_kernel_sleeps() -> None:
    assert not [path for path in SRC.rglob("*.py") if re.search("nanosleep", path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", GPUS)
def test_a_model_names_the_file_of_its_measurement(name: str) -> None:
    row = GPUS[name]
    assert row.name == name
    assert (ROOT / "benchmarks" / "results" / row.measured).is_file()
    assert row.clustered <= row.multiprocessors


@pytest.mark.parametrize(("name", "stated"), [("H100", 3.35e12), ("H200", 4.8e12)])
def test_memory_is_as_fast_as_nvidia_states(name: str, stated: float) -> None:
    assert GPUS[name].bytes_a_second == pytest.approx(stated, rel=0.02)
    assert GPUS[name].bytes_a_second > CPU.bytes_a_second


def told(name: str, **further: int) -> SimpleNamespace:
    """What PyTorch says of a card."""
    return SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=78, L2_cache_size=60 << 20, **further)


def test_what_the_driver_tells_comes_before_the_row() -> None:
    found = model_of(told("NVIDIA H200 NVL", memory_clock_rate=1_000_000, memory_bus_width=4096))
    row = GPUS["H200"]
    assert (found.multiprocessors, found.l2) == (78, 60 << 20)
    assert found.bytes_a_second == pytest.approx(1.024e12)
    assert found.operations_a_second / 78 == pytest.approx(row.operations_a_second / row.multiprocessors)
    assert found.instructions_a_second / 78 == pytest.approx(row.instructions_a_second / row.multiprocessors)
    assert (found.at_once(1), found.at_once(2)) == (78, 78)
    assert 0 < found.at_once(4) <= 78
    assert found.at_once(4) % 8 == 0


@pytest.mark.parametrize("name", [*GPUS, "something else"])
def test_a_model_without_a_row_is_the_default_one(name: str) -> None:
    """PyTorch before 2.8 does not tell the memory's clock."""
    assert model_of(told(f"NVIDIA {name}")).bytes_a_second == GPUS[name if name in GPUS else DEFAULT].bytes_a_second


def test_the_target_of_a_device_is_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told("NVIDIA H20"))
    target._of_gpu.cache_clear()
    try:
        found = target_of("cuda:0")
    finally:
        target._of_gpu.cache_clear()
    assert replace(found, processor=TARGETS[90].processor) == TARGETS[90]
    assert found.processor.multiprocessors == 78


SMALL = Processor("made up", 16, 16, 8 << 20, bytes_a_second=4e11, operations_a_second=1e14, clock=1e9)


def costs(m: int, n: int) -> dict[str, float]:
    """Estimates of each design of a plain product, best first."""
    args = arguments("def plain(accum): D = accum; return D", m=m, n=n, k=4096)
    return {kernel.metadata.kernel_name: kernel.plan.allocation.cost for kernel in ef.get_kernels(args, cc=90)}


def test_plans_are_of_the_model_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer multiprocessors make more waves, and another design best where a larger GPU is not full."""
    shapes = [(64 * i, 256 * j) for i in (1, 4, 10, 24) for j in (1, 3, 8, 16)]
    before = {shape: costs(*shape) for shape in shapes}
    monkeypatch.setitem(TARGETS, 90, replace(TARGETS[90], processor=SMALL))
    after = {shape: costs(*shape) for shape in shapes}
    assert all(max(after[shape].values()) >= max(before[shape].values()) for shape in shapes)
    assert sum(after[24 * 64, 16 * 256].values()) > 4 * sum(before[24 * 64, 16 * 256].values())
    assert any(next(iter(after[shape])) != next(iter(before[shape])) for shape in shapes)


def test_an_architecture_asked_for_is_the_device_s_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cc=90` beside tensors of a Hopper GPU means that GPU."""
    own = replace(TARGETS[90], processor=SMALL)
    monkeypatch.setattr(settle, "target_of", lambda device: own)
    args = arguments("def plain(accum): D = accum; return D")
    assert {kernel.plan.problem.target for cc in (90, None) for kernel in ef.get_kernels(args, cc=cc)} == {own}
    assert ef.get_kernels(args, cc=0)[0].plan.problem.target == TARGETS[0]
