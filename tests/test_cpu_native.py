"""The compiled loop of the CPU provider: what torch's own operations give, and refusals by name."""

import itertools

import pytest
import torch

import epifuse as ef
from epifuse.base.config import Config
from epifuse.fusion.primitives import PRIMITIVES
from epifuse.providers.cpu import native, toolchain
from epifuse.providers.cpu.emit_cpp import LANES, ROWS, SLEEF

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in LANES or toolchain.missing() is not None,
    reason="no vector unit we emit for, or no C++ compiler: the kernel is refused there, which other tests cover",
)

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, 1e-40, -1e-40, 3e38, float("inf"), float("-inf"), float("nan")]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Small problems compile too."""
    monkeypatch.setattr(native, "CONFIG", Config(native_elements=0))
    monkeypatch.setattr(native, "FEWEST_ROWS", 1)


def kernel_for(args):
    """The compiled kernel, which must be offered."""
    kernels = ef.get_kernels(args, metadata_filter=lambda metadata: metadata.kernel_name == "cpu_native")
    assert kernels, ef.explain(args)
    return kernels[0]


def arguments(epilogue, a, b, **operands):
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, operands))


def both_kernels(args):
    """Outputs of the compiled loop and of the panel kernel."""
    panel = ef.get_kernels(args, metadata_filter=lambda metadata: metadata.kernel_name == "cpu_panel")[0]
    return kernel_for(args).run(args), panel.run(args)


def every_row_in_one_epilogue():
    """Source with one output for each row of the compiled table: one compile tests them all."""
    results = []
    for name in (*ROWS, *SLEEF):
        row = PRIMITIVES[name]
        arguments = {
            "logic": ["X > Y", "Y > 0.5"],
            "select": ["X > Y", "X", "Y"],
        }.get(row.rule, ["X", "Y", "Z"])[: row.arity]
        text = f"{name}({', '.join(arguments)})"
        results.append((f"r_{name}", f"where({text}, 1.0, 2.0)" if row.rule in ("logic", "compare") else text))
    body = "".join(f"    {name} = {text}\n" for name, text in results)
    names = ", ".join(name for name, _ in results)
    return f"def epi(accum, X, Y, Z):\n{body}    return {names}\n"


TWO_ULP = 2.0**-22


def test_every_row_equals_torch():
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    x = torch.cat([pairs[:, 0], torch.randn(1003) * 3]).expand(3, -1).contiguous()
    y = torch.cat([pairs[:, 1], torch.randn(1003)]).expand(3, -1).contiguous()
    z = torch.randn(x.shape)
    a, b = torch.zeros(3, 4), torch.zeros(4, x.shape[1])
    compiled, panel = both_kernels(arguments(every_row_in_one_epilogue(), a, b, X=x, Y=y, Z=z))
    # addcmul fuses the multiplication and addition, the compiled loop rounds after each, as x * y + z does.
    panel["r_multiply_add"] = x * y + z
    for name in compiled:
        # torch takes roots and transcendental functions from MKL, we from SLEEF: each is good to one ulp.
        rtol = TWO_ULP if name.removeprefix("r_") in (*SLEEF, "sqrt", "rsqrt") else 0
        torch.testing.assert_close(compiled[name], panel[name], equal_nan=True, rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 33), (7, 16), (300, 523), (530, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_accesses_and_ragged_shapes(m, n, dtype, batch):
    def epilogue(accum, C, row, column, scalar, mask_limit):
        t = scalar * accum + C * column + row
        D = ef.where(t > mask_limit, t, ef.exp(t))
        Aux = D * accum
        return D, Aux

    a, b = torch.randn(*batch, m, 8, dtype=dtype), torch.randn(*batch, 8, n, dtype=dtype)
    c = torch.randn(*batch, m, n + 5, dtype=dtype)[..., :n]
    args = arguments(
        epilogue, a, b, C=c, row=torch.randn(n), column=torch.randn(m, 1), scalar=2.0, mask_limit=torch.tensor([0.5])
    )
    compiled, panel = both_kernels(args)
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    for name in compiled:
        torch.testing.assert_close(compiled[name], panel[name], rtol=tolerance, atol=tolerance)


def test_the_accumulator_may_use_a_shared_destination():
    a, b = torch.randn(40, 8), torch.randn(8, 33)
    c = torch.randn(40, 33)
    want = (a @ b) * c + c
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(lambda accum, C: accum * C + C, C=c, D=c))
    kernel_for(args).run(args)
    torch.testing.assert_close(c, want)


PARTS = {
    "halves": "gate, up = accum.chunk(2, -1); D = F.silu(gate) * up",
    "halves and the whole": "gate, up = (accum + row).chunk(2, -1); D = F.silu(gate) * up; P = accum * 2",
    "halves of operands": "a, b = accum.chunk(2, -1); g, u = C.chunk(2, -1); D = torch.cat([a * u, b * g], -1)",
    "quarters exchanged": "a, b, c, d = accum.chunk(4, -1); D = torch.cat([d, c, b, a], -1) * C",
    "a column": "D = accum[..., :48] * col - accum[..., 48:] * alpha",
    "rotated": "x, y = accum.chunk(2, -1); D = accum * row + torch.cat([-y, x], -1) * C",
    "a mask": "D = torch.where(accum[..., :48] > 0, accum[..., 48:], C[..., :48])",
    "of three widths": "a, b, c = (accum + row).split([48, 24, 24], -1); D = F.silu(b) * c; P = a * alpha",
    "every other one": "D = F.silu(accum[..., 0::2] + row[0::2]) * accum[..., 1::2] * C[..., :48]",
    "of a dim": "x = accum.unflatten(-1, (2, 48)); D = x[..., 0, :] * x[..., 1, :]",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_row_are_computed_beside_each_other(name, dtype):
    steps = PARTS[name].split("; ")
    text = "".join(f"    {step}\n" for step in steps)
    outputs = ", ".join(output for output in ("D", "P") if f"{output} = " in text)
    names = [operand for operand in ("C", "row", "col", "alpha") if operand in text]
    source = f"def epi(accum, {', '.join(names)}):\n{text}    return {outputs}\n"
    for lead, m in (((), 70), ((3,), 5)):
        every = {"C": torch.randn(m, 96), "row": torch.randn(96), "col": torch.randn(m, 1)}
        given = {operand: x.to(dtype) for operand, x in every.items() if operand in names}
        given |= {"alpha": 0.5} if "alpha" in names else {}
        args = arguments(source, torch.randn(*lead, m, 8).to(dtype), torch.randn(8, 96).to(dtype), **given)
        got, want = both_kernels(args)
        for output in want:
            torch.testing.assert_close(
                got[output], want[output], atol=1e-5, rtol=1e-4 if dtype == torch.float32 else 1e-2
            )


@pytest.mark.parametrize(
    ("epilogue", "reason"),
    [
        (
            lambda accum: accum[..., :2] * torch.cat([accum[..., 2:], accum[..., :2]], -1).sum(-1, keepdim=True),
            "no parts",
        ),
        (lambda accum: torch.stack([accum[..., 0::2] + 1.0, accum[..., 1::2]], -1).flatten(-2), "not stored by rows"),
        (lambda accum: ef.sum(accum), "has no sum"),
        (lambda accum: accum * ef.index_n(accum), "takes integers only as"),
        (lambda accum: accum * ef.philox_rand(ef.index_m(accum), 3), "has no philox_rand"),
        (lambda accum: accum.to(torch.bfloat16), "has no cast"),
        (lambda accum: accum > 0, "stores full-size floats"),
        (lambda accum: accum / accum.amax(), "second sweep"),
        (lambda accum: accum.T * 2.0, "not stored by rows"),
        (lambda accum: accum.T.flatten() * 2.0, "not stored by rows"),
    ],
)
def test_refusals_say_what_is_missing(epilogue, reason):
    args = arguments(epilogue, torch.randn(4, 4), torch.randn(4, 4))
    refusals = {refusal.kernel: refusal.reason for refusal in ef.explain(args).refusals}
    assert reason in refusals["cpu_native"]


def test_small_problems_are_not_worth_compiling(monkeypatch):
    monkeypatch.setattr(native, "CONFIG", Config())
    args = arguments(lambda accum: accum + 1.0, torch.randn(4, 4), torch.randn(4, 4))
    assert any("EPIFUSE_NATIVE_ELEMENTS" in refusal.reason for refusal in ef.explain(args).refusals)


def test_a_mask_that_is_a_constant():
    a, b, q = torch.randn(8, 4), torch.randn(4, 16), torch.randn(8, 16)
    for weight in (0.9, 0.1):
        args = arguments(f"lambda accum, q: torch.lerp(accum, q, {weight})", a, b, q=q)
        got = kernel_for(args).run(args)["D"]
        torch.testing.assert_close(got, torch.lerp(a @ b, q, weight))
