"""Reductions on the Hopper kernel: every kind to every destination, ragged edges, what is not finite, the same bits.

Integers and masks are reduced exactly.
"""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzzing.check import function_of
from gpu.harness import Machine, check, check_the_same_bits, exact_product, judge, refusal, run

import epifuse as ef
from epifuse.fusion.reduction import REDUCTIONS

SHAPES = {
    "batched": (3, 129, 264, 72),
    "matrix": (0, 257, 136, 64),
    "one tile": (0, 64, 128, 64),
    "thin": (0, 1, 8, 64),
    "whole subtiles": (0, 320, 352, 64),
    "whole subtiles of rows": (2, 192, 280, 64),
}
KINDS = (("sum", "mean", "amax", "amin", "any", "prod"), ("absmax", "sum_of_squares", "norm", "all", "logsumexp"))
DESTINATIONS: dict[str, tuple[str, Any]] = {
    "a number": ("batched", None),
    "per batch": ("batched", (1, 2)),
    "per row and batch": ("batched", 2),
    "per column and batch": ("batched", 1),
    "per row": ("batched", (0, 2)),
    "per column": ("batched", (0, 1)),
    "a number of a matrix": ("matrix", None),
    "per row of a matrix": ("matrix", 1),
    "per column of a matrix": ("matrix", 0),
    "per row of one tile": ("one tile", 1),
    "per column of one tile": ("one tile", 0),
    "per row of a thin matrix": ("thin", 1),
    "per column of a thin matrix": ("thin", 0),
    "a number of whole subtiles": ("whole subtiles", None),
    "per row of whole subtiles": ("whole subtiles", 1),
    "per column of whole subtiles": ("whole subtiles", 0),
    "per batch of whole subtiles of rows": ("whole subtiles of rows", (1, 2)),
}
SUM_ERROR = 1e-6
"""Of the sum of magnitudes, against float64: the promise of docs/numerics.md for sums of 16384 x 16384 elements."""


def inputs(machine: Machine, shape: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Data whose products and sums are exact: A, B and a full operand."""
    l, m, n, k = SHAPES[shape]
    lead = (l,) if l else ()
    C = machine.laid_out(torch.randint(-8, 9, (*lead, m, n)) / 4)
    return machine.whole(*lead, m, k), machine.whole(*lead, k, n), {"C": C}


def reduced(name: str, value: str, dim: Any) -> str:
    """As a float: masks become 0 and 1 once all tiles are done, and so does the sign of a product of signs."""
    if name == "prod":
        return f"where(prod(where({value} > 3.0, -1.0, 1.0), dim={dim}, keepdim=True) > 0.0, 1.0, 0.0)"
    if REDUCTIONS[name].rule == "mask":
        return f"where({name}({value} > 0.5, dim={dim}, keepdim=True), 1.0, 0.0)"
    return f"{name}({value}, dim={dim}, keepdim=True)"


def source_of(names: tuple[str, ...], dim: Any, value: str = "accum * 0.25 + C") -> str:
    """D is not among the outputs."""
    lines = "".join(f"    {name}_ = {reduced(name, 'x', dim)}\n" for name in names)
    return f"def epi(accum, C):\n    x = {value}\n{lines}    return {', '.join(f'{name}_' for name in names)}\n"


def test_every_kind_is_here() -> None:
    assert {name for names in KINDS for name in names} == set(REDUCTIONS)


@pytest.mark.sweep
@pytest.mark.parametrize("names", KINDS, ids="-".join)
@pytest.mark.parametrize("destination", DESTINATIONS)
def test_every_kind_to_every_destination(destination: str, names: tuple[str, ...], machine: Machine) -> None:
    shape, dim = DESTINATIONS[destination]
    a, b, operands = inputs(machine, shape)
    check(machine, source_of(names, dim), a, b, operands)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("shape", ["matrix", "whole subtiles"])
def test_lanes_outside_the_result_never_count(shape: str, dim: Any, sign: int, machine: Machine) -> None:
    """Data of one sign, far from zero: a zero or a poisoned lane would win."""
    a, b, operands = inputs(machine, shape)
    value = f"accum * 0.25 + C + ({sign} * 1000.0)"
    names = ("amax", "amin", "absmax", "mean", "all")
    found = check(machine, source_of(names, dim, value), a, b, operands)
    assert all((found[name] * sign > 0).all() for name in ("amax_", "amin_"))
    assert (found["all_"] == (sign > 0)).all()


@pytest.mark.parametrize("names", KINDS, ids="-".join)
@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf], ids=str)
def test_what_is_not_finite(broken: float, names: tuple[str, ...], machine: Machine) -> None:
    """One element at each end, and a row and a column that hold nothing else: logsumexp of them is that too."""
    a, b, operands = inputs(machine, "matrix")
    C = operands["C"]
    C[3], C[:, 5], C[-1, -1], C[0, 0] = broken, broken, broken, broken
    for dim in (1, 0):
        found = check(machine, source_of(names, dim), a, b, operands)
        if "amax_" in found:
            flat = found["amax_"].flatten()
            assert torch.equal(flat[3 if dim else 5], torch.tensor(broken)) or (broken != broken and flat[3].isnan())


def mixed(accum: Any, C: Any, eps: Any) -> Any:
    D = accum * 0.25 + C
    loss = -(D.sum()) / 1000.0
    r = ef.rsqrt(ef.mean(D * D, dim=-1, keepdim=True) + eps)
    bias = ef.sum(D * C, dim=-2, keepdim=True)
    spread = ef.amax(D) - ef.amin(D)
    Aux = ef.relu(D)
    return D, loss, r, bias, spread, Aux


@pytest.mark.parametrize("shape", ["batched", "matrix", "one tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_several_reductions_beside_full_results(dtype: torch.dtype, shape: str, machine: Machine) -> None:
    """Reductions are of float32 values, whatever D is stored as."""
    a, b, operands = inputs(machine, shape)
    dtypes = dict.fromkeys(("D", "Aux", "loss", "r", "bias", "spread"), dtype)
    got = run(machine, mixed, a, b, {**operands, "eps": 1e-5}, out_dtypes=dtypes)
    judge(got, ef.reference(mixed), exact_product(a, b), {**operands, "eps": 1e-5})


AGAIN = {
    "a mean of row losses": "r = logsumexp(x, dim=-1); s = mean(r - 0.1 * mean(x, dim=-1) + 1e-4 * r * r); return r, s",
    "a share of all": "r = sum(x, dim=-1) / (sum(abs(x)) + 1.0); return r",
    "a share of the rows": "w = sum(abs(x), dim=-1); r = w / amax(w); return r",
    "of both axes": "r = mean(sum(x, dim=-1)) + amax(sum(x, dim=-2)) + sum(x > 0); return r",
    "integers": "r = sum(sum(x > 0, dim=-1) > 3); s = all(any(x > 9.0, dim=-2)); return r, s",
    "beside full values": "D = relu(x); r = norm(logsumexp(x, dim=-2)); return D, r",
    "over batches": "r = sum(sum(x, dim=-1) / (sum(abs(x)) + 1.0), dim=0); s = amax(sum(x, dim=(-2, -1))); return r, s",
}
"""Reductions of finished values, and of different extents together."""


@pytest.mark.parametrize("shape", ["batched", "matrix", "one tile"])
@pytest.mark.parametrize("name", AGAIN)
def test_what_is_finished_is_reduced_again(name: str, shape: str, machine: Machine) -> None:
    a, b, operands = inputs(machine, shape)
    source = f"def epi(accum, C): x = accum * 0.25 + C; {AGAIN[name]}"
    if shape == "batched" or name != "over batches":
        check(machine, source, a, b, operands, out_dtypes={"D": torch.float32} if "D =" in source else None)


BESIDE = {
    "rows that count": "r = logsumexp(x, -1, True); c = labels != 3; s = sum(where(c, r, 0.0)) / sum(c); return s",
    "weights of rows": "r = logsumexp(x, -1, keepdim=True); s = sum(r * w) / sum(w) + amax(w); return s",
    "weights of columns": "r = sum(x, -2, keepdim=True); s = sum(r * v) / sum(v * v); return r, s",
}
"""Reductions of operands alone, beside those of the rows or columns that they have a value for."""


@pytest.mark.parametrize("m", [1, 70, 257])
@pytest.mark.parametrize("name", BESIDE)
def test_an_operand_is_reduced_beside_rows(name: str, m: int, machine: Machine) -> None:
    a, b = machine.whole(m, 64), machine.whole(64, 136)
    labels = torch.randint(0, 5, (m, 1), device=machine.device)
    every = {"labels": labels, "w": machine.whole(m, 1).abs() + 1, "v": machine.whole(136) + 0.5}
    source = f"def epi(accum, {{}}): x = accum * 0.25; {BESIDE[name]}"
    used = {key: value for key, value in every.items() if f"{key} " in BESIDE[name] or f"{key})" in BESIDE[name]}
    check(machine, source.format(", ".join(used)), a, b, used, exact=False)


def test_an_operand_of_batches_is_reduced_beside_rows(machine: Machine) -> None:
    a, b = machine.whole(3, 70, 64), machine.whole(3, 64, 136)
    source = (
        "def epi(accum, w): r = logsumexp(accum * 0.25, -1, keepdim=True); s = sum(w, -2, keepdim=True); "
        "total = sum(r * w) / sum(w); return total, s"
    )
    check(machine, source, a, b, {"w": machine.whole(3, 70, 1).abs() + 1}, exact=False)


@pytest.mark.parametrize(("l", "m"), [(2, 65), (1, 65), (65, 1), (1, 1)])
def test_a_mean_loss_of_merged_rows(l: int, m: int, machine: Machine) -> None:
    """Of what counts, labels say: their one dim is of both of accum's."""
    a, b, labels = machine.whole(l, m, 64), machine.whole(64, 136), torch.randint(0, 5, (l * m,), device=machine.device)
    labels[-1] = 1  # one counts
    source = "def epi(accum, labels): x = accum * 0.25; return F.cross_entropy(x.flatten(0, 1), labels, ignore_index=3)"
    check(machine, source, a, b, {"labels": labels}, exact=False)


CHOSEN = {
    "of log_softmax": "p = log_softmax(x, dim=-1).gather(-1, labels); r = -p; return r",
    "of softmax": "p = softmax(x * 2.0, dim=-1).gather(-1, labels); r = -log(p + 1e-9); return p, r",
    "of bent logits": "y = 30.0 * tanh(x / 30.0); s = mean(-log_softmax(y, -1).gather(-1, labels)); return s",
    "of what is masked": "y = where(C > -2.0, x, -inf); r = log_softmax(y, -1).gather(-1, labels); return r",
    "probabilities as targets": "r = -(exp(C * 0.1) * log_softmax(x, -1)).sum(-1, True) / 100.0; return r",
    "smoothed": "y = log_softmax(x, -1); r = y.gather(-1, labels) * 0.9 + y.mean(-1, True) * 0.1; return r",
    "clipped": "r = exp(log_softmax(x, -1).gather(1, labels) - old); s = min(r * w, clamp(r, 0.8, 1.2) * w); return s",
}
"""What is computed of whole rows, of which one column or a sum is stored."""


@pytest.mark.parametrize("n", [136, 4104])
@pytest.mark.parametrize("name", CHOSEN)
def test_one_column_of_what_is_computed_of_rows(name: str, n: int, machine: Machine) -> None:
    """Rows wider than a cluster, too, as no value of a tile waits for its row."""
    a, b = machine.normal(257, 64), machine.normal(64, n)
    labels = torch.randint(0, n, (257, 1), device=machine.device)
    every = {
        "labels": labels,
        "C": machine.normal(257, n),
        "old": machine.normal(257, 1) - 4.0,
        "w": machine.normal(257, 1),
    }
    used = {key: value for key, value in every.items() if re.search(rf"\b{key}\b", CHOSEN[name])}
    source = f"def epi(accum, {', '.join(used)}): x = accum * 0.25; {CHOSEN[name]}"
    check(machine, source.replace("-inf", "float('-inf')"), a, b, used, exact=False)


@pytest.mark.parametrize("n", [136, 4104])
def test_a_column_that_is_not_there_gives_zero(n: int, machine: Machine) -> None:
    """And where the largest value of a row is no finite number, the result is PyTorch's."""
    a, b, C = machine.normal(70, 64), machine.normal(64, n), torch.zeros(70, n, device=machine.device)
    C[3, 5], C[4], C[5, 6], C[6, 7] = torch.inf, -torch.inf, torch.nan, -torch.inf
    labels = torch.arange(70, device=machine.device)[:, None] % n
    labels[:3, 0] = torch.tensor([-1, n, -100], device=machine.device)
    labels[6] = 7
    source = "def epi(accum, C, labels): r = log_softmax(accum + C, dim=-1).gather(-1, labels); return r"
    found = run(machine, source, a, b, {"C": C, "labels": labels})["r"].double().cpu()
    rows = torch.log_softmax(a.double() @ b.double() + C, dim=-1).cpu()
    want = rows.gather(-1, labels.cpu().clamp(0, n - 1))
    want[:3] = 0.0
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("l", "m", "n"), [(0, 257, 4104), (0, 5, 4104), (3, 70, 2056), (0, 1, 50000), (0, 640, 4096)])
def test_the_place_of_the_largest_value_of_a_wide_row(l: int, m: int, n: int, machine: Machine) -> None:
    """The first one of equal values, and NaN where there is one; with few rows A and B are exchanged."""
    a, b = (machine.whole(*shape) if l else machine.whole(*shape[1:]) for shape in ((l, m, 64), (l, 64, n)))
    C = torch.zeros(*((l,) if l else ()), m, n, device=machine.device)
    C[..., 0, 7], C[..., 0, n - 2] = torch.nan, torch.nan
    if m > 4:
        C[..., 1, :], C[..., 2, n - 1], C[..., 3, 5:9] = -torch.inf, torch.inf, torch.inf
    body = "i, j, k = argmax(x, -1), argmin(x, -1, True), argmax(x * 0.0, -1); return i, j, k"
    source = f"def epi(accum, C): x = accum + C; {body}"
    found = run(machine, source, a, b, {"C": C})
    x = (a.float() @ b.float() + C).cpu()
    assert torch.equal(found["i"].cpu(), x.argmax(-1))
    assert torch.equal(found["j"].cpu(), x.argmin(-1, True))
    assert torch.equal(found["k"].cpu(), (x * 0.0).argmax(-1))


def sums(accum: Any) -> Any:
    D = accum
    total, rows, columns = D.sum(), D.sum(dim=1), D.sum(dim=0)
    squares = ef.sum_of_squares(D)
    return D, total, rows, columns, squares


def test_sums_beside_float64(machine: Machine) -> None:
    """Of the float32 values that the same launch stored."""
    extent = 16384 if machine.gpu else 512
    a, b = machine.normal(extent, 64, dtype=torch.bfloat16), machine.normal(64, extent, dtype=torch.bfloat16)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(sums, {}), out_dtypes=torch.float32)
    found = machine.kernel(args).run(args)
    D = found["D"].double()
    squares = D * D
    for name, value, dims in (
        ("total", D, (0, 1)),
        ("rows", D, (1,)),
        ("columns", D, (0,)),
        ("squares", squares, (0, 1)),
    ):
        error = (found[name].double() - value.sum(dims)).abs() / value.abs().sum(dims)
        assert error.max() <= SUM_ERROR, f"{name}: {error.max():.1e} of the sum of magnitudes"


LOGARITHMS = {
    "softplus": ("softplus(x)", lambda x, C: x.relu()),
    "logsigmoid": ("-logsigmoid(x)", lambda x, C: (-x).relu()),
    "a loss": ("softplus(x) - x * C", lambda x, C: x.relu() - x * C),
}


SUMS = {"sum(t)": (0, 1), "mean(t)": (0, 1), "sum(t, dim=1)": 1, "mean(t, dim=0)": 0}


@pytest.mark.parametrize("shift", [0.0, -6.0, -20.0, -60.0, 20.0, 60.0])
@pytest.mark.parametrize("name", LOGARITHMS)
def test_sums_of_logarithms_beside_float64(name: str, shift: float, machine: Machine) -> None:
    """Terms of every size, the targets cancelling all else."""
    text, linear = LOGARITHMS[name]
    for shape in ("matrix", "whole subtiles"):
        a, b, _ = inputs(machine, shape)
        x = (a.double() @ b.double()).cpu() * 2.0**-6 + shift
        C = (x > 0).float()
        t = linear(x, C.double()) + (-x.abs()).exp().log1p()
        # The CPU takes float32 values from one another, and what is left is as exact as they were.
        size = t if machine.gpu or name != "a loss" else t + x.abs()
        for written, dims in SUMS.items():
            source = f"def epi(accum, C, shift): x = accum * {2.0**-6} + shift; t = {text}; r = {written}; return r"
            got = run(machine, source, a, b, {"C": machine.laid_out(C), "shift": shift})["r"].double()
            reduce = torch.mean if written.startswith("mean") else torch.sum
            error = (got - reduce(t, dims)).abs() / reduce(size, dims)
            assert error.max() <= SUM_ERROR, f"{written}: {error.max():.1e} of the sum of magnitudes"


@pytest.mark.parametrize("x", [-1.5, -15.850454, -52.66867])
@pytest.mark.parametrize("written", SUMS)
def test_sums_of_equal_logarithms_round_x_once_more(written: str, x: float, machine: Machine) -> None:
    """Nothing averages out. The largest errors that were found by emulation."""
    a, b = machine.whole(256, 64, most=0), machine.whole(64, 256, most=0)
    source = f"def epi(accum, shift): t = softplus(accum + shift); r = {written}; return r"
    got = run(machine, source, a, b, {"shift": x})["r"].double()
    each = math.log1p(math.exp(torch.tensor(x).item()))
    want = each * (1 if written.startswith("mean") else 256 ** (1 if "dim" in written else 2))
    torch.testing.assert_close(got, torch.full_like(got, want), rtol=2.0**-24 * abs(x) + SUM_ERROR / 2, atol=0)


@pytest.mark.parametrize("written", SUMS)
def test_a_product_of_largest_terms_does_not_overflow(written: str, machine: Machine) -> None:
    """1 + exp(-|0|) is 2, and a thread has 128 of them in a tile of 128 x 128."""
    a, b = machine.whole(256, 64, most=0), machine.whole(64, 256, most=0)
    pinned = ef.Constraints(tile=(128, 128), cluster=(2, 1), schedule="pingpong") if machine.gpu else None
    source = f"def epi(accum): t = softplus(accum); r = {written}; return r"
    got = run(machine, source, a, b, {}, constraints=pinned)["r"].double()
    want = math.log(2) * (1 if written.startswith("mean") else 256 ** (1 if "dim" in written else 2))
    torch.testing.assert_close(got, torch.full_like(got, want), rtol=SUM_ERROR, atol=0)


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf], ids=str)
def test_sums_of_logarithms_of_what_is_not_finite(broken: float, machine: Machine) -> None:
    a, b, operands = inputs(machine, "matrix")
    operands["C"][3] = broken
    found = run(machine, "def epi(accum, C): rows = sum(softplus(accum + C), dim=1); return rows", a, b, operands)
    want = F.softplus(a.double() @ b.double() + operands["C"].double()).sum(1)
    torch.testing.assert_close(found["rows"].double(), want.cpu(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_same_bits_on_two_streams_at_once(dim: Any, hopper: Machine) -> None:
    a, b = hopper.normal(1000, 512, dtype=torch.bfloat16), hopper.normal(512, 1288, dtype=torch.bfloat16)
    function = function_of(source_of(("sum", "norm", "logsumexp", "mean", "amax"), dim), {})
    check_the_same_bits(hopper, function, a, b, {"C": hopper.normal(1000, 1288)})


@pytest.mark.parametrize(
    "text", ["D = accum / sum(accum, dim=-1, keepdim=True)", "D = softmax(accum, dim=-1)", "D = accum - mean(accum)"]
)
def test_what_needs_a_finished_reduction_runs_or_says_why_not(text: str, machine: Machine) -> None:
    a, b, _ = inputs(machine, "matrix")
    source = f"def epi(accum): {text}; return D"
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(source, {}))
    if ef.get_kernels(args, cc=90, providers=["cutedsl"], limit=1):
        check(machine, source, a, b, {}, out_dtypes=torch.float32)
        return
    assert any(word in refusal(args) for word in ("whole rows", "recompute the product", "recomputes the product")), (
        refusal(args)
    )


WHOLE = {
    "mask": "m = x > 0.5; total = sum(m, dim={d}, keepdim=True)",
    "int32": "m = x.to(torch.int32) * 1048576; total = sum(m, dim={d}, keepdim=True)",
    "int64": "m = x.to(torch.int64) * big; total = sum(m, dim={d}, keepdim=True)",
}
ORDERED = "".join(
    f"; {name}_ = {name}(m, dim={{d}}, keepdim=True)" for name in ("amax", "amin", "absmax", "any", "all")
)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("destination", DESTINATIONS)
def test_integers_and_masks_are_reduced_exactly(destination: str, kind: str, machine: Machine) -> None:
    """Sums beyond 32 bits, and maxima beyond what a float holds; of one sign, where a zero would win."""
    shape, dim = DESTINATIONS[destination]
    a, b, operands = inputs(machine, shape)
    if kind == "int64":
        operands["big"] = torch.full((1,), 2**40 + 1, device=machine.device)
    text = WHOLE[kind] + ("; any_ = any(m, dim={d}); all_ = all(m, dim={d})" if kind == "mask" else ORDERED)
    squares = "" if kind == "mask" else "; squares = sum_of_squares(x.to(torch.int32), dim={d})"
    names = [name.split(" = ")[0] for name in (text + squares).split("; ")[1:]]
    for value in ("accum * 0.25 + C", "accum * 0.25 + C - 1000", "accum * 0.25 + C + 1000"):
        body = (text + squares).format(d=dim)
        source = f"def epi(accum, {', '.join(operands)}): x = {value}; {body}; return {', '.join(names)}"
        dtypes = {name: torch.bool if name in ("any_", "all_") else torch.int64 for name in names}
        got = run(machine, source, a, b, operands, out_dtypes=dtypes)
        want = ef.reference(function_of(source, {}))(a.cpu().float() @ b.cpu().float(), **here(operands))
        for name, tensor in zip(names, want, strict=True):
            assert torch.equal(got[name].flatten(), tensor.flatten().to(got[name].dtype)), (name, value)


def here(operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in operands.items()}


@pytest.mark.parametrize(("l", "m", "n"), [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_reductions_of_nothing(l: int, m: int, n: int, machine: Machine) -> None:
    a, b = machine.whole(l, m, 64), machine.whole(l, 64, n)
    source = """def epi(accum, scale):
    total = sum(accum) + scale
    mean_ = mean(accum)
    lse = logsumexp(accum)
    count = sum(accum > 0)
    rows = sum(accum, dim=2)
    columns = any(accum > 0, dim=1)
    return total, mean_, lse, count, rows, columns"""
    found = run(machine, source, a, b, {"scale": machine.whole(1).fill_(3.0)})
    assert (found["total"], found["lse"], found["count"]) == (3.0, -torch.inf, 0)
    assert found["mean_"].isnan()
    assert (found["rows"] == 0).all()
    assert not found["columns"].any()


@pytest.mark.parametrize(("m", "n"), [(1, 264), (130, 1), (1, 1)])
def test_an_operand_is_reduced_where_the_result_is_thin(m: int, n: int, machine: Machine) -> None:
    """Beside M = 1 a (1, N) operand is a row to the kernel, and a mask of it is reduced like any full value."""
    a, b, C = machine.whole(m, 64), machine.whole(n, 64).t(), machine.whole(m, n)
    mean = "sum(where(C > 0, accum, 0.0)) / (sum(C > 0) + 1)"
    source = f"def epi(accum, C): mean = {mean}; total = sum(C); return mean, total"
    check(machine, source, a, b, {"C": C}, exact=False)
