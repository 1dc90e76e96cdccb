"""Measuring how long calls take. Calls are interleaved, in a new random order each round, so that clock rates and heat
are the same for all of them.

On a GPU the time is taken by CUDA events, with nothing in the L2 cache that a call reads: the cache is overwritten
before each call, or calls use several sets of operands in turn.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Call = Callable[[], Any]

_SECONDS = 0.2
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 31
_FLUSHED = 4
"""The size of the buffer that overwrites the L2 cache, in sizes of the cache."""


def interleaved(calls: Sequence[Call], device: torch.device) -> list[list[float]]:
    """Seconds of each call in each round: as many rounds as 0.2 s hold, at least 7 and at most 31.

    Each call runs before the first round, because first runs build things. Raises what the calls raise.
    """
    measure = _on_gpu(device) if device.type == "cuda" else _on_host
    host = [_host_seconds(call, device) for call in calls]
    once = sum(measure(call, seconds) for call, seconds in zip(calls, host, strict=True))
    rounds = min(max(math.ceil(_SECONDS / max(once, 1e-9)), _LEAST_ROUNDS), _MOST_ROUNDS)
    taken: list[list[float]] = [[] for _ in calls]
    drawn = random.Random(0)
    for _ in range(rounds):
        for index in drawn.sample(range(len(calls)), len(calls)):
            taken[index].append(measure(calls[index], host[index]))
    return taken


def _on_host(call: Call, _: float) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _host_seconds(call: Call, device: torch.device) -> float:
    """Host time of one call in seconds. On a GPU this is the time until the launch returns, not until it is done."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = _on_host(call, 0.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


def _on_gpu(device: torch.device) -> Callable[[Call, float], float]:
    """A function that times a call with CUDA events, with a cold L2 cache.

    The cache is overwritten first, and often enough that the host gets ahead of the GPU. Without that, a short kernel
    would be measured as long as its launch takes on the host.
    """
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(_FLUSHED * cache, dtype=torch.uint8, device=device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def flush(times: int) -> float:
        start.record()
        for _ in range(times):
            buffer.zero_()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / times

    flush(2)
    one = flush(8)

    def measure(call: Call, host: float) -> float:
        for _ in range(1 + math.ceil(1.5 * host / one)):
            buffer.zero_()
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        del result
        return float(start.elapsed_time(stop)) / 1e3

    return measure


# --- several calls in a row -------------------------------------------------------------------------------------------

_SAMPLE = 1.5e-3
"""Seconds of work in one sample. CUDA events resolve half a microsecond, and clock rates settle as in a running
model."""
_ROUNDS, _FIRST, _CLOSE, _LONGEST = 12, 3, 1.2, 2.0
"""The number of rounds. After the first 3 of them only variants go on that take at most 1.2 times as long as the
fastest, and no new round starts after 2 seconds."""


def in_turn(
    variants: Sequence[Sequence[Call]], device: torch.device, rounds: int = _ROUNDS, close: float = _CLOSE
) -> list[list[float]]:
    """Seconds for a call of each variant in each round. A variant is a list of calls, one for each set of operands.

    A sample is many calls in a row, on a GPU replayed from a CUDA graph. The first round is not counted. Variants that
    take more than `close` times as long as the fastest get three rounds, and so do all if rounds take long.
    """
    sampled = _looped
    if device.type == "cuda":  # one stream for all captures: cuBLAS keeps a workspace for each
        sampled = partial(_replayed, device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    samples = [sampled(calls) for calls in variants]
    taken: list[list[float]] = [[] for _ in variants]
    drawn, going = random.Random(0), [*range(len(variants))]
    begun = time.perf_counter()
    for round_ in range(rounds + 1):
        if round_ > _FIRST and time.perf_counter() - begun > _LONGEST:
            break
        for index in drawn.sample(going, len(going)):
            seconds = samples[index]()
            if round_:
                taken[index].append(seconds)
        if round_ == _FIRST:
            medians = [median(each) for each in taken]
            going = [index for index in going if medians[index] <= close * min(medians)]
    return taken


def median(seconds: Sequence[float]) -> float:
    """The median."""
    from statistics import median  # imported here because it takes 3 ms, and most calls time nothing

    return median(seconds)


def _looped(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that takes a sample on the host and returns seconds for each call."""

    def sample(turns: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(turns):
            for call in calls:
                call()
        return (time.perf_counter() - start) / turns / len(calls)

    sample()
    turns = _turns(sample() * len(calls))
    return lambda: sample(turns)


def _replayed(device: torch.device, stream: torch.cuda.Stream, calls: Sequence[Call]) -> Callable[[], float]:
    """A function that takes a sample on a GPU, by replaying a CUDA graph, and returns seconds for each call."""
    with torch.cuda.device(device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def sample(call: Call) -> float:
            with torch.cuda.device(device):
                start.record()
                call()
                stop.record()
                stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

        def once() -> None:
            for call in calls:
                call()

        once()  # because lazy loading cannot be captured
        turns = _turns(sample(once))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(turns):
                once()
    return lambda: sample(graph.replay) / turns / len(calls)


def _turns(seconds: float) -> int:
    return max(1, round(_SAMPLE / max(seconds, 1e-9)))


def random_like(value: torch.Tensor, integer: int = 0) -> torch.Tensor:
    """A tensor of the same shape, strides, dtype and device with random values.

    Floats are normal, and 90 % of booleans are true. Integers are all `integer`, because they may be indices.
    """
    extents = zip(value.shape, value.stride(), strict=True)
    size = 1 + sum((extent - 1) * stride for extent, stride in extents) if value.numel() else 0
    drawn = torch.Generator(value.device).manual_seed(0)  # leaves the user's generators alone
    if value.is_floating_point():
        wide = value.dtype if value.dtype.itemsize > 1 else torch.float32  # PyTorch draws no float8
        flat = torch.empty(size, dtype=wide, device=value.device).normal_(generator=drawn).to(value.dtype)
    elif value.dtype == torch.bool:
        flat = torch.empty(size, dtype=value.dtype, device=value.device).bernoulli_(0.9, generator=drawn)
    else:
        flat = torch.full((size,), integer, dtype=value.dtype, device=value.device)
    return flat.as_strided(value.shape, value.stride())
