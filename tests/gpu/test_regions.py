"""Regions of N: ranges of columns that differ in what is computed of them, as q, k and v of one projection."""

from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import LAYOUTS, Machine, check, check_the_same_bits, judge, product, run

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.providers.cutedsl.designs import HEAD_DESIGNS
from epifuse.request.problem import Constraints

M, K = 200, 72
Q, KV, HEAD = 1024, 256, 64
N = Q + 2 * KV
"""Rows that end within a tile; regions of 16 heads and of 4 each, in whole tiles of all widths but 192."""

OPERANDS: dict[str, tuple[int, ...]] = {
    "C": (M, N),
    "row": (N,),
    "column": (M, 1),
    "wide": (M, Q),
    "narrow": (M, KV),
    "of_q": (HEAD,),
    "of_k": (HEAD,),
    "cosines": (M, 1, HEAD // 2),
    "sines": (M, 1, HEAD // 2),
}
SPLIT = f"q, k, v = accum.split([{Q}, {KV}, {KV}], dim=-1); "
HEADS = "; ".join(f"{name} = {name[0]}.unflatten(-1, (-1, {HEAD}))" for name in ("qh", "kh", "vh")) + "; "


def normed(name: str) -> str:
    """The heads of q or k divided by their norms, times a weight."""
    x = f"{name}h"
    return f"{name}n = {x} * rsqrt(mean({x} * {x}, dim=-1, keepdim=True) + 0.001) * of_{name}; "


def rotated(name: str, x: str) -> str:
    """The halves of each head by angles."""
    a, b = f"{name}0", f"{name}1"
    turned = f"{a} * cosines - {b} * sines, {b} * cosines + {a} * sines"
    return f"{a}, {b} = {x}.chunk(2, dim=-1); {name}r = cat(({turned}), dim=-1); "


def first(q: str, k: str) -> str:
    """Heads before rows, as attention takes them."""
    return f"D = {q}.permute(1, 0, 2); P = {k}.permute(1, 0, 2); R = vh.permute(1, 0, 2)"


CASES = {
    "as they are": f"{SPLIT}D = q * 1; P = k * 1; R = v * 1",
    "elementwise": f"{SPLIT}D = relu(q + wide); P = k * narrow; R = v + column",
    "two of three": f"{SPLIT}D = v * 2; P = q - 1",
    "equal parts": "q, k, v = accum.chunk(3, dim=-1); D = relu(q); P = k * 2; R = v + column",
    "parts that do not nest": (
        f"q, k, v = accum.split([{N // 3}, {N // 6}, {N // 2}], dim=-1); D = relu(q); P = k + 1; R = v * column"
    ),
    "a slice": f"D = relu(accum[:, {KV}:])",
    "after what is common": (
        f"x = relu(accum + row) * column + C; q, k, v = x.split([{Q}, {KV}, {KV}], dim=-1); "
        "D = q * 1; P = k * 2; R = v * 3"
    ),
    "counted": f"x = accum + index_n(accum) * 2; q, k = x.split([{Q + KV}, {KV}], dim=-1); D = q; P = k + index_n(k)",
    "heads first": f"{SPLIT}{HEADS}{first('qh', 'kh')}",
    "normed": f"{SPLIT}{HEADS}{normed('q')}{normed('k')}{first('qn', 'kn')}",
    "rotated": f"{SPLIT}{HEADS}{rotated('q', 'qh')}{rotated('k', 'kh')}{first('qr', 'kr')}",
    "normed and rotated": (
        f"{SPLIT}{HEADS}{normed('q')}{rotated('q', 'qn')}{normed('k')}{rotated('k', 'kn')}{first('(qr * 0.125)', 'kr')}"
    ),
    "one head of keys": (
        f"q, k, v = accum.split([{N - 2 * HEAD}, {HEAD}, {HEAD}], dim=-1); {HEADS}"
        f"{normed('q')}{rotated('q', 'qn')}{normed('k')}{rotated('k', 'kn')}{first('qr', 'kr')}"
    ),
    "whole rows of one": f"{SPLIT}D = q * rsqrt(mean(q * q, dim=-1, keepdim=True) + 0.001); P = k * 2; R = v * 1",
    "reduced": f"{SPLIT}D = q * 1; P = absmax(k.unflatten(-1, (-1, {HEAD})), dim=-1); R = v * 1",
    "summed": f"{SPLIT}D = sum(q, dim=-1); P = sum(k, dim=0); R = v * 1",
    "parted twice": (
        f"x, v = accum.split([{Q + KV}, {KV}], dim=-1); q, k = x.split([{Q}, {KV}], dim=-1); D = q * 1; P = k * 2"
    ),
    "parted twice, beside operands": (
        f"x, v = accum.split([{Q + KV}, {KV}], dim=-1); q, k = x.split([{Q}, {KV}], dim=-1); "
        "D = q + wide; P = k * index_n(k) - narrow"
    ),
    "one of equal parts": f"D = relu(accum[:, {N // 3}:{2 * N // 3}])",
    "a gate beside a range": (
        f"a, b, c = (relu(accum + row) + C).split([{N // 4}, {N // 4}, {N // 2}], dim=-1); "
        "D = relu(a) * b; P = c * column"
    ),
    "joined behind a range": (
        f"x = accum + index_n(accum); c, a, b = x.split([{N // 2}, {N // 4}, {N // 4}], dim=-1); "
        "D = cat([b, a + column], dim=-1); P = relu(c); R = a * index_n(b) - b"
    ),
    "beside all columns": f"{SPLIT}D = relu(q + wide); P = accum * column; R = v + narrow",
    "beside all columns, after what is common": f"P = relu(accum + row) + C; D = P[:, {Q // 4}:{Q // 2}] * column",
    "beside heads of all columns": (
        f"x = accum + row; D = x.unflatten(-1, (-1, {HEAD})).permute(1, 0, 2); "
        f"P = x[:, {Q}:{Q + KV}] * 2; R = column * 2"
    ),
    "a gate beside all columns": (
        f"x = accum + row; a, b, c = x.split([{N // 4}, {N // 4}, {N // 2}], dim=-1); D = relu(a) * b; P = c * 1; R = x"
    ),
    "equal parts beside sums and all columns": (
        "q, k, v = accum.chunk(3, dim=-1); D = sum(q, dim=-1); P = accum + C; R = v + column"
    ),
    "one column": "D = accum[:, 3] * 2",
    "sums of one column": f"q, k, v = accum.split([{Q}, {N - Q - 1}, 1], dim=-1); D = relu(q); P = sum(v, dim=-1)",
}


def source(body: str) -> str:
    """The function of these lines, whose outputs are D, P and R."""
    read = [name for name in OPERANDS if name in body]
    returned = ", ".join(name for name in "DPR" if f"{name} =" in body)
    return f"def epi({', '.join(('accum', *read))}): {body}; return {returned}"


def operands_of(machine: Machine, text: str, layout: str = "rows", rows: int = M) -> dict[str, Any]:
    """Whole numbers for what a function reads."""
    names = text[text.index("(") + 1 : text.index(")")].split(", ")[1:]
    shapes = {name: tuple(rows if extent == M else extent for extent in OPERANDS[name]) for name in names}
    return {name: machine.laid_out(machine.whole(*shape), layout) for name, shape in shapes.items()}


def product_of(machine: Machine, m: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    return machine.whole(m, K, most=1), machine.whole(N, K, most=1).t()


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_each_region_has_its_own(name: str, layout: str, machine: Machine) -> None:
    """With operands and outputs as TMA can address them, and as it cannot."""
    text = source(CASES[name])
    number = list(CASES).index(name) + LAYOUTS.index(layout)
    dtype = (torch.float32, torch.bfloat16)[number % 2]
    check(machine, text, *product_of(machine), operands_of(machine, text, layout), out_dtypes=dtype, layouts=[layout])


IN_DESIGNS = [
    "elementwise", "equal parts", "after what is common", "reduced", "normed and rotated", "beside all columns"
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_DESIGNS)
@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_in_every_design(design: Any, name: str, hopper: Machine) -> None:
    """Of many tiles, so that a CTA has several, of several regions."""
    m, text = 4096 + 72, source(CASES[name])
    asked = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule)
    made = ef.EpilogueArguments.partial(function_of(text, {}), operands_of(hopper, text, rows=m))
    args = ef.GemmArguments(*product_of(hopper, m), epilogue=made, out_dtypes=torch.float32, constraints=asked)
    if not ef.get_kernels(args, cc=90, providers=["cutedsl"]):
        return
    options = {"out_dtypes": torch.float32, "constraints": asked, "layouts": ["rows"]}
    check(hopper, text, *product_of(hopper, m), operands_of(hopper, text, rows=m), **options)


@pytest.mark.parametrize("name", ["elementwise", "heads first", "normed and rotated", "reduced"])
def test_of_batches(name: str, machine: Machine) -> None:
    a, b = machine.whole(3, M, K, most=1), machine.whole(3, N, K, most=1).mT
    text = source(CASES[name].replace("permute(1, 0, 2)", "permute(0, 2, 1, 3)"))
    operands = operands_of(machine, text)
    check(machine, text, a, b, operands, out_dtypes=torch.float32)


def test_of_no_rows(machine: Machine) -> None:
    """What has elements nevertheless, of each range its own."""
    text = (
        "def epi(accum, row): x = accum + row; q, k = x.split([192, 64], dim=-1); "
        "D = q.sum(0); P = k.sum(0); R = x.sum(0); S = row * 2; T = q * 2; return D, P, R, S, T"
    )
    a, b, row = machine.whole(0, K), machine.whole(256, K).t(), machine.whole(256)
    extents = {"D": (192,), "P": (64,), "R": (256,), "S": (256,), "T": (0, 192)}
    outputs = {name: torch.full(extent, 5.0, device=machine.device) for name, extent in extents.items()}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(text, row=row, **outputs))
    machine.kernel(args).run(args)
    assert all((outputs[name] == 0).all() for name in "DPR")
    assert torch.equal(outputs["S"], row.float() * 2)


@pytest.mark.parametrize("m", [1, 200])
@pytest.mark.parametrize("accumulates", [False, True])
def test_onto_what_is_there(m: int, machine: Machine, *, accumulates: bool) -> None:
    """All columns onto an operand, or added to what their memory holds, beside a range."""
    (a, b), held = product_of(machine, m), machine.whole(m, N).float()
    onto, ranged = held.clone(), torch.empty(m, 320, device=machine.device)
    if accumulates:
        text = "def epi(accum): D = accum[:, 64:384] * 2; P = accum; return D, P"
        made = ef.EpilogueArguments(text, D=ranged, P=ef.Store(onto, accumulate=True))
    else:
        text = "def epi(accum, C): D = accum[:, 64:384] * 2; P = accum + C; return D, P"
        made = ef.EpilogueArguments(text, C=onto, D=ranged, P=onto)
    args = ef.GemmArguments(a, b, epilogue=made)
    machine.kernel(args).run(args)
    accum = a.float() @ b.float()
    assert torch.equal(onto, accum + held)
    assert torch.equal(ranged, accum[:, 64:384] * 2)


@pytest.mark.parametrize("m", [1, 64, 129, 700])
@pytest.mark.parametrize("name", ["normed and rotated", "beside heads of all columns"])
def test_of_every_number_of_rows(name: str, m: int, machine: Machine) -> None:
    text = source(CASES[name])
    a, b = product_of(machine, m)
    check(machine, text, a, b, operands_of(machine, text, rows=m), out_dtypes=torch.bfloat16)


OVERLAPPING = {
    "every second of a range, and a range of it": "x = accum[:, 64:1088]; D = x[:, ::2]; E = x[:, :320]",
    "a range, and the largest of a range of it": "x = accum[:, :448] * 2; D = x[:, 64:]; E = x; P = x.amax(dim=-1)",
    "sums of two ranges": "x = accum[:, 8:1032]; D = x.sum(dim=0); E = x[:, :512].sum(dim=-1)",
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_of_ranges_that_overlap(name: str, machine: Machine) -> None:
    """Where columns may be computed twice, each range has a launch of its own."""
    outputs = [output for output in "DEP" if f"{output} = " in OVERLAPPING[name]]
    text = f"def epi(accum):\n    {OVERLAPPING[name]}\n    return {', '.join(outputs)}\n"
    options = {"out_dtypes": torch.float32, "constraints": Constraints(allow_recompute=True)}
    check(machine, text, *product_of(machine), {}, **options)


def rms_norm(x, weight):
    """As `transformers` writes it for Qwen3."""
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-6))


def rotate_half(x):
    """As `transformers` writes it."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def attention_inputs(head: int) -> Any:
    """q, k and v of (..., S, N) as (..., H, S, D), the first two normed by head and rotated."""

    def epilogue(accum, of_q, of_k, cos, sin):
        q, k, v = accum.split([1024, 256, 256], dim=-1)
        qn, kn = rms_norm(q.unflatten(-1, (-1, head)), of_q), rms_norm(k.unflatten(-1, (-1, head)), of_k)
        query = (qn * cos + rotate_half(qn) * sin).transpose(-3, -2)
        key = (kn * cos + rotate_half(kn) * sin).transpose(-3, -2)
        value = v.unflatten(-1, (-1, head)).transpose(-3, -2)
        return query, key, value

    return epilogue


def test_what_attention_takes(machine: Machine) -> None:
    """Of two sequences, with angles of each position, beside the module's own steps in float64."""
    a, b = machine.normal(2, M, 512, dtype=torch.bfloat16), machine.normal(N, 512, dtype=torch.bfloat16) * 0.05
    angles = torch.outer(torch.arange(M), 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD))
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    operands = {
        "of_q": machine.normal(HEAD, dtype=torch.bfloat16),
        "of_k": machine.normal(HEAD, dtype=torch.bfloat16),
        "cos": angles.cos().bfloat16().to(machine.device),
        "sin": angles.sin().bfloat16().to(machine.device),
    }
    epilogue = attention_inputs(HEAD)
    got = run(machine, epilogue, a, b.t(), operands, layouts=["rows"])
    assert got["query"].shape == (2, Q // HEAD, M, HEAD)
    assert got["key"].shape == got["value"].shape == (2, KV // HEAD, M, HEAD)
    judge(got, epilogue, product(a, b.t()), operands)


@pytest.mark.parametrize("design", [*HEAD_DESIGNS, *(one for one in DESIGNS if one.tile[1] % 128 == 0)], ids=str)
@pytest.mark.parametrize("m", [200, 4096 + 72])
def test_heads_of_128(m: int, design: Any, machine: Machine) -> None:
    """One tile a CTA, and several of several regions, of which one reads no operand in tiles."""
    if not machine.gpu and (m > 1000 or design not in HEAD_DESIGNS):
        return  # tiles are the CPU's there
    a, b = machine.normal(m, 1032, dtype=torch.bfloat16), machine.normal(N, 1032, dtype=torch.bfloat16) * 0.05
    names = {"of_q": (128,), "of_k": (128,), "cos": (m, 1, 128), "sin": (m, 1, 128)}
    operands = {name: machine.normal(*shape, dtype=torch.bfloat16) for name, shape in names.items()}
    asked = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule) if machine.gpu else None
    epilogue = attention_inputs(128)
    got = run(machine, epilogue, a, b.t(), operands, layouts=["rows"], constraints=asked)
    judge(got, epilogue, product(a, b.t()), operands)


@pytest.mark.gpu
def test_the_same_bits_each_time(hopper: Machine) -> None:
    text = source(CASES["normed and rotated"])
    a, b = product_of(hopper, 700)
    check_the_same_bits(hopper, function_of(text, {}), a, b, operands_of(hopper, text, rows=700))
