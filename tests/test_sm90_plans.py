"""What the Hopper kernel plans and refuses, on any machine: the reason names what stands in the way."""

import pytest
import torch
from hopper import BF16, CASES, PLACED, arguments, hopper_kernel, reasons, storing

import epifuse as ef


def layer_norm(accum):
    centred = accum - ef.mean(accum, dim=-1, keepdim=True)
    return centred * ef.rsqrt(ef.mean(centred * centred, dim=-1, keepdim=True) + 1e-5)


def mean_of_squares(accum):
    mean = ef.mean(accum, dim=-1, keepdim=True)
    return (accum - mean) * ef.rsqrt(ef.mean(accum * accum, dim=-1, keepdim=True) - mean * mean + 1e-5)


def spread(accum):
    return ef.mean(ef.abs(accum - ef.mean(accum, dim=-1, keepdim=True)), dim=-1)


NEED = "its reductions need one another: where they can be written so that none does"
APPLY = "in the next GEMM's epilogue, or pass allow_recompute=True:"
ADVICE = {
    layer_norm: f"columns; {NEED} (mean(x * x) - mean(x) ** 2 for a variance, less exact where the mean is large), "
    f"store and apply them {APPLY} 2 further launches recompute the product, 3.0 x the FLOPs",
    mean_of_squares: f"columns; store both mean(x, dim=-1) and apply them {APPLY} a second launch recomputes",
    spread: f"columns; {NEED}, store and apply them {APPLY} a second launch recomputes",
}


@pytest.mark.parametrize("epilogue", [lambda accum: accum.argmax(), lambda accum: accum.var()], ids=["argmax", "var"])
def test_what_was_written_as_one_reduction_is_told_as_one(epilogue):
    told = {refusal.reason for refusal in ef.explain(arguments(epilogue), cc=90).refusals}
    assert any(
        "tile; store the product and reduce it in PyTorch, or pass allow_recompute=True:" in each for each in told
    )
    hopper_kernel(arguments(epilogue, allowed=True))


@pytest.mark.parametrize("epilogue", ADVICE, ids=lambda each: each.__name__)
def test_wide_rows_are_refused_with_what_to_store(epilogue):
    refusals = {r.kernel: r.reason for r in ef.explain(arguments(epilogue, n=4096), cc=90).refusals}
    assert ADVICE[epilogue] in refusals["sm90_gemm_128x256_cooperative_2x1"]


def test_one_column_of_wide_rows_needs_no_whole_row():
    def log_probability(accum, labels):
        p = torch.log_softmax(accum, dim=-1).gather(-1, labels)
        return p

    def all_of_them_too(accum, labels):
        every = torch.log_softmax(accum, dim=-1)
        p = every.gather(-1, labels)
        return every, p

    labels = torch.empty(4096, 1, dtype=torch.int64)
    hopper_kernel(arguments(log_probability, m=4096, n=128256, labels=labels))
    told = reasons(arguments(all_of_them_too, m=4096, n=128256, labels=labels))
    assert "log_softmax over N = 128256 does not fit one cluster's 2048 columns" in told


def test_one_reason_where_a_design_takes_two_launches():
    def softmax(accum):
        return ef.softmax(accum, dim=-1)

    told = [refusal.reason for refusal in ef.explain(arguments(softmax, n=4096), cc=90).refusals]
    assert any("store x and logsumexp(x, dim=-1), and apply it where x is read next" in reason for reason in told)
    assert not any("with 2 launches" in reason for reason in told)
    told = [refusal.reason for refusal in ef.explain(arguments(softmax, n=4096, allowed=True), cc=90).refusals]
    assert any("with 2 launches" in reason for reason in told)


def test_a_kernel_for_another_target_is_not_run():
    args = CASES["plain"]
    with pytest.raises(ef.errors.ArgumentError, match="built for sm_90a"):
        hopper_kernel(args).run(args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (arguments(lambda accum: accum, k=100, dtype=torch.int8), "stride of 100 bytes"),
        (arguments(lambda accum: accum, dtype=torch.float64), "it multiplies float16, bfloat16, float32 and 8 bits"),
        (
            arguments(lambda accum: ef.softmax(accum)),
            "N = 512 does not fit the 256 columns of its rows, and softmax needs them whole",
        ),
        (arguments(lambda accum: accum / ef.norm(accum)), "a second launch recomputes the product, 2.0 x"),
        (
            arguments("def f(accum, C): D = C * sum(accum); return D", C=torch.empty(512)),
            "this value is computed from reductions, none of which has its shape",
        ),
        (
            arguments(lambda accum: ef.sum(accum.reshape(4, 128, 512), dim=0)),
            "reduces a part of an axis that a reshape cut",
        ),
        (
            arguments(lambda accum: ef.sum(ef.sum(accum, dim=-1).reshape(4, 128), dim=0)),
            "sum reduces a part of an axis that a reshape cut: store its argument, and reduce that in PyTorch",
        ),
    ],
)
def test_refusals_name_the_reason(args, reason):
    refusals = {refusal.kernel: refusal.reason for refusal in ef.explain(args, cc=90).refusals}
    assert reason in refusals["sm90_gemm_128x256_cooperative_2x1"]


@pytest.mark.parametrize(
    ("epilogue", "m", "shape"),
    [
        ("def f(accum, C): D = C * 2; return D", 512, (512,)),
        ("def f(accum, C): E = C / 2; s = sum(E); return E, s", 1, (1, 512)),
        ("def f(accum, C): s = sum(where(C > 0, accum, 0.0)) / sum(C > 0); return s", 1, (1, 512)),
    ],
)
def test_values_that_vary_over_one_axis_alone_are_planned(epilogue, m, shape):
    args = arguments(epilogue, m=m, C=torch.empty(shape, dtype=BF16))
    assert ef.get_kernels(args, cc=90), ef.explain(args, cc=90)


def test_what_makes_results_less_exact_is_in_the_plan():
    a, b = torch.empty(128, 64), torch.empty(64, 64).t()
    loose = ef.Constraints(precision="tf32", fast_math=True)
    text = str(ef.explain(ef.GemmArguments(a, b, constraints=loose), cc=90))
    assert "note     A and B are multiplied as tf32, with 10 bits of fraction" in text
    assert "note     fast_math: every function by approximate instructions" in text
    assert not any(word in str(ef.explain(CASES["plain"], cc=90)) for word in ("as tf32,", "fast_math:"))


@pytest.mark.parametrize(("m", "n"), [(2**31, 8), (2**32, 2**31), (2**20, 2**30)])
def test_what_32_bits_do_not_count_is_refused(m, n):
    a, b = (torch.empty(extent, 8, dtype=BF16, device="meta") for extent in (m, n))
    explanation = ef.explain(ef.GemmArguments(a, b.t()), cc=90)
    assert explanation.plan is None
    assert any("an extent or the number of tiles is too large" in reason for reason in explanation.selection.reasons)


def no_division_by_its_own_sum(accum):
    total = ef.sum(accum)
    D = accum / total
    return D


def no_part_of_a_reduction(accum):
    D = ef.sum(ef.sum(accum, dim=-1).reshape(4, 128), dim=0)
    return D


def no_row_of_half_an_axis(accum):
    D = accum.reshape(512, 8, 64).softmax(-2)
    return D


@pytest.mark.parametrize(
    ("epilogue", "written"),
    [
        (no_division_by_its_own_sum, "D = accum / total"),
        (no_part_of_a_reduction, "D = ef.sum(ef.sum(accum, dim=-1).reshape(4, 128), dim=0)"),
        (no_row_of_half_an_axis, "D = accum.reshape(512, 8, 64).softmax(-2)"),
    ],
)
def test_a_refusal_shows_the_line_of_the_epilogue(epilogue, written):
    found = ef.explain(arguments(epilogue), cc=90)
    assert found.plan is None
    assert found.selection.loc.text.strip() == written
    assert f"test_sm90_plans.py:{found.selection.loc.line}\n" in str(found)
    assert "amax" not in str(found.selection.reasons)


@pytest.mark.parametrize("shape", [(512, 1024), (512,)])
def test_what_is_asked_to_travel_by_tma_does_or_is_refused(shape):
    C = torch.empty(shape)[..., ::2] if shape == (512, 1024) else torch.empty(shape)
    source = "def epi(accum, C): D = accum + C; return D"
    assert ef.explain(arguments(source, C=ef.Load(C)), cc=90).plan is not None
    asked = ef.explain(arguments(source, C=ef.Load(C, via="tma")), cc=90)
    assert asked.plan is None
    assert "'C' does not travel by TMA, as was asked for" in str(asked)
    assert ef.explain(arguments(source, C=ef.Load(torch.empty(512, 512), via="tma")), cc=90).plan is not None


def test_a_column_apart_the_load_is_another_kernel():
    """Which places are aligned is known while planning, and a part of what is compiled."""
    keys = set()
    for span in (513, 514, 516):
        args = storing(PLACED, {}, C=torch.empty(512, span)[:, :512])
        keys.add(dict(hopper_kernel(args).plan.allocation.transports)["C"])
    why = ", as a stride of {} bytes is no multiple of 16"
    single, pairs = f"direct, 4 bytes at a time{why.format(2052)}", f"direct, 8 bytes at a time{why.format(2056)}"
    assert keys == {single, pairs, "TMA through shared memory"}


DIRECT = {
    "a stride of 2052 bytes is no multiple of 16": torch.empty(512, 513)[:, :512],
    "it does not start at a multiple of 16 bytes": torch.empty(512, 516)[:, 1:513],
    "its values have 64 bits": torch.empty(512, 512, dtype=torch.int64),
    "neither its rows nor its columns are contiguous": torch.empty(512, 512, 4)[..., 0],
    "it is expanded: hand in what it was expanded from": torch.empty(1, 512).expand(512, 512),
}


@pytest.mark.parametrize("why", DIRECT)
def test_a_plan_says_why_an_operand_goes_direct(why):
    assert f", as {why}\n" in str(hopper_kernel(storing(PLACED, {}, C=DIRECT[why])).plan)


OUTPUTS = {
    "allocated": {},
    "padded": {"D": torch.empty(512, 264, dtype=torch.bfloat16)[:, :260]},
    "by columns": {"D": torch.empty(260, 520, dtype=torch.bfloat16)[:, :516].t()},
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_a_plan_says_why_an_output_goes_direct(case):
    """Padding does not help where the last granule of a line would be written too."""
    given = OUTPUTS[case]
    m, line = (516, 1032) if case == "by columns" else (512, 520)
    plan = str(hopper_kernel(storing("def epi(accum): D = accum; return D", {}, m=m, n=260, **given)).plan)
    assert f" at a time, as its contiguous lines of {line} bytes are no multiple of 16\n" in plan


def test_the_plan_lists_each_view_of_an_operand():
    heads = "(accum + C).reshape(512, 8, 64) + C.reshape(512, 64, 8).permute(0, 2, 1)"
    source = f"def epi(accum, C): D = ({heads}).reshape(512, 512); return D"
    lines = str(hopper_kernel(storing(source, {}, C=torch.empty(512, 512))).plan).splitlines()
    first, second = (line for line in lines if line.startswith("  load     C: "))
    assert first.endswith("TMA through shared memory")
    assert second.endswith("as no single stride steps along M, N or the batches")


def test_a_plan_says_which_operands_made_room():
    names = [f"C{i}" for i in range(5)]
    source = f"def epi(accum, {', '.join(names)}): D = accum + {' + '.join(names)}; return D"
    args = storing(source, {}, k=4096, **{name: torch.empty(512, 512) for name in names})
    plan = str(hopper_kernel(args).plan)
    assert "direct, 8 bytes at a time, as A and B have more stages so" in plan
    assert "direct, 8 bytes at a time, as shared memory has no room for all of them" in plan


def test_what_the_model_says_of_the_best_three_is_shown() -> None:
    """In microseconds, each term that there is; the plan's own first, and no slower than the next."""
    args = arguments(lambda accum: accum, m=16, n=4096, k=14336)
    lines = [line for line in str(ef.explain(args, cc=90)).splitlines() if line.startswith("model")]
    names = [kernel.metadata.kernel_name for kernel in ef.get_kernels(args, cc=90, limit=3)]
    assert [line.split()[1].rstrip(":") for line in lines] == names
    costs = [float(line.split()[2]) for line in lines]
    assert costs == sorted(costs)
    assert all("multiplying" in line and "memory" in line for line in lines)
    assert all(("sums of parts of K" in line) == ("_split" in name) for line, name in zip(lines, names, strict=True))


def test_b_without_batches_is_read_once() -> None:
    """By the model; of A there are as many as batches."""

    def reading(*lead: int) -> float:
        a = torch.empty(16, 16, 4096, dtype=BF16, device="meta")
        b = torch.empty(*lead, 1024, 4096, dtype=BF16, device="meta").mT
        told = next(line for line in str(ef.explain(ef.GemmArguments(a, b), cc=90)).splitlines() if "model" in line)
        return float(told.split(" memory ")[1].split(",")[0].split(")")[0])

    assert reading(16) > 3 * reading()


def test_no_estimate_for_no_elements() -> None:
    a, b = torch.empty(0, 64, dtype=BF16, device="meta"), torch.empty(128, 64, dtype=BF16, device="meta").t()
    assert "model" not in str(ef.explain(ef.GemmArguments(a, b), cc=90))


def recomputed(epilogue, m: int, n: int, k: int) -> ef.Explanation:
    """What is planned where a second launch is allowed."""
    made = arguments(epilogue, m=m, n=n, k=k)
    asked = ef.Constraints(allow_recompute=True)
    return ef.explain(ef.GemmArguments(made.A, made.B, epilogue=made.epilogue, constraints=asked), cc=90)


def test_the_estimate_of_several_launches_is_more_than_theirs() -> None:
    """By the time between two kernels, for each but the first."""
    explained = recomputed(layer_norm, 1000, 4096, 512)
    told = next(line for line in str(explained).splitlines() if line.startswith("model"))
    whole, each = float(told.split()[2]), told.split("launches: ")[1].split(", and")[0]
    times = [float(one) for one in each.split(", ")]
    assert len(times) == len(explained.plan.allocation.launches) > 1
    assert whole - sum(times) > len(times) - 1


@pytest.mark.parametrize(("m", "n", "k"), [(16, 100, 512), (16, 128, 512), (1, 64, 128), (256, 512, 1024)])
def test_small_products_are_not_computed_twice(m: int, n: int, k: int) -> None:
    assert not recomputed(lambda accum: ef.softmax(accum, dim=-1), m, n, k).plan.allocation.launches


WIDE = ef.Constraints((128, 128), (2, 1), "pingpong", split=1)
FEW = ef.Constraints((16, 40), schedule="swapped", split=1)
KERNELS = {
    "N": ("lambda accum: accum", WIDE, [[(64, 1024), (64, 1032)], [(64, 1020), (64, 1022)], [(64, 1021)]]),
    "N, few rows": ("lambda accum: accum", FEW, [[(4, 1024), (4, 1032)], [(4, 1020), (4, 1021)]]),
    "M": ("lambda accum: accum.t()", WIDE, [[(1000, 1024), (1024, 1020)], [(1004, 1024), (1001, 1024)]]),
    "one row": ("lambda accum, C: accum + C", FEW, [[(1, 1024)], [(2, 1024), (16, 1024)]]),
}
"""An epilogue and a design, and which extents share a kernel."""


@pytest.mark.parametrize("case", KERNELS)
def test_which_extents_share_a_kernel(case: str) -> None:
    """As docs/hopper.md says."""
    source, asked, shared = KERNELS[case]

    def text(m: int, n: int) -> str:
        operands = {"C": torch.empty(m, n, dtype=BF16)} if "C" in source else {}
        made = ef.EpilogueArguments.partial(source, operands)
        a, b = torch.empty(m, 2048, dtype=BF16), torch.empty(n, 2048, dtype=BF16).t()
        return hopper_kernel(ef.GemmArguments(a, b, epilogue=made, constraints=asked)).plan.allocation.program.text

    texts = [{text(*extents) for extents in group} for group in shared]
    assert [len(each) for each in texts] == [1] * len(shared)
    assert len(set.union(*texts)) == len(shared)
