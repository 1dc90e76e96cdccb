"""`python -m epifuse demo`: a linear layer whose epilogue is its binary cross-entropy loss, on pictures of digits.

The loss is the one of the article on epilogue visitor trees: with f = x @ w + bias and one-hot labels C,
loss = -sum((C - 1) * f + log(clamp(sigmoid(f), 0.001, 0.999))) / n.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from epifuse.api import explain, gemm
from epifuse.arguments import EpilogueArguments, GemmArguments
from epifuse.debug import peak_bytes, to_svg
from epifuse.errors import fail
from epifuse.fusion.activation import logsigmoid, sigmoid
from epifuse.fusion.forms import clamp
from epifuse.fusion.primitives import Value, log
from epifuse.fusion.reduction import sum
from epifuse.target import TARGETS

Run = Callable[[], torch.Tensor]


def bce(accum: Value, C: Value, bias: Value) -> Value:
    """The loss, summed over the batch and the labels; nothing of full size is written."""
    f = accum + bias
    total = sum((C - 1) * f + log(clamp(sigmoid(f), 0.001, 0.999)))
    return total


def bce_and_gradient(accum: Value, C: Value, bias: Value) -> Value:
    """The loss without its clamp, which would hide mistakes from a learner, and its derivative with respect to f."""
    f = accum + bias
    total = sum((C - 1) * f + logsigmoid(f))
    G = C - sigmoid(f)
    return total, G


def eager(x: torch.Tensor, w: torch.Tensor, C: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same loss in PyTorch, one operation at a time."""
    f = x @ w + bias
    return torch.sum((C - 1) * f + torch.log(torch.clamp(torch.sigmoid(f), 0.001, 0.999)))


class Problem(NamedTuple):
    """A layer with its data: x (n, K), w (K, labels), one-hot labels C, bias."""

    x: torch.Tensor
    w: torch.Tensor
    C: torch.Tensor
    bias: torch.Tensor

    @property
    def arguments(self) -> GemmArguments:
        """For `explain`: the loss alone."""
        return GemmArguments(self.x, self.w, epilogue=EpilogueArguments.partial(bce, {"C": self.C, "bias": self.bias}))


def run(svg: Path, rounds: int) -> None:
    """Everything, told as it happens; under a minute."""
    torch.manual_seed(0)
    pixels, digits = _digits()
    device = _device(pixels)
    ten = _layer(pixels.to(device), digits.to(device), 10)
    _look(ten, svg)
    _learn(ten, digits.to(device))
    _measure(_which_picture(pixels.to(device)), rounds)


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise fail("missing_package", None, what="the demo", package="scikit-learn", extra="demo") from None
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def _layer(x: torch.Tensor, classes: torch.Tensor, labels: int) -> Problem:
    C = torch.nn.functional.one_hot(classes, labels).to(x.dtype)
    return Problem(x, 0.05 * torch.randn(x.shape[1], labels, device=x.device), C, torch.zeros(labels, device=x.device))


def _device(pixels: torch.Tensor) -> torch.device:
    """The GPU where some kernel can run there, else the CPU, and why."""
    if not torch.cuda.is_available():
        _say("Device: the CPU; this machine has no GPU.")
        return torch.device("cpu")
    reasons = _refusals_on_gpu(pixels)
    if not reasons:
        _say(f"Device: {torch.cuda.get_device_name()}.")
        return torch.device("cuda")
    _say(f"Device: the CPU. There is {torch.cuda.get_device_name()}, but no kernel for this epilogue on it:")
    _list(reasons)
    return torch.device("cpu")


def _refusals_on_gpu(pixels: torch.Tensor) -> tuple[str, ...]:
    """Why no kernel runs the loss on this GPU; nothing where one does. Asked with shapes alone."""
    major, minor = torch.cuda.get_device_capability()
    cc = major * 10 + minor
    if cc not in TARGETS:
        return (f"compute capability {cc} is none of {', '.join(map(str, TARGETS))}",)
    shapes = (pixels.shape, (pixels.shape[1], 10), (len(pixels), 10), (10,))
    found = explain(Problem(*(torch.empty(shape, device="meta") for shape in shapes)).arguments, cc=cc)
    return () if found.plan else found.selection.reasons


# --- the three acts ----------------------------------------------------------------------------------------------


def _look(problem: Problem, svg: Path) -> None:
    _title("1. The graph, the plan, the refusals, the result")
    args = problem.arguments
    _say(str(explain(args)))
    on_hopper = explain(args, cc=90)
    if on_hopper.plan is None:
        _say("\nOn a Hopper GPU (explain(args, cc=90)) no kernel can run this:")
        _list(on_hopper.selection.reasons)
    _say(f"\nThe graph as a picture: {to_svg(args.graph, svg)}\n")
    fused = gemm(problem.x, problem.w, epilogue=bce, C=problem.C, bias=problem.bias)
    _beside(problem, fused)


def _beside(problem: Problem, fused: torch.Tensor) -> None:
    n, exact = len(problem.x), _exact(problem)
    _say(f"  loss, PyTorch in float64   {-exact / n:.9f}")
    for name, total in (("PyTorch", eager(*problem)), ("epifuse", fused)):
        error = abs(total.item() - exact) / abs(exact)
        _say(f"  loss, {name:<20} {-total.item() / n:.9f}   relative error {error:.0e}")


def _exact(problem: Problem) -> float:
    """In float64, some rows at a time, to stay small."""
    w, bias = problem.w.double(), problem.bias.double()
    parts = zip(torch.split(problem.x, 1024), torch.split(problem.C, 1024), strict=True)
    return float(torch.stack([eager(x.double(), w, C.double(), bias) for x, C in parts]).sum())


def _learn(problem: Problem, digits: torch.Tensor, steps: int = 200) -> None:
    _title("2. Learning: the same epilogue also returns the gradient; the update is the epilogue of a second GEMM")
    x, w, C, bias = problem
    n, rate = len(x), 2.0 / len(x)

    def update(accum: Value, W: Value) -> Value:
        return W + rate * accum

    for step in range(steps + 1):
        total, G = gemm(x, w, epilogue=bce_and_gradient, C=C, bias=bias)
        if step % 50 == 0:
            right = ((x @ w + bias).argmax(1) == digits).float().mean()
            _say(f"  step {step:>3}: loss {-total.item() / n:.4f}, {right:.1%} of the digits right")
        gemm(x.t(), G, epilogue=update, W=w, out=w)
        bias += rate * G.sum(0)


def _which_picture(pixels: torch.Tensor) -> Problem:
    """A label for every picture, to be recognised after a shift by one pixel in each direction."""
    count = len(pixels)
    pictures = pixels.view(count, 8, 8)
    shifts = [pictures.roll(shift, dims=dim) for dim in (1, 2) for shift in (-1, 1)]
    shifted = torch.stack([pictures, *shifts]).view(-1, 64)
    features = torch.relu(shifted @ torch.randn(64, 256, device=pixels.device) / 4)
    return _layer(features, torch.arange(count, device=pixels.device).repeat(5), count)


def _measure(problem: Problem, rounds: int) -> None:
    (m, k), n = problem.x.shape, problem.w.shape[1]
    _title(f"3. Time and memory: {n} labels, one a picture ({m} x {k} features, {m * n / 1e6:.0f} million logits)")
    x, w, C, bias = problem
    runs: dict[str, Run] = {
        "PyTorch, eager": lambda: eager(*problem),
        "epifuse": lambda: gemm(x, w, epilogue=bce, C=C, bias=bias),
    }
    _beside(problem, runs["epifuse"]())
    seconds = _interleaved(runs, rounds)
    for name, times in seconds.items():
        _say(f"  {name:<16} {statistics.median(times) * 1e3:8.1f} ms   {_peak(runs[name], x) / 1e6:8.1f} MB allocated")
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    _say(
        f"  PyTorch takes {ratio:.2f} x the time: median of {rounds} paired rounds, {torch.get_num_threads()} thread(s)"
    )


def _interleaved(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in every round, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    print(f"  timing {rounds} rounds ", end="", flush=True)
    for round_ in range(rounds + 1):
        for name, call in runs.items():
            start = time.perf_counter()
            call().item()  # waits for the device
            if round_:
                seconds[name].append(time.perf_counter() - start)
        print(".", end="", flush=True)
    print()
    return seconds


def _peak(call: Run, x: torch.Tensor) -> int:
    if not x.is_cuda:
        return peak_bytes(call)
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    call()
    return torch.cuda.max_memory_allocated(x.device) - before


# --- telling -----------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, flush=True)


def _title(text: str) -> None:
    _say(f"\n{text}\n{'-' * len(text)}")


def _list(lines: Iterable[str]) -> None:
    for line in lines:
        _say(f"  {line}")
