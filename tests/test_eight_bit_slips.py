"""What people who quantise tripped over: scales of float16 tensors, sums beyond int32, and hints about scales."""

import pytest
import torch

import epifuse as ef

E4M3 = torch.float8_e4m3fn
WEIGHT, SCALES = torch.randn(256, 384).to(E4M3), torch.rand(2, 3)
ROWS, BATCH = torch.randn(5, 384).to(E4M3), torch.randn(2, 5, 384).to(E4M3)


@pytest.mark.parametrize("rounding", ["none", "up", "floor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_of_16_bits_are_those_of_float32(rounding: str, dtype: torch.dtype) -> None:
    """Half has no 2^-126, and no power above 65504."""
    largest = torch.tensor([0.0, 1e-5, 65504.0, torch.nan, torch.inf]).to(dtype)
    torch.testing.assert_close(
        ef.block_scale(largest, rounding=rounding), ef.block_scale(largest.float(), rounding=rounding), equal_nan=True
    )


def test_the_power_below_65504_is_one_that_half_holds() -> None:
    assert ef.floor_power_of_two(torch.tensor([65504.0], dtype=torch.float16)).item() == 32768


@pytest.mark.parametrize(("dtype", "k", "value"), [(torch.int8, 140000, -128), (torch.uint8, 34000, 255)], ids=str)
def test_sums_beyond_int32_wrap_where_a_model_is_compiled(dtype: torch.dtype, k: int, value: int) -> None:
    a, b = torch.full((1, k), value, dtype=dtype), torch.full((k, 1), value, dtype=dtype)
    compiled = torch.compile(lambda a, b: ef.gemm(a, b), backend="aot_eager")
    assert compiled(a, b).item() == ef.gemm(a, b).item()


def masked(accum, mask):
    return accum.masked_fill(mask, float("-inf")).softmax(-1)


def builtins_of_python(accum):
    return max(accum, 0) + abs(accum) * pow(accum, 2) - min(accum, 1)


def test_builtins_break_no_graph() -> None:
    x, w, mask = torch.randn(8, 16), torch.randn(16, 32), torch.rand(8, 32) > 0.5

    def call(x, w):
        return ef.gemm(x, w, epilogue=masked, mask=mask), ef.gemm(x, w, epilogue=builtins_of_python)

    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(x, w), call(x, w))


def forgot(accum, scale, ws):
    return accum * scale * ws


def test_a_forgotten_operand_is_named_in_a_graph() -> None:
    compiled = torch.compile(
        lambda x, s: ef.linear(x, WEIGHT, epilogue=forgot, scale=s), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Argument ws is not provided"):
        compiled(ROWS, torch.rand(5, 1))


def test_what_requires_grad_is_told_how_to_run() -> None:
    x = torch.randn(5, 384, requires_grad=True).to(E4M3)
    with pytest.raises(ef.errors.ArgumentError) as raised:
        ef.linear(x, WEIGHT)
    assert "use torch.no_grad() or x.detach() where nothing is trained" in str(raised.value)
    assert ef.linear(x.detach(), WEIGHT).shape == (5, 256)


OF_X = {
    "one row": (ROWS, torch.rand(3), "is (5, 3) here; theirs is (3,)", "there is one for each 128 of a row"),
    "one row of one": (ROWS[:1], torch.rand(3), "is (1, 3) here; theirs is (3,)", "pass scales[None]"),
    "keepdim": (BATCH, torch.rand(2, 5, 3, 1), "the shape (2, 5, K/128), which is (2, 5, 3)", "scales.squeeze(-1)"),
    "rows of one batch": (BATCH, torch.rand(5, 3), "theirs is (5, 3)", "there is one for each 128 of a row"),
    "turned": (BATCH, torch.rand(2, 3, 5), "theirs is (2, 3, 5)", "pass scales.mT"),
}


@pytest.mark.parametrize("slip", OF_X)
def test_wrong_scales_of_x(slip: str) -> None:
    x, scales, said, hint = OF_X[slip]
    with pytest.raises(ef.errors.ArgumentError) as raised:
        ef.linear(ef.Scaled(x, scales), ef.Scaled(WEIGHT, SCALES))
    assert said in str(raised.value)
    assert hint in str(raised.value)


OF_WEIGHT = {
    "keepdim": (SCALES[..., None], "theirs is (2, 3, 1)", "pass scales.squeeze(-1)"),
    "turned": (SCALES.t(), "theirs is (3, 2)", "pass scales.t()"),
    "apart": (SCALES[:, None, :, None], "theirs is (2, 1, 3, 1)", "there is one for each 128 x 128"),
}


@pytest.mark.parametrize("slip", OF_WEIGHT)
def test_wrong_scales_of_a_weight(slip: str) -> None:
    scales, said, hint = OF_WEIGHT[slip]
    with pytest.raises(ef.errors.ArgumentError) as raised:
        ef.linear(ef.Scaled(ROWS, torch.rand(5, 3)), ef.Scaled(WEIGHT, scales))
    assert said in str(raised.value)
    assert hint in str(raised.value)


@pytest.mark.parametrize("scales", [torch.rand(()), torch.rand(1), torch.rand(1, 1)])
def test_one_scale_for_all_has_one_hint(scales: torch.Tensor) -> None:
    for x, weight in ((ef.Scaled(ROWS, scales), WEIGHT), (ROWS, ef.Scaled(WEIGHT, scales))):
        with pytest.raises(ef.errors.ArgumentError, match="multiply by those of a row or a tensor in the epilogue"):
            ef.linear(x, weight)


def test_scales_elsewhere_are_to_be_moved() -> None:
    with pytest.raises(ef.errors.ArgumentError, match=r"scales\.to\('cpu'\)"):
        ef.linear(ef.Scaled(ROWS, torch.ones(5, 3, device="meta")), WEIGHT)


def test_batches_with_scales_are_told_by_their_own_shape() -> None:
    x = ef.Scaled(BATCH.unflatten(0, (2, 1)), torch.rand(2, 1, 5, 3))
    with pytest.raises(ef.errors.ArgumentError, match=r"A has block scales.*its shape is \(2, 1, 5, 384\)"):
        ef.gemm(x, WEIGHT.t())


def test_hints_about_scales_hold() -> None:
    """Each way out gives what the right scales give."""
    own = torch.rand(2, 5, 3)
    want = ef.linear(ef.Scaled(BATCH, own), ef.Scaled(WEIGHT, SCALES))
    for scales in (own[..., None].squeeze(-1), own.mT.contiguous().mT, own.reshape(10, 3)):
        assert torch.equal(ef.linear(ef.Scaled(BATCH, scales), ef.Scaled(WEIGHT, SCALES)), want)


@pytest.mark.parametrize("value", [0, -7])
def test_integers_are_filled_where_a_mask_holds(value: int) -> None:
    a = torch.randint(-3, 4, (4, 5), dtype=torch.int8)
    found = ef.gemm(a, a.t(), epilogue=f"lambda accum: accum.masked_fill(accum > 0, {value})")
    accum = a.int() @ a.t().int()
    assert torch.equal(found, accum.masked_fill(accum > 0, value))


def test_integers_are_not_filled_with_fractions() -> None:
    """PyTorch cuts them."""
    a = torch.ones(4, 5, dtype=torch.int8)
    with pytest.raises(ef.errors.EpilogueTypeError, match="masked_fill takes floats"):
        ef.gemm(a, a.t(), epilogue="lambda accum: accum.masked_fill(accum > 0, 0.5)")
