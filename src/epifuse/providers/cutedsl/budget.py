"""What a design costs in shared memory. Imports no cutlass, so that planning needs none."""

from __future__ import annotations

from dataclasses import replace

from epifuse.providers.cutedsl.program import Design

STORE_STAGES = 2
SUBTILE = (128, 32)  # of both warp groups together, in either schedule
K_TILE = 64  # elements of 16 bits: one swizzle span of 128 bytes


def shared_bytes(design: Design, input_bytes: int, output_bytes: int) -> int:
    """Bytes of shared memory: A and B stages, the store buffers, barriers, and alignment."""
    m, n = design.tile
    stages = design.stages * (m + n) * K_TILE * input_bytes
    stores = STORE_STAGES * SUBTILE[0] * SUBTILE[1] * output_bytes
    return stages + stores + 16 * design.stages + 3 * 1024


def fit_stages(design: Design, output_bytes: int, capacity: int) -> int:
    """The most stages that fit, at most twelve; three at least hide the latency of a TMA load."""
    stages = 2
    while stages < 12 and shared_bytes(replace(design, stages=stages + 1), 2, output_bytes) <= capacity:
        stages += 1
    return stages
