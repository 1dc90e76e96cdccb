"""Which values of an epilogue a Hopper kernel may compute with cheaper instructions."""

import pytest
import torch

import epifuse as ef
from epifuse.providers.cutedsl.lowering import lower
from epifuse.providers.cutedsl.precision import accuracies
from epifuse.request.problem import Constraints

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def exactness(body, dtypes, **options):
    """The accuracy of each activation, exponential and quotient by name."""
    a = torch.empty(64, 64, dtype=BF16)
    outputs = ", ".join(dtypes)
    source = f"def epilogue(accum, C):\n    {body}\n    return {outputs}\n"
    epilogue = ef.EpilogueArguments.partial(source, {"C": torch.empty(64, 64)})
    args = ef.GemmArguments(a, a, epilogue=epilogue, out_dtypes=dtypes, **options)
    graph = lower(args.graph, args.problem).walked
    found = accuracies(graph, dtypes, fast_math=args.problem.constraints.fast_math)
    return {str(node.attr or node.op): found[node] for node in graph.nodes if node.op in ("call", "exp", "div")}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "body",
    [
        "D = silu(accum)",
        "D = silu(accum + C)",
        "D = silu(accum) * C",
        "D = -clip(silu(accum) * C, -1.0, 1.0)",
        "D = where(C > 0, silu(accum), silu(accum) * 0.5)",
        "D = sqrt(silu(accum)) / C",
        "D = C / silu(accum)",
        "D = tanh(silu(accum))",
    ],
)
def test_what_only_reaches_16_bits_through_factors_is_narrow(body, dtype):
    assert set(exactness(body, {"D": dtype}).values()) == {"narrow"}
    assert set(exactness(body, {"D": F32}).values()) == {"full"}


@pytest.mark.parametrize(
    "body",
    [
        "D = silu(accum) + C",
        "D = C - silu(accum)",
        "D = multiply_add(silu(accum), C, C)",
        "D = where(silu(accum) > C, 1.0, 0.0)",
        "D = floor(silu(accum))",
        "D = round(silu(accum) * C)",
        "D = sign(silu(accum))",
        "D = silu(accum).to(torch.bfloat16) * C",
        "D = silu(accum).to(torch.int32) * C",
        "D = sin(silu(accum))",
        "D = silu(accum) ** C",
        "D = C * silu(accum).amax()",
        "D = silu(accum); debug_print('{}', D)",
    ],
)
def test_what_may_cancel_step_or_multiply_an_error_is_full(body):
    assert exactness(body, {"D": BF16})["silu"] == "full"


def test_each_value_on_its_own():
    assert exactness("D = exp(silu(accum))", {"D": BF16}) == {"silu": "full", "exp": "narrow"}
    assert exactness("D = where(silu(accum) > 0, exp(C), 1.0)", {"D": BF16}) == {"silu": "full", "exp": "narrow"}


def test_one_wide_output_is_enough():
    body = "D = silu(accum); E = D * 2.0"
    assert exactness(body, {"D": BF16, "E": F16}) == {"silu": "narrow"}
    assert exactness(body, {"D": BF16, "E": F32}) == {"silu": "full"}
    assert exactness("D = silu(accum); E = exp(C)", {"D": F32, "E": F16}) == {"silu": "full", "exp": "narrow"}


def test_errors_that_meet_too_often_are_not_allowed():
    powers = "a = silu(accum); " + "; ".join(f"{y} = {x} * {x}" for x, y in zip("abcde", "bcdef", strict=True))
    assert exactness(f"{powers}; D = e", {"D": BF16}) == {"silu": "narrow"}
    assert exactness(f"{powers}; D = f", {"D": BF16}) == {"silu": "full"}


def test_fast_math_is_for_every_output():
    options = {"constraints": Constraints(fast_math=True)}
    assert exactness("D = silu(accum) + C", {"D": F32}, **options) == {"silu": "fast"}


def test_a_sum_of_exponentials_cannot_cancel():
    """softmax's is as exact as they are; log-softmax takes a logarithm of it, and a sum of products may cancel."""
    assert exactness("D = softmax(accum, dim=-1)", {"D": BF16}) == {"exp": "narrow", "div": "narrow"}
    assert exactness("D = softmax(accum, dim=-1)", {"D": F32}) == {"exp": "full", "div": "full"}
    assert exactness("D = log_softmax(accum, dim=-1)", {"D": BF16}) == {"exp": "full"}
    assert exactness("D = C / sum(exp(accum) * C, dim=-1, keepdim=True)", {"D": BF16})["exp"] == "full"


@pytest.mark.parametrize(
    ("body", "accuracy"),
    [
        ("s = sigmoid(C); D = accum * (s * (1 + C * (1 - s)))", "narrow"),
        ("s = sigmoid(C); D = accum * s * (1 - s)", "narrow"),
        ("D = C * (sigmoid(accum) - 1)", "narrow"),
        ("D = C * (sigmoid(accum) - 0.5)", "full"),
        ("D = C - sigmoid(accum)", "full"),
        ("D = sigmoid(accum) + silu(C)", "full"),
        ("D = log(1 - sigmoid(accum))", "full"),
        ("D = where(1 - sigmoid(accum) > 0.1, C, 0.0)", "full"),
        ("s = sigmoid(C); D = accum * (1 - s); E = floor(1 - s)", "full"),
    ],
)
def test_one_less_a_sigmoid(body, accuracy):
    outputs = {name: BF16 for name in ("D", "E") if f"{name} =" in body}
    assert exactness(body, outputs)["sigmoid"] == accuracy
    assert exactness(body, {**outputs, "D": F32})["sigmoid"] == "full"


@pytest.mark.parametrize(
    ("scale", "accuracy"),
    [
        ("maximum(absmax(C, dim=-1, keepdim=True) * 0.01, 0.001)", "fast"),
        ("where(C > 0, 2.0, maximum(abs(C) / 448.0, 2.0**-126))", "fast"),
        ("ef.block_scale(absmax(C, dim=-1, keepdim=True))", "fast"),
        ("ef.block_scale(absmax(C, dim=-1, keepdim=True), rounding='up')", "fast"),
        ("maximum(abs(C), 0.001)", "narrow"),  # the reciprocal of the largest float is no normal number
        ("maximum(abs(C) / 448.0, 2.0**-127)", "narrow"),
        ("where(C > 0, C * 0.01, 1.0)", "narrow"),
        ("maximum(C * 0.01, -1.0)", "narrow"),
        ("maximum(abs(C) / 448.0, 2.0**-126) * 0.5", "narrow"),
        ("C", "narrow"),
    ],
)
def test_a_quotient_by_a_number_of_middle_size_is_fast(scale, accuracy):
    found = exactness(f"s = {scale}; q = accum / s; D = q", {"D": torch.float8_e4m3fn})
    assert found["div"] == accuracy
    found = exactness(f"s = {scale}; q = accum / s; D = q", {"D": F32})
    assert found["div"] == "full"
