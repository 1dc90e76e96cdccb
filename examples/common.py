"""What the examples share: command lines, runs, timing.

Where no size is given, each element is compared with PyTorch at a small size, for the CPU does that, and times are
taken at a size at which a person would use the example on the device.
"""

import argparse
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

os.environ.setdefault("EPIFUSE_BACKGROUND", "0")  # what is timed is the best kernel, and none that stands in for it

import epifuse as ef
from epifuse.debug import interleaved, peak_bytes
from epifuse.testing import Verdict, verified, wanted

NAMES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
DTYPES = {name: getattr(torch, name) for name in NAMES}
FLOATS = tuple(DTYPES[name] for name in NAMES[:4])
Size = tuple[int, ...]


class Sizes(NamedTuple):
    """Of an example, where none is given: to compare each element, and to take times on the CPU or a GPU."""

    checked: Size
    cpu: Size
    gpu: Size

    def checked_and_timed(self, given: Size | None, device: torch.device) -> tuple[Size, Size]:
        """A size that was given is both."""
        return given or self.checked, given or (self.gpu if device.type == "cuda" else self.cpu)

    def __str__(self) -> str:
        checked, cpu, gpu = (",".join(map(str, size)) for size in self)
        return f"by default {cpu} on the CPU and {gpu} on a GPU, verified at {checked}"


CUTLASS = Sizes(checked=(512, 256, 128, 1), cpu=(2048, 2048, 256, 1), gpu=(8192, 4096, 2048, 1))
"""Of the programs that take CUTLASS's command lines: M, N, K and L."""


def dtype(text: str) -> torch.dtype:
    """`float16`, as torch calls it."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


def amount(text: str) -> int:
    """`10`, a whole number from 0."""
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def numbers(count: int, names: str) -> Callable[[str], tuple[int, ...]]:
    """`256,128` as whole numbers above 0."""

    def parse(text: str) -> tuple[int, ...]:
        parts = text.replace("x", ",").split(",")
        if len(parts) != count or not all(part.strip().isdigit() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}, {count} whole numbers above 0")
        return tuple(map(int, parts))

    return parse


def command_line(description: str, *tensors: str) -> argparse.ArgumentParser:
    """The options of every example; `tensors` are those whose dtypes can be chosen beside A and B."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    problem = parser.add_argument_group("problem")
    problem.add_argument("--mnkl", type=numbers(4, "M,N,K,L"), default=argparse.SUPPRESS, help=f"M,N,K,L; {CUTLASS}")
    problem.add_argument("--ab_dtype", type=dtype, default=torch.float16, help="dtype of A and B")
    problem.add_argument("--acc_dtype", type=dtype, default=torch.float32, help="dtype of the accumulator")
    for name in tensors:
        problem.add_argument(f"--{name}_dtype", type=dtype, default=torch.float16, help=f"dtype of {name.upper()}")
    for name, majors in (("a", "km"), ("b", "nk"), ("cd", "nm")):
        problem.add_argument(f"--{name}_major", choices=list(majors), default=majors[0], help="the contiguous axis")
    kernel = parser.add_argument_group("kernel")
    kernel.add_argument("--mma_tiler_mn", type=numbers(2, "M,N"), help="the tile; the planner's choice by default")
    kernel.add_argument("--cluster_shape_mn", type=numbers(2, "M,N"), help="the cluster; the planner's by default")
    kernel.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    run_ = parser.add_argument_group("run")
    run_.add_argument("--warmup_iterations", type=amount, default=2, help="runs before the timing")
    run_.add_argument("--iterations", type=amount, default=10, help="timed runs")
    run_.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with PyTorch")
    run_.add_argument("--explain", action="store_true", help="print the graph, the plan and the refusals")
    return parser


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    make: Callable[[argparse.Namespace], tuple[ef.DenseGemm, tuple[torch.Tensor, ...], dict[str, Any]]],
) -> int:
    """Parse the command line, make the GEMM with its tensors and numbers, verify, explain and time it."""
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    try:
        device = torch.device(options.device)
        checked, timed = CUTLASS.checked_and_timed(getattr(options, "mnkl", None), device)
        if options.verify:
            gemm, tensors, scalars = make(at(options, mnkl=checked))
            say_verdicts(gemm.verify(*tensors, **scalars), checked)
        gemm, tensors, scalars = make(at(options, mnkl=timed))
        explanation = ef.explain(gemm.arguments(*tensors, **scalars))
        print(explanation if options.explain else explanation.plan or explanation)
        say_times({"epifuse": lambda: gemm.run(*tensors, **scalars)}, device, options, 2 * math.prod(timed))
    except (ef.errors.EpifuseError, RuntimeError) as error:  # torch's, where memory does not suffice
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


def at(options: argparse.Namespace, **size: Size) -> argparse.Namespace:
    """The options with another size."""
    return argparse.Namespace(**{**vars(options), **size})


def say_verdicts(verdicts: Mapping[str, Verdict], size: Size) -> None:
    """How much of each output was compared, and at which size."""
    for name, verdict in verdicts.items():
        compared = f"{verdict.judged} of {verdict.total} elements compared with PyTorch"
        print(f"verified {name}: {compared} at {' x '.join(map(str, size))}, all right")


def say_times(
    runs: Mapping[str, Callable[[], Any]], device: torch.device, options: argparse.Namespace, operations: int = 0
) -> None:
    """Time and memory of each run; on a GPU the device's time, from an empty L2 cache. `operations`: of the product."""
    if options.iterations == 0:
        return
    for name, times in interleaved(runs, device, options.iterations, options.warmup_iterations).items():
        seconds = statistics.median(times)
        rate = f", {operations / seconds / 1e12:.2f} TFLOP/s" if operations else ""
        memory = f"{peak_bytes(runs[name], device) / 1e6:.1f} MB allocated"
        print(f"{name:<16}{seconds * 1e3:9.3f} ms{rate}, median of {options.iterations}; {memory}")


# --- examples of a layer or a loss, written as functions -------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]
Gemm = Callable[..., Any]


class Layer(NamedTuple):
    """The same computation three times, each returning what it makes, by name, and a sentence about what is saved."""

    fused: Callable[[Gemm], Tensors]
    eager: Callable[[], Tensors]
    exact: Callable[[], Tensors]
    remark: str


def layer_command_line(description: str, sizes: Sizes, meaning: str) -> argparse.ArgumentParser:
    """The options of every such example; `meaning` says what M, N and K are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--mnk", type=numbers(3, "M,N,K"), default=argparse.SUPPRESS, help=f"{meaning}; {sizes}")
    parser.set_defaults(sizes=sizes)
    parser.add_argument(
        "--dtype", type=dtype, choices=FLOATS, default=torch.bfloat16, metavar="dtype", help="activations and weights"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    parser.add_argument("--warmup_iterations", type=amount, default=2, help="runs before the timing")
    parser.add_argument("--iterations", type=amount, default=10, help="timed runs")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with float64")
    return parser


def run_layer(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, make: Callable[[argparse.Namespace], Layer]
) -> int:
    """Parse the command line; say what is fused, how exact it is beside eager PyTorch, and how fast."""
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    try:
        device = torch.device(options.device)
        checked, timed = options.sizes.checked_and_timed(getattr(options, "mnk", None), device)
        layer = make(at(options, mnk=timed))
        if options.verify:
            (layer if checked == timed else make(at(options, mnk=checked))).fused(verified_gemm)
        made = layer.fused(told)
        if options.verify:
            say_errors(made, layer)
        print(layer.remark)
        say_times({"epifuse": lambda: layer.fused(ef.gemm), "PyTorch, eager": layer.eager}, device, options)
    except (ef.errors.EpifuseError, RuntimeError) as error:  # torch's, where memory does not suffice
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


def told(a: torch.Tensor, b: torch.Tensor, **named: Any) -> Any:
    """`ef.gemm`, and a word on what was fused."""
    print(ef.explain(described(a, b, **named)).plan)
    return ef.gemm(a, b, **named)


def verified_gemm(a: torch.Tensor, b: torch.Tensor, **named: Any) -> Any:
    """`ef.gemm`, and every output compared with the epilogue run by PyTorch in float64, by an error bound."""
    args = described(a, b, **named)
    wants = wanted(args, ef.reference(named["epilogue"]))
    result = ef.gemm(a, b, **named)
    outputs = args.epilogue.parsed.output_names
    made = dict(zip(outputs, result if len(outputs) > 1 else (result,), strict=True))
    say_verdicts(verified(made, wants), (len(a), b.shape[1], len(b)))
    return result


def described(
    a: torch.Tensor, b: torch.Tensor, *, epilogue: Any, out_dtypes: Any = None, **operands: Any
) -> ef.GemmArguments:
    """What `ef.gemm` would be asked to do."""
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, operands), out_dtypes=out_dtypes)


def say_errors(made: Tensors, layer: Layer) -> None:
    """The largest error of each result beside its largest value: the fused one's and eager PyTorch's."""
    eager, exact = layer.eager(), layer.exact()
    for name, want in exact.items():
        ours, theirs = (float((x[name].double() - want).abs().max() / want.abs().max()) for x in (made, eager))
        print(f"error of {name} against float64: epifuse {ours:.1e}, PyTorch, eager {theirs:.1e}")


def normal(*shape: int, like: argparse.Namespace, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return (torch.randn(shape) * scale).to(like.dtype).to(like.device)
