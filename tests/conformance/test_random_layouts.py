"""Random lines of layouts, parts, joins and reductions. epifuse refuses them, or computes the same as PyTorch."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epifuse as ef
from tests.frontend.sources import function_from

M, N, K = 6, 24, 4
PROGRAMS = 250
Values = dict[str, torch.Tensor]


def _chunk(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    names = [f"{name}_{i}" for i in range(rng.choice([2, 3, 4]))]
    return f"{', '.join(names)} = {x}.chunk({len(names)}, dim={dim})"


def _slice(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    whole = ":, " * (dim % max(values[x].dim(), 1))
    return f"{name} = {x}[{whole}{rng.choice([0, 2, 4, 6, 8, 12])}:{rng.choice([4, 6, 8, 12, 24, -4, -12])}]"


def _stepped(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    step = rng.choice([2, 3, 4])
    return f"{name} = {x}[..., {rng.randrange(step)}::{step}]"


def _element(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    return f"{name} = {x}[..., {rng.choice([0, 1, 3, -1])}]"


def _split_dim(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    return f"{name} = {x}.unflatten({dim}, {rng.choice([(2, -1), (-1, 2), (3, -1), (4, -1), (2, 2, -1)])})"


def _turned(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    return f"{name} = {x}.transpose({dim}, -1)"


def _merged(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    return f"{name} = {x}.flatten({dim}, -1)"


def _computed(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    return f"{name} = {x} {rng.choice('+-*')} torch.tanh({rng.choice(list(values))})"


def _joined(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    alike = [other for other, value in values.items() if value.shape == values[x].shape]
    parts = ", ".join(rng.choice(alike) for _ in range(rng.choice([2, 2, 3])))
    return f"{name} = torch.{rng.choice(['cat', 'stack'])}([{parts}], dim={dim})"


def _reduced(rng: random.Random, name: str, x: str, dim: int, values: Values) -> str:
    return f"{name} = {x}.{rng.choice(['sum', 'amax', 'mean'])}(dim={dim}, keepdim={rng.choice([True, False])})"


LINES: tuple[Callable[[random.Random, str, str, int, Values], str], ...] = (
    *(_chunk, _slice, _stepped, _element, _split_dim, _turned, _merged, _computed, _joined, _joined, _reduced),
)


def inputs() -> dict[str, torch.Tensor]:
    return {"accum": torch.randn(M, N), "C": torch.randn(M, N), "row": torch.randn(N), "col": torch.randn(M, 1)}


def program(rng: random.Random) -> str:
    """The text of an epilogue of random lines that PyTorch can run. One or two of their values are outputs."""
    values, lines = inputs(), []
    for number in range(rng.randint(2, 7)):
        x = rng.choice([name for name in values if values[name].dim()])
        line = rng.choice(LINES)(rng, f"v{number}", x, rng.randrange(-values[x].dim(), values[x].dim()), values)
        there: dict[str, Any] = dict(values)
        try:
            exec(line, {"torch": torch}, there)
        except (RuntimeError, IndexError, ValueError):
            continue
        new = {name: value for name, value in there.items() if name not in values}
        if all(0 < value.numel() <= 4 * M * N for value in new.values()):
            values.update(new)
            lines.append(line)
    made = list(values)[4:] or ["accum"]
    outputs = rng.sample(made, min(len(made), 2))
    body = [*lines, *(f"out{i} = {name} * 1.0" for i, name in enumerate(outputs))]
    operands = [name for name in ("C", "row", "col") if any(re.search(rf"\b{name}\b", line) for line in body)]
    returned = ", ".join(f"out{i}" for i in range(len(outputs)))
    text = "".join(f"    {line}\n" for line in body)
    return f"def epilogue({', '.join(['accum', *operands])}):\n{text}    return {returned}\n"


def check(function: Callable[..., Any], names: list[str], rows: int, text: str) -> bool:
    """Whether epifuse ran the function with so many rows. Its result has to equal PyTorch's."""
    a, b = torch.randn(rows, K), torch.randn(K, N)
    all_operands = {"C": torch.randn(rows, N), "row": torch.randn(N), "col": torch.randn(rows, 1)}
    operands = {name: all_operands[name] for name in names}
    try:
        got = ef.gemm(a, b, epilogue=function, **operands)
    except ef.errors.EpifuseError:
        return False
    want = function(a @ b, **operands)  # fails if PyTorch refuses what epifuse ran
    pair = [(x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (got, want)]
    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4, msg=lambda said: f"{rows} rows: {said}\n{text}")
    return True


@pytest.mark.parametrize("seed", range(4))
def test_refused_or_as_torch(seed: int, whole_sweeps: bool) -> None:
    """Each function runs with several numbers of rows, which one structure may serve."""
    rng, ran, programs = random.Random(seed), 0, PROGRAMS if whole_sweeps else PROGRAMS // 2
    for _ in range(programs):
        text = program(rng)
        function = function_from(text, file="user.py", torch=torch)
        names = [name for name in ("C", "row", "col") if re.search(rf"\b{name}\b", text.split(":")[0])]
        ran += sum([check(function, names, rows, text) for rows in (M, 7, 12)])
    assert ran > programs // 10  # otherwise the test would show nothing
