"""Run a test on a GPU, and on the CPU kernel as well, which shows that the logic of the test is right.

Every output lies in a larger buffer of poison, which is NaN for floats. So elements that are not written, and writes
around the output, are noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from fuzzing.check import function_of

import epifuse as ef
from epifuse.kernel import Kernel
from epifuse.providers.cutedsl.design import MULTISTAGE, TCGEN05
from epifuse.request.problem import Constraints
from epifuse.tools.testing import FP8_SUM_EPS, TF32_EPS, ULPS_PER_OPERATION, Bounded, bounded, compare_bounded, gpu_room

_GUARD = 64  # elements before and after a tensor; a multiple of 16 bytes, so that the base stays aligned
_EPS = torch.finfo(torch.float32).eps

Shape = Sequence[int]


# --- memory ----------------------------------------------------------------------------------------------------------

LAYOUTS = ("rows", "columns", "padded", "odd", "even", "shifted")
"""How a tensor lies in its buffer. "rows" and "columns" are contiguous by rows and by columns. "padded" has gaps
between rows, and TMA can address it. TMA cannot address "odd" and "even", whose rows lie an odd or an even number of
elements apart; pairs of elements are aligned in "even". The base of "shifted" is not aligned."""


class Place(NamedTuple):
    """A tensor, `view`, inside a larger buffer, `memory`."""

    view: torch.Tensor
    memory: torch.Tensor

    def poison(self) -> None:
        """Fill the whole buffer with poison, which no result has."""
        _poisoned(self.memory)

    def intact(self) -> bool:
        """Whether the buffer around the tensor still holds poison."""
        kept = self.memory.clone()
        view = self.view
        inside = kept.as_strided(view.shape, view.stride(), view.storage_offset())
        inside.copy_(_poisoned(torch.empty(view.shape, dtype=view.dtype, device=view.device)))
        return bool((kept.view(torch.uint8) == _poison_of(kept.dtype)).all())


def _poison_of(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else 255  # all bits set: NaN in every float


def _poisoned(memory: torch.Tensor) -> torch.Tensor:
    if memory.numel():
        memory.reshape(-1).view(torch.uint8).fill_(_poison_of(memory.dtype))
    return memory


def place(shape: Shape, dtype: torch.dtype, device: str, layout: str = "rows") -> Place:
    """A poisoned buffer with a tensor of this shape in one of `LAYOUTS`."""
    swapped = layout == "columns" and len(shape) > 1
    order = [*shape[:-2], shape[-1], shape[-2]] if swapped else list(shape) or [1]
    row = max(order[-1], 1)
    span = {"padded": -(-row // 16) * 16 + 16, "odd": row + 1 + row % 2, "even": row + 2 + row % 2}.get(layout, row)
    start = _GUARD + (layout == "shifted")
    strides = [span * math.prod(order[i + 1 : -1]) for i in range(len(order) - 1)] + [1]
    memory = torch.empty(start + math.prod(order[:-1]) * span + _GUARD, dtype=dtype, device=device)
    view = memory.as_strided(order, strides, start)
    view = view.mT if swapped else view.view(()) if not shape else view
    _poisoned(memory)
    return Place(view, memory)


OF_A_TILE = "columns, and its tile has"
"""A text in reasons that hold for one tile only. The reasons of other tiles decide."""
REFUSED = (
    "does not fit the",  # whole rows of more columns than a tile
    "columns, and there are",  # segments that no tile of the kernel has whole
    "does not travel by TMA, as was asked for",
    "not the one asked for",  # a tile that the test pins
)
"""Texts in the reasons of a kernel that is not Hopper's. For these reasons alone a test is skipped under `--schedule`.
docs/other_gpus.md lists them as limits of such kernels, and CPU tests check them (test_mma_sync.py, test_sm100.py)."""

# --- machines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Where a test runs: on a Hopper GPU, or on the CPU. On the CPU Hopper's plan is made as well.

    `schedule` is the value of pytest's `--schedule`: the test then runs that kernel, on the GPU that is there. A test
    that pins a design of Hopper's, or whose problem that kernel refuses, is skipped with the reason.
    """

    device: str
    schedule: str | None = None

    @property
    def gpu(self) -> bool:
        """Whether kernels run on the GPU, and not on the CPU."""
        return self.device == "cuda"

    def kernel(self, args: ef.GemmArguments) -> Kernel:
        """The kernel to run. Fails if Hopper's kernel refuses `args`, on the CPU too."""
        planned = self.planned(args)
        return planned if self.gpu else ef.get_kernels(args)[0]

    def planned(self, args: ef.GemmArguments) -> Kernel:
        """Hopper's kernel, or the one that `schedule` names; a plan for Hopper is made on the CPU too."""
        if self.schedule is not None:
            return self._scheduled(args, self.schedule)
        found = ef.get_kernels(args, cc=90, providers=["cutedsl"], limit=1)
        assert found, refusal(args)
        return found[0]

    def _scheduled(self, args: ef.GemmArguments, schedule: str) -> Kernel:
        asked = args.problem.constraints.schedule
        assert asked is not None, "--schedule has not reached the problem"
        found = ef.get_kernels(args, providers=["cutedsl"], limit=1) if asked == schedule else ()
        if not found:
            named = {refusal.reason for refusal in ef.explain(args).refusals if schedule in refusal.kernel}
            deciding = [reason for reason in sorted(named) if OF_A_TILE not in reason]
            assert deciding, named
            assert all(any(known in reason for known in REFUSED) for reason in deciding), deciding
            # There is no result to judge: this kernel refused the problem, or the design of Hopper's that the test
            # pins, only for documented reasons. Any other reason has failed in the line above.
            pytest.skip(f"{schedule} refuses it as documented: {'; '.join(deciding)}")
        return found[0]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers, the same on every machine."""
        return torch.randn(shape).to(dtype).to(self.device)

    def whole(self, *shape: int, most: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Small whole numbers: their products and sums are exact."""
        return torch.randint(-most, most + 1, shape).to(dtype).to(self.device)

    def laid_out(self, values: torch.Tensor, layout: str = "rows") -> torch.Tensor:
        """`values` on the device in this layout, in a poisoned buffer."""
        return place(values.shape, values.dtype, self.device, layout).view.copy_(values)

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.gpu:
            torch.cuda.synchronize()


def refusal(args: ef.GemmArguments) -> str:
    """The reasons why no design of the Hopper kernel takes `args`. Fails if one does."""
    if args.problem.constraints.schedule in (MULTISTAGE, TCGEN05):
        # The caller compares the text of the refusal by Hopper's kernel, which another schedule does not have.
        pytest.skip("it is of what Hopper's kernel refuses")
    assert not ef.get_kernels(args, cc=90, providers=["cutedsl"], limit=1), "taken, not refused"
    return "; ".join(dict.fromkeys(r.reason for r in ef.explain(args, cc=90).refusals if r.kernel.startswith("sm90")))


# --- running and judging ---------------------------------------------------------------------------------------------


def run(
    machine: Machine,
    epilogue: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    *,
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
    layouts: Sequence[str] = LAYOUTS,
    constraints: Constraints | None = None,
    accumulator: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Run the kernel. Return the outputs on the CPU.

    They are written into poisoned buffers, with these layouts in turn, and memory around them must stay intact.
    """
    given = ef.EpilogueArguments.partial(epilogue, operands)
    if machine.schedule is not None and accumulator == torch.float16:
        accumulator = None  # only Hopper's kernel adds up in float16; the test still judges the epilogue
    blank = ef.GemmArguments(a, b, accumulator_type=accumulator, epilogue=given, out_dtypes=out_dtypes).allocate()
    places = {
        name: place(tensor.shape, tensor.dtype, machine.device, layouts[i % len(layouts)])
        for i, (name, tensor) in enumerate(blank.items())
    }
    outputs = {name: one.view for name, one in places.items()}
    made = ef.EpilogueArguments(epilogue, **operands, **outputs)
    made_of = {"epilogue": made, "accumulator_type": accumulator}
    args = ef.GemmArguments(a, b, **made_of, constraints=constraints or Constraints())
    machine.kernel(args).run(args)
    for name, one in places.items():
        assert one.intact(), f"memory around '{name}' was written"
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def exact_product(a: torch.Tensor, b: torch.Tensor) -> Bounded:
    """A @ B with its error bound, for data whose sums are exact in float32."""
    made: Bounded = bounded(a.cpu().double() @ b.cpu().double(), _EPS)
    return made


def product(
    a: torch.Tensor, b: torch.Tensor, accumulator: torch.dtype | None = None, fp8: float = FP8_SUM_EPS
) -> Bounded:
    """A @ B with an error bound: for tf32, if A is float32, and for a sum in any order in the accumulator's dtype.

    The tensor cores' sums of 8-bit floats may be wrong by `fp8` times the sum of absolute values. Integers are exact.
    """
    wide = a.cpu().double(), b.cpu().double()
    if not a.dtype.is_floating_point:
        return exact_product(a, b)
    rounding = 2 * TF32_EPS if a.dtype == torch.float32 else fp8 if a.dtype.itemsize == 1 else 0.0
    rounding += a.shape[-1] * torch.finfo(accumulator or torch.float32).eps
    made: Bounded = bounded(wide[0] @ wide[1], _EPS, rounding * (wide[0].abs() @ wide[1].abs()))
    return made


def judge(
    got: Mapping[str, torch.Tensor], function: Callable[..., Any], accum: Bounded, operands: Mapping[str, Any]
) -> None:
    """Compare each output with `function` in float64 and its error bound. Fails if only half of it can be judged."""
    wants = function(accum, **{name: bounded(_here(x), accum.eps) for name, x in operands.items()})
    wants = wants if isinstance(wants, tuple) else (wants,)
    for (name, output), want in zip(got.items(), wants, strict=True):
        share = judge_one(name, output, want)
        assert share > 0.5, f"{name}: only {share:.0%} could be judged"


def judge_one(name: str, output: torch.Tensor, want: torch.Tensor) -> float:
    """Compare one output with the values that it may have. Return the share of elements that could be judged."""
    verdict = compare_bounded(output, want.expand(output.shape).reshape(output.shape), gpu_room(output.dtype))
    assert verdict.wrong == 0, f"{name}: {verdict.wrong} of {verdict.total} elements, {verdict.detail}"
    return verdict.judged / verdict.total


def rounded(want: torch.Tensor) -> Bounded:
    """An exact result, with an error bound for an operation that rounds as a GPU's division does."""
    size = want.double().abs().nan_to_num(0.0, posinf=0.0)
    made: Bounded = bounded(want, _EPS, size * _EPS * ULPS_PER_OPERATION)
    return made


def _here(value: Any) -> Any:
    """An operand on the CPU. A float becomes a tensor, so that its rounding to float32 is in the error bound."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def check(
    machine: Machine,
    source: str,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    *,
    exact: bool = True,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Run the epilogue `source`, judge its outputs, and return them."""
    function = function_of(source, {})
    got = run(machine, function, a, b, operands, **options)
    accum = exact_product(a, b) if exact else product(a, b, options.get("accumulator"))
    judge(got, ef.reference(function), accum, operands)
    return got


def check_the_same_bits(machine: Machine, function: Any, a: torch.Tensor, b: torch.Tensor, operands: Any) -> None:
    """Run 100 times, on two streams at once, each time into new poisoned outputs. All have to equal the first."""
    blank = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(function, operands)).allocate()
    outputs = [{name: place(t.shape, t.dtype, machine.device) for name, t in blank.items()} for _ in range(100)]
    runs = []
    for made in outputs:
        views = {name: one.view for name, one in made.items()}
        runs.append(ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(function, **operands, **views)))
    kernel = machine.kernel(runs[0])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    machine.synchronise()
    for i, args in enumerate(runs):
        kernel.run(args, stream=streams[i % 2])
    machine.synchronise()
    for made in outputs:
        for name, one in made.items():
            assert torch.equal(one.view, outputs[0][name].view), name
            assert one.view.isfinite().all()
            assert one.intact(), name
