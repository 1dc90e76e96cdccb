"""What the examples share: command lines, runs, timing."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import epifuse as ef
from epifuse.testing import verified, wanted

NAMES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
DTYPES = {name: getattr(torch, name) for name in NAMES}
FLOATS = tuple(DTYPES[name] for name in NAMES[:4])


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
    problem.add_argument("--mnkl", type=numbers(4, "M,N,K,L"), default=(512, 256, 128, 1), help="M,N,K,L")
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
    """Parse the command line, make the GEMM with its tensors and numbers, explain, verify and time it."""
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    try:
        gemm, tensors, scalars = make(options)
        args = gemm.arguments(*tensors, **scalars)
        explanation = ef.explain(args)
        print(explanation if options.explain else explanation.plan or explanation)
        if options.verify:
            for name, verdict in gemm.verify(*tensors, **scalars).items():
                print(f"verified {name}: {verdict.judged} of {verdict.total} elements compared with PyTorch, all right")
        seconds = timed(lambda: gemm.run(*tensors, **scalars), options.warmup_iterations, options.iterations)
    except (ef.errors.EpifuseError, RuntimeError) as error:  # torch's, where memory does not suffice
        parser.exit(1, f"{parser.prog}: {error}\n")
    m, n, k, l = options.mnkl
    if seconds is not None:
        rate = 2 * m * n * k * l / seconds
        print(f"{seconds * 1e3:.3f} ms a run, {rate / 1e12:.2f} TFLOP/s, mean of {options.iterations}")
    return 0


# --- examples of a layer or a loss, written as functions -------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]
Gemm = Callable[..., Any]


class Layer(NamedTuple):
    """The same computation three times, each returning what it makes, by name, and a sentence about what is saved."""

    fused: Callable[[Gemm], Tensors]
    eager: Callable[[], Tensors]
    exact: Callable[[], Tensors]
    remark: str


def layer_command_line(description: str, mnk: tuple[int, int, int], meaning: str) -> argparse.ArgumentParser:
    """The options of every such example; `meaning` says what M, N and K are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--mnk", type=numbers(3, "M,N,K"), default=mnk, help=meaning)
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
        layer = make(options)
        made = layer.fused(told_and_verified if options.verify else told)
        if options.verify:
            say_errors(made, layer)
        print(layer.remark)
        for name, step in (("epifuse", lambda: layer.fused(ef.gemm)), ("PyTorch, eager", layer.eager)):
            seconds = timed(step, options.warmup_iterations, options.iterations)
            if seconds is not None:
                print(f"{name:<16}{seconds * 1e3:9.3f} ms, mean of {options.iterations}")
    except (ef.errors.EpifuseError, RuntimeError) as error:  # torch's, where memory does not suffice
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


def told(a: torch.Tensor, b: torch.Tensor, **named: Any) -> Any:
    """`ef.gemm`, and a word on what was fused."""
    print(ef.explain(described(a, b, **named)).plan)
    return ef.gemm(a, b, **named)


def told_and_verified(a: torch.Tensor, b: torch.Tensor, **named: Any) -> Any:
    """`told`, and every output compared with the epilogue run by PyTorch in float64, by an error bound."""
    args = described(a, b, **named)
    wants = wanted(args, ef.reference(named["epilogue"]))
    result = told(a, b, **named)
    outputs = args.epilogue.parsed.output_names
    made = dict(zip(outputs, result if len(outputs) > 1 else (result,), strict=True))
    for name, verdict in verified(made, wants).items():
        print(f"verified {name}: {verdict.judged} of {verdict.total} elements compared with PyTorch, all right")
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


# --- timing ----------------------------------------------------------------------------------------------------------


def timed(step: Callable[[], Any], warmup: int, iterations: int) -> float | None:
    """Mean seconds of a run; says how far it is once a second."""
    for _ in range(warmup):
        step()
    wait()
    start = said = time.perf_counter()
    for done in range(1, iterations + 1):
        step()
        if time.perf_counter() - said > 1.0 and done < iterations:
            wait()
            said = time.perf_counter()
            print(f"  {done} of {iterations} runs, {(said - start) / done * 1e3:.1f} ms each", flush=True)
    wait()
    return (time.perf_counter() - start) / iterations if iterations > 0 else None


def wait() -> None:
    """Until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
