"""Parts of a row: gates of stacked and interleaved weights, with operands and outputs of either width; backward too."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu.harness import LAYOUTS, Machine, check, run

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.request.problem import Constraints

M, N, K = 200, 272, 72
"""Rows and columns that end within a tile and within a subtile: parts of 136 columns."""

OPERANDS: dict[str, tuple[int, ...]] = {
    "C": (M, N // 2),
    "E": (M, N),
    "row": (N // 2,),
    "wide": (N,),
    "column": (M, 1),
    "part": (1,),
}
CASES = {
    "swiglu": "gate, up = accum.chunk(2, dim=-1); D = silu(gate) * up",
    "glu": "D = glu(accum)",
    "interleaved": "D = silu(accum[..., 0::2]) * accum[..., 1::2]",
    "one part": "D = accum[:, 136:] * 2",
    "a bias": "gate, up = (accum + wide).chunk(2, dim=-1); D = gelu(gate) * (up + 1)",
    "a bias of each": "gate, up = accum.chunk(2, -1); a, b = wide.chunk(2, -1); D = relu(gate + a) * (up - b)",
    "an interleaved bias": "x = accum + wide; D = relu(x[..., 0::2]) * (x[..., 1::2] + 1)",
    "a residual": "gate, up = accum.chunk(2, dim=-1); D = silu(gate) * up + C",
    "operands of every width": "g, u = (accum * column + E).chunk(2, -1); D = (relu(g) * u + C) * row",
    "interleaved operands": "x = accum + E; D = x[..., 0::2] * x[..., 1::2] - C",
    "what comes before the gate": "x = accum + wide; gate, up = x.chunk(2, dim=-1); D = silu(gate) * up; P = x",
    "interleaved before the gate": "x = accum * 2; D = relu(x[..., 0::2]) + x[..., 1::2]; P = x",
    "several": "gate, up = accum.chunk(2, dim=-1); D = relu(gate) * up; P = gate - up; Q = accum + 1",
    "clamped": "g, u = accum.chunk(2, -1); h = minimum(g, 7.0); D = h * sigmoid(1.702 * h) * (clip(u, -7, 7) + 1)",
    "halves exchanged": "a, b = accum.chunk(2, dim=-1); D = cat((b, a), dim=-1) * E",
    "halves to pairs": "a, b = accum.chunk(2, -1); D = stack([a, b], dim=-1).flatten(1)",
    "pairs to halves": "D = cat([accum[..., 0::2], accum[..., 1::2]], dim=-1) + wide",
    "rotated": "a, b = accum.chunk(2, -1); D = accum + cat([-b, a], dim=-1) * 2",
    "columns are counted": "x = accum + index_n(accum); a, b = x.chunk(2, -1); D = a * 2 + b; P = a + index_n(a)",
    "pairs are counted": "x = accum + index_n(accum); D = x[:, 0::2] * 2 + x[:, 1::2] + index_m(accum)",
    "heads of a part": "a, b = accum.chunk(2, -1); D = (relu(a) * b).unflatten(-1, (17, 8)).permute(1, 0, 2)",
}
DTYPES = (torch.bfloat16, torch.float32, torch.int32)


def source(body: str) -> str:
    """The function of these lines, whose outputs are D, P and Q."""
    read = [name for name in OPERANDS if name in body.replace("E =", "")]
    returned = ", ".join(name for name in "DPQ" if f"{name} =" in body)
    return f"def epi({', '.join(('accum', *read))}): {body}; return {returned}"


def operands_of(machine: Machine, text: str, layout: str = "rows") -> dict[str, Any]:
    """Whole numbers for what a function reads."""
    names = text[text.index("(") + 1 : text.index(")")].split(", ")[1:]
    return {name: machine.laid_out(machine.whole(*OPERANDS[name]), layout) for name in names}


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_both_parts_of_a_row_are_there(name: str, layout: str, machine: Machine) -> None:
    """With operands and outputs as TMA can address them, and as it cannot."""
    text = source(CASES[name])
    a, b = machine.whole(M, K, most=1), machine.whole(N, K, most=1).t()
    number = list(CASES).index(name) + LAYOUTS.index(layout)
    dtype = DTYPES[number % 2 if "silu" in text or "gelu" in text or "sigmoid" in text else number % len(DTYPES)]
    check(machine, text, a, b, operands_of(machine, text, layout), out_dtypes=dtype, layouts=[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["swiglu", "operands of every width", "what comes before the gate"])
def test_of_a_b_by_rows(name: str, layout: str, machine: Machine) -> None:
    text = source(CASES[name])
    a, b = machine.whole(M, K, most=1), machine.whole(K, N, most=1)
    check(machine, text, a, b, operands_of(machine, text, layout), layouts=[layout])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["operands of every width", "what comes before the gate", "interleaved", "by rows"])
@pytest.mark.parametrize("design", [one for one in DESIGNS if one.tile[1] % 64 == 0 and one.tile != (64, 64)], ids=str)
def test_in_every_design(design: Any, name: str, hopper: Machine) -> None:
    asked = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule)
    text = source(CASES.get(name, CASES["a bias"]))
    a, b = hopper.whole(M, K, most=1), hopper.whole(N, K, most=1).t()
    if name == "by rows":
        b = b.contiguous()
    why = None
    if name == "by rows" and design.tile[1] % 128:
        why = "takes multiples of 64"
    elif name == "operands of every width" and design.rows * design.tile[1] > 128**2:
        why = "too few registers"
    with pytest.raises(AssertionError, match=why) if why else nullcontext():
        check(hopper, text, a, b, operands_of(hopper, text), constraints=asked, layouts=["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["operands of every width", "what comes before the gate"])
def test_of_many_tiles(name: str, hopper: Machine) -> None:
    """Each CTA has several, and operands of its last one wait elsewhere."""
    m, n = 4096 + 64, 4096 + 272
    text = source(CASES[name])
    shapes = {"C": (m, n // 2), "E": (m, n), "row": (n // 2,), "wide": (n,), "column": (m, 1)}
    operands = {key: hopper.whole(*shape) for key, shape in shapes.items() if key in operands_of(hopper, text)}
    check(hopper, text, hopper.whole(m, K, most=1), hopper.whole(n, K, most=1).t(), operands, layouts=["rows"])


@pytest.mark.parametrize("shape", [(1, 16, 8), (3, 48, 8), (64, 128, 64), (129, 1040, 520), (257, 528, 1032)], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "interleaved"])
def test_of_every_size(name: str, shape: tuple[int, int, int], machine: Machine) -> None:
    m, n, k = shape
    a, b = machine.whole(m, k, most=1), machine.whole(n, k, most=1).t()
    check(machine, source(CASES[name]), a, b, {}, layouts=["rows"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "interleaved", "what comes before the gate"])
def test_of_batches(name: str, shared: bool, machine: Machine) -> None:
    """Each with a B of its own, or all with one."""
    text = source(CASES[name])
    a, b = machine.whole(3, M, K, most=1), machine.whole(*([] if shared else [3]), N, K, most=1).mT
    if name == "swiglu":
        check(machine, text, a, b.contiguous(), {})
    check(machine, text, a, b, operands_of(machine, text))


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [(torch.float16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("name", ["swiglu", "an interleaved bias"])
def test_of_other_products(name: str, dtype: torch.dtype, accumulator: torch.dtype, machine: Machine) -> None:
    text, tf32 = source(CASES[name]), Constraints(precision="tf32")
    a, b = machine.whole(M, K, most=1, dtype=dtype), machine.whole(N, K, most=1, dtype=dtype).t()
    options = {"accumulator": accumulator, "constraints": tf32 if dtype == torch.float32 else Constraints()}
    check(machine, text, a, b, operands_of(machine, text), **options)


def test_of_normal_numbers(machine: Machine) -> None:
    a, b = machine.normal(M, 512, dtype=torch.bfloat16), machine.normal(N, 512, dtype=torch.bfloat16).t()
    check(machine, source(CASES["swiglu"]), a, b * 0.1, {}, exact=False, layouts=["rows"])


def test_where_k_is_zero(machine: Machine) -> None:
    a, b = machine.whole(M, 0), machine.whole(N, 0).t()
    text = source(CASES["a bias"])
    check(machine, text, a, b, operands_of(machine, text))


REDUCED = {
    "rows": "g, u = accum.chunk(2, -1); D = relu(g) * u; P = D.sum(dim=-1)",
    "columns": "g, u = accum.chunk(2, -1); D = relu(g) * u; P = D.sum(dim=0)",
    "columns of both parts": "g, u = accum.chunk(2, -1); D = relu(g) * u; P = (accum + E).sum(dim=0)",
    "everything": "D = absmax(relu(accum[:, 0::2]) * accum[:, 1::2])",
}


@pytest.mark.parametrize("name", REDUCED)
def test_parts_are_reduced(name: str, machine: Machine) -> None:
    text = source(REDUCED[name])
    a, b = machine.whole(M, K, most=1), machine.whole(N, K, most=1).t()
    check(machine, text, a, b, operands_of(machine, text), out_dtypes=torch.float32)


def backward(accum: Any, wide: Any) -> Any:
    gate, up = wide.chunk(2, dim=-1)
    dgate = ef.where(gate > 0, accum * up, 0.0)
    dup = accum * ef.relu(gate)
    h = ef.relu(gate) * up
    return dgate, dup, h


@pytest.mark.parametrize("order", ["stacked", "interleaved"])
def test_the_backward_of_a_gate(order: str, machine: Machine) -> None:
    """What it writes of both parts lies in one tensor."""
    a, b = machine.whole(M, K, most=1), machine.whole(K, N // 2, most=1)
    wide = machine.whole(M, N)
    both, h = torch.full_like(wide, float("nan")), torch.empty_like(wide[:, : N // 2])
    parts = both.chunk(2, dim=-1) if order == "stacked" else (both[:, 0::2], both[:, 1::2])
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(backward, wide=wide, dgate=parts[0], dup=parts[1], h=h))
    machine.kernel(args).run(args)
    wants = ef.reference(backward)((a.double() @ b.double()).float().cpu(), wide.float().cpu())
    for got, want in zip((*parts, h), wants, strict=True):
        assert torch.equal(got.float().cpu(), want)


def test_parts_of_operands_alone(machine: Machine) -> None:
    """Beside a product as wide as they are."""
    text = "def epi(accum, wide): a, b = wide[:, 0::2], wide[:, 1::2]; D = accum * a + b; return D"
    a, b = machine.whole(M, K, most=1), machine.whole(K, N // 2, most=1)
    for layout in LAYOUTS:
        run(machine, text, a, b, {"wide": machine.laid_out(machine.whole(M, N), layout)})
        check(machine, text, a, b, {"wide": machine.laid_out(machine.whole(M, N), layout)})


def gated(accum: Any, E: Any) -> Any:
    x = accum + E
    gate, up = x.chunk(2, dim=-1)
    D = ef.relu(gate) * up
    return D, x


@pytest.mark.parametrize("onto", [("D",), ("x",), ("D", "x")], ids="+".join)
def test_onto_what_is_there(onto: tuple[str, ...], machine: Machine) -> None:
    a, b, E = machine.whole(M, K, most=1), machine.whole(N, K, most=1).t(), machine.whole(M, N)
    outputs = {"D": machine.whole(M, N // 2, dtype=torch.float32), "x": machine.whole(M, N, dtype=torch.float32)}
    wants = gated((a.double() @ b.double()).float(), E.float())
    wants = [want + outputs[name] * (name in onto) for name, want in zip(outputs, wants, strict=True)]
    stores = {name: ef.Store(tensor, accumulate=name in onto) for name, tensor in outputs.items()}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(gated, E=E, **stores))
    machine.kernel(args).run(args)
    machine.synchronise()
    assert all(torch.equal(got, want) for got, want in zip(outputs.values(), wants, strict=True))


def test_over_what_was_read(machine: Machine) -> None:
    a, b, E = machine.whole(M, K, most=1), machine.whole(N, K, most=1).t(), machine.whole(M, N, dtype=torch.float32)
    D = torch.empty_like(E[:, : N // 2]).contiguous()
    wants = gated((a.double() @ b.double()).float(), E.clone())
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(gated, E=E, D=D, x=E))
    machine.kernel(args).run(args)
    machine.synchronise()
    assert all(torch.equal(got, want) for got, want in zip((D, E), wants, strict=True))


SUMS_OF_PAIRS = {
    "a row": "E = accum.unflatten(-1, (-1, 2)).sum(dim=1)",
    "all": "E = accum.unflatten(-1, (-1, 2)).sum(dim=(0, 1))",
}


@pytest.mark.parametrize("name", SUMS_OF_PAIRS)
def test_sums_of_each_of_a_pair_beside_their_gate(name: str, machine: Machine) -> None:
    """Results of two columns, which leave in the two parts of a row."""
    gate = "D = relu(accum[..., 0::2]) * accum[..., 1::2]"
    text = f"def epi(accum):\n    {gate}\n    {SUMS_OF_PAIRS[name]}\n    return D, E\n"
    a, b = machine.whole(200, 72, most=1), machine.whole(512, 72, most=1).t()
    check(machine, text, a, b, {}, out_dtypes=torch.float32)
