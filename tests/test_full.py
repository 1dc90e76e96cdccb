"""float32 in full on Hopper: what is planned and refused, how much workspace it takes, what it compiles to, what
becomes of each number, and how exact it is where tensor cores cut sums."""

import re
from dataclasses import replace
from typing import Any

import gpu.test_full as on_gpu
import numpy as np
import pytest
import torch
from emulated import Emulated
from emulated import emulated as emulated  # a fixture
from gpu.test_full import in_full as in_full  # a fixture
from machine_code import reported

import epifuse as ef
from epifuse.providers.cutedsl.design import Rewriting
from epifuse.providers.cutedsl.inputs import PARTS, PROMOTED_PARTS
from epifuse.providers.cutedsl.kernel_text import read

PLAIN = "def epi(accum): D = accum; return D\n"
BIAS_GELU = "def epi(accum, bias): D = gelu(accum + bias, approximate='tanh'); return D\n"
SOFTMAX = "def epi(accum, bias): D = softmax(accum + bias, dim=-1); return D\n"
GATED = "def epi(accum): gate, up = accum.chunk(2, dim=-1); D = silu(gate) * up; return D\n"
REDUCED = "def epi(accum, bias): D = accum + bias; s, t = sum(D, dim=0), amax(accum, dim=-1); return D, s, t\n"


def matrices(m=512, n=512, k=1024):
    """K contiguous in both."""
    return torch.empty(m, k), torch.empty(n, k).t()


def arguments(a, b, source=PLAIN, asked=None, **operands):
    given = ef.EpilogueArguments.partial(source, operands)
    return ef.GemmArguments(a, b, epilogue=given, constraints=asked or ef.Constraints())


def kernels(*given: Any, **asked: Any) -> Any:
    return ef.get_kernels(arguments(*given, **asked), cc=90)


# --- plans and refusals ----------------------------------------------------------------------------------------------


LAYOUTS = {
    "K contiguous": matrices(),
    "neither": (torch.empty(1024, 512).t(), torch.empty(1024, 512)),
    "odd rows": (torch.empty(512, 1023)[:, :1021], torch.empty(512, 1025)[:, :1021].t()),
    "misaligned": (torch.empty(512 * 1024 + 1)[1:].view(512, 1024), torch.empty(1024, 514)[:, 1:513]),
    "no mode contiguous": (torch.empty(512, 2048)[:, ::2], torch.empty(512, 2048)[:, ::2].t()),
    "one matrix for all batches": (torch.empty(3, 512, 1024), torch.empty(1024, 512).expand(3, 1024, 512)),
    "batches": (torch.empty(1024, 3, 512).permute(1, 2, 0), torch.empty(1024, 512)),
    "one of all": (torch.empty(1, 1), torch.empty(1, 1)),
    "nothing along K": (torch.empty(512, 0), torch.empty(0, 512)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_taken(name, in_full):
    (a, b), notes = LAYOUTS[name], str(ef.explain(arguments(*LAYOUTS[name]), cc=90))
    found = kernels(a, b)
    assert found
    assert "float32 in full: three tf32 products of the parts of A and B" in notes
    assert "the tensor cores add up 32 products at a time, and float32 adds up these sums" in notes
    designs = [read(kernel.plan.allocation.program.text).design for kernel in found]
    assert {(design.rewritten, design.promoted) for design in designs} == {(Rewriting(PARTS), PROMOTED_PARTS)}


@pytest.mark.parametrize(
    ("source", "given"),
    [(BIAS_GELU, ("bias",)), (SOFTMAX, ("bias",)), (GATED, ()), (REDUCED, ("bias",))],
    ids=["bias gelu", "whole rows", "parts of rows", "reductions"],
)
def test_every_kind_of_epilogue_is_taken(source, given, in_full):
    assert kernels(*matrices(), source, **{name: torch.empty(512) for name in given})


def test_few_rows_are_exchanged_and_a_long_k_is_cut(in_full):
    found = [kernel.spec.design for kernel in kernels(*matrices(m=16, k=4096))]
    assert {design.swapped for design in found} == {True, False}
    assert {design.split for design in found} >= {1, 2}


def test_where_tf32_is_allowed_it_is_tf32(in_full):
    tf32 = kernels(*matrices(), asked=ef.Constraints(precision="tf32"))
    assert {kernel.plan.allocation.program.design.rewritten for kernel in tf32} == {None}
    by_rows = kernels(torch.empty(512, 512), torch.empty(512, 512), asked=ef.Constraints(precision="tf32"))
    of_b = Rewriting(1, of_a=False)  # whose K is not contiguous
    assert {kernel.plan.allocation.program.design.rewritten_as_given for kernel in by_rows} == {of_b}


def test_full_designs_that_add_up_alike_share_bits(in_full):
    full = {k.plan.allocation.bits for k in kernels(*matrices(m=64)) if k.spec.design.split == 1}
    tf32 = kernels(*matrices(m=64), asked=ef.Constraints(precision="tf32"))
    assert len(full) == 1
    assert full.isdisjoint({kernel.plan.allocation.bits for kernel in tf32})


def test_the_price_is_three_products_and_the_bytes_of_the_parts(in_full):
    pinned = {"tile": (128, 256), "cluster": (2, 1), "split": 1}

    def cost(m, n, k, precision):
        asked = ef.Constraints(**pinned, precision=precision)
        (kernel,) = kernels(*matrices(m, n, k), asked=asked)
        return kernel.plan.allocation.cost

    large = cost(8192, 8192, 8192, "ieee") / cost(8192, 8192, 8192, "tf32")
    assert 3.0 / 0.95 < large < 3.8
    assert cost(8192, 256, 8192, "ieee") / cost(8192, 256, 8192, "tf32") > large, "each element serves fewer products"
    assert "the parts of A and B" in str(ef.explain(arguments(*matrices(), asked=ef.Constraints(**pinned)), cc=90))


# --- workspace -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "rows"),
    [
        ((100, 61), (61, 72), 172),
        ((5, 100, 61), (61, 72), 5 * 100 + 72),
        ((5, 100, 61), (1, 61, 72), 5 * 100 + 72),
        ((5, 100, 61), (5, 61, 72), 5 * 172),
    ],
    ids=str,
)
def test_the_workspace_has_three_parts_of_each_number(a, b, rows, in_full):
    args = arguments(torch.empty(a), torch.empty(b), asked=ef.Constraints(split=1))
    for kernel in ef.get_kernels(args, cc=90):
        assert kernel.get_workspace_size(args) == 12 * 64 * rows


def test_matrices_that_are_the_same_have_one_copy(in_full):
    args = arguments(torch.empty(5, 100, 64), torch.empty(64, 72).expand(5, 64, 72), asked=ef.Constraints(split=1))
    assert ef.get_kernels(args, cc=90)[0].get_workspace_size(args) == 12 * 64 * (500 + 72)


def test_partial_results_and_sums_of_parts_of_k_lie_behind(in_full):
    bias = torch.empty(512)
    for split in (1, 4):
        asked = ef.Constraints(split=split, tile=(64, 128), cluster=(2, 1))
        tf32 = replace(asked, precision="tf32")
        sizes = []
        for one in (asked, tf32):
            args = arguments(*matrices(k=4096), REDUCED, one, bias=bias)
            sizes.append(ef.get_kernels(args, cc=90)[0].get_workspace_size(args))
        assert sizes[0] - sizes[1] == 12 * 4096 * 1024
        assert sizes[1] > 0


# --- what a launch is handed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", on_gpu.LAYOUT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(17, 40, 61), (130, 264, 33)], ids=str)
def test_a_launch_is_handed_a_and_b_as_they_lie(shape, layouts, emulated: Emulated, in_full):
    on_gpu.test_products_of_whole_numbers_are_exact(shape, layouts, emulated)


def test_batches_and_epilogues_are_handed_over(emulated: Emulated, in_full):
    on_gpu.test_batches(emulated)
    on_gpu.test_nothing_along_k(emulated)
    for name in on_gpu.EPILOGUES:
        on_gpu.test_epilogues(name, emulated)


# --- what is compiled ------------------------------------------------------------------------------------------------


def compiled(kernel, folder, capfd):
    """PTX of a kernel, which spills nothing and whose multiplications overlap."""
    function = reported(kernel.plan.allocation.program.text, folder)
    report = " ".join(capfd.readouterr().err.split())
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(spilled) >= 2, "one kernel writes the parts, one multiplies them"
    assert set(spilled) == {0}
    assert "serialized" not in report
    assert "injected" not in report
    return function.__ptx__


MEANT = {
    "plain": lambda: arguments(*matrices(k=4096)),
    "neither by K": lambda: arguments(*LAYOUTS["neither"], BIAS_GELU, bias=torch.empty(512)),
    "batches": lambda: arguments(*LAYOUTS["batches"]),
    "few rows": lambda: arguments(*matrices(m=16, k=4096), BIAS_GELU, bias=torch.empty(512)),
    "whole rows": lambda: arguments(*matrices(k=4096), SOFTMAX, bias=torch.empty(512)),
    "parts of rows": lambda: arguments(*matrices(k=4096), GATED),
    "reductions": lambda: arguments(*matrices(k=4096), REDUCED, bias=torch.empty(512)),
}

KINDS = {
    "layouts": ("neither by K", "batches"),
    "rows": ("whole rows", "parts of rows", "reductions"),
    **{name: (name,) for name in ("plain", "few rows")},
}
"""Without --whole-sweeps one of each."""

IN_EVERY_TILE = ("plain", "reductions")
"""Of the other cases those tiles alone whose threads hold most sums."""
IN_EVERY_SCHEDULE = ("plain", "few rows")
"""Without --whole-sweeps: with K whole and in parts. Of the others the tile alone whose threads hold most sums. For few
rows of those alone that exchange A and B."""


@pytest.mark.sweep("of")
@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in KINDS.items() for name in names])
def test_every_tile_multiplies_tf32_and_spills_nothing(of, name, capfd, tmp_path, in_full, whole_sweeps):
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    found = {}
    for kernel in ef.get_kernels(MEANT[name](), cc=90):
        design = kernel.spec.design
        found.setdefault((design.tile, design.swapped, design.split > 1), kernel)
    kernels = sorted(found.values(), key=lambda kernel: -kernel.spec.design.rows * kernel.spec.design.tile[1])
    if not whole_sweeps:
        kernels = [k for k in kernels if k.spec.design.swapped] or kernels
        of_each = {(k.spec.design.schedule, k.spec.design.split > 1): k for k in reversed(kernels)}
        kernels = list(of_each.values()) if name in IN_EVERY_SCHEDULE else kernels[:1]
    for kernel in kernels if not whole_sweeps or name in IN_EVERY_TILE else kernels[:4]:
        ptx = compiled(kernel, tmp_path, capfd)
        lines = [line.split()[0] for line in map(str.strip, ptx.splitlines()) if line.startswith("wgmma.mma_async")]
        assert {line.partition("k8.")[2] for line in lines} == {"f32.tf32.tf32"}
        waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+0", ptx)
        assert len(waits) >= len(lines) // 4, "float32 adds up what four instructions make"


# --- the parts of a number -------------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch):
    """The kernel's own function, on numpy's numbers: low, high where it is finite, and high."""
    pytest.importorskip("cutlass", reason="CuTe DSL is an optional dependency; `make setup` installs it on Linux")
    import simulated
    from simulated import CUTLASS, Float32, Int32

    from epifuse.providers.cutedsl.kernels import rewrite

    for name, value in {"cutlass": CUTLASS, "Float32": Float32, "Int32": Int32}.items():
        monkeypatch.setattr(rewrite, name, value)
    for kind in (Float32, Int32):
        monkeypatch.setattr(kind, "bitcast", lambda self, to: to(self.v.view(to.dtype)), raising=False)

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        monkeypatch.setattr(simulated, "T", len(x))  # a thread for each number
        with np.errstate(all="ignore"):
            return tuple(one.v for one in rewrite.split(Float32(x)))

    return split


def of_tf32(x: np.ndarray) -> bool:
    return not (x.view(np.int32) & 0x1FFF).any()


def test_a_number_is_the_sum_of_its_parts(parts):
    """To 2^-23 of its size, high to nearest; whatever its exponent."""
    bits = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], np.float32([0.0, -0.0, 1e-45, 2**-126, np.finfo(np.float32).max])])
    low, finite, high = parts(x)
    assert of_tf32(low)
    assert of_tf32(high)
    assert np.array_equal(finite, high)
    assert np.isfinite(high).all()
    size = abs(x.astype(np.float64))
    least = 2.0**-137  # of tf32's own subnormals, half a unit
    largest = size >= float(2**128) * (1 - 2.0**-12)
    assert (abs(high - x.astype(np.float64)) <= np.maximum(size * np.where(largest, 2.0**-10, 2.0**-11), least)).all()
    wide = low.astype(np.float64) + high
    assert (abs(wide - x) <= np.maximum(size * np.where(largest, 2.0**-22, 2.0**-23), least)).all()


def test_what_is_not_finite_is_in_high_alone(parts):
    x = np.float32([np.inf, -np.inf, np.nan, -np.nan])
    x = np.concatenate([x, np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)])
    low, finite, high = parts(x)
    assert not low.any()
    assert not finite.any()
    assert np.array_equal(high[:2], x[:2])
    assert np.isnan(high[2:]).all()
    kept = (high.view(np.int32) & -0x2000).view(np.float32)
    assert np.isnan(kept[2:]).all(), "of what tf32 keeps of it too"


# --- accuracy --------------------------------------------------------------------------------------------------------
# Sums as Hopper's tensor cores make them, by what is published of them: what 8 products and the sum before have is cut
# so many bits below the last one of the largest, and the sum is cut to float32.

_EXTRA = 2


def instruction(total: np.ndarray, products: np.ndarray) -> np.ndarray:
    terms = np.concatenate([total[None].astype(np.float64), products])
    largest = abs(terms).max(0)
    unit = np.ldexp(1.0, np.frexp(np.where(largest == 0, 1, largest))[1] - 24 - _EXTRA)
    found = np.trunc(terms / unit).sum(0) * unit
    near = found.astype(np.float32)
    return np.where(abs(near.astype(np.float64)) > abs(found), np.nextafter(near, np.float32(0)), near)


def tensor_cores(a: np.ndarray, b: np.ndarray, promoted: int) -> np.ndarray:
    """Sums down columns of a * b; float32 adds up what each `promoted` rows make, where it does."""
    zero = np.zeros(a.shape[1], np.float32)
    total, part = zero, zero
    for k in range(0, len(a), 8):
        part = instruction(part, a[k : k + 8].astype(np.float64) * b[k : k + 8])
        if promoted and (k + 8) % promoted == 0:
            total, part = total + part, zero
    return total + part


def chain(a: np.ndarray, b: np.ndarray, parts: int = 1) -> np.ndarray:
    """float32's own sums, of parts of K that are added up in order."""
    found = np.zeros(a.shape[1], np.float32)
    for own_a, own_b in zip(np.array_split(a, parts), np.array_split(b, parts), strict=True):
        total = np.zeros(a.shape[1], np.float32)
        for x, y in zip(own_a, own_b, strict=True):
            total = (total + x.astype(np.float64) * y).astype(np.float32)
        found = found + total
    return found


def errors(k: int, positive: bool, parts: Any, promoted: int) -> tuple[float, float, float]:
    """Mean squares' roots: of the product of parts, of float32's chain, and of one in 8 parts."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((k, 256)).astype(np.float32) for _ in range(2))
    a, b = (abs(x) if positive else x for x in (a, b))
    want = (a.astype(np.float64) * b).sum(0)
    rows = -(-k // 4) * 4
    of_a, of_b = (
        [np.pad(one.reshape(x.shape), ((0, rows - k), (0, 0))) for one in parts(x.reshape(-1))[:2]] for x in (a, b)
    )
    (low_a, high_a), (low_b, high_b) = of_a, of_b
    long_a, long_b = (np.concatenate(one) for one in ((low_a, high_a, high_a), (high_b, low_b, high_b)))
    found = tensor_cores(*(np.pad(x, ((0, -len(x) % 32), (0, 0))) for x in (long_a, long_b)), promoted)
    each = found, chain(a, b), chain(a, b, 8)
    return tuple(float(np.sqrt(((one - want) ** 2).mean())) for one in each)  # type: ignore[return-value]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [1, 8, 100, 1024, 4096, 16384])
def test_errors_are_within_four_times_those_of_float32(k, positive, parts):
    found, one, eight = errors(k, positive, parts, PROMOTED_PARTS)
    assert found < 4 * min(one, eight)
    if k > 128:
        assert found < one


@pytest.mark.parametrize(("promoted", "least"), [(0, 4.0), (128, 4.0)])
def test_with_fewer_additions_in_float32_they_would_not_be(promoted, least, parts):
    """Beside a chain in 8 parts, as cuBLAS may have it."""
    found, _, eight = errors(4096, True, parts, promoted)
    assert found > least * eight
