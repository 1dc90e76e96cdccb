"""Build every way to compute a case. Each is run once, and its result is compared, before it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gemm_cases import CASES, COMPILED, Case, Operands, Outputs, Peer, cublas
from gpu_timing import Calls

import epifuse as ef

EPIFUSE, OWN_PLAIN, CUBLAS_PLAIN = "epifuse", "epifuse plain", "cuBLAS plain"


@dataclass
class Variants:
    """The ways to compute one case: calls by name, the errors of their results, and why others were skipped."""

    calls: dict[str, Calls] = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    kernel: dict[str, Any] = field(default_factory=dict)


class WrongResultError(Exception):
    """A variant's result differs too much from the reference."""


def build(
    case: Case, sets: Sequence[Operands], wanted: Collection[str] | None, afford: Callable[[str], bool]
) -> Variants:
    """Build and check each variant. `wanted` are names of peers, None for all. A variant of torch.compile is left out
    if `afford(name)` says that there is no time to compile it."""
    torch._dynamo.reset()  # torch.compile compiles a function for eight shapes, then runs it eager
    made = Variants()
    want = reference(case, sets[0])
    _add(made, EPIFUSE, partial(fused, case, sets, made.kernel), case, sets[0], want)
    for name, peer in case.peers.items():
        if wanted is None or name in wanted:
            _add(made, name, partial(_direct, peer, sets), case, sets[0], want, peer)
    for name, mode in COMPILED.items() if case.compiled else ():
        if wanted is not None and name not in wanted:
            continue
        if not afford(name):
            made.skipped[name] = "no time left to compile it"
            continue
        _add(made, name, partial(_compiled, case, mode, sets), case, sets[0], want)
    made.peers = [name for name in made.calls if name != EPIFUSE]
    if case.epilogue is not None:
        plain = CASES[0]
        product = reference(plain, sets[0])
        _add(made, OWN_PLAIN, partial(fused, plain, sets, {}), plain, sets[0], product)
        _add(made, CUBLAS_PLAIN, partial(_direct, Peer(cublas), sets), plain, sets[0], product)
    return made


def reference(case: Case, x: Operands) -> Outputs:
    """The outputs of the case, computed by PyTorch in float32."""
    return case.eager(x.a.float(), x.b.float(), x.bias.float(), x.C.float())


def _add(
    made: Variants,
    name: str,
    prepare: Callable[[], Calls],
    case: Case,
    x: Operands,
    want: Outputs,
    peer: Peer | None = None,
) -> None:
    """Prepare a variant and compare its first result. If it fails, it is left out, and the reason is kept."""
    x.D.fill_(float("nan"))
    x.preact.fill_(float("nan"))
    try:
        calls = prepare()
        got = calls[0]()
        torch.cuda.synchronize()
        made.errors[name] = [round(e, 6) for e in compare(peer.finish(got) if peer else got, want)]
    except Exception as error:  # a peer may be missing, or may raise anything
        made.skipped[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return
    made.calls[name] = calls


def compare(got: Outputs, want: Outputs) -> list[float]:
    """The relative error of each output, by norms. Raises `WrongResultError` if one is too large."""
    errors = [float((g.float() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
    # The limit is one step between bfloat16 numbers. Rounding once makes an error of a fifth of it in this norm. Eager
    # PyTorch rounds three times, and a peer's reductions read rounded values.
    if not all(error <= torch.finfo(torch.bfloat16).eps for error in errors):
        raise WrongResultError(f"relative errors {errors}")
    return errors


def fused(case: Case, sets: Sequence[Operands], kernel: dict[str, Any]) -> Calls:
    """epifuse's calls, compiled. Facts about the kernel are stored in `kernel`. Raises `RuntimeError` if none runs."""
    arguments = [case.arguments(x) for x in sets]
    found = ef.get_kernels(arguments[0], limit=1)
    if not found:
        raise RuntimeError("; ".join(map(str, ef.explain(arguments[0]).refusals)))
    chosen = found[0]
    start = time.perf_counter()
    artifact = chosen.compile(arguments[0])
    kernel.update(
        name=chosen.metadata.kernel_name,
        tile=list(chosen.metadata.tile_shape),
        compile_seconds=round(time.perf_counter() - start, 3),
    )

    def run(args: ef.GemmArguments) -> Outputs:
        outputs = chosen.run(args, compiled_artifact=artifact)
        return tuple(outputs[name] for name in case.outputs)

    return [partial(run, args) for args in arguments]


def _direct(peer: Peer, sets: Sequence[Operands]) -> Calls:
    return [partial(peer.run, x) for x in sets]


def _compiled(case: Case, mode: str | None, sets: Sequence[Operands]) -> Calls:
    function = torch.compile(case.eager, mode=mode, dynamic=False)
    return [partial(function, x.a, x.b, x.bias, x.C) for x in sets]
