"""One random problem from one number: shapes, dtypes, layouts, operands, an epilogue and its outputs."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fuzzing.forms import HELPERS
from fuzzing.grammar import attempt, write, write_all
from fuzzing.operands import ACCESSES, DTYPES, Operand, Output, choose_layout, facts_of
from fuzzing.reductions import reduction
from fuzzing.values import Facts, Val
from fuzzing.writer import Frame, Statement, Writer

_BATCHES = (1, 2, 2, 3, 3, 5)
_EXTENTS = (1, 2, 2, 3, 4, 5, 7, 8, 12, 13, 16, 17, 24, 31, 32, 40)
_DEPTHS = (1, 2, 3, 7, 8, 16, 17, 33)
_TILES = ((1, 3), (2, 5), (4, 8), (3, 7), (8, 16), (5, 1), (16, 64))
GEMM_DTYPES = (
    (torch.float32, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.float16, torch.float16, None),
    (torch.float16, torch.float16, torch.float16),
    (torch.float8_e4m3fn, torch.float8_e5m2, None),
    (torch.float8_e5m2, torch.float8_e5m2, None),
    (torch.int8, torch.int8, None),
    (torch.uint8, torch.int8, None),
)
FOCI = tuple((access, dtype) for dtype in DTYPES for access in ACCESSES)
"""Every access and dtype of an operand that a kernel must be able to load. The cases take them in turn."""


@dataclass
class Case:
    """Everything that determines a run, except the data, which is made from the seed too.

    With `exact` data the results have to be equal. Other data are smooth, and results are judged by an error bound.
    `special` data contain NaN and infinities; `extreme` matrices hold integers near the largest of their dtype.
    """

    seed: int
    sizes: dict[str, int]
    depth: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    layouts: tuple[str, str]
    batches: tuple[bool, bool]
    exact: bool
    special: bool
    extreme: bool
    tile: tuple[int, int]
    as_string: bool
    operands: list[Operand] = field(default_factory=list)
    numbers: dict[str, float | int] = field(default_factory=dict)
    captured: dict[str, float | int] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def wide(self) -> bool:
        """True if the epilogue computes in float64."""
        return self.dtypes[0] == torch.float64

    @property
    def batched(self) -> bool:
        """True if accum has three dims."""
        return any(self.batches)

    def source(self, *, wide: bool | None = None) -> str:
        """The epilogue as Python text; `wide` writes its casts to float32 as casts to float64."""
        parameters = ["accum", *(o.name for o in self.operands), *self.numbers]
        lines = [str(statement) for statement in self.statements]
        lines.append(f"return {', '.join(output.name for output in self.outputs)}")
        text = f"def epi({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
        return text.replace("FLOAT", "torch.float64" if (self.wide if wide is None else wide) else "torch.float32")

    def __str__(self) -> str:
        data = "exact" if self.exact else "smooth"
        head = f"seed {self.seed}: {data}{' special' * self.special}, sizes {self.sizes}, K={self.depth}, {self.dtypes}"
        given = [f"  {o}" for o in (*self.operands, *self.outputs)]
        numbers = f"  numbers {self.numbers}, captured {self.captured}, tile {self.tile}, string {self.as_string}"
        place = f"  layouts {self.layouts}, batches {self.batches}"
        helpers = [HELPERS] * ("helper(" in self.source())
        return "\n".join([head, place, *given, numbers, *helpers, self.source()])


def make(seed: int) -> Case:
    """The case of this number. Successive cases go through all operands and both kinds of data."""
    rng = random.Random(seed)
    turn, focus = divmod(seed // 2, len(FOCI))
    access, dtype = FOCI[focus]
    case = _frame(rng, seed, access, dtype)
    names = iter(rng.sample(["C", "bias", "scale", "x1", "gate", "w", "k", "Aux"], 8))
    dense = rng.random() < 0.7
    for _ in range(rng.choice((5, 6, 7)) if dense else rng.choice((1, 2, 2, 3))):
        case.operands.append(_operand(rng, case, next(names), access, dtype))
        access, dtype = _another(rng, case)
    writer = Writer(
        rng,
        Frame(case.sizes, case.batched, case.exact, case.wide, case.special, not case.as_string),
        [],
        _numbers(rng, case),
    )
    _accum(writer, case)
    if case.extreme:
        attempt(writer, lambda: reduction(writer, rng.choice(("sum", "sum_of_squares"))))
    for operand in case.operands:
        _load(rng, writer, operand)
    if dense:
        write_all(writer, rng.choice((12, 15, 18)), turn)
    write(writer, rng.choice((1, 2, 4, 6)))
    case.statements = writer.statements
    _choose_outputs(rng, case, writer)
    return case


def _frame(rng: random.Random, seed: int, access: str, dtype: torch.dtype) -> Case:
    batched = access.startswith("batch") or rng.random() < 0.4
    sizes = {"m": rng.choice(_EXTENTS), "n": rng.choice(_EXTENTS), "l": rng.choice(_BATCHES) if batched else 1, "1": 1}
    depth = rng.choice(_DEPTHS)
    if rng.random() < 0.02:
        sizes[rng.choice("mn")] = 0
    if rng.random() < 0.02:
        depth = 0
    for whole, (outer, inner) in {"n": ("h", "d"), "m": ("g", "s")}.items():
        divisors = [d for d in range(2, sizes[whole]) if sizes[whole] % d == 0]
        if divisors and rng.random() < 0.5:
            # Two pieces of equal size are likely, because they can be confused with each other.
            square = math.isqrt(sizes[whole])
            sizes[inner] = square if square in divisors and rng.random() < 0.7 else rng.choice(divisors)
            sizes[outer] = sizes[whole] // sizes[inner]
    wide = dtype == torch.float64 or rng.random() < 0.12
    dtypes = (torch.float64, torch.float64, None) if wide else rng.choice(GEMM_DTYPES)
    exact = seed % 2 == 0
    extreme = not dtypes[0].is_floating_point and rng.random() < 0.2
    if extreme:
        sizes |= {"m": min(sizes["m"], 3), "n": min(sizes["n"], 4)}
        sizes = {k: v for k, v in sizes.items() if k in "lmn1"}
        depth = rng.choice((300, 1100, 2100))
    batches = rng.choice(((True, True), (True, False), (False, True))) if batched else (False, False)
    layouts = (choose_layout(rng), choose_layout(rng))
    special = exact and rng.random() < 0.15
    case = Case(
        seed, sizes, depth, dtypes, layouts, batches, exact, special, extreme, rng.choice(_TILES), rng.random() < 0.25
    )
    return case


def _another(rng: random.Random, case: Case) -> tuple[str, torch.dtype]:
    accesses = [access for access in ACCESSES if case.batched == access.startswith("batch") or rng.random() < 0.3]
    accesses = [access for access in accesses if case.batched or not access.startswith("batch")] or ["tile"]
    dtype = torch.float64 if case.wide and rng.random() < 0.5 else rng.choice(DTYPES[:-1])
    return rng.choice(accesses), dtype


def _operand(rng: random.Random, case: Case, name: str, access: str, dtype: torch.dtype) -> Operand:
    dims = ACCESSES[access][-1 if rng.random() < 0.7 else 0]
    operand = Operand(name, access, dims, dtype, choose_layout(rng))
    sizes = case.sizes
    if rng.random() > 0.15:
        return operand
    if dims == ("m", "1"):
        return operand._replace(view="[:, None]", shape=(sizes["m"],))
    if dims == ("l", "m", "1"):
        return operand._replace(view="[..., None]", shape=(sizes["l"], sizes["m"]))
    if dims == ("m", "n"):
        return operand._replace(view=".permute(1, 0)", shape=(sizes["n"], sizes["m"]))
    if dims == ("n",) and "h" in sizes:
        shape = (sizes["h"], sizes["d"])
        return operand._replace(view=f".reshape({sizes['n']})", shape=shape, layout="plain")
    return operand


def _numbers(rng: random.Random, case: Case) -> list[Val]:
    found = []
    for name, kind, place in (("alpha", "float", case.numbers), ("beta", "float", case.numbers),
                              ("S", "int", case.captured), ("T", "float", case.captured)):  # fmt: skip
        captured = place is case.captured
        if rng.random() < 0.5 or (captured and case.as_string):
            continue
        place[name] = draw_number(rng, kind)
        found.append(Val(name, kind, (), Facts(4.0, 0.5 if kind == "float" else 1.0), True))  # type: ignore[arg-type]
    return found


def draw_number(rng: random.Random, kind: str) -> float | int:
    """A random number operand. It is exact with both kinds of data."""
    return rng.randint(-8, 8) / 2 if kind == "float" else rng.randint(-4, 4)


def _accum(writer: Writer, case: Case) -> None:
    dims = ("l", "m", "n") if case.batched else ("m", "n")
    integers = not case.dtypes[0].is_floating_point
    bound = float(max(case.depth, 1)) * (16.0 if case.exact else 4.0)
    if integers:
        bound = case.depth * (65025.0 if case.extreme else 81.0) + 1
    facts = Facts(bound, 1.0 if integers else 0.25, rounded=not case.exact and not integers)
    writer.values.append(Val("accum", "int" if integers else "float", dims, facts))


def _load(rng: random.Random, writer: Writer, operand: Operand) -> None:
    facts = facts_of(operand.dtype, writer.frame.exact)
    if not operand.dims:
        # A 0-d tensor on the CPU is handed over as a number.
        if operand.kind != "mask":
            writer.numbers.append(Val(operand.name, operand.kind, (), facts, True))
        return
    value = Val(operand.name + operand.view, operand.kind, operand.dims, facts, raw=True)
    if operand.view:
        writer.assign(value)
    else:
        writer.values.insert(rng.randrange(1 + len(writer.values)), value)


def _choose_outputs(rng: random.Random, case: Case, writer: Writer) -> None:
    named = [s.value for s in case.statements if s.value is not None and s.value.text == s.name]
    if not named:
        named = [
            writer.assign(writer.values[[v.text for v in writer.values].index("accum")]._replace(text="accum * 1"))
        ]
    used = set(re.findall(r"\bt\d+\b", " ".join(s.text for s in case.statements)))
    # Values that no other statement reads become outputs, so that every statement counts.
    ends = [value for value in named if value.text not in used]
    others = [value for value in named if value.text in used]
    chosen = ends[-6:] + rng.sample(others, min(len(others), rng.choice((0, 0, 1))))
    rename = {chosen[0].text: "D"} if rng.random() < 0.6 else {}
    for value in chosen:
        case.outputs.append(_output(rng, case, value))
    _rename(case, rename)


def _output(rng: random.Random, case: Case, value: Val) -> Output:
    dtype = rng.choice(DTYPES) if rng.random() < 0.6 else None
    layout = choose_layout(rng) if rng.random() < 0.5 else None
    if layout == "expanded":
        layout = "transposed"
    if layout is not None and dtype is None:
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.int32, torch.int64))
    alias = None
    for operand in case.operands:
        whole = ("l", "m", "n") if case.batched else ("m", "n")
        same = operand.dims == value.dims == whole and not operand.view
        if (
            same
            and operand.layout != "expanded"
            and not any(o.alias == operand.name for o in case.outputs)
            and rng.random() < 0.4
        ):
            alias, dtype, layout = operand.name, operand.dtype, operand.layout
    return Output(value.text, value.dims, value.kind, dtype, layout, alias)


def _rename(case: Case, names: Mapping[str, str]) -> None:
    def renamed(text: str) -> str:
        return re.sub(r"\b(t\d+)\b", lambda match: names.get(match[1], match[1]), text)

    case.statements = [Statement(renamed(s.name), renamed(s.text), s.value) for s in case.statements]
    case.outputs = [output._replace(name=renamed(output.name)) for output in case.outputs]


def shape_of(case: Case, dims: Any) -> tuple[int, ...]:
    """The extents of these letters."""
    return tuple(case.sizes[letter] for letter in dims)
