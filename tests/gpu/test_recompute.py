"""Values that need a finished reduction, where the product may be computed again: one launch a sweep."""

from typing import Any

import pytest
import torch
from gpu.harness import Machine, check, refusal

import epifuse as ef
from epifuse.request.problem import Constraints

ALLOWED = Constraints(allow_recompute=True)
LAYER_NORM = """c = accum - mean(accum, dim=-1, keepdim=True)
    s = rsqrt(mean(c * c, dim=-1, keepdim=True) + 1e-5)
    D = c * s * row; return D, s"""
EPILOGUES = {
    "a number": "D = accum / norm(accum); return D",
    "per column": "D = accum / norm(accum, dim=-2, keepdim=True); return D",
    "per row": "D = accum - mean(accum, dim=-1, keepdim=True); return D",
    "softmax": "D = softmax(accum * scale + row); return D",
    "layer norm": LAYER_NORM,
    "several extents": """t = sum(accum, dim=-2, keepdim=True) * norm(accum)
    D = accum * (amax(accum, dim=-1, keepdim=True) + t); return D""",
    "stored as soon as known": "d = relu(accum); t = sum(d); D = d + t; u = t * scale; return d, D, t, u",
    "a mask": "D = where(any(accum > 20, dim=-2, keepdim=True), accum, row); return D",
}
SHAPES = {
    "one tile": (0, 64, 128, 64),
    "ragged": (0, 257, 392, 72),
    "batched": (3, 129, 264, 40),
    "wide": (0, 192, 3000, 64),
    "thin": (0, 1, 8, 64),
}


def source_of(name: str) -> tuple[str, list[str]]:
    body = EPILOGUES[name]
    operands = [operand for operand in ("row", "scale") if operand in body]
    return f"def epi({', '.join(('accum', *operands))}):\n    {body}\n", operands


def data(machine: Machine, shape: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    l, m, n, k = SHAPES[shape]
    lead = (l,) if l else ()
    a, b = (machine.normal(*lead, *extents, dtype=torch.bfloat16) for extents in ((m, k), (k, n)))
    return a, b, {"row": machine.normal(n), "scale": 0.5}


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EPILOGUES)
def test_beside_float64(name: str, shape: str, machine: Machine) -> None:
    a, b, operands = data(machine, shape)
    source, wanted = source_of(name)
    given = {operand: operands[operand] for operand in wanted}
    check(machine, source, a, b, given, exact=False, constraints=ALLOWED, out_dtypes=torch.float32)


def arguments(machine: Machine, name: str, shape: str = "ragged", constraints: Constraints = ALLOWED) -> Any:
    a, b, operands = data(machine, shape)
    source, wanted = source_of(name)
    epilogue = ef.EpilogueArguments.partial(source, {operand: operands[operand] for operand in wanted})
    return ef.GemmArguments(a, b, epilogue=epilogue, constraints=constraints, out_dtypes=torch.float32)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("a number", "store norm(x) and apply it"),
        ("per column", "store norm(x, dim=-2) and apply it"),
        ("several extents", "store sum(x, dim=-2) and norm(x) and amax(x, dim=-1) and apply them"),
    ],
)
def test_unasked_the_refusal_says_the_price_and_the_ways_out(name: str, stored: str) -> None:
    reason = refusal(arguments(Machine("cpu"), name, constraints=Constraints()))
    assert f"{stored} in the next GEMM's epilogue, or pass allow_recompute=True" in reason
    assert "a second launch recomputes the product, 2.0 x the FLOPs" in reason


def test_the_plan_shows_each_launch() -> None:
    args = arguments(Machine("cpu"), "a number")
    shown = str(ef.explain(args, cc=90))
    assert "2 launches: the product is computed twice, 2.0 x the FLOPs" in shown
    assert "  launch 1\n" in shown
    assert "load     norm~0: scalar" in shown.split("  launch 2\n")[1]
    plan = ef.get_kernels(args, cc=90)[0].plan
    parts = plan.allocation.launches
    assert plan.allocation.cost > sum(part.allocation.cost for part in parts)
    assert plan.allocation.workspace_bytes == 16 + max(part.allocation.workspace_bytes for part in parts)


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_workspace_that_is_given(name: str, machine: Machine) -> None:
    """Whatever it holds; one byte less is refused."""
    args = arguments(machine, name)
    kernel = machine.kernel(args)
    need = kernel.get_workspace_size(args)
    want = {output: tensor.clone() for output, tensor in kernel.run(args).items()}
    memory = torch.full((need,), 255, dtype=torch.uint8, device=machine.device)
    for _ in range(2):
        found = kernel.run(args, workspace=memory)
        assert all(torch.equal(found[output], tensor) for output, tensor in want.items())
    if machine.gpu and need:
        with pytest.raises(ef.errors.ArgumentError, match=f"the workspace must be a tensor of at least {need} bytes"):
            kernel.run(args, workspace=memory[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a number", "softmax", "layer norm"])
def test_captured_and_replayed(name: str, hopper: Machine) -> None:
    """With new data each time, as an ordinary launch."""
    args = arguments(hopper, name)
    kernel = hopper.kernel(args)
    step = kernel.bind(args)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(20):
        args.A.copy_(hopper.normal(*args.A.shape))
        want = kernel.run(args)
        graph.replay()
        assert all(torch.equal(captured[output], tensor) for output, tensor in want.items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a number", "softmax", "layer norm"])
def test_on_two_streams_at_once(name: str, hopper: Machine) -> None:
    """Each launch has a workspace of its own."""
    works = [arguments(hopper, name, "wide") for _ in range(2)]
    kernel = hopper.kernel(works[0])
    wants = [kernel.run(args) for args in works]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    differing = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in works]
    torch.cuda.synchronize()
    for i in range(100):
        with torch.cuda.stream(streams[i % 2]):
            for output, tensor in kernel.run(works[i % 2]).items():
                differing[i % 2] += (tensor != wants[i % 2][output]).sum()
    torch.cuda.synchronize()
    assert [int(count) for count in differing] == [0, 0]
