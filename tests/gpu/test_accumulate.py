"""Outputs that are added onto what their destinations hold: in float32, rounded once."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, place

import epifuse as ef
from epifuse.request.problem import Constraints

MICRO_BATCHES = 4


def backward(accum: Any, z: Any) -> Any:
    D = ef.where(z > 0.0, accum, 0.0)
    dbias = ef.sum(D, dim=-2)
    total = ef.sum(D)
    return D, dbias, total


DESTINATIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "as torch": {"dbias": (136,), "total": ()},
    "keeping dims": {"dbias": (1, 136), "total": (1, 1)},
    "one number": {"dbias": (136,), "total": (1,)},
}


def held(machine: Machine, m: int, n: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:
    """Destinations that hold whole numbers, in surroundings of NaN."""
    made = {name: place(shape, torch.float32, machine.device) for name, shape in shapes.items()}
    made["D"] = place((m, n), dtype, machine.device, "padded")
    for one in made.values():
        one.view.copy_(machine.whole(*one.view.shape, most=8))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", DESTINATIONS)
def test_gradients_of_micro_batches(shapes: str, dtype: torch.dtype, machine: Machine) -> None:
    """Four calls are one sum in float64; a bfloat16 D is rounded once a call."""
    m, n, k = 257, 136, 64
    places = held(machine, m, n, DESTINATIONS[shapes], dtype)
    want = {name: one.view.double().cpu() for name, one in places.items()}
    for _ in range(MICRO_BATCHES):
        a, b, z = machine.whole(m, k), machine.whole(k, n), machine.whole(m, n, dtype=torch.float32)
        onto = {name: ef.Store(one.view, accumulate=True) for name, one in places.items()}
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(backward, z=z, **onto))
        machine.kernel(args).run(args)
        D = torch.where(z > 0, a.double() @ b.double(), 0.0).cpu()
        want["dbias"] += D.sum(0).view_as(want["dbias"])
        want["total"] += D.sum().view_as(want["total"])
        want["D"] = (want["D"] + D).to(dtype).double()
    for name, one in places.items():
        assert torch.equal(one.view.double().cpu(), want[name]), name
        assert one.intact(), name


def test_only_what_is_named_is_added(machine: Machine) -> None:
    a, b, z = machine.whole(64, 64), machine.whole(64, 136), torch.ones(64, 136, device=machine.device)
    out = {"D": torch.full((64, 136), 3.0, device=machine.device), "dbias": torch.full((136,), 3.0, device=a.device)}
    out["total"] = torch.full((), 3.0, device=machine.device)
    for _ in range(2):  # as a call of its own, and warm
        ef.gemm(a, b, epilogue=backward, z=z, out=out, accumulate="dbias")
    D = a.double() @ b.double()
    assert torch.equal(out["D"].double(), D)
    assert torch.equal(out["total"].double(), D.sum())
    assert torch.equal(out["dbias"].double(), 3.0 + 2 * D.sum(0))


@pytest.mark.parametrize("layout", ["rows", "columns", "odd", "shifted"])
def test_a_full_result_lies_anywhere(layout: str, machine: Machine) -> None:
    """By TMA or element by element, in batches."""
    a, b = machine.whole(3, 129, 64), machine.whole(3, 64, 72)
    one = place((3, 129, 72), torch.float32, machine.device, layout)
    one.view.copy_(machine.whole(3, 129, 72, most=8))
    want = one.view.double() + a.double() @ b.double()
    epilogue = ef.EpilogueArguments("def epi(accum): D = accum; return D", D=ef.Store(one.view, accumulate=True))
    args = ef.GemmArguments(a, b, epilogue=epilogue)
    machine.kernel(args).run(args)
    assert torch.equal(one.view.double(), want)
    assert one.intact()


def test_where_the_product_is_computed_again(machine: Machine) -> None:
    """The old content of `total` is no part of the maximum that D is of."""
    a, b = machine.whole(129, 64), machine.whole(64, 136)
    a[0], b[:, 0] = 2, 2
    source = "def epi(accum): total = amax(accum); D = accum * (total * 0.25); return D, total"
    places = held(machine, 129, 136, {"total": ()}, torch.float32)
    want = {name: one.view.double().clone() for name, one in places.items()}
    epilogue = ef.EpilogueArguments(source, **{n: ef.Store(one.view, accumulate=True) for n, one in places.items()})
    args = ef.GemmArguments(a, b, epilogue=epilogue, constraints=Constraints(allow_recompute=True))
    kernel = machine.kernel(args)
    for _ in range(2):
        kernel.run(args)
    product = a.double() @ b.double()
    assert torch.equal(places["total"].view.double(), want["total"] + 2 * product.max())
    assert torch.equal(places["D"].view.double(), want["D"] + 2 * product * product.max() / 4)


@pytest.mark.gpu
def test_each_replay_adds(hopper: Machine) -> None:
    a, b, z = hopper.whole(257, 64), hopper.whole(64, 136), torch.ones(257, 136, device="cuda")
    places = held(hopper, 257, 136, DESTINATIONS["as torch"], torch.float32)
    want = {name: one.view.double().clone() for name, one in places.items()}
    onto = {name: ef.Store(one.view, accumulate=True) for name, one in places.items()}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(backward, z=z, **onto))
    step = hopper.kernel(args).bind(args)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    D = a.double() @ b.double()
    for name, value in {"D": D, "dbias": D.sum(0), "total": D.sum()}.items():
        assert torch.equal(places[name].view.double(), want[name] + 6 * value), name
