"""Launching again and again: the same bits, in place, captured, on two streams, without compiling anew."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from gpu.harness import Machine, Place, place

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.providers.cutedsl import load
from epifuse.request.problem import Constraints

M, N, K = 1000, 1288, 264


def plain(accum: Any, C: Any, row: Any, alpha: Any) -> Any:
    D = alpha * accum
    return D


def loaded(accum: Any, C: Any, row: Any, alpha: Any) -> Any:
    D = ef.relu(alpha * accum + C) * row
    Aux = ef.gelu(accum - C)
    return D, Aux


def reducing(accum: Any, C: Any, row: Any, alpha: Any) -> Any:
    D = ef.silu(alpha * accum + C) + row
    rows, columns, total = D.sum(dim=1), ef.amax(D, dim=0), ef.logsumexp(D)
    return D, rows, columns, total


EPILOGUES = {function.__name__: function for function in (plain, loaded, reducing)}


class Work(NamedTuple):
    """Arguments whose outputs lie in poisoned memory, and that memory."""

    args: ef.GemmArguments
    places: dict[str, Place]

    def poison(self) -> None:
        for one in self.places.values():
            one.poison()

    def bits(self) -> list[torch.Tensor]:
        """All of it, outputs and surroundings."""
        return [one.memory.view(torch.uint8) for one in self.places.values()]


def work(machine: Machine, function: Callable[..., Any], like: Work | None = None, **options: Any) -> Work:
    """One problem; with `like`, the same inputs and outputs of its own."""
    m, n, k = (M, N, K) if machine.gpu else (100, 72, 24)
    dtype = torch.bfloat16
    if like is None:
        a, b = machine.normal(m, k, dtype=dtype), machine.normal(k, n, dtype=dtype)
        operands = {"C": machine.normal(m, n, dtype=dtype), "row": machine.normal(n), "alpha": 0.5}
    else:
        a, b, operands = like.args.A, like.args.B, {"alpha": 0.5}
        operands |= {name: like.args.epilogue.tensors[name] for name in ("C", "row")}
    blank = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, operands)).allocate()
    places = {name: place(t.shape, t.dtype, machine.device, "padded") for name, t in blank.items()}
    outputs = {name: one.view for name, one in places.items()}
    return Work(ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(function, **operands, **outputs)), places)


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_thousand_launches_give_the_same_bits(name: str, machine: Machine) -> None:
    """On two streams at once, onto outputs poisoned before each."""
    first = work(machine, EPILOGUES[name])
    kernel = machine.kernel(first.args)
    kernel.run(first.args)
    machine.synchronise()
    assert all(one.intact() and not one.view.isnan().any() for one in first.places.values())
    streams: list[Any] = [torch.cuda.Stream(), torch.cuda.Stream()] if machine.gpu else [None, None]
    works = [work(machine, EPILOGUES[name], like=first) for _ in streams]
    differing = [torch.zeros((), dtype=torch.int64, device=machine.device) for _ in streams]
    machine.synchronise()
    for i in range(1000 if machine.gpu else 10):
        with torch.cuda.stream(streams[i % 2]):
            works[i % 2].poison()
            kernel.run(works[i % 2].args)
            for one, again in zip(first.bits(), works[i % 2].bits(), strict=True):
                differing[i % 2] += (one != again).sum()
    machine.synchronise()
    assert [int(count) for count in differing] == [0, 0]


@pytest.mark.parametrize("way", ["rows", "columns", "padded", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_d_may_be_c(dtype: torch.dtype, way: str, machine: Machine) -> None:
    """In place, each element read before it is written; by TMA and direct."""
    m, n, k = (M, N, 64) if machine.gpu else (100, 72, 16)
    a, b = machine.whole(m, k), machine.whole(k, n)
    start = machine.whole(m, n, most=8, dtype=dtype)
    held = place((m, n), dtype, machine.device, way)

    def epi(accum: Any, C: Any) -> Any:
        D = accum + C * 2.0
        return D

    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(epi, C=held.view, D=held.view))
    kernel = machine.kernel(args)
    want = (a.double() @ b.double() + start.double() * 2.0).to(dtype)
    for _ in range(3):
        held.view.copy_(start)
        kernel.run(args)
        assert torch.equal(held.view, want)
    assert held.intact()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["run", "bound"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_a_captured_launch(name: str, way: str, hopper: Machine) -> None:
    """Replayed 100 times with new data: as an ordinary launch, with no allocation and no wait for the device."""
    made = work(hopper, EPILOGUES[name])
    kernel = hopper.kernel(made.args)
    step = kernel.bind(made.args) if way == "bound" else lambda: kernel.run(made.args)
    step()
    ordinary = work(hopper, EPILOGUES[name], like=made)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for _ in range(100):
        made.args.A.copy_(hopper.normal(M, K))
        made.args.epilogue.tensors["C"].copy_(hopper.normal(M, N))
        made.poison()
        ordinary.poison()
        kernel.run(ordinary.args)
        torch.cuda.synchronize()
        assert waits_and_allocates(graph.replay) == 0
        torch.cuda.synchronize()
        for one, again in zip(ordinary.bits(), made.bits(), strict=True):
            assert torch.equal(one, again)


def waits_and_allocates(step: Callable[[], Any]) -> int:
    """Allocations of a step; raises where it waits for the device."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) - before


@pytest.mark.gpu
@pytest.mark.parametrize("name", EPILOGUES)
def test_a_launch_allocates_its_workspace_at_most(name: str, hopper: Machine) -> None:
    made = work(hopper, EPILOGUES[name])
    kernel = hopper.kernel(made.args)
    bound = kernel.bind(made.args)
    bound()
    most = int(kernel.get_workspace_size(made.args) > 0)
    assert waits_and_allocates(bound) <= most
    kernel.run(made.args)
    assert waits_and_allocates(lambda: kernel.run(made.args)) <= most


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("name", EPILOGUES)
def test_another_device_than_the_current_one(name: str, hopper: Machine) -> None:
    """The same bits as on the current device; which that is stays."""
    here = work(hopper, EPILOGUES[name])
    kernel = hopper.kernel(here.args)
    kernel.run(here.args)
    tensors = {n: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for n, x in here.args.epilogue.tensors.items()}
    operands = {name: tensors[name] for name in ("C", "row")} | {"alpha": 0.5}
    epilogue = ef.EpilogueArguments.partial(EPILOGUES[name], operands)
    args = ef.GemmArguments(here.args.A.to("cuda:1"), here.args.B.to("cuda:1"), epilogue=epilogue)
    kernel = hopper.kernel(args)
    for there in (kernel.run(args), kernel.bind(args)()):
        assert torch.cuda.current_device() == 0
        for output, tensor in there.items():
            assert tensor.device == torch.device("cuda:1")
            assert torch.equal(tensor.to("cuda:0"), here.places[output].view)


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts of the kernels that would have been found on disk or compiled from here on; nothing is."""
    met: list[str] = []
    monkeypatch.setattr(load, "stored", lambda text, _: met.append(text))
    monkeypatch.setattr(load, "load", lambda _: None)
    forget()
    yield met
    forget()


def sized(function: Any, l: int, m: int, n: int, k: int, alpha: float = 1.0) -> ef.GemmArguments:
    """Arguments of these extents without data, for one design."""
    lead = (l,) if l else ()
    a, b = (torch.empty(*lead, *shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    operands = {"C": torch.empty(*lead, m, n), "row": torch.empty(n), "alpha": alpha}
    pinned = Constraints(tile=(128, 128), cluster=(1, 1), schedule="pingpong", split=1)
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, operands), constraints=pinned)


@pytest.mark.parametrize("name", ["plain", "loaded"])
def test_numbers_and_extents_never_compile_anew(name: str, compilations: list[str]) -> None:
    """M, N and L, ragged or not, and K; a kernel with a batch axis serves every number of batches."""
    shapes = ((256, 256, 64), (250, 264, 72), (3, 8, 8), (4096, 512, 1016), (129, 136, 264))
    for batches, expected in ((0, 1), (2, 2), (7, 2)):
        for shape in shapes:
            for alpha in (1.0, -2.5):
                args = sized(EPILOGUES[name], batches, *shape, alpha)
                ef.get_kernels(args, cc=90, limit=1)[0].compile(args)
        assert len(compilations) <= expected, compilations
    assert compilations


ENDS = {
    "a tile": ((256, 256, 64), (128, 512, 72), (4096, 512, 264)),
    "a subtile": ((192, 160, 64), (64, 32, 72), (320, 352, 520)),
    "within a subtile": ((250, 264, 72), (3, 8, 8), (129, 136, 264)),
}


@pytest.mark.parametrize("end", ENDS)
def test_reductions_compile_once_for_each_way_results_end(end: str, compilations: list[str]) -> None:
    for shape in ENDS[end]:
        args = sized(reducing, 0, *shape)
        ef.get_kernels(args, cc=90, limit=1)[0].compile(args)
    assert len(compilations) == 1, compilations


@pytest.mark.parametrize(("epilogue", "kernels"), [(plain, 1), (reducing, 2), (loaded, 2)])
def test_kernels_differ_with_k_if_stages_and_tiles_share_memory(
    epilogue: Any, kernels: int, compilations: list[str]
) -> None:
    """What reduces or reads float32 has a kernel below 1024 bfloat16 of K, and one from there on."""
    for k in (512, 520, 1016, 1024, 4088, 4096, 14336):
        args = sized(epilogue, 0, 256, 256, k)
        ef.get_kernels(args, cc=90, limit=1)[0].compile(args)
    assert len(compilations) == kernels, compilations
