"""Every row of the vocabulary on values of every access, many in one kernel: a compilation costs a second or two.

One output is one row. Its columns take turns: in column n the row is applied to the arguments of turn n % turns.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from gpu.harness import Machine, check

from epifuse.fusion.primitives import PRIMITIVES
from tests.conformance.test_meanings import INF_IS_NAN_IN_PYTORCH
from tests.conformance.test_vocabulary import ELEMENTWISE, kinds_of, values_of

L, M, N, K = 2, 72, 136, 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PER_KERNEL, PARTS = 8, 2

ACCESSES: Mapping[str, tuple[tuple[int, ...], str]] = {
    "scalar": ((1,), "rows"),
    "row": ((N,), "rows"),
    "column": ((M, 1), "rows"),
    "tile": ((M, N), "rows"),
    "by_columns": ((M, N), "columns"),
    "direct": ((M, N), "odd"),
    "pairs": ((M, N), "even"),
    "unaligned": ((L, M, N), "shifted"),
    "batch_scalar": ((L, 1, 1), "rows"),
    "batch_row": ((L, 1, N), "rows"),
    "batch_column": ((L, M, 1), "rows"),
    "batch_tile": ((L, M, N), "padded"),
}
NUMBERS: Mapping[str, Any] = {"number": 1.5, "zero_d": torch.tensor(-0.75)}
VARIED = ("accum", *[name for name in ACCESSES if name not in ("scalar", "row", "column")])
SOURCES = ("varied", "number", "row", "zero_d", "column", "scalar")
"""What an argument is: those of `VARIED` by turns, or one that leaves the value without some axis."""
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
LONG = ("sin", "cos", "tan", "snake", "pow")
"""Code so long that one copy of it takes the turns of its arguments."""
RESULTS = {"compare": "where({}, 1.0, 0.0)", "logic": "where({}, 1.0, 0.0)"}
GROUPS = [ELEMENTWISE[i : i + PER_KERNEL] for i in range(0, len(ELEMENTWISE), PER_KERNEL)]
KERNELS = [(rows, part) for rows in GROUPS for part in range(PARTS)]


def turns_of(row: str, part: int) -> list[tuple[str, ...]]:
    """The arguments of each turn: over the parts each argument is each source. A value without axes is no value."""
    arity = len(values_of(row))
    sources = SOURCES if arity > 1 else [source for source in SOURCES if source not in NUMBERS]
    return [
        tuple(sources[(turn + position) % len(sources)] for position in range(arity))
        for turn in range(part, len(sources), PARTS)
    ]


def written(source: str, kind: str, position: int) -> str:
    """A source as a value of this kind; what integers are divided by is not zero."""
    if source == "varied":
        return by_turns([written(name, kind, position) for name in VARIED])
    if kind == "mask":
        return f"({source} > 0.25)"
    if kind != "int32":
        return source
    if source in NUMBERS:
        return "7"  # a number that is handed over is a float
    whole = f"(clip({source}, -4.0, 4.0) * 4.0).to(torch.int32)"
    if source in ("tile", "by_columns", "direct", "pairs", "unaligned", "batch_tile"):
        whole = f"where({source} == {source}, {whole}, 9)"  # a NaN is no integer
    return f"({whole} * 2 + 1)" if position else whole


def by_turns(values: list[str]) -> str:
    """The values of each turn in its columns."""
    *firsts, text = values
    for i, value in reversed(list(enumerate(firsts))):
        text = f"where(index_n(accum) % {len(values)} == {i}, {value}, {text})"
    return text


def output(row: str, part: int) -> str:
    """One row, by turns."""
    kinds = kinds_of(row, len(values_of(row)))
    form = RESULTS.get(PRIMITIVES[row].rule if row in PRIMITIVES else "", "{} * 1.0")
    turns = [
        [written(source, kind, p) for p, (source, kind) in enumerate(zip(turn, kinds, strict=True))]
        for turn in turns_of(row, part)
    ]
    if row in LONG:
        turns = [[by_turns([turn[p] for turn in turns]) for p in range(len(kinds))]]
    value = by_turns([form.format(f"{row}({', '.join(turn)})") for turn in turns])
    return f"where(accum > -1000.0, {value}, 0.0)"  # full-size whatever its arguments are


def operands_of(rows: list[str], part: int) -> list[str]:
    met = {source for row in rows for turn in turns_of(row, part) for source in turn}
    return [name for name in (*ACCESSES, *NUMBERS) if name in met or name in VARIED]


def source_of(rows: list[str], part: int) -> str:
    lines = "".join(f"    {row}_ = {output(row, part)}\n" for row in rows)
    parameters = ", ".join(["accum", *operands_of(rows, part)])
    return f"def epi({parameters}):\n{lines}    return {', '.join(f'{row}_' for row in rows)}\n"


def data(machine: Machine, number: int, rows: list[str]) -> dict[str, Any]:
    """Multiples of 1/4, with NaN, infinities and -0 where there is room."""
    made: dict[str, Any] = dict(NUMBERS)
    special = SPECIAL
    if not machine.gpu and INF_IS_NAN_IN_PYTORCH.intersection(rows):
        special = torch.where(special == torch.inf, 0.0, special)
    for i, (name, (shape, layout)) in enumerate(ACCESSES.items()):
        values = torch.randint(-16, 17, shape) / 4
        if values.numel() >= M * N:
            values.view(-1)[torch.randperm(values.numel())[:64]] = special.repeat(16)
        made[name] = machine.laid_out(values.to(FLOATS[(number + i) % 3]), layout)
    return made


def test_each_argument_of_each_row_is_each_source() -> None:
    for row in ELEMENTWISE:
        turns = [turn for part in range(PARTS) for turn in turns_of(row, part)]
        for position in range(len(values_of(row))):
            met = {turn[position] for turn in turns}
            assert met == set(SOURCES) - (set(NUMBERS) if len(turns[0]) == 1 else set())
        assert all(set(turn) - set(NUMBERS) for turn in turns)


@pytest.mark.sweep
@pytest.mark.parametrize(("first", "part"), [(rows[0], part) for rows, part in KERNELS])
def test_rows(first: str, part: int, machine: Machine) -> None:
    """float32 outputs in one part, 16-bit ones, whose functions may be cheaper, in the other."""
    number, rows = next((i, rows) for i, (rows, own) in enumerate(KERNELS) if (rows[0], own) == (first, part))
    a = (torch.randint(-1, 2, (L, M, K)) / 2).to(FLOATS[1 + number // 2 % 2]).to(machine.device)
    b = (torch.randint(-1, 2, (L, K, N)) / 2).to(a.dtype).to(machine.device)
    given = data(machine, number, rows)
    operands = {name: given[name] for name in operands_of(rows, part)}
    dtypes = {f"{row}_": torch.float32 if part == 0 else FLOATS[1 + i % 2] for i, row in enumerate(rows)}
    check(machine, source_of(rows, part), a, b, operands, out_dtypes=dtypes)
