"""What is asked of the CUDA driver for clusters, without a driver: the bytes it reads, its constants, its failures."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from epifuse.base.errors import LaunchError
from epifuse.providers.cutedsl import clusters

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings come with CuTe DSL, an optional dependency")


class Driver(SimpleNamespace):
    """Answers as the driver does, and keeps the configuration it was asked about."""

    def __init__(self, **failures: int) -> None:
        calls = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuModuleUnload")
        super().__init__(**{call: lambda *_, call=call: self.answer(call) for call in calls})
        self.failures, self.called = failures, []

    def answer(self, call: str) -> int:
        self.called.append(call)
        return self.failures.get(call, 0)

    def cuOccupancyMaxActiveClusters(self, count: Any, _: Any, configuration: Any) -> int:  # noqa: N802 - its name
        asked = configuration._obj
        self.configuration = bytes(asked)
        self.attribute = ctypes.string_at(asked.attributes, ctypes.sizeof(asked.attributes.contents))
        count._obj.value = 16
        return self.answer("cuOccupancyMaxActiveClusters")


def test_the_driver_is_asked_in_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver()
    monkeypatch.setattr(clusters.ctypes, "CDLL", lambda name: fake)
    with clusters._Probe() as probe:
        assert probe.resident(8) == 16
    assert fake.called[-1] == "cuModuleUnload"
    want, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = 1, 8, 1
    want.gridDimX, want.gridDimY, want.gridDimZ = 1, 8, 1
    want.blockDimX, want.blockDimY, want.blockDimZ = clusters._THREADS, 1, 1
    want.sharedMemBytes, want.attrs, want.numAttrs = clusters.TARGETS[90].shared_memory, [attribute], 1
    theirs = ctypes.string_at(want.getPtr(), len(fake.configuration))
    pointer = clusters._Configuration.attributes
    assert without(theirs, pointer) == without(fake.configuration, pointer)
    assert ctypes.string_at(attribute.getPtr(), len(fake.attribute)) == fake.attribute


def without(structure: bytes, field: Any) -> bytes:
    return structure[: field.offset] + structure[field.offset + field.size :]


def test_the_constants_are_the_drivers() -> None:
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    wide = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert (int(shared), int(wide)) == (
        clusters._MAX_DYNAMIC_SHARED_SIZE_BYTES,
        clusters._NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    )


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuFuncSetAttribute", "cuOccupancyMaxActiveClusters"])
def test_what_the_driver_refuses_is_said(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters.ctypes, "CDLL", lambda name: Driver(**{call: 201}))
    with pytest.raises(LaunchError, match=f"{call} returned 201"), clusters._Probe() as probe:
        probe.resident(4)


def test_groups_are_what_was_seen_together() -> None:
    assert clusters._groups([(0, 1), (4, 5), (2, 3), (5, 1), (6, 7)]) == {
        0: 0,
        1: 0,
        4: 0,
        5: 0,
        2: 2,
        3: 2,
        6: 6,
        7: 6,
    }


def test_clusters_of_a_group_have_ranks_one_after_the_other() -> None:
    groups = [9, 0, 2, 0, 2, 9, 0]
    table = clusters.RankTable(groups, 2)
    assert table.address % 8 == 0
    rows = ctypes.string_at(table.address, 16 * 8)
    for count in range(len(groups) + 1):
        own = list(rows[16 * count : 16 * count + count])
        assert sorted(own) == list(range(count))
        ordered = [cluster for _, cluster in sorted(zip(own, range(count), strict=True))]
        assert ordered == sorted(range(count), key=lambda cluster: (groups[cluster], cluster))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that is asked where clusters are, and what it answers."""
    gpu = SimpleNamespace(answers=[], recording=False, count=0)

    def placed(device: int, size: int, count: int) -> list[int] | None:
        gpu.count += 1
        groups: list[int] | None = gpu.answers.pop(0)
        return groups

    monkeypatch.setattr(clusters, "placed", placed)
    monkeypatch.setattr(clusters, "_TABLES", {})
    monkeypatch.setattr(clusters, "_TRIES", {})
    monkeypatch.setattr(clusters.torch.cuda, "device", nullcontext)
    monkeypatch.setattr(clusters.torch.cuda, "is_current_stream_capturing", lambda: gpu.recording)
    return gpu


def test_ranks_are_measured_once_for_each_device_and_size(asked: SimpleNamespace) -> None:
    asked.answers = [[4, 0, 4, 0], [0, 0, 4, 4]]
    first, second = (clusters.rank_table(device, 2, 1, 4) for device in (0, 1))
    assert clusters.rank_table(0, 2, 1, 4)[0] is first[0]
    assert (first[1], second[1], asked.count) == (True, True, 2)
    assert ctypes.string_at(first[0].address + 4 * 8 * clusters.rank_words(2), 4) == bytes([2, 0, 3, 1])


def test_parts_of_k_go_by_the_cluster_of_their_first(asked: SimpleNamespace) -> None:
    asked.answers = [[1, 0, 0, 1, 1, 0]]
    table, _ = clusters.rank_table(0, 1, 2, 3)
    assert ctypes.string_at(table.address + 3 * 8 * clusters.rank_words(1), 3) == bytes([1, 0, 2])


def test_a_recorded_or_busy_gpu_is_asked_again_later(asked: SimpleNamespace) -> None:
    asked.recording = True
    assumed, is_final = clusters.rank_table(0, 2, 1, 66)
    assert (is_final, asked.count) == (False, 0)
    asked.recording, asked.answers = False, [None, [0] * 66]
    assert clusters.rank_table(0, 2, 1, 66) == (assumed, False)
    found, is_final = clusters.rank_table(0, 2, 1, 66)
    assert is_final
    assert found is not assumed


def test_a_gpu_that_is_always_busy_is_not_asked_for_ever(asked: SimpleNamespace) -> None:
    asked.answers = [None] * 9
    found = [clusters.rank_table(0, 2, 1, 66) for _ in range(9)]
    assert [is_final for _, is_final in found] == [False] * 4 + [True] * 5
    assert asked.count == 4


def test_large_clusters_are_assumed_to_be_placed_in_turn(asked: SimpleNamespace) -> None:
    table, is_final = clusters.rank_table(0, 4, 1, 32)
    assert (is_final, asked.count) == (True, 0)
    row = ctypes.string_at(table.address + 32 * 8 * clusters.rank_words(4), 32)
    assert list(row) == [4 * (cluster % 8) + cluster // 8 for cluster in range(32)]


def test_a_driver_that_fails_is_no_reason_for_a_launch_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters.ctypes, "CDLL", lambda name: Driver(cuModuleLoadData=221))
    monkeypatch.setattr(clusters.torch.cuda, "device", nullcontext)
    asked = []
    monkeypatch.setattr(clusters.torch.cuda, "mem_get_info", lambda: asked.append("the runtime"))
    assert clusters.placed(0, 2, 66) is None
    assert asked, "a thread that is new has no context"
