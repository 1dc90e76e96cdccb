"""The Hopper kernel on a Hopper GPU: accesses, dtypes, majors, ragged shapes, against PyTorch in float32."""

import pytest
import torch

import epifuse as ef
from epifuse.base.cache import forget
from epifuse.providers.cutedsl import DESIGNS, load
from epifuse.providers.cutedsl.kernel_text import read

pytestmark = pytest.mark.gpu

SHAPES = [(128, 256, 64), (256, 512, 1024), (1, 8, 64), (129, 264, 72), (1000, 1000, 128), (4096, 512, 256)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def check(epilogue, a, b, operands, out_dtypes=None):
    """Fused on poisoned outputs, beside the user's function in float32 on the float32 product."""
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, operands), out_dtypes=out_dtypes)
    kernels = ef.get_kernels(args)
    assert kernels, str(ef.explain(args))
    assert kernels[0].metadata.kernel_name.startswith("sm90_gemm")
    outputs = args.allocate()
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    bound = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(epilogue, **operands, **outputs))
    kernels[0].run(bound)
    wide = {n: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in operands.items()}
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = ef.reference(epilogue)(a.float() @ b.float(), **wide)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for (name, tensor), want in zip(outputs.items(), wanted, strict=True):
        tolerance = TOLERANCE[tensor.dtype]
        torch.testing.assert_close(tensor.float(), want, rtol=tolerance, atol=tolerance * a.shape[-1] ** 0.5, msg=name)


@pytest.mark.parametrize("index", range(len(DESIGNS)), ids=[str(design) for design in DESIGNS])
def test_every_design(index):
    for m, n, k in ((1000, 1288, 264), (129, 264, 72)):
        a, b = normal(m, k, dtype=torch.bfloat16), normal(k, n, dtype=torch.bfloat16)
        args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(plain, {}))
        design = DESIGNS[index]
        kernel = next(k for k in ef.get_kernels(args) if k.spec.design == design)
        want = a.float() @ b.float()
        for _ in range(3):
            torch.testing.assert_close(kernel.run(args)["D"].float(), want, rtol=1e-2, atol=0.01 * k**0.5)


def plain(accum):
    D = accum
    return D


def everything(accum, C, row, column, alpha, scale):
    t = alpha * accum + C + row
    D = ef.gelu(t, approximate="tanh") * scale
    Aux = ef.where(ef.index_n(accum) <= ef.index_m(accum), t - column, 0.0)
    return D, Aux


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plain_product(shape, dtype):
    m, n, k = shape
    check(plain, normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), {})


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_majors(a_transposed, b_transposed):
    m, n, k = 264, 520, 136
    a = normal(k, m, dtype=torch.bfloat16).t() if a_transposed else normal(m, k, dtype=torch.bfloat16)
    b = normal(n, k, dtype=torch.bfloat16).t() if b_transposed else normal(k, n, dtype=torch.bfloat16)
    check(plain, a, b, {})


@pytest.mark.parametrize("shape", [(129, 264, 72), (512, 384, 256)], ids=str)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batches", [None, 3])
def test_operands_of_every_access(shape, out, batches):
    m, n, k = shape
    lead = () if batches is None else (batches,)
    a, b = normal(*lead, m, k, dtype=torch.bfloat16), normal(*lead, k, n, dtype=torch.bfloat16)
    operands = {
        "C": normal(*lead, m, n, dtype=torch.bfloat16),
        "row": normal(n),
        "column": normal(*lead, m, 1),
        "alpha": 0.5,
        "scale": normal(1),
    }
    check(everything, a, b, operands, {"D": out, "Aux": torch.float32})


def both(accum, C, E, row):
    D = accum * row + C
    Aux = D - E
    return D, Aux


@pytest.mark.parametrize("majors", range(16))
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_each_operand_and_output_by_rows_or_by_columns(majors, dtypes):
    m, n, k = 200, 328, 128
    a, b = normal(m, k, dtype=torch.bfloat16), normal(k, n, dtype=torch.bfloat16)

    def matrix(bit, dtype):
        return normal(n, m, dtype=dtype).t() if majors >> bit & 1 else normal(m, n, dtype=dtype)

    operands = {"C": matrix(0, dtypes[0]), "E": matrix(1, dtypes[1]), "row": normal(n)}
    outputs = {"D": matrix(2, dtypes[0]).fill_(torch.nan), "Aux": matrix(3, dtypes[1]).fill_(torch.nan)}
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(both, **operands, **outputs))
    kernel = ef.get_kernels(args)[0]
    assert str(kernel.plan).count("TMA through") == 4
    kernel.run(args)
    wide = {name: tensor.float() for name, tensor in operands.items()}
    for (name, out), want in zip(outputs.items(), ef.reference(both)(a.float() @ b.float(), **wide), strict=True):
        torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=0.1, msg=name)


@pytest.mark.parametrize("n", [1, 7, 250])
def test_rows_that_tma_cannot_address_go_direct(n):
    a, b = normal(130, 64, dtype=torch.bfloat16), normal(n, 64, dtype=torch.bfloat16).t()
    check(both, a, b, {"C": normal(130, n, dtype=torch.bfloat16), "E": normal(130, n), "row": normal(n)})


def many(accum, C0, C1, C2, C3, C4, C5, C6, C7):
    D0, D1, D2, D3 = accum + C0, accum * C1, accum - C2, accum + 2.0 * C3
    D4, D5, D6, D7 = accum - C4, accum + C5 * C6, accum + C7, accum
    return D0, D1, D2, D3, D4, D5, D6, D7


def test_eight_float32_in_and_eight_out():
    a, b = normal(300, 96, dtype=torch.float16), normal(96, 520, dtype=torch.float16)
    operands = {f"C{i}": normal(300, 520) for i in range(8)}
    check(many, a, b, operands, {f"D{i}": torch.float32 for i in range(8)})


def test_numbers_and_extents_do_not_recompile(monkeypatch):
    built = []
    original = load.stored
    monkeypatch.setattr(load, "stored", lambda text, name: built.append(read(text).design) or original(text))
    forget()
    for m in (256, 300, 512):
        a, b = normal(m, 64, dtype=torch.bfloat16), normal(64, 264, dtype=torch.bfloat16)
        for alpha in (1.0, 2.0, -3.5):
            d = ef.gemm(a, b, epilogue=lambda accum, alpha: accum * alpha + 0.375, alpha=alpha)
            torch.testing.assert_close(d.float(), alpha * (a.float() @ b.float()) + 0.375, rtol=1e-2, atol=0.2)
    assert built, "nothing was counted"
    assert len(set(built)) == len(built), "one design was compiled twice"


def test_repeated_launches_are_bit_identical():
    a, b = normal(1000, 512, dtype=torch.bfloat16), normal(512, 1000, dtype=torch.bfloat16)
    first = ef.gemm(a, b, epilogue=ef.silu)
    for _ in range(50):
        again = ef.gemm(a, b, epilogue=ef.silu)
        assert torch.equal(first, again)


def loss_and_sums(accum, C):
    loss = ef.sum(accum * C)
    sums = ef.sum(accum, dim=0)
    return loss, sums


def test_a_workspace_is_reused_whatever_it_holds():
    a, b = normal(700, 256, dtype=torch.bfloat16), normal(256, 520, dtype=torch.bfloat16)
    args = ef.GemmArguments(
        a, b, epilogue=ef.EpilogueArguments.partial(loss_and_sums, {"C": normal(700, 520)}), out_dtypes=torch.float32
    )
    kernel = ef.get_kernels(args)[0]
    need = kernel.get_workspace_size(args)
    first = kernel.run(args)
    workspace = torch.full((need,), 255, dtype=torch.uint8, device="cuda")  # every float32 in it is a NaN
    for _ in range(3):
        again = kernel.run(args, workspace=workspace)
        assert all(torch.equal(first[name], again[name]) for name in ("loss", "sums"))
    with pytest.raises(ef.errors.ArgumentError, match=f"at least {need} bytes"):
        kernel.run(args, workspace=workspace[:-1])
