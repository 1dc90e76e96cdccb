"""Block scales: what they mean on the CPU, what Hopper plans and refuses, what it compiles to, what is refused."""

import copy
import re

import pytest
import torch
from hopper import reasons
from machine_code import reported

import epifuse as ef
from epifuse.base.config import CONFIG
from epifuse.base.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from epifuse.plan.settle import Settled
from epifuse.request.scaled import BLOCK, blocks
from epifuse.runtime.reference import unfused

E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


def plain(accum):
    D = accum
    return D


def biased(accum, bias):
    D = ef.gelu(accum + bias, approximate="tanh")
    return D


def softmax(accum):
    D = ef.softmax(accum, dim=-1)
    return D


def totals(accum):
    D = accum
    sums, largest = ef.sum(accum, dim=-1), ef.amax(accum, dim=0)
    return D, sums, largest


def gated(accum):
    gate, up = accum.chunk(2, dim=-1)
    D = ef.silu(gate) * up
    return D


def whole_sum(accum):
    D = accum / ef.norm(accum)
    return D


def quantised(m, n, k, dtypes=(E4M3, E4M3)):
    """A, a weight (N, K), and the scales of both."""
    a, weight = torch.randn(m, k).to(dtypes[0]), torch.randn(n, k).to(dtypes[1])
    return a, weight, torch.rand(m, blocks(k)) + 0.5, torch.rand(blocks(n), blocks(k)) + 0.5


def product(a, weight, of_a, of_weight):
    """In float64, element by element."""
    along = torch.arange(a.shape[1]) // BLOCK
    across = torch.arange(weight.shape[0]) // BLOCK
    wide = a.double() * of_a.double()[:, along]
    return wide @ (weight.double() * of_weight.double()[across][:, along]).t()


def arguments(epilogue=plain, m=512, n=512, k=4096, dtypes=(E4M3, E4M3), sides="AB", **options):
    """Without data."""
    operands = {name: options.pop(name) for name in ("bias",) if name in options}
    a, b = torch.empty(m, k, dtype=dtypes[0]), torch.empty(n, k, dtype=dtypes[1]).t()
    a = ef.Scaled(a, torch.empty(m, blocks(k))) if "A" in sides else a
    b = ef.Scaled(b, torch.empty(blocks(k), blocks(n))) if "B" in sides else b
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, operands), **options)


# --- what they mean ---------------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (5, 40, 300), (130, 257, 128), (300, 520, 1024)]
"""Smaller than a block in every axis, ragged ones, and whole ones."""


def close(found, want):
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_scaled_blocks(shape, dtypes):
    a, weight, of_a, of_weight = quantised(*shape, dtypes)
    want = product(a, weight, of_a, of_weight)
    close(ef.gemm(ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t())), want)
    for _ in range(3):  # the later ones are launched as calls that were seen before
        close(ef.linear(ef.Scaled(a, of_a), ef.Scaled(weight, of_weight)), want)
    unit_a, unit_weight = torch.ones_like(of_a), torch.ones_like(of_weight)
    close(ef.gemm(ef.Scaled(a, of_a), weight.t()), product(a, weight, of_a, unit_weight))
    close(ef.linear(a, ef.Scaled(weight, of_weight)), product(a, weight, unit_a, of_weight))
    sides = ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t())
    assert ef.DenseGemm(torch.float32).verify(*sides)["D"].wrong == 0


def test_scales_are_read_at_each_call():
    a, weight, of_a, _ = quantised(20, 30, 260)
    first = ef.gemm(ef.Scaled(a, of_a), weight.t())
    for _ in range(3):
        of_a *= 2
        first = first * 2
        assert torch.equal(ef.gemm(ef.Scaled(a, of_a), weight.t()), first)


LAYOUTS = {
    "contiguous along K": lambda x: x,
    "contiguous along rows": lambda x: x.t().contiguous().t(),
    "neither": lambda x: torch.stack([x, x], -1)[..., 0],
    "one for all": lambda x: x[:1, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_lie_in_any_way(layout):
    a, weight, *scales = quantised(20, 300, 512)
    of_a, of_weight = map(LAYOUTS[layout], scales)
    want = product(a, weight, of_a, of_weight)
    close(ef.linear(ef.Scaled(a, of_a), ef.Scaled(weight, of_weight)), want)
    args = ef.GemmArguments(ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t()))
    assert ef.get_kernels(args, cc=90)


def test_x_of_more_dims():
    x, weight, of_x, of_weight = quantised(24, 40, 300)
    want = product(x, weight, of_x, of_weight)
    for shape in ((2, 12), (2, 3, 4)):
        x_, of_x_ = x.view(*shape, -1), of_x.view(*shape, -1)
        for _ in range(2):
            found = ef.linear(ef.Scaled(x_, of_x_), ef.Scaled(weight, of_weight))
            close(found, want.view(*shape, -1))
            close(ef.linear(ef.Scaled(x_, of_x), ef.Scaled(weight, of_weight)), want.view(*shape, -1))


def test_parts_of_x_and_vectors():
    """What is not one matrix in memory is copied, as x of more than three dims is; a vector is one row."""
    x, weight, of_x, of_weight = quantised(24, 40, 300)
    want, w = product(x, weight, of_x, of_weight), ef.Scaled(weight, of_weight)
    x_, of_x_ = x.view(3, 8, -1)[:, :5], of_x.view(3, 8, -1)[:, :5]
    close(ef.linear(ef.Scaled(x_, of_x_), w), want.view(3, 8, -1)[:, :5])
    close(ef.linear(ef.Scaled(x[0], of_x[0]), w), want[0])
    close(ef.linear(ef.Scaled(x[0], of_x[:1]), w), want[0])
    with pytest.raises(UnsupportedError, match="sum over some of its leading dims"):
        ef.linear(ef.Scaled(x.view(3, 8, -1), of_x.view(3, 8, -1)), w, epilogue="lambda accum: accum.sum(1)")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_zeros_nan_and_infinities_are_numbers_like_others(value):
    """A scale of zero takes its block out; others reach what its block is part of, and nothing else."""
    a, weight, of_a, of_weight = quantised(4, 300, 300)
    of_a[2, 1] = value
    of_weight[1, 0] = value
    found = ef.linear(ef.Scaled(a, of_a), ef.Scaled(weight, of_weight))
    reached = torch.zeros(4, 300, dtype=torch.bool)
    reached[2], reached[:, BLOCK : 2 * BLOCK] = True, True
    finite = product(a, weight, of_a, of_weight)
    close(found[~reached], finite[~reached])
    if value == 0:
        close(found, finite)
    else:
        assert not found[reached].isfinite().any()


def test_nothing_along_an_axis():
    for m, n, k in ((0, 40, 300), (40, 0, 300), (40, 30, 0)):
        a, weight, of_a, of_weight = quantised(m, n, k)
        scaled = ef.Scaled(a, of_a), ef.Scaled(weight, of_weight)
        D = ef.linear(*scaled, epilogue="lambda accum: accum + 1")
        assert torch.equal(D, torch.ones(m, n))
        assert ef.get_kernels(ef.GemmArguments(scaled[0], ef.Scaled(weight.t(), of_weight.t())), cc=90)


def test_every_kernel_of_the_cpu_agrees(monkeypatch):
    monkeypatch.setitem(vars(CONFIG), "native_elements", 0)
    a, weight, of_a, of_weight = quantised(130, 260, 300)
    made = ef.EpilogueArguments.partial(biased, {"bias": torch.randn(260)})
    args = ef.GemmArguments(ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t()), epilogue=made)
    want = ef.reference(biased)(product(a, weight, of_a, of_weight), args.epilogue.tensors["bias"].double())
    kernels = ef.get_kernels(args)
    assert {kernel.spec.name for kernel in kernels} == {"cpu_native", "cpu_panel"}
    for kernel in kernels:
        for _ in range(2):
            close(kernel.run(args)["D"], want)


def test_the_fallback_means_the_same():
    a, weight, of_a, of_weight = quantised(20, 30, 260)
    pinned = {"tile": (3, 5), "cluster": (7, 7)}
    scaled = ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t())
    args = ef.GemmArguments(*scaled, constraints=ef.Constraints(**pinned))
    assert not ef.get_kernels(args)
    outputs = {"D": torch.empty(20, 30)}
    unfused(args.call, Settled(args.problem, args.structure), outputs)
    close(outputs["D"], product(a, weight, of_a, of_weight))


def test_arguments_are_copied():
    a, weight, of_a, of_weight = quantised(5, 7, 130)
    args = ef.GemmArguments(ef.Scaled(a, of_a), ef.Scaled(weight.t(), of_weight.t()))
    want = ef.get_kernels(args)[0].run(args)["D"]
    made = copy.deepcopy(args)  # PyTorch pickles no 8-bit floats outside of torch.save
    assert torch.equal(ef.get_kernels(made)[0].run(made)["D"], want)


# --- what PyTorch sees ------------------------------------------------------------------------------------------------


def layer(x, of_x, weight, of_weight, bias):
    return ef.linear(ef.Scaled(x, of_x), ef.Scaled(weight, of_weight), bias, epilogue="lambda accum: relu(accum)")


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_call_is_one_graph(backend):
    """Inductor 2.13 computes two of three blocks where it can tell that 128 columns have one scale."""
    x, weight, of_x, of_weight = quantised(6, 40, 300)
    given = x.view(2, 3, -1), of_x.view(2, 3, -1), weight, of_weight, torch.randn(40)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*given), layer(*given))
    call = torch.compile(lambda x, weight: ef.linear(x, weight), fullgraph=True, backend=backend)
    scaled = ef.Scaled(given[0], given[1]), ef.Scaled(weight, of_weight)
    torch.testing.assert_close(call(*scaled), ef.linear(*scaled))


def test_an_exported_program_has_the_scales():
    x, weight, of_x, of_weight = quantised(6, 40, 300)
    given = x, of_x, weight, of_weight, torch.randn(40)
    module = type("Layer", (torch.nn.Module,), {"forward": staticmethod(layer)})()
    torch.testing.assert_close(torch.export.export(module, given).module()(*given), layer(*given))


def test_gradients_are_refused_by_name():
    x, weight, of_x, of_weight = quantised(6, 40, 300)
    bias = torch.randn(40, requires_grad=True)
    for given in ((of_x, bias), (of_x.clone().requires_grad_(), bias.detach())):
        with pytest.raises(UnsupportedError, match="block scales cannot be combined with an input that requires grad"):
            layer(x, given[0], weight, of_weight, given[1])
        with torch.no_grad():
            assert not layer(x, given[0], weight, of_weight, given[1]).requires_grad


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a, s.t()), w.t()), r"scales of A .* \(M, K/128\).*pass scales.t"),
        (lambda a, w, s, t: ef.gemm(a, ef.Scaled(w.t(), t)), r"scales of B .* \(K/128, N/128\).*pass scales.t"),
        (lambda a, w, s, t: ef.linear(a, ef.Scaled(w, t.t())), r"scales of weight .* \(N/128, K/128\).*scales.t\(\)"),
        (lambda a, w, s, t: ef.linear(ef.Scaled(a, s[:, :1]), w), r"scales of x .*one for each 128 of a row"),
        (lambda a, w, s, t: ef.linear(ef.Scaled(a, s[..., None]), w), r"scales of x .*scales.squeeze\(-1\)"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a[:1], s[0]), w.t()), r"scales of A .*pass scales\[None\]"),
        (lambda a, w, s, t: ef.linear(a, ef.Scaled(w, t[0])), r"scales of weight .* theirs is \(3,\)"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a, torch.tensor(1.0)), w.t()), r"theirs is \(\)"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a, s.bfloat16()), w.t()), r"bfloat16, and block scales are float32"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a.int(), s), w.t()), r"no kernel multiplies"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a.half(), s), w.t().half()), r"float16, and block scales are those of 8"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a[None], s[None]), w.t()), r"it must be one matrix"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a, s), w.t(), accumulator_type=torch.float16), r"accumulator_type"),
        (lambda a, w, s, t: ef.gemm(ef.Scaled(a, s.to("meta")), w.t()), r"scales of A is on meta"),
    ],
)  # fmt: skip
def test_wrong_scales_are_told_what_is_right(call, message):
    a, weight, of_a, of_weight = quantised(20, 200, 300)
    with pytest.raises(ArgumentError, match=re.compile(message, re.S)):
        call(a, weight, of_a, of_weight)


@pytest.mark.parametrize("given", [(1, torch.ones(1)), (torch.ones(1), None), (torch.ones(1), 2.0)])
def test_what_is_no_tensor_is_refused_where_it_is_made(given):
    with pytest.raises(ArgumentTypeError, match=r"Scaled\.(tensor|scales) must be a torch\.Tensor"):
        ef.Scaled(*given)


def test_an_output_over_the_scales_is_refused():
    a, weight, of_a, _ = quantised(20, 3, 300)
    with pytest.raises(ArgumentError, match="overlap"):
        ef.gemm(ef.Scaled(a, of_a), weight.t(), out=of_a)


# --- Hopper -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["AB", "A", "B"])
@pytest.mark.parametrize("m", [16, 512])
def test_hopper_takes_one_side_and_both(sides, m):
    plans = [kernel.plan for kernel in ef.get_kernels(arguments(m=m, sides=sides), cc=90)]
    assert {plan.allocation.program.design.scaled for plan in plans} == {("A" in sides, "B" in sides)}
    assert any(plan.spec.design.swapped for plan in plans) == (m == 16)
    assert any(plan.spec.design.split > 1 for plan in plans)
    assert len({plan.allocation.bits for plan in plans if plan.spec.design.split == 1}) == 1


def test_a_plan_says_what_is_scaled():
    for sides, told in (("AB", "A and B"), ("B", "B")):
        shown = str(ef.explain(arguments(sides=sides), cc=90))
        assert f"with 14 bits, and float32 adds up these sums times the block scales of {told}" in shown


def test_a_plain_product_is_another_kernel():
    kernels = [ef.get_kernels(arguments(sides=sides), cc=90)[0].plan for sides in ("", "A", "AB")]
    assert len({plan.allocation.program.text for plan in kernels}) == len(kernels)


def test_fast_sums_have_no_block_to_scale():
    asked, plain_ = (
        ef.get_kernels(arguments(constraints=ef.Constraints(fast_accum=fast)), cc=90)[0].plan for fast in (True, False)
    )
    assert asked.allocation.program.text == plain_.allocation.program.text


def test_hopper_says_what_it_does_not_scale():
    far = torch.empty_strided((512, 32), (1 << 23, 1), device="meta")
    a = torch.empty(512, 4096, dtype=E4M3, device="meta")
    args = ef.GemmArguments(ef.Scaled(a, far), a.t())
    assert reasons(args) == {f"it counts elements of the scales of A up to {2**31 - 1}"}


def test_few_rows_have_designs_that_exchange_a_and_b():
    chosen = ef.get_kernels(arguments(m=16), cc=90)[0].plan.allocation.program.design
    assert chosen.swapped
    assert chosen.scaled == (True, True)


def test_the_options_of_a_call_reach_scaled_products():
    assert ef.get_kernels(arguments(whole_sum, constraints=ef.Constraints(allow_recompute=True)), cc=90)


# --- what is compiled -------------------------------------------------------------------------------------------------

MEANT = {
    "plain": arguments(out_dtypes=BF16),
    "A alone": arguments(sides="A", out_dtypes=BF16),
    "B alone, e5m2": arguments(sides="B", dtypes=(E5M2, E4M3), out_dtypes=BF16),
    "bias and gelu": arguments(biased, bias=torch.empty(512), out_dtypes=E4M3),
    "whole rows": arguments(softmax, out_dtypes=BF16),
    "reductions": arguments(totals, out_dtypes=BF16),
}


IN_EVERY_TILE = ("plain", "reductions")
"""Of the other cases those tiles alone whose threads hold most sums. Without --whole-sweeps one such tile of each case;
of the first one of each schedule, with K whole and in parts."""


@pytest.mark.parametrize("name", MEANT)
def test_every_design_compiles_and_nothing_spills(name, capfd, tmp_path, whole_sweeps):
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    plans = {(k.spec.design.tile, k.spec.design.split > 1): k.plan for k in ef.get_kernels(MEANT[name], cc=90)}
    widest = sorted(plans.values(), key=lambda plan: -plan.spec.design.rows * plan.spec.design.tile[1])
    if not whole_sweeps:
        of_each = {(plan.spec.design.schedule, plan.spec.design.split > 1): plan for plan in reversed(widest)}
        widest = list(of_each.values()) if name == IN_EVERY_TILE[0] else widest[:1]
    for plan in widest if not whole_sweeps or name in IN_EVERY_TILE else widest[:4]:
        ptx = reported(plan.allocation.program.text, tmp_path).__ptx__
        report = " ".join(capfd.readouterr().err.split())
        assert {int(count) for count in re.findall(r"(\d+) bytes spill stores", report)} == {0}, plan.spec.name
        assert "serialized" not in report
        assert "fma.rn.f32" in ptx


def test_a_traced_call_has_gradients_of_block_scales():
    """Of PyTorch's own operations, into which `torch.compile` decomposes it; an eager call refuses."""
    a, b = torch.randn(8, 256).to(E4M3), torch.randn(128, 256).to(E4M3).t()

    def call(of_a, of_b):
        return ef.gemm(ef.Scaled(a, of_a), ef.Scaled(b, of_b), out_dtypes=torch.float32)

    scales = [torch.rand(8, 2, requires_grad=True), torch.rand(2, 1, requires_grad=True)]
    with pytest.raises(ef.errors.UnsupportedError, match="block scales cannot be combined with an input that requires"):
        call(*scales)
    found = torch.autograd.grad(torch.compile(call, backend="aot_eager", fullgraph=True)(*scales).sum(), scales)
    blocks = [torch.stack([a[:, k : k + 128].float() @ b[k : k + 128].float() for k in (0, 128)], dim=-1).sum(dim=1)]
    torch.testing.assert_close(found[0], blocks[0] * scales[1].detach().t(), rtol=1e-5, atol=1e-5)
    want = (blocks[0] * scales[0].detach()).sum(dim=0, keepdim=True).t()
    torch.testing.assert_close(found[1], want, rtol=1e-5, atol=1e-5)


def test_a_cpu_scales_each_element():
    """As docs/numerics.md says: infinite where an element times its scale is beyond float32."""
    a, b = torch.full((1, 128), 448.0).to(E4M3), torch.full((128, 1), 0.125).to(E4M3)
    D = ef.gemm(ef.Scaled(a, torch.full((1, 1), 1e38)), ef.Scaled(b, torch.full((1, 1), 1e-30)))
    assert D.isinf().all()
