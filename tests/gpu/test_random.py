"""Sixty random epilogues of the foundation's generator that the Hopper kernel takes, each beside PyTorch and the CPU.

The generator writes for the whole language. Here its shapes, dtypes and layouts of A and B are TMA's, its statements
keep to one element, and what it returns is spread over the whole result, as floats.
"""

import functools
import random
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fuzzing import case, check, forms, grammar
from fuzzing.case import Case
from fuzzing.operands import Output
from fuzzing.writer import Statement
from gpu.harness import Machine, judge_one, place, rounded

import epifuse as ef
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments

COUNT, EACH, PARTS = 60, 40, 20
LONGEST = 60  # nodes: a compilation of more takes up to ten seconds
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("rows", "columns", "padded", "odd")
SPREAD = {"float": "{}", "int": "{}.to(FLOAT)", "long": "{}.to(FLOAT)", "mask": "where({}, 1.0, 0.0)"}
SMALLER: Mapping[str, Any] = {
    "_EXTENTS": (1, 8, 40, 64, 72, 129, 136, 200, 264),
    "_DEPTHS": (8, 16, 64, 72, 136),
    "GEMM_DTYPES": ((torch.bfloat16, torch.bfloat16, None), (torch.float16, torch.float16, None)),
}
LEFT_OUT = (forms.split, forms.permute, grammar.reductions.reduction, grammar.reductions.softmax)


class Made(NamedTuple):
    """A case with the layout of each output."""

    case: Case
    layouts: dict[str, str]


def written(seed: int) -> Made | None:
    """The case of this number for a Hopper GPU; None where it returns nothing that can be spread."""
    productions = tuple(entry for entry in grammar.PRODUCTIONS if entry[1] not in LEFT_OUT)
    with (
        mock.patch.multiple(case, **SMALLER),
        mock.patch.multiple(grammar, PRODUCTIONS=productions, REDUCTIONS={}),
    ):
        made = case.make(seed)
    if made.wide or 0 in made.sizes.values() or not made.dtypes[0].is_floating_point:
        return None
    made.layouts = "plain", "transposed" if made.sizes["n"] % 8 or seed % 2 else "plain"
    return _spread(made) if made.depth else None


def _spread(made: Case) -> Made | None:
    """Outputs as full-size floats: what has fewer axes is repeated, where the product is a number at all."""
    rng, outputs, layouts = random.Random(made.seed), [], {}
    full = ("l", "m", "n") if made.batched else ("m", "n")
    for i, output in enumerate(made.outputs):
        if output.dims[-2:-1] not in ((), ("m",), ("1",)) or output.dims[-1:] not in ((), ("n",), ("1",)):
            continue
        value = SPREAD[output.kind].format(output.name)
        made.statements.append(Statement(f"Y{i}", f"where(accum > -1e9, {value}, 0.0)"))
        dtype = rng.choice(OUT_DTYPES)
        outputs.append(Output(f"Y{i}", full, "float", dtype, None))
        layouts[f"Y{i}"] = rng.choice(LAYOUTS)
    made.outputs = outputs
    return Made(made, layouts) if outputs else None


def arguments(made: Made, data: check.Data, outputs: Mapping[str, torch.Tensor], device: str) -> GemmArguments:
    """What the case hands over, on a device: each tensor in memory laid out as its own."""
    operands = {name: _moved(x, data.memory.get(name), device) for name, x in data.operands.items()}
    function: Any = made.case.source()
    if not made.case.as_string:
        function = check.function_of(function, made.case.captured)
    given = EpilogueArguments.partial(function, {**operands, **outputs})
    dtypes = {o.name: o.dtype for o in made.case.outputs if o.dtype and o.name not in outputs}
    return GemmArguments(_moved(data.a, None, device), _moved(data.b, None, device), epilogue=given, out_dtypes=dtypes)


def _moved(value: Any, memory: torch.Tensor | None, device: str) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    memory = value if memory is None else memory
    return memory.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


@functools.cache
def taken(turn: int) -> Made:
    """The first case of this turn's numbers that the Hopper kernel takes."""
    for seed in range(turn * EACH, (turn + 1) * EACH):
        made = written(seed)
        if made is None:
            continue
        args = arguments(made, check.draw(made.case), {}, "cpu")
        if len(args.graph.nodes) <= LONGEST and ef.get_kernels(args, cc=90, providers=["cutedsl"], limit=1):
            return made
    raise AssertionError(f"the Hopper kernel takes none of {EACH} random epilogues")


@pytest.mark.sweep("part")
@pytest.mark.parametrize(("turn", "part"), [(turn, turn % PARTS) for turn in range(COUNT)])
def test_random(turn: int, part: int, machine: Machine) -> None:
    """Fused into poisoned outputs, with their surroundings, then beside the function in PyTorch."""
    made = taken(turn)
    data = check.draw(made.case)
    shape = tuple(made.case.sizes[letter] for letter in ("lmn" if made.case.batched else "mn"))
    places = {
        output.name: place(shape, output.dtype or torch.float32, machine.device, made.layouts[output.name])
        for output in made.case.outputs
    }
    args = arguments(made, data, {name: one.view for name, one in places.items()}, machine.device)
    machine.kernel(args).run(args)
    wants = check.expected(made.case, data, made.case.numbers, made.case.captured)
    for (name, one), want in zip(places.items(), wants, strict=True):
        if made.case.exact:
            want = rounded(want)
        judge_one(f"{name} of\n{made.case}\n", one.view.cpu(), want)
        assert one.intact(), name


def test_the_cases_are_worth_running() -> None:
    """Every access, most dtypes and all layouts; many operands, and outputs whose elements can mostly be judged."""
    cases = [taken(turn) for turn in range(COUNT)]
    operands = [operand for made in cases for operand in made.case.operands]
    assert len(operands) > 2 * COUNT
    assert len({operand.access for operand in operands}) == 8
    assert len({operand.dtype for operand in operands}) >= 8
    assert {layout for made in cases for layout in made.layouts.values()} == set(LAYOUTS)
