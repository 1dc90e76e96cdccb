"""Planning in two steps: what is found again for an unseen extent is what planning from nothing finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import run_python

import epifuse as ef
from epifuse.base import cache
from epifuse.providers.cutedsl.family import FAMILIES

BF16 = torch.bfloat16
ROWS = (1, 2, 8, 63, 64, 65, 128, 192, 256, 300, 512, 1000, 1024, 1025, 4096)
COLUMNS = (128, 250, 256, 258, 512)
DEPTHS = (0, 64, 512, 1024, 4096)
FULL = "def epi(accum, row, C): D = gelu(accum + row) + C; return D"
EPILOGUES = {
    "elementwise": FULL,
    "rows whole": "def epi(accum, row, C): D = softmax(accum + row + C, dim=-1); s = amax(D, dim=-1); return D, s",
    "merged": "def epi(accum, row, C): D = accum * row + C; s = sum(D, dim=0); t = norm(D); return D, s, t",
    "several sweeps": "def epi(accum, row, C): D = (accum + C) / norm(accum) * row; return D",
    "heads": "def epi(accum, row, C): D = (accum + row + C).reshape(-1, 4, 64).permute(1, 0, 2); return D",
    "printed": "def epi(accum, row, C):\n    debug_print('{}', sum(accum + C, dim=0))\n    D = accum\n    return D",
}
PLACES: dict[str, Callable[[int, int], torch.Tensor]] = {
    "by rows": lambda m, n: torch.empty(m, n, dtype=BF16, device="meta"),
    "by columns": lambda m, n: torch.empty(n, m, dtype=BF16, device="meta").t(),
    "odd rows": lambda m, n: torch.empty(m, n + 3, device="meta")[:, :n],
    "repeated": lambda m, n: torch.empty(1, n, device="meta").expand(m, n),
}


def problems(epilogue: str, rng: random.Random, count: int = 4) -> Iterator[ef.GemmArguments]:
    """So many layouts and depths, each in several extents; some operands asked to go by TMA."""
    for _ in range(count):
        place, k, by_columns = rng.choice(list(PLACES)), rng.choice(DEPTHS), rng.random() < 0.3
        for _ in range(6):
            m, n = rng.choice(ROWS), 256 if "reshape" in epilogue else rng.choice(COLUMNS)
            C = PLACES[place](m, n)
            given: dict[str, Any] = {"row": torch.empty(n, device="meta")}
            given["C"] = ef.Load(C, via="tma") if rng.random() < 0.3 else C
            if by_columns and "reshape" not in epilogue:
                given["D"] = PLACES["by columns"](m, n)
            a, b = PLACES[rng.choice(("by rows", "by columns"))](m, k), PLACES["by columns"](k, n)
            if "reshape" not in epilogue and rng.random() < 0.2:
                a, given = a.expand(2, m, k), {name: x for name, x in given.items() if name != "D"}
            constraints = ef.Constraints(allow_recompute=rng.random() < 0.5)
            made = ef.EpilogueArguments.partial(epilogue, given)
            yield ef.GemmArguments(a, b, epilogue=made, constraints=constraints)


def told(args: ef.GemmArguments) -> str:
    """All that planning for Hopper says of a problem."""
    found = ef.explain(args, cc=90).selection
    plans = [f"{plan}\n{plan.allocation}\n{plan.allocation.workspace_bytes}" for plan in found.plans]
    return "\n".join([*plans, *map(str, found.refusals), str(found.loc)])


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_plan_found_again_is_the_one_made_anew(name: str, whole_sweeps: bool) -> None:
    epilogue, seed, count = EPILOGUES[name], len(name), 4 if whole_sweeps else 2
    again = [told(args) for args in problems(epilogue, random.Random(seed), count)]
    for args, before in zip(problems(epilogue, random.Random(seed), count), again, strict=True):
        cache.forget()
        args.structure.works.clear()
        assert told(args) == before


def test_rows_of_a_transposed_result_are_its_step() -> None:
    """An address that TMA cannot take for 1001 of them."""
    text = "def epi(accum): D = accum.permute(1, 0); return D"
    made = {}
    for m in (1000, 1001):
        a, b = PLACES["by rows"](m, 64), PLACES["by columns"](64, 256)
        made[m] = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(text, {}))
    told(made[1000])
    assert "D: tile, bf16[n, m], direct" in told(made[1001])


ON_THE_CPU = {
    **{name: text for name, text in EPILOGUES.items() if "print" not in text},
    "vectors": "def epi(accum, row, C): s = sum(accum + C, dim=-1, keepdim=True); D = accum * s + row; return D, s",
    "counted": "def epi(accum, row, C): s = mean(accum + row, dim=0); t = absmax(accum - C); return s, t",
    "numbers": "def epi(accum, row, C, alpha=2): D = exp(alpha) * C + accum; E = accum - row; return D, E",
    "coordinates": "def epi(accum, row, C): D = where(index_n(accum) > index_m(accum), accum, row) + C; return D",
}


def calls(epilogue: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Arguments of `gemm`, each layout in several extents; some results lie over C, in tiles of several shapes."""
    for _ in range(4):
        k, out, dtype = (
            rng.choice((0, 3, 64)),
            rng.choice(("new", "own", "narrow", "columns", "C")),
            rng.choice((BF16, None)),
        )
        for _ in range(8):
            m, n = rng.choice((0, 1, 2, 5, 64, 130)), 256 if "reshape" in epilogue else rng.choice((1, 5, 64, 130))
            C = torch.arange(m * n).reshape(m, n) % 7 - 3.0
            made = {
                "own": torch.empty(m, n),
                "narrow": torch.empty(m, n, dtype=BF16),
                "columns": torch.empty(n, m).t(),
                "C": C,
            }.get(out)
            written = {} if made is None or "D =" not in epilogue or "reshape" in epilogue else {"D": made}
            a, b = torch.arange(m * k).reshape(m, k) % 5 - 2.0, torch.arange(k * n).reshape(k, n) % 3 - 1.0
            given = {"row": torch.arange(n) % 2 + 0.5, "C": C.to(dtype) if dtype and out != "C" else C}
            yield {"a": a, "b": b, "given": given | written, "tile": rng.choice((None, (64, n), (16, 64)))}


def computed(epilogue: str, a: torch.Tensor, b: torch.Tensor, given: dict[str, Any], tile: Any) -> Any:
    """What a call leaves in its outputs, to the bit, or the error."""
    try:
        bound = ef.EpilogueArguments.partial(epilogue, given)
        args = ef.GemmArguments(a, b, epilogue=bound, constraints=ef.Constraints(tile=tile))
        kernels = ef.get_kernels(args)
        found = kernels[-1].run(args) if kernels else {}
    except ef.errors.EpifuseError as error:
        return str(error)
    return {name: x.contiguous().reshape(-1).view(torch.uint8).tolist() for name, x in found.items()}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_code_found_again_computes_what_code_made_anew_does(name: str) -> None:
    epilogue, seed = ON_THE_CPU[name], len(name)
    cache.forget()
    again = [computed(epilogue, **call) for call in calls(epilogue, random.Random(seed))]
    for call, before in zip(calls(epilogue, random.Random(seed)), again, strict=True):
        cache.forget()
        assert computed(epilogue, **call) == before
    assert any(isinstance(one, dict) for one in again)


def test_an_unseen_extent_needs_no_code_of_its_own() -> None:
    cache.forget()
    b = torch.ones(8, 60)
    for m in range(2, 40):
        a, given = torch.ones(m, 8), {"row": torch.ones(60), "C": torch.ones(m, 60)}
        ef.gemm(a, b, epilogue=FULL, **given)
    structure = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(FULL, given)).structure
    assert len(structure.works["cpu"].panels.codes) == 1


def test_an_unseen_extent_is_no_family_of_its_own() -> None:
    cache.forget()

    def arguments(m: int) -> ef.GemmArguments:
        given = {"row": torch.empty(256, device="meta"), "C": PLACES["by rows"](m, 256)}
        a, b = torch.empty(m, 64, dtype=BF16, device="meta"), torch.empty(256, 64, dtype=BF16, device="meta").t()
        return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(FULL, given))

    assert ef.get_kernels(arguments(300), cc=90)
    known = len(FAMILIES)
    assert all(ef.get_kernels(arguments(m), cc=90) for m in range(301, 340))
    assert len(FAMILIES) == known


def test_the_best_plan_is_the_first() -> None:
    for args in problems(FULL, random.Random(0)):
        found = ef.explain(args, cc=90).selection
        assert found.best == (found.plans[0] if found.plans else None)
        costs = [plan.allocation.cost for plan in found.plans]
        assert costs == sorted(costs)


@pytest.mark.parametrize(
    "extents",
    [(1, 1), (3, 5), (64, 32), (64, 16), (328, 48), (128, 256), (512, 6144), (192, 96), (1000, 2048)],
    ids=str,
)
def test_cuts_stand_for_their_extents(extents: tuple[int, int]) -> None:
    """Whatever the design, tiles end alike at an extent and at what stands for it."""
    from epifuse.providers.cutedsl.designs import NARROW_DESIGNS, SPECS
    from epifuse.providers.cutedsl.family import cuts
    from epifuse.providers.cutedsl.partials import edges

    m, n = extents
    for design in (spec.design for spec in SPECS if spec.design not in NARROW_DESIGNS):  # they take no reductions
        own = design.exchanged_sides if design.swapped else design
        if own.is_low:  # nor do these
            continue
        assert edges(own, *cuts({"m": m, "n": n}, swapped=design.swapped)) == edges(own, m, n)


WITHOUT_COMPILER = """
import sys
sys.modules["cutlass"] = None
import torch
import epifuse as ef
a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 256), (256, 512)))
args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial("def f(accum): D = relu(accum); return D", {}))
kernels = ef.get_kernels(args, cc=90)
print(kernels[0].plan)
print(ef.explain(args, cc=90))
print(kernels[0].get_workspace_size(args))
"""


def test_planning_needs_no_compiler() -> None:
    done = run_python("-c", WITHOUT_COMPILER)
    assert done.returncode == 0, done.stderr
    assert "sm90_gemm_" in done.stdout
