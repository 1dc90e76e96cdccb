"""Launching on a GPU: streams, devices, graphs, memory that moves. Small integers, so that every result is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import ArgumentError
from epifuse.kernel import Kernel

pytestmark = pytest.mark.gpu

M, N, K = 256, 512, 64
BUSY = 20_000_000  # clock cycles: some ten milliseconds, far longer than a launch takes the host


def integers(*shape: int, device: str = "cuda") -> torch.Tensor:
    """At most 64 * 4 in the product, which bfloat16 holds exactly."""
    return torch.randint(-2, 3, shape, device=device).bfloat16()


def epi(accum: Any, bias: Any, alpha: Any) -> Any:
    D = accum * alpha + bias
    return D


def expected(args: ef.GemmArguments, alpha: float = 1.0) -> torch.Tensor:
    product = args.A.double() @ args.B.double()
    return (product * alpha + args.epilogue.tensors["bias"].double()).to(torch.float32)


def arguments(device: str = "cuda") -> tuple[ef.GemmArguments, Kernel]:
    D = torch.full((M, N), torch.nan, device=device)
    made = ef.EpilogueArguments(epi, bias=integers(N, device=device), alpha=1.0, D=D)
    args = ef.GemmArguments(integers(M, K, device=device), integers(N, K, device=device).t(), epilogue=made)
    return args, ef.get_kernels(args)[0]


WAYS: dict[str, Callable[[Kernel, ef.GemmArguments], Callable[[], Any]]] = {
    "run": lambda kernel, args: lambda: kernel.run(args)["D"],
    "bound": lambda kernel, args: (lambda step: lambda: step()["D"])(kernel.bind(args)),
    "gemm": lambda kernel, args: (
        lambda: ef.gemm(
            args.A, args.B, epilogue=epi, bias=args.epilogue.tensors["bias"], alpha=1.0, out_dtypes=torch.float32
        )
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_current_stream_is_used(way: str) -> None:
    args, kernel = arguments()
    step = WAYS[way](kernel, args)
    step()
    later, side = integers(M, K), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        args.A.copy_(later)
        found = step()
    side.synchronize()
    assert torch.equal(found, expected(args)), "it did not wait for the copy that its stream was to make first"


@pytest.mark.parametrize("handed", [lambda stream: stream, lambda stream: stream.cuda_stream], ids=["stream", "handle"])
def test_a_stream_that_is_given_is_used(handed: Callable[[torch.cuda.Stream], Any]) -> None:
    args, kernel = arguments()
    kernel.run(args)
    later, side = integers(M, K), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        args.A.copy_(later)
    found = kernel.run(args, stream=handed(side))["D"]
    side.synchronize()
    assert torch.equal(found, expected(args))


@pytest.mark.parametrize("stream", ["default", object()], ids=["a word", "an object"])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    args, kernel = arguments()
    with pytest.raises(ArgumentError, match="stream must be a torch"):
        kernel.run(args, stream=stream)


@pytest.mark.parametrize("way", ["run", "bound"])
def test_a_captured_launch_reads_new_data_and_allocates_nothing(way: str) -> None:
    args, kernel = arguments()
    step = WAYS[way](kernel, args)
    step()
    first = torch.cuda.CUDAGraph()  # while none lives, a capture allocates for the random generators
    with torch.cuda.graph(first):
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.cuda.graph(graph):
        step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for _ in range(100):
        args.A.copy_(integers(M, K))
        args.epilogue.tensors["D"].fill_(torch.nan)
        graph.replay()
        assert torch.equal(args.epilogue.tensors["D"], expected(args))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_another_device_than_the_current_one(way: str) -> None:
    args, kernel = arguments("cuda:1")
    step = WAYS[way](kernel, args)
    for _ in range(3):
        assert torch.equal(step(), expected(args))
    assert torch.cuda.current_device() == 0


def test_warm_calls_see_new_numbers_new_memory_and_new_shapes() -> None:
    for m in (M, 40, M):
        a, b, bias = integers(m, K), integers(N, K).t(), integers(N)
        for alpha in (1.0, 2.0, -1.0):
            found = ef.gemm(a, b, epilogue=epi, bias=bias, alpha=alpha, out_dtypes=torch.float32)
            assert torch.equal(found, (a.float() @ b.float()) * alpha + bias.float())


def test_memory_that_moved_is_bound_anew() -> None:
    args, kernel = arguments()
    kernel.run(args)
    args.A.data = integers(M, K)
    assert torch.equal(kernel.run(args)["D"], expected(args))


def test_nothing_waits_for_the_device() -> None:
    args, kernel = arguments()
    step = kernel.bind(args)
    kernel.run(args)
    ef.gemm(args.A, args.B)  # what comes first may build
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    step()
    kernel.run(args)
    ef.gemm(args.A, args.B)
    assert not torch.cuda.current_stream().query(), "a launch waited until the device was done"
