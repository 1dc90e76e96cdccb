"""Every row of the vocabulary, run fused and compared with PyTorch. The rows come from the registries.

A new primitive, activation or reduction is tested here without a new test. Each row meets every access class, every
dtype, every layout and every ragged shape. Over all rows, every pair of these meets too.
"""

import ast
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import epifuse as ef
from epifuse import providers
from epifuse.base.dtypes import BY_TORCH
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.fusion.vocabulary import VOCABULARY, is_static
from epifuse.passes.accesses import CLASSES
from epifuse.providers.cutedsl import costs
from tests.conformance.test_meanings import INF_IS_NAN_IN_PYTORCH

ELEMENTWISE = [n for n, e in VOCABULARY.items() if e.group in ("primitive", "activation")]
DTYPES = list(BY_TORCH)
ACCESSES = list(CLASSES)
SHAPES = [(2, 5, 7, 3), (1, 1, 1, 1), (3, 1, 9, 2), (2, 19, 1, 4), (2, 9, 37, 5)]  # L, M, N, K
TILE = (4, 8)  # several ragged panels on all but the smallest shapes

Shape = tuple[int, ...]


# --- layouts: the same elements, at other addresses ---------------------------------------------------------------


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x


def strided(x: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)[..., 1::2]
    return wide.copy_(x)


def offset(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1], x])[1:]


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [contiguous, transposed, strided, offset, expanded]


# --- cases ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """The access class, dtype and layout of the operands of one run, and its L, M, N and K."""

    access: frozenset[str]
    dtype: torch.dtype
    layout: Callable[[torch.Tensor], torch.Tensor]
    shape: Shape

    def __str__(self) -> str:
        return f"{CLASSES[self.access]}, {self.dtype}, {self.layout.__name__}, L M N K = {self.shape}"


LISTS: list[list[Any]] = [ACCESSES, DTYPES, LAYOUTS, SHAPES]


def cases(row: int) -> Iterator[Case]:
    """Cases that go through each list repeatedly, in a random order for this row, so that the row meets every entry."""
    order = random.Random(row)
    turns = [itertools.cycle(order.sample(entries, len(entries))) for entries in LISTS]
    return itertools.islice(map(Case, *turns), max(map(len, LISTS)) + 4)


def test_over_all_rows_every_pair_meets() -> None:
    met = [case for row in range(len(ELEMENTWISE)) for case in cases(row)]
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(case[first], case[second]) for case in met}
        assert len(pairs) == len(LISTS[first]) * len(LISTS[second])


def operand(case: Case, kind: str) -> torch.Tensor:
    """A random operand of a kind: multiples of 1/4, exact in all wide enough dtypes. Large ones contain NaN, infinities
    and -0."""
    L, M, N, _ = case.shape
    shape = [extent if axis in case.access else 1 for axis, extent in zip("lmn", (L, M, N), strict=True)]
    x = torch.randint(-16, 17, shape) / 4
    if kind == "mask":
        return case.layout(x > 0)
    if kind == "int32":  # no zeros, because torch refuses to divide integers by them
        integer = torch.int32 if case.dtype.is_floating_point or case.dtype == torch.bool else case.dtype
        return case.layout(torch.where(x == 0, 3, x * 4).to(integer))
    if case.dtype == torch.bool or (kind == "exponent" and not case.dtype.is_floating_point):
        return case.layout(x)
    if x.numel() > 8 and case.dtype.is_floating_point:  # converting NaN to an integer is not defined
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    return case.layout(x.to(case.dtype))


def loaded(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """The operand as the kernel sees it, converted to the kind that it loads as."""
    kind = BY_TORCH[x.dtype].loads_as
    return x if kind in ("mask", "int64") else x.to(torch.int32 if kind == "int32" else compute)


def kinds_of(name: str, count: int) -> list[str]:
    """A combination of kinds that the row accepts. test_kinds tests the other combinations."""
    rule = PRIMITIVES[name].rule if name in PRIMITIVES else "floating"
    return {
        "logic": ["mask"] * count,
        "integer": ["int32"] * count,
        "bits": ["int32"] * count,
        "random": ["int32"] * count,
        "select": ["mask", *["float"] * (count - 1)],
        "power": ["float", "exponent"],
    }.get(rule, ["float"] * count)


def values_of(name: str) -> list[str]:
    return [p.name for p in VOCABULARY[name].signature.parameters.values() if not is_static(p)]


def product_for(case: Case, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B whose product is exact. The accumulator has the kind `kind`; for a mask it is compared with 0 later."""
    L, M, N, K = case.shape
    if kind == "int32":
        return torch.randint(1, 6, (L, M, K), dtype=torch.int8), torch.randint(1, 6, (L, K, N), dtype=torch.int8)
    return torch.randint(-3, 4, (L, M, K)).to(dtype) / 2, torch.randint(-3, 4, (L, K, N)).to(dtype) / 2


def run(source: str, a: torch.Tensor, b: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run an epilogue. Return its outputs by name."""
    epilogue = ef.EpilogueArguments.partial(source, inputs)
    args = ef.GemmArguments(a, b, epilogue=epilogue, constraints=ef.Constraints(tile=TILE))
    return ef.get_kernels(args, limit=1)[0].run(args)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_row(name: str) -> None:
    """The fused row is compared with its function, which runs on PyTorch tensors.

    It runs on the CPU, which carries the whole language. The Hopper kernel's rows are in tests/gpu/test_vocabulary.py.
    """
    names = values_of(name)
    kinds = kinds_of(name, len(names))
    for number, case in enumerate(cases(ELEMENTWISE.index(name))):
        place = number % (len(names) + 1)  # the argument that is the accumulator; in the last turn none is
        compute = torch.float64 if case.dtype == torch.float64 else torch.float32
        a, b = product_for(case, kinds[min(place, len(names) - 1)], compute)
        inputs = {f"x{i}": operand(case, kind) for i, kind in enumerate(kinds) if i != place}
        accum = "accum > 0" if place < len(names) and kinds[place] == "mask" else "accum"
        written = ", ".join(accum if i == place else f"x{i}" for i in range(len(names)))
        outputs = run(f"def epi({', '.join(['accum', *inputs])}): D = {name}({written}); return D", a, b, inputs)
        exact = (a.double() @ b.double()).to(compute if a.dtype != torch.int8 else torch.int32)
        given = [
            (exact > 0 if accum != "accum" else exact) if i == place else loaded(inputs[f"x{i}"], compute)
            for i in range(len(names))
        ]
        want = VOCABULARY[name].function(*given).reshape(outputs["D"].shape)
        if name in INF_IS_NAN_IN_PYTORCH:  # and in the CPU kernel's fast form
            outputs["D"] = torch.where(want.isinf() & outputs["D"].isnan(), want, outputs["D"])
        torch.testing.assert_close(outputs["D"], want, equal_nan=True, msg=lambda text, c=case: f"{c}\n{text}")


# --- rows that miss -----------------------------------------------------------------------------------------------


def table(provider: str, name: str) -> set[str]:
    """The keys of a provider's table. They are read from its text, because importing it may need a toolchain."""
    path = Path(providers.__file__).parent / provider / "primitives.py"
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
            assert isinstance(statement.value, ast.Dict)
            return {ast.literal_eval(key) for key in statement.value.keys if key is not None}
    raise AssertionError(f"{path} has no table {name}")


def refuses(provider: str, name: str) -> bool:
    """Whether every kernel of the provider, on its own target, refuses the primitive with a reason that names it."""
    kinds = kinds_of(name, PRIMITIVES[name].arity)
    x = {"mask": torch.ones(64, 64) > 0, "int32": torch.ones(64, 64, dtype=torch.int32)}
    inputs = {f"x{i}": x.get(kind, torch.ones(64, 64)) for i, kind in enumerate(kinds)}
    source = f"def epi(accum, {', '.join(inputs)}): D = where({name}({', '.join(inputs)}) > 0, accum, 0.0); return D"
    if PRIMITIVES[name].rule in ("logic", "compare"):
        source = source.replace(" > 0, accum", ", accum")
    half = torch.ones(64, 64, dtype=torch.float16)
    args = ef.GemmArguments(half, half, epilogue=ef.EpilogueArguments.partial(source, inputs))
    plain = ef.GemmArguments(half, half)
    for spec in providers.load(provider).specs():
        cc = spec.ccs[0]
        whatever = {refusal.kernel for refusal in ef.explain(plain, cc=cc).refusals}  # kernels that refuse any epilogue
        reasons = {refusal.kernel: refusal.reason for refusal in ef.explain(args, cc=cc).refusals}
        if spec.name not in whatever and name not in reasons.get(spec.name, ""):
            return False
    return True


@pytest.mark.parametrize("provider", providers.NAMES)
def test_every_primitive_has_a_row(provider: str) -> None:
    rows = table(provider, "PRIMITIVE_ROWS")
    # The CPU carries the whole language, so it must not refuse a primitive.
    missing = [name for name in PRIMITIVES if name not in rows and (provider == "cpu" or not refuses(provider, name))]
    assert not missing, f"neither a row in providers/{provider}/primitives.py nor refused by name: {missing}"
    assert rows <= set(PRIMITIVES), "rows for primitives that do not exist"
    assert table(provider, "FAST") <= set(VOCABULARY), "fast forms of activations that do not exist"


def test_every_primitive_has_a_row_of_costs() -> None:
    """Planning for a GPU reads the costs instead of the GPU's own table, which needs cutlass."""
    assert costs.PRIMITIVES.keys() == PRIMITIVES.keys()
