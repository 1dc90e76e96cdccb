"""Every way to say an epilogue on a GPU, on small whole numbers that every sum holds exactly."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine

import epifuse as ef
from epifuse.forms import thread
from epifuse.forms.evt import EVT, AccFetch, Compute, RowBroadcast, SrcFetch

M, N, K = 72, 136, 64
F32 = torch.float32


def operands(machine: Machine, *batch: int) -> tuple[torch.Tensor, ...]:
    """A, B, C and a bias."""
    return (
        machine.whole(*batch, M, K),
        machine.whole(*batch, K, N),
        machine.whole(*batch, M, N),
        machine.whole(N, dtype=F32),
    )


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.cpu().double() @ b.cpu().double()).float()


def residual(accum: Any, C: Any, bias: Any) -> Any:
    D = ef.relu(accum + bias) + C
    return D


def wanted(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(product(a, b) + bias.cpu()) + c.cpu()


TREE = EVT(
    Compute(ef.add),
    EVT(Compute(ef.relu), EVT(Compute(ef.add), AccFetch(), RowBroadcast("bias"))),
    SrcFetch("C"),
)
SOURCE = "def epi(accum, C, bias): D = relu(accum + bias) + C; return D"


class Residual(thread.Functor):
    @staticmethod
    def formula(accum: Any, C: Any, bias: Any) -> Any:
        return ef.relu(accum + bias) + C


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("way", [residual, SOURCE, TREE, Residual()], ids=["function", "source", "tree", "functor"])
def test_ways_to_say_an_epilogue(machine: Machine, way: Any, batch: tuple[int, ...]) -> None:
    a, b, c, bias = operands(machine, *batch)
    given = ef.EpilogueArguments.partial(way, {"C": c, "bias": bias})
    assert machine.kernel(ef.GemmArguments(a, b, epilogue=given, out_dtypes=F32))
    got = ef.gemm(a, b, epilogue=way, C=c, bias=bias, out_dtypes=F32)
    assert got.device == a.device
    assert torch.equal(got.cpu(), wanted(a, b, c, bias))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)], ids=str)
def test_linear(machine: Machine, lead: tuple[int, ...]) -> None:
    x, weight, bias = machine.whole(*lead, K), machine.whole(N, K), machine.whole(N, dtype=F32)
    got = ef.linear(x, weight, bias, epilogue=ef.relu, out_dtypes=F32)
    assert torch.equal(got.cpu(), torch.relu(product(x, weight.t()) + bias.cpu()))


@pytest.mark.parametrize("shape", [(), (1, 1, N), (2, 1, N), (2, 24, 1), (24, N), (1, 24, N), (2, 24, N)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, (0, 1), (1, 2), None], ids=str)
def test_linear_of_three_dims(machine: Machine, shape: tuple[int, ...], dim: Any) -> None:
    """Operands and reductions as eager has them, also where M alone would not give it."""
    x, weight, C = machine.whole(2, 24, K), machine.whole(N, K), machine.whole(*shape, dtype=F32)
    source = f"def epi(accum, C): D = accum + C * 2; s = sum(D, dim={dim}); return D, s"
    D, s = ef.linear(x, weight, epilogue=source, C=C, out_dtypes=F32)
    want = product(x, weight.t()) + C.cpu() * 2
    assert torch.equal(D.cpu(), want)
    assert torch.equal(s.cpu(), ef.sum(want, dim=dim))


def test_autocast(machine: Machine) -> None:
    x, weight = machine.whole(2, 24, K, dtype=F32), machine.whole(N, K, dtype=F32)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        got = ef.linear(x, weight, epilogue=ef.relu)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.cpu(), torch.relu(product(x, weight.t())).to(torch.bfloat16))


class Scaled(ef.DenseGemm):
    def epilogue_operation(self, accumulator: Any, c: Any, alpha: float) -> Any:
        y = accumulator * alpha
        d = y + c
        return d, y


@pytest.mark.parametrize(("tile", "cluster"), [(None, None), ((128, 128), (2, 1)), ((64, 256), (1, 1))])
def test_the_class_form(machine: Machine, tile: Any, cluster: Any) -> None:
    a, b, c, _ = operands(machine, 2)
    assert ef.get_kernels(Scaled(None, False, tile, cluster).arguments(a, b, c, alpha=0.5), cc=90)
    gemm = Scaled(None, False, tile, cluster if machine.gpu else None)  # the CPU has no clusters to choose
    d, y = gemm.run(a, b, c, alpha=0.5)
    assert d.dtype == y.dtype == torch.bfloat16
    assert all(verdict.judged == verdict.total for verdict in gemm.verify(a, b, c, alpha=0.5).values())


def test_the_plan_object(machine: Machine) -> None:
    a, b, c, bias = operands(machine)
    plan = ef.Gemm(element=torch.bfloat16, layout=ef.LayoutType.RowMajor, element_D=F32, cc=None if machine.gpu else 0)
    plan.epilogue_visitor = ef.trace(residual, {"accum": torch.empty(M, N), "C": c, "bias": bias, "D": c.float()})
    for tile in plan.tile_descriptions()[:3]:
        plan.tile_description = tile
        D = torch.empty(M, N, device=machine.device)
        plan.run(a, b, c, D, visitor_args={"C": c, "bias": bias, "D": D})
        assert torch.equal(D.cpu(), wanted(a, b, c, bias))


def test_a_number_of_the_enclosing_scope_and_one_on_the_device(machine: Machine) -> None:
    a, b, *_ = operands(machine)
    factor = 2.0

    def scaled(accum: Any, shift: Any) -> Any:
        return accum * factor + shift

    for factor in (2.0, 4.0):
        for shift in (1.0, machine.whole(1, dtype=F32)):
            got = ef.gemm(a, b, epilogue=scaled, shift=shift, out_dtypes=F32)
            assert torch.equal(got.cpu(), product(a, b) * factor + (shift.cpu() if torch.is_tensor(shift) else shift))
