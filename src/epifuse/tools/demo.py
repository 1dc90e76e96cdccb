"""`python -m epifuse demo`: a linear layer whose epilogue is its binary cross-entropy loss, on pictures of digits.

It runs on a GPU if a kernel can run there, else on the CPU, in float32. On a GPU its large last job is in bfloat16.
The loss is that of the article on epilogue visitor trees: with f = x @ w + bias and one-hot labels C,
loss = -sum((C - 1) * f + log(clamp(sigmoid(f), 0.001, 0.999))) / n.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from epifuse.api import explain, gemm
from epifuse.base.dtypes import short
from epifuse.base.errors import EpifuseError, UnsupportedError, fail
from epifuse.base.target import TARGETS
from epifuse.fusion.activation import logsigmoid, sigmoid
from epifuse.fusion.forms import clamp
from epifuse.fusion.primitives import Value, log
from epifuse.fusion.reduction import sum
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.tools.debug import interleaved, peak_bytes, to_svg

LABELS = 16
"""Ten digits and six labels that never occur: a row of 16 values is a multiple of 16 bytes, as GPU kernels need it."""


class Setting(NamedTuple):
    """Where the demo runs, and how large its last job is and in which dtype."""

    device: torch.device
    dtype: torch.dtype
    features: int
    reach: int  # how far pictures are shifted, in pixels
    clock: str  # the time that is measured, in words


CPU = Setting(torch.device("cpu"), torch.float32, features=256, reach=1, clock="wall-clock time")
GPU = Setting(torch.device("cuda"), torch.bfloat16, features=1024, reach=3, clock="GPU time from an empty L2 cache")


def bce(accum: Value, C: Value, bias: Value) -> Value:
    """The loss, summed over the batch and the labels. No tensor of full size is written."""
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


def fused(x: torch.Tensor, w: torch.Tensor, C: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same loss in one kernel."""
    total: torch.Tensor = gemm(x, w, epilogue=bce, C=C, bias=bias)
    return total


class Problem(NamedTuple):
    """A layer with its data: x (n, K), w (K, labels), one-hot labels C, bias."""

    x: torch.Tensor
    w: torch.Tensor
    C: torch.Tensor
    bias: torch.Tensor

    @property
    def arguments(self) -> GemmArguments:
        """The arguments of the product with the loss as its epilogue, for `explain`."""
        return GemmArguments(self.x, self.w, epilogue=EpilogueArguments.partial(bce, {"C": self.C, "bias": self.bias}))


def run(svg: Path, rounds: int) -> None:
    """Run the whole demo, and print each step. It takes less than a minute."""
    torch.manual_seed(0)
    setting = _setting()
    pixels, digits = (tensor.to(setting.device) for tensor in _pictures())
    layer = _layer(pixels, digits, LABELS)
    _look(layer, svg)
    _learn(layer, digits)
    _measure(_which_picture(pixels, setting), setting, rounds)


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures of digits, (n, 64) with values from 0 to 1, and the digit of each."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        error = fail("missing_package", None, what="reading digits", package="scikit-learn", extra="demo")
        _left_out(error, "Ten random patterns with noise take their place.")
        return _patterns()
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def _patterns(count: int = 1797) -> tuple[torch.Tensor, torch.Tensor]:
    patterns, digits = torch.rand(10, 64), torch.randint(10, (count,))
    return (patterns[digits] + 0.2 * torch.randn(count, 64)).clamp(0, 1), digits


def _layer(x: torch.Tensor, classes: torch.Tensor, labels: int) -> Problem:
    C = torch.nn.functional.one_hot(classes, labels).to(x.dtype)
    w = 0.05 * torch.randn(x.shape[1], labels, dtype=x.dtype, device=x.device)
    return Problem(x, w, C, torch.zeros_like(w[0]))


def _setting() -> Setting:
    """Return the setting of the GPU if a kernel can run there, else that of the CPU, and print why."""
    if not torch.cuda.is_available():
        _say(f"Device: the CPU, {torch.get_num_threads()} thread(s); this machine has no GPU.")
        return CPU
    reasons = _refusals_on_gpu()
    if not reasons:
        _say(f"Device: {torch.cuda.get_device_name()}.")
        return GPU
    _say(f"Device: the CPU. There is {torch.cuda.get_device_name()}, but no kernel for this epilogue on it:")
    _list(reasons)
    return CPU


def _refusals_on_gpu() -> tuple[str, ...]:
    """The reasons why no kernel runs the loss on this GPU; none if one does. Only shapes are planned, nothing runs."""
    major, minor = torch.cuda.get_device_capability()
    cc = major * 10 + minor
    if cc not in TARGETS:
        return (f"compute capability {cc} is none of {', '.join(map(str, TARGETS))}",)
    shapes = ((1797, 64), (64, LABELS), (1797, LABELS), (LABELS,))
    problem = Problem(*(torch.empty(shape, device="meta") for shape in shapes))
    found = explain(problem.arguments, cc=cc)
    return () if found.plan else found.selection.reasons


# --- the three acts ----------------------------------------------------------------------------------------------


def _look(problem: Problem, svg: Path) -> None:
    _title("1. The graph, the plan, the refusals, the result")
    args = problem.arguments
    _say(str(explain(args)))
    if problem.x.device.type == "cpu":
        _say(f"\nThe plan for a Hopper GPU:\n{explain(args, cc=90).plan}")
    _say("")
    try:
        _say(f"The graph as a picture: {to_svg(args.graph, svg)}")
    except (UnsupportedError, OSError) as error:
        _left_out(error)
    _say("")
    _beside(problem)


def _beside(problem: Problem) -> None:
    n, exact = len(problem.x), _exact(problem)
    _say(f"  loss, PyTorch in float64   {-exact / n:.9f}")
    for name, total in (("PyTorch", eager(*problem)), ("epifuse", fused(*problem))):
        error = abs(total.item() - exact) / abs(exact)
        _say(f"  loss, {name:<20} {-total.item() / n:.9f}   relative error {error:.0e}")


def _exact(problem: Problem) -> float:
    """The loss in float64, computed for some rows at a time to save memory."""
    w, bias = problem.w.double(), problem.bias.double()
    parts = zip(torch.split(problem.x, 1024), torch.split(problem.C, 1024), strict=True)
    return float(torch.stack([eager(x.double(), w, C.double(), bias) for x, C in parts]).sum())


def _learn(problem: Problem, digits: torch.Tensor, steps: int = 200) -> float:
    """Train the layer, and return the share of digits that it recognises in the end."""
    _title("2. Learning: the same epilogue also returns the gradient; the update is the epilogue of a second GEMM")
    x, w, C, _ = problem
    n, rate = len(x), 2.0 / len(x)
    w, bias = w.clone(), problem.bias.clone()

    def update(accum: Value, W: Value) -> Value:
        w = W + rate * accum
        return w

    right = 0.0
    for step in range(steps + 1):
        total, G = gemm(x, w, epilogue=bce_and_gradient, C=C, bias=bias)
        if step % 50 == 0:
            right = ((x @ w + bias).argmax(1) == digits).float().mean().item()
            _say(f"  step {step:>3}: loss {-total.item() / n:.4f}, {right:.1%} of the digits right")
        gemm(x.t(), G, epilogue=update, W=w, out=w)
        bias += rate * G.sum(0)
    return right


def _which_picture(pixels: torch.Tensor, setting: Setting) -> Problem:
    """A layer that recognises each picture after shifts: every picture has its own label. The number of labels is a
    multiple of eight, so that a row of bfloat16 values is a multiple of 16 bytes, see `LABELS`."""
    pictures = pixels[: len(pixels) // 8 * 8].view(-1, 8, 8)
    span = range(-setting.reach, setting.reach + 1)
    shifts = [shift for shift in product(span, span) if abs(shift[0]) + abs(shift[1]) <= setting.reach]
    shifted = torch.cat([pictures.roll(shift, dims=(1, 2)) for shift in shifts]).view(-1, 64)
    features = torch.relu(shifted @ torch.randn(64, setting.features, device=pixels.device) / 4)
    classes = torch.arange(len(pictures), device=pixels.device).repeat(len(shifts))
    return _layer(features.to(setting.dtype), classes, len(pictures))


def _measure(problem: Problem, setting: Setting, rounds: int) -> None:
    (m, k), n = problem.x.shape, problem.w.shape[1]
    size = f"{m} x {k} features, {m * n / 1e6:.0f} million logits, {short(problem.x.dtype)}"
    _title(f"3. Time and memory: {n} labels, one a picture ({size})")
    runs = {"PyTorch, eager": lambda: eager(*problem), "epifuse": lambda: fused(*problem)}
    _beside(problem)
    seconds = interleaved(runs, setting.device, rounds)
    for name, times in seconds.items():
        allocated = peak_bytes(runs[name], setting.device) / 1e6
        _say(f"  {name:<16} {statistics.median(times) * 1e3:8.3f} ms   {allocated:8.1f} MB allocated")
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    _say(f"  PyTorch takes {ratio:.2f} x the time: median of {rounds} paired rounds, {setting.clock}")


# --- telling -----------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, flush=True)


def _left_out(error: EpifuseError | OSError, instead: str = "") -> None:
    """Print what is missing and how to install it, on one line."""
    _say(" ".join(["Left out:", "; ".join(line.strip() for line in str(error).splitlines()) + ".", instead]).strip())


def _title(text: str) -> None:
    _say(f"\n{text}\n{'-' * len(text)}")


def _list(lines: Iterable[str]) -> None:
    for line in lines:
        _say(f"  {line}")
