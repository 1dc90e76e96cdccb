"""Regions of N on Hopper without a GPU: what is planned, what is refused, what each launch is handed."""

import pytest
import torch
from emulated import Emulated, emulated  # noqa: F401  # a fixture
from gpu import test_regions as on_gpu
from hopper import BF16, arguments, reasons

import epifuse as ef

M, N = 1024, 1536


@pytest.mark.parametrize("name", on_gpu.CASES)
def test_each_region_is_handed_over_where_it_lies(name, emulated: Emulated):  # noqa: F811
    for layout in ("rows", "columns", "odd"):
        on_gpu.test_each_region_has_its_own(name, layout, emulated)


def overlapping(accum):
    q, _k = accum.split([1024, 512], dim=-1)
    return q, accum


def of_whole_rows(accum):
    q, k = (accum / ef.norm(accum, dim=-1, keepdim=True)).split([1024, 512], dim=-1)
    D, P = q * 2, k + 1
    return D, P


def of_each_other(accum):
    q, k = accum.split([1024, 512], dim=-1)
    D = q / ef.amax(k, dim=-1, keepdim=True)
    return D


def of_other_heads(accum, scales):
    x = (accum.unflatten(-1, (-1, 768)) * scales).flatten(-2, -1)
    q, k = x.split([896, 640], dim=-1)
    D, P = q * 2, k + 1
    return D, P


OUT = "store the product, and combine its parts in PyTorch"
REFUSED = {
    "columns twice": (
        arguments(overlapping, n=N),
        (
            "it computes columns 0:1024 and 0:1536 in a launch each, and these overlap: store the product and take its "
            "parts in PyTorch, or pass allow_recompute=True"
        ),
    ),
    "whole rows": (
        arguments(of_whole_rows, n=N),
        f"it needs norm over whole rows for a part of their columns: {OUT}",
    ),
    "columns of another region": (
        arguments(of_each_other, n=N),
        f"it computes with columns 0:1024 and 1024:1536 of a row at once: {OUT}",
    ),
    "a dim that is cut": (
        arguments(of_other_heads, n=N, scales=torch.empty(2, 1)),
        f"it cuts a dim in columns 0:896: {OUT}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_with_a_way_out(name):
    args, reason = REFUSED[name]
    assert reason in reasons(args)


def test_columns_are_computed_twice_where_that_is_allowed():
    args = arguments(overlapping, n=N, allowed=True)
    plan = ef.get_kernels(args, cc=90)[0].plan
    assert plan.allocation.columns == ((0, 1024), (0, N))


def projection(accum, weight):
    q, k, v = accum.split([1024, 256, 256], dim=-1)
    x = q.unflatten(-1, (-1, 128))
    D = x * ef.rsqrt(ef.mean(x * x, dim=-1, keepdim=True) + 1e-6) * weight
    return D, k, v


def test_each_region_reads_what_it_needs_alone():
    args = arguments(projection, m=M, n=N, weight=torch.empty(128, dtype=BF16))
    plan = ef.get_kernels(args, cc=90)[0].plan
    text = str(plan)
    assert plan.allocation.columns == ((0, 1024), (1024, 1280), (1280, N))
    assert text.count("load") == 1
    assert "columns 0:1024, 1024:1280, 1280:1536 of the product" in text
