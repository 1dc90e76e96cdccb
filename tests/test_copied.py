"""What TMA cannot address is copied on Hopper: what is planned and told, how much workspace it takes, and the views of
A and B that a launch is handed."""

import gpu.test_copied as on_gpu
import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.test_full import PLAIN

import epifuse as ef

BF16, F32 = torch.bfloat16, torch.float32
TF32 = ef.Constraints(precision="tf32")
ODD = torch.empty(500, 257, dtype=BF16), torch.empty(300, 257, dtype=BF16).t()
ALIGNED = torch.empty(500, 264, dtype=BF16), torch.empty(304, 264, dtype=BF16).t()


def arguments(a, b, source=PLAIN, **asked):
    return ef.GemmArguments(
        a, b, epilogue=ef.EpilogueArguments.partial(source, {}), constraints=ef.Constraints(**asked)
    )


def kernels(*given, **asked):
    return ef.get_kernels(arguments(*given, **asked), cc=90)


def test_a_plan_says_that_a_and_b_are_copied():
    told = str(ef.explain(arguments(*ODD), cc=90))
    assert "A and B are copied first, to where TMA can address them: 0.5 MB of workspace" in told
    assert "copied first" not in str(ef.explain(arguments(*ALIGNED), cc=90))


WHY = {
    "pad K with zeros to a multiple of 8 elements in both A and B": ODD[0],
    "pass A.contiguous()": torch.empty(500, 528, dtype=BF16)[:, ::2],
    "A does not start at a multiple of 16 bytes": torch.empty(500 * 264 + 1, dtype=BF16)[1:].view(500, 264),
    "A is expanded": torch.empty(1, 264, dtype=BF16).expand(500, 264),
    "A has a stride of 264002 bytes": torch.empty(3 * 132001, dtype=BF16).as_strided((3, 500, 264), (132001, 264, 1)),
}


@pytest.mark.parametrize("why", WHY)
@pytest.mark.parametrize("rows", [5, 500])
def test_a_plan_says_why_a_is_copied(why, rows):
    """Where A and B are exchanged as well."""
    a = WHY[why][..., :rows, :]
    b = torch.empty(304, 272, dtype=BF16)[:, : a.shape[-1]].t()
    (told,) = (line for line in str(ef.explain(arguments(a, b), cc=90)).splitlines() if why in line)
    assert told.startswith("  note     A ")


@pytest.mark.parametrize("rows", [5, 500])
def test_one_matrix_for_all_batches_is_not_copied(rows):
    """However it is handed over, it costs as much."""
    a, b = torch.empty(8, rows, 264, dtype=BF16), ALIGNED[1]
    (plain, *_), (expanded, *_) = kernels(a, b), kernels(a, b.expand(8, 264, 304))
    assert plain.spec == expanded.spec
    assert plain.plan.allocation.cost == expanded.plan.allocation.cost
    assert "copied" not in str(ef.explain(arguments(a, b.expand(8, 264, 304)), cc=90))


@pytest.mark.parametrize("rows", [5, 500])
def test_what_tma_can_address_stays_where_it_is(rows):
    """Whether A and B are exchanged or not."""
    padded = torch.empty(rows, 264, dtype=BF16)[:, :257], torch.empty(300, 264, dtype=BF16)[:, :257].t()
    odd = torch.empty(rows, 257, dtype=BF16), ODD[1]
    for name, extent, a, b in (("A", rows, odd[0], padded[1]), ("B", 300, padded[0], odd[1])):
        args = arguments(a, b, split=1)
        assert f"note     {name} is copied first, to where TMA can address it" in str(ef.explain(args, cc=90))
        assert {kernel.get_workspace_size(args) for kernel in ef.get_kernels(args, cc=90)} == {extent * 5 * 128}


def test_the_workspace_holds_rows_that_begin_with_lines_of_l2():
    args = arguments(*ODD, split=1)
    (kernel,) = ef.get_kernels(args, cc=90, limit=1)
    assert kernel.get_workspace_size(args) == (500 + 300) * 5 * 128  # 257 elements of 2 bytes
    aligned = arguments(*ALIGNED, split=1)
    (kernel,) = ef.get_kernels(aligned, cc=90, limit=1)
    assert kernel.get_workspace_size(aligned) == 0


def test_the_bits_are_those_of_aligned_operands():
    """One kernel multiplies both, so that a row of a batch keeps its bits."""
    bits = [{kernel.plan.allocation.bits for kernel in kernels(*given, split=1)} for given in (ODD, ALIGNED)]
    assert bits[0] == bits[1]
    assert kernels(*ODD, batch_invariant=True)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_few_rows_are_exchanged(rows):
    a = torch.empty(rows, 257, dtype=BF16)
    assert any(kernel.spec.design.swapped for kernel in kernels(a, ODD[1]))


def test_tf32_lies_in_any_way():
    for a, b in ((torch.empty(64, 64).t(), torch.empty(64, 64)), (torch.empty(64, 1), torch.empty(1, 64))):
        assert kernels(a, b, precision="tf32")


def test_regions_of_copies_take_a_launch_each():
    source = "def epi(accum): D = relu(accum[:, :256]); E = accum[:, 256:]; return D, E\n"
    for k, apart in ((257, True), (256, False)):
        a, b = torch.empty(512, k, dtype=BF16), torch.empty(768, k, dtype=BF16).t()
        (kernel, *_) = kernels(a, b, source)
        assert bool(kernel.plan.allocation.launches) == apart


@pytest.mark.parametrize("layouts", on_gpu.LAYOUT_PAIRS, ids=str)
def test_a_launch_is_handed_a_and_b_as_they_lie(layouts, emulated: Emulated):
    for shape in on_gpu.SHAPES[:4]:
        on_gpu.test_products_of_whole_numbers_are_exact(shape, layouts, emulated)


def test_batches_and_epilogues_are_handed_over(emulated: Emulated):
    on_gpu.test_no_mode_need_be_contiguous(emulated)
    on_gpu.test_batches(emulated)
    on_gpu.test_rows_that_are_one_and_batches_apart(emulated)
    for name in on_gpu.EPILOGUES:
        on_gpu.test_epilogues(name, emulated)
