"""How long calls take: interleaved, in an order drawn anew each round, so that clocks and heat are the same for all.

On a GPU by events, and with an L2 cache that holds nothing of the last call.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

_SECONDS = 0.2
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 31
_FLUSHED = 4
"""How often the buffer that empties the L2 cache is as large as that."""


def interleaved(calls: Sequence[Call], device: torch.device) -> list[list[float]]:
    """Seconds of each call in each round: as many rounds as 0.2 s hold, at least 7 and at most 31.

    Each is called twice before, as first calls build things. Raises what they raise.
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
    """What the host needs for one call; of a GPU's it is over before the GPU is."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = _on_host(call, 0.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


def _on_gpu(device: torch.device) -> Callable[[Call, float], float]:
    """What measures a call by events. Before it the L2 cache is filled with something else, so often that the host gets
    ahead of the GPU: the time of a short kernel would else be that of its launch."""
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
