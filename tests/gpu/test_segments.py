"""Segments of a row: heads and blocks that are reduced within a tile, stored, and read again."""

from typing import Any

import pytest
import torch
from fuzzing.check import function_of
from gpu.harness import LAYOUTS, Machine, check, run

import epifuse as ef
from epifuse.providers.cutedsl import DESIGNS
from epifuse.request.problem import Constraints

M, N, K = 200, 576, 72
"""Rows that end within a tile; columns that do for every tile but the one of 192, in whole segments of 64 and of 96."""

OPERANDS: dict[str, tuple[int, ...]] = {
    "C": (M, N),
    "row": (N,),
    "column": (M, 1),
    "each": (64,),
    "heads": (N // 64, 1),
    "angles": (M, 1, 64),
    "scales": (M, N // 64, 1),
    "cosines": (M, 1, 32),
    "sines": (M, 1, 32),
}
ROTATED = "D = cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)"
CASES = {
    "a block's largest": "D = absmax(accum.unflatten(-1, (-1, 32)), dim=-1)",
    "beside the product": "D = accum + C; P = absmax(D.unflatten(-1, (-1, 64)), dim=-1)",
    "by columns": "D = amax((accum + row).unflatten(-1, (-1, 16)), dim=-1).T; P = accum",
    "of eight": "D = accum.unflatten(-1, (-1, 8)).sum(dim=-1)",
    "of 24": "D = accum.unflatten(-1, (-1, 24)).mean(dim=-1, keepdim=True); P = accum * 2",
    "of 192": "D = accum.unflatten(-1, (-1, 192)).amin(dim=-1)",
    "what is computed of it": "x = accum.unflatten(-1, (-1, 64)); D = absmax(x, dim=-1, keepdim=True) * heads + scales",
    "logsumexp": "x = accum.unflatten(-1, (-1, 64)) * 0.0625; D = logsumexp(x, dim=-1)",
    "counted": "x = accum.unflatten(-1, (-1, 64)); D = sum(x > 2, dim=-1); P = any(x > 12, dim=-1)",
    "rms norm": (
        "x = accum.unflatten(-1, (-1, 64)); r = rsqrt(mean(x * x, dim=-1, keepdim=True) + 0.001); "
        "D = (x * r * each).flatten(-2, -1); P = r"
    ),
    "heads first": (
        "x = (accum + row).unflatten(-1, (-1, 64)); "
        "D = (x * rsqrt(mean(x * x, dim=-1, keepdim=True) + 0.001) * angles).permute(1, 0, 2)"
    ),
    "layer norm": (
        "x = (accum * 0.25 + C).unflatten(-1, (-1, 96)); y = x - mean(x, dim=-1, keepdim=True); "
        "D = (y * rsqrt(mean(y * y, dim=-1, keepdim=True) + 0.001)).flatten(-2, -1)"
    ),
    "softmax": "D = softmax((accum * 0.0625 + C).unflatten(-1, (-1, 64)), dim=-1).flatten(-2, -1)",
    "scaled by the largest": (
        "x = (accum * column).unflatten(-1, (-1, 32)); a = absmax(x, dim=-1, keepdim=True); "
        "s = where(a > 0, a * 0.001953125, 1.0); D = (x / s).flatten(-2, -1); P = s"
    ),
    "less the largest": (
        "x = (accum + C).unflatten(-1, (-1, 64)); D = (x - amax(x, dim=-1, keepdim=True)).flatten(-2, -1)"
    ),
    "where some are large": (
        "x = accum.unflatten(-1, (-1, 64)); D = where(any(x > 12, dim=-1, keepdim=True), x, 0.0).flatten(-2, -1)"
    ),
    "of two widths": (
        "x = accum.unflatten(-1, (-1, 64)); y = (x - amax(x, dim=-1, keepdim=True)).flatten(-2, -1); "
        "z = y.unflatten(-1, (-1, 16)); D = (z - amin(z, dim=-1, keepdim=True)).flatten(-2, -1)"
    ),
    "stored of what is read": (
        "x = accum.unflatten(-1, (-1, 64)); y = x - amax(x, dim=-1, keepdim=True); D = y.flatten(-2, -1); "
        "P = absmax(y, dim=-1); Q = amax(x, dim=-1)"
    ),
    "column sums beside": (
        "x = accum.unflatten(-1, (-1, 64)); D = (x - amin(x, dim=-1, keepdim=True)).flatten(-2, -1); P = sum(D, dim=0)"
    ),
    "rotated": f"x = accum.unflatten(-1, (-1, 64)); a, b = x.chunk(2, dim=-1); {ROTATED}.flatten(-2, -1)",
    "rotated as written often": (
        "x = accum.unflatten(-1, (-1, 64)); a, b = x.chunk(2, dim=-1); "
        "D = (x * angles + cat((-b, a), dim=-1) * each).flatten(-2, -1)"
    ),
    "pairs rotated": (
        "x = accum.unflatten(-1, (-1, 32, 2)); a, b = x.unbind(-1); "
        "D = stack((a * cosines - b * sines, b * cosines + a * sines), dim=-1).flatten(-3, -1)"
    ),
    "normed and rotated": (
        "x = accum.unflatten(-1, (-1, 64)); y = x * rsqrt(mean(x * x, dim=-1, keepdim=True) + 0.001) * each; "
        f"a, b = y.chunk(2, dim=-1); {ROTATED}.permute(1, 0, 2)"
    ),
    "rotated and normed": (
        "x = (accum + C).unflatten(-1, (-1, 96)); a, b = x.chunk(2, dim=-1); y = cat((b, -a), dim=-1) + x; "
        "D = (y - amax(y, dim=-1, keepdim=True)).flatten(-2, -1); P = amin(y, dim=-1)"
    ),
    "a sum rotated": (
        "x = (accum + C).unflatten(-1, (-1, 16)); a, b = x.chunk(2, dim=-1); "
        "D = cat((a - b, b + a), dim=-1).flatten(-2, -1)"
    ),
    "a sum that is stored too": (
        "x = (accum + row).unflatten(-1, (-1, 64)); D = (x * 2 - x.roll(32, -1)).flatten(-2, -1); P = accum * column"
    ),
    "thirds of 48": (
        "a, b, c = accum.unflatten(-1, (-1, 48)).chunk(3, dim=-1); D = cat((b, c, a), dim=-1).flatten(-2, -1)"
    ),
    "a whole row rotated": (
        "x = (accum - amax(accum, dim=-1, keepdim=True)).unflatten(-1, (-1, 64)); a, b = x.chunk(2, dim=-1); "
        "D = cat((b, a), dim=-1).flatten(-2, -1)"
    ),
    "blocks of a gate": (
        "g, u = (accum + C).chunk(2, dim=-1); D = relu(g) * u; P = absmax(D.unflatten(-1, (-1, 32)), dim=-1)"
    ),
    "blocks of a gate scaled": (
        "g, u = accum.chunk(2, dim=-1); x = (relu(g) * u).unflatten(-1, (-1, 32)); "
        "a = absmax(x, dim=-1, keepdim=True); s = where(a > 0, a * 0.001953125, 1.0); "
        "D = (x / s).flatten(-2, -1); P = s"
    ),
    "pairs less their largest": (
        "x = accum[:, 0::2] * (accum[:, 1::2] + 1); y = x.unflatten(-1, (-1, 32)); "
        "D = (y - amax(y, dim=-1, keepdim=True)).flatten(-2, -1); P = x"
    ),
    "a gate's heads first": (
        "g, u = accum.chunk(2, dim=-1); D = (relu(g) * u).unflatten(-1, (-1, 32)).permute(1, 0, 2)"
    ),
    "row sums beside": "D = absmax(accum.unflatten(-1, (-1, 64)), dim=-1); P = sum(accum, dim=-1)",
}


def source(body: str) -> str:
    """The function of these lines, whose outputs are D, P and Q."""
    read = [name for name in OPERANDS if name in body]
    returned = ", ".join(name for name in "DPQ" if f"{name} =" in body)
    return f"def epi({', '.join(('accum', *read))}): {body}; return {returned}"


def operands_of(machine: Machine, text: str, layout: str = "rows", most: int = 2) -> dict[str, Any]:
    """Whole numbers for what a function reads."""
    names = text[text.index("(") + 1 : text.index(")")].split(", ")[1:]
    return {name: machine.laid_out(machine.whole(*OPERANDS[name], most=most), layout) for name in names}


def product_of(machine: Machine, m: int = M, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    return machine.whole(m, K, most=1), machine.whole(n, K, most=1).t()


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_each_segment_has_its_own(name: str, layout: str, machine: Machine) -> None:
    """With operands and outputs as TMA can address them, and as it cannot."""
    text = source(CASES[name])
    number = list(CASES).index(name) + LAYOUTS.index(layout)
    dtype = (torch.float32, torch.int32 if name == "counted" else torch.bfloat16)[number % 2]
    check(machine, text, *product_of(machine), operands_of(machine, text, layout), out_dtypes=dtype, layouts=[layout])


def holds(design: Any, name: str) -> bool:
    """Whether a design's tile is whole segments of a case, and has registers for it where K is short."""
    widths = {"layer norm": 96, "rotated and normed": 96, "by columns": 32, "a sum rotated": 32}
    if design.rows * design.tile[1] > 128**2:
        return name == "a sum rotated"
    return design.tile[1] % widths.get(name, 64) == 0 and (name, design.tile) != ("blocks of a gate", (64, 64))


IN_DESIGNS = [
    "beside the product",
    "by columns",
    "layer norm",
    "of two widths",
    "column sums beside",
    "a sum rotated",
    "rotated and normed",
    "blocks of a gate",
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_DESIGNS)
@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_in_every_design(design: Any, name: str, hopper: Machine) -> None:
    if not holds(design, name):
        return
    check(hopper, source(CASES[name]), *of_many_tiles(hopper, name), layouts=["rows"], **in_a_design(design))


def of_many_tiles(machine: Machine, name: str) -> tuple[Any, ...]:
    """A, B and operands of a case, so large that a CTA has several tiles."""
    a, b = product_of(machine, 4096 + 72, 4096 + 512)
    shapes = {"C": (a.shape[0], b.shape[1]), "row": (b.shape[1],)}
    return a, b, {key: machine.whole(*shape) for key, shape in shapes.items() if key in CASES[name]}


def in_a_design(design: Any) -> dict[str, Any]:
    asked = Constraints(tile=design.tile, cluster=design.cluster, schedule=design.schedule)
    return {"out_dtypes": torch.float32, "constraints": asked}


@pytest.mark.parametrize("name", IN_DESIGNS)
def test_a_design_takes_what_it_holds(name: str) -> None:
    function = function_of(source(CASES[name]), {})
    a, b, operands = of_many_tiles(Machine("cpu"), name)
    for design in DESIGNS:
        epilogue = ef.EpilogueArguments.partial(function, operands)
        args = ef.GemmArguments(a, b, epilogue=epilogue, **in_a_design(design))
        assert bool(ef.get_kernels(args, cc=90, providers=["cutedsl"])) == holds(design, name), design


@pytest.mark.sweep
@pytest.mark.parametrize(
    "shape", [(1, 192, 8), (3, 192, 8), (64, 384, 64), (129, 1152, 520), (257, 576, 1032)], ids=str
)
@pytest.mark.parametrize("name", ["beside the product", "layer norm", "of two widths"])
def test_of_every_size(name: str, shape: tuple[int, int, int], machine: Machine) -> None:
    m, n, k = shape
    a, b = machine.whole(m, k, most=1), machine.whole(n, k, most=1).t()
    operands = {"C": machine.whole(m, n)} if "C" in CASES[name] else {}
    check(machine, source(CASES[name]), a, b, operands, out_dtypes=torch.float32)


@pytest.mark.parametrize(("width", "n"), [(80, 1280), (112, 1344)])
@pytest.mark.parametrize("m", [3, 300])
def test_heads_that_tiles_of_one_width_hold(m: int, width: int, n: int, machine: Machine) -> None:
    """Of 160 columns, and of 224."""
    text = source(f"x = (accum + C).unflatten(-1, (-1, {width})); P = sum(x, dim=-1); D = x * P.unsqueeze(-1)")
    a, b = product_of(machine, m, n)
    check(machine, text, a, b, {"C": machine.whole(m, n, most=1)}, out_dtypes=torch.float32)


ALONE = {
    "normed and rotated": (
        "x = accum + C; y = x * rsqrt(mean(x * x, dim=-1, keepdim=True) + 0.001) * each; a, b = y.chunk(2, dim=-1); "
        f"{ROTATED}"
    ),
    "of one head": (
        "x = accum.unflatten(-1, (1, -1)); y = x / (absmax(x, dim=-1, keepdim=True) + 1) * each; "
        "a, b = y.chunk(2, dim=-1); D = (y * angles + cat((-b, a), dim=-1)).permute(1, 0, 2)"
    ),
    "pairs": (
        "a, b = (accum - amax(accum, dim=-1, keepdim=True)).unflatten(-1, (-1, 2)).unbind(-1); "
        "D = stack((b, a), dim=-1).flatten(-2, -1)"
    ),
    "a value a row beside": (
        "s = absmax(accum, dim=-1, keepdim=True); a, b = (accum / (s + 1)).chunk(2, dim=-1); "
        "D = cat((b, -a), dim=-1); P = s"
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("n", [32, 64, 96, 128, 256])
def test_a_row_that_is_one_segment(n: int, name: str, machine: Machine) -> None:
    """It is reduced, and its columns are combined: a head alone."""
    a, b = product_of(machine, M, n)
    text = source(ALONE[name])
    shapes = {"C": (M, n), "each": (n,), "angles": (M, 1, n), "cosines": (M, n // 2), "sines": (M, n // 2)}
    operands = {key: machine.whole(*shape) for key, shape in shapes.items() if key in text}
    check(machine, text, a, b, operands, out_dtypes=torch.float32)


@pytest.mark.parametrize("name", ["beside the product", "softmax", "stored of what is read"])
def test_of_batches(name: str, machine: Machine) -> None:
    a, b = machine.whole(3, M, K, most=1), machine.whole(3, N, K, most=1).mT
    text = source(CASES[name])
    check(machine, text, a, b, operands_of(machine, text), out_dtypes=torch.float32)


def test_blocks_of_few_rows(machine: Machine) -> None:
    """Stored by columns, one block behind the other: what heads are where A and B are exchanged."""
    a, b = machine.whole(64, K, most=1), machine.whole(N, K, most=1).t()
    text = "def epi(accum): D = accum.unflatten(0, (-1, 32)).permute(0, 2, 1); return D"
    check(machine, text, a, b, {}, out_dtypes=torch.bfloat16)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_blocks_are_quantised(width: int, machine: Machine) -> None:
    """Each block by its own scale: of zeros by one, and what is not finite stays so."""
    text = (
        "def epi(accum, C):\n"
        f"    x = (accum + C).unflatten(-1, (-1, {width}))\n"
        "    a = absmax(x, dim=-1, keepdim=True)\n"
        "    s = where(a == 0.0, 1.0, a / 448.0)\n"
        "    D = (x / s).flatten(-2, -1)\n"
        "    return D, s\n"
    )
    m, n = 130, 1280
    a, b = machine.whole(m, K, most=1), machine.whole(n, K, most=1).t()
    a[5], a[7] = 0.0, 0.0
    C = machine.whole(m, n, dtype=torch.float32)
    C[5], C[7], C[9, 3], C[7, 3] = 0.0, 0.0, torch.inf, torch.nan
    dtypes = {"D": torch.float8_e4m3fn, "s": torch.float32}
    got = check(machine, text, a, b, {"C": C}, out_dtypes=dtypes, layouts=["rows"])
    assert (got["s"][5] == 1).all()
    assert got["s"][7, 0].isnan()
    assert (got["s"][7, 1:] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["a block's largest", "softmax"])
def test_of_other_products(name: str, dtype: torch.dtype, machine: Machine) -> None:
    text = source(CASES[name])
    a, b = machine.whole(M, K, most=1, dtype=dtype), machine.whole(N, K, most=1, dtype=dtype).t()
    tf32 = Constraints(precision="tf32") if dtype == torch.float32 else Constraints()
    check(machine, text, a, b, operands_of(machine, text), constraints=tf32, layouts=["rows"])


def test_of_normal_numbers(machine: Machine) -> None:
    a, b = machine.normal(M, 512, dtype=torch.bfloat16), machine.normal(N, 512, dtype=torch.bfloat16).t()
    text = source(CASES["rms norm"])
    check(machine, text, a, b * 0.1, operands_of(machine, text), exact=False, layouts=["rows"])


def test_where_k_is_zero(machine: Machine) -> None:
    text = source(CASES["stored of what is read"])
    check(machine, text, machine.whole(M, 0), machine.whole(N, 0).t(), {})


def test_a_second_launch_is_not_needed(machine: Machine) -> None:
    a, b = product_of(machine)
    text = source(CASES["stored of what is read"])
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(text, {}))
    kernel = ef.get_kernels(args, cc=90, providers=["cutedsl"])[0]
    assert kernel.get_workspace_size(args) == 0
    assert str(kernel.plan).count("once a segment of a row") == 2


OF_A_GATE = {
    "norm": "D = h * rsqrt(mean(h * h, dim=-1, keepdim=True) + 1e-6); return D",
    "block": "x = h.unflatten(-1, (-1, {0})); s = absmax(x, dim=-1, keepdim=True) + 1.0; "
    "D = (x / s).flatten(-2, -1); return D, s",
}


@pytest.mark.parametrize("columns", [32, 64, 96, 128])
@pytest.mark.parametrize("name", OF_A_GATE)
def test_a_gate_before_a_row_that_is_one_segment(name: str, columns: int, machine: Machine) -> None:
    """As an expert with few columns has it: no value needs a row that a tile does not hold."""
    head = "def epi(accum): gate, up = accum.chunk(2, -1); h = silu(gate * 0.1) * up;"
    source = f"{head} {OF_A_GATE[name].format(columns)}"
    a, b = machine.whole(200, 64), machine.whole(2 * columns, 64).t()
    found = run(machine, source, a, b, {}, out_dtypes=torch.float32)
    want = ef.reference(function_of(source, {}))(a.double().cpu() @ b.double().cpu())
    for got, one in zip(found.values(), want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(got.double().cpu(), one.double(), rtol=1e-5, atol=1e-5)
