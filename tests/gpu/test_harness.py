"""The harness sees what it is there to see: planted faults, each in one element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import LAYOUTS, Machine, check, judge_one, place

import epifuse as ef
from epifuse.kernel import Kernel
from epifuse.tools.testing import bounded

CPU = Machine("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 5), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_place_notices_every_write_around_it(dtype: torch.dtype, layout: str, shape: tuple[int, ...]) -> None:
    made = place(shape, dtype, "cpu", layout)
    assert made.view.shape == torch.Size(shape)
    made.view.zero_()
    assert made.intact()
    numbers = torch.arange(made.memory.numel())
    view = made.view
    inside = set(numbers.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist())
    for at in (0, 64 - 1, *(i for i in range(made.memory.numel()) if i not in inside)):
        if at not in inside:
            held = made.memory[at].clone()
            made.memory[at] = 0
            assert not made.intact(), at
            made.memory[at] = held
    assert (made.memory.element_size() * view.storage_offset() % 16 != 0) == (
        layout == "shifted" and dtype.itemsize < 16
    )


FAULTS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "one element off by a hundred-thousandth": lambda out: out["D"][3, 5].mul_(1 + 1e-5),
    "one element not written": lambda out: out["D"][-1, -1].fill_(torch.nan),
    "rows exchanged": lambda out: out["D"].copy_(out["D"].roll(1, 0)),
    "the wrong output": lambda out: out["E"].copy_(out["D"]),
    "a write behind the last element": lambda out: out["D"].as_strided((1,), (1,), 64 + 40 * 24).zero_(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = CPU.whole(40, 16), CPU.whole(16, 24)
    source = "def epi(accum, C): D = exp(accum * 0.125) + C; E = D * 2.0; return D, E"
    given = {"C": CPU.whole(40, 24)}

    def tested() -> None:
        check(CPU, source, a, b, given, out_dtypes=torch.float32, layouts=["rows"])

    tested()
    right = Kernel.run

    def wrong(kernel: Kernel, args: ef.GemmArguments, *rest: Any) -> dict[str, torch.Tensor]:
        outputs = right(kernel, args, *rest)
        FAULTS[fault](outputs)
        return outputs

    monkeypatch.setattr(harness.Kernel, "run", wrong)
    with pytest.raises(AssertionError):
        tested()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_output_may_differ_only_if_rounding_is_close(dtype: torch.dtype) -> None:
    want = torch.rand(1000, dtype=torch.float64) + 1.0
    near = want.to(dtype)
    assert judge_one("D", near, bounded(want, 0.0)) == 1.0
    step = torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match="1 of 1000 elements"):
        judge_one("D", torch.where(torch.arange(1000) == 7, near + step, near), bounded(near.double(), 0.0))


def test_a_refusal_is_no_kernel() -> None:
    """Where a test says that Hopper takes it, a refusal fails on the CPU already, with the reason."""
    a, b = CPU.normal(8, 12), CPU.normal(12, 8)
    with pytest.raises(AssertionError, match="it multiplies float16, bfloat16, float32 and 8 bits"):
        check(CPU, "def epi(accum): D = accum; return D", a.double(), b.double(), {})
    a, b = a[:, :8].bfloat16().contiguous(), b[:8].bfloat16()
    with pytest.raises(AssertionError, match="taken, not refused"):
        harness.refusal(ef.GemmArguments(a, b))
