"""One sweep, one part: each an epilogue of its own, and one after the other what the whole is."""

from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import judge, product

import epifuse as ef
from epifuse.passes.assign_stages import has_row_stage, sweeps
from epifuse.passes.split_sweeps import SweepPart, crossing_names, split_sweeps
from epifuse.passes.structure import Structure
from epifuse.passes.verify import verify
from epifuse.plan import select
from epifuse.providers import WORKSPACE, Runner, load, sequence
from epifuse.runtime.numbers import scalars

M, N, K = 37, 53, 16
LAYER_NORM = """
    c = accum - mean(accum, dim=-1, keepdim=True)
    s = rsqrt(mean(c * c, dim=-1, keepdim=True) + 1e-5)
    D = c * s * row
    return D, s"""
EPILOGUES: dict[str, tuple[str, int, int]] = {
    "a number": ("D = accum / norm(accum); return D", 2, 2),
    "per column": ("D = accum / norm(accum, dim=-2, keepdim=True); return D", 2, 2),
    "per row": ("D = accum - mean(accum, dim=-1, keepdim=True); return D", 1, 2),
    "softmax": ("D = softmax(accum * scale + row); return D", 1, 2),
    "log softmax": ("D = log_softmax(accum + row); return D", 1, 2),
    "softmax down columns": ("D = softmax(accum, dim=-2); return D", 2, 2),
    "layer norm": (LAYER_NORM, 1, 3),
    "several extents in one value": (
        "D = accum * (sum(accum, dim=-1, keepdim=True) + sum(accum, dim=-2, keepdim=True) * norm(accum)); return D",
        2,
        2,
    ),
    "stored by the first that can": ("d = relu(accum); t = sum(d); D = d + t; u = t * scale; return d, D, t, u", 2, 2),
    "rows beside a whole": ("D = softmax(accum); E = accum / amax(D); return D, E", 2, 3),
    "a mask": ("D = where(any(accum > 3, dim=-2, keepdim=True), accum, row); return D", 2, 2),
    "one sweep": ("D = accum + row; t = sum(D, dim=-2); return D, t", 1, 1),
}


def arguments(body: str, lead: tuple[int, ...] = (), **given: Any) -> ef.GemmArguments:
    torch.manual_seed(0)
    a, b = torch.randn(*lead, M, K), torch.randn(*lead, K, N)
    operands = {name: value for name, value in {"row": torch.randn(N), "scale": 0.5}.items() if name in body}
    source = f"def epi({', '.join(('accum', *operands))}):\n    {body.strip()}\n"
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function_of(source, {}), operands | given))


def runner_of(parts: tuple[SweepPart, ...], args: ef.GemmArguments) -> Runner:
    """The CPU kernel, one part after the other."""
    cpu = load("cpu")
    plans = [select(Structure.of(*part), part.problem, [(cpu, cpu.specs())]).plans[0] for part in parts]
    between = sequence.slots(parts, args.problem)
    return sequence.in_sequence([cpu.build(plan) for plan in plans], between, size_of(parts, args))


def size_of(parts: tuple[SweepPart, ...], args: ef.GemmArguments) -> int:
    return sequence.workspace_bytes(sequence.slots(parts, args.problem), [0])


def run_parts(parts: tuple[SweepPart, ...], args: ef.GemmArguments) -> dict[str, torch.Tensor]:
    """Through a workspace that holds NaN, and through one of its own."""
    runner, operands = (
        runner_of(parts, args),
        args.epilogue.tensors | scalars(args.graph, args.problem, args.call.numbers),
    )
    poisoned = torch.full((size_of(parts, args),), 255, dtype=torch.uint8)
    runner(
        args.A,
        args.B,
        operands | {WORKSPACE: poisoned},
        outputs := args.allocate(),
    )()
    runner(args.A, args.B, operands, again := args.allocate())()
    assert all(torch.equal(outputs[name], tensor) for name, tensor in again.items())
    return outputs


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "batched"])
@pytest.mark.parametrize("whole_rows", [True, False], ids=["whole rows", "rows finished"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_the_parts_are_the_whole(name: str, whole_rows: bool, lead: tuple[int, ...]) -> None:
    body, *counts = EPILOGUES[name]
    args = arguments(body, lead)
    parts = split_sweeps(args.graph, args.problem, whole_rows=whole_rows)
    assert len(parts) == counts[not whole_rows]
    for graph, problem in parts:
        verify("split_sweeps", args.graph, graph)
        assert sweeps(graph) == 1
        assert whole_rows or not has_row_stage(graph) or len(parts) == 1
        assert [name for name, _ in problem.dtypes] == [output.name for output in graph.outputs]
    operands = {name: args.epilogue.tensors[name] for name in args.epilogue.parsed.parameters}
    judge(run_parts(parts, args), ef.reference(args.epilogue.epilogue_fn), product(args.A, args.B), operands)


def test_a_graph_of_one_sweep_is_its_own_part() -> None:
    args = arguments(EPILOGUES["one sweep"][0])
    for whole_rows in (True, False):
        ((graph, problem),) = split_sweeps(args.graph, args.problem, whole_rows=whole_rows)
        assert graph is args.graph
        assert problem == args.problem


def test_what_is_stored_where() -> None:
    args = arguments(EPILOGUES["stored by the first that can"][0])
    first, second = split_sweeps(args.graph, args.problem)
    assert [output.name for output in first.graph.outputs] == ["d", "t", "u", "sum~0"]
    assert [output.name for output in second.graph.outputs] == ["D"]
    assert crossing_names(first, args.problem) == ("sum~0",)


def test_a_result_over_its_operand_waits_for_the_last_sweep() -> None:
    """Each sweep reads the operand."""
    C = torch.randn(M, N)
    body = "def epi(accum, C): d = accum + C; D = d / norm(C - accum); return d, D"
    given = {"C": C, "d": C}
    args = ef.GemmArguments(torch.randn(M, K), torch.randn(K, N), epilogue=ef.EpilogueArguments.partial(body, given))
    first, second = split_sweeps(args.graph, args.problem)
    assert [output.name for output in first.graph.outputs] == ["norm~0"]
    assert second.problem.aliases == (("d", "C"),)
    accum, before = args.A @ args.B, C.clone()
    runner = runner_of((first, second), args)
    runner(args.A, args.B, {"C": C}, outputs := args.allocate())()
    torch.testing.assert_close(C, accum + before)
    torch.testing.assert_close(outputs["D"], C / torch.linalg.vector_norm(before - accum))


def test_slots_are_aligned_and_lie_behind_each_other() -> None:
    args = arguments(LAYER_NORM)
    between = sequence.slots(split_sweeps(args.graph, args.problem, whole_rows=False), args.problem)
    assert [slot.start % 16 for slot in between] == [0, 0]
    assert [slot.stop - slot.start for slot in between] == [4 * M, 4 * M]
    assert between[0].stop <= between[1].start
    assert sequence.workspace_bytes(between, [1, 100]) == 2 * 160 + 100, "the parts' own is used one after the other"
