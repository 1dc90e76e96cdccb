"""Compile a model with torch.export and AOTInductor, with epifuse's pass. Check that the package computes the right
values here, and that it cannot be loaded in a process without epifuse.

    python benchmarks/aot_inductor.py [--device cuda] [--save benchmarks/results/aot_inductor.json]

AOTInductor compiles C++, which takes a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import machine, save
from torch import Tensor, nn

import epifuse as ef
from epifuse.pytorch.fuse import Fuse

ALONE = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"


class Mlp(nn.Module):
    """One product that calls `ef.linear`, and two that the pass finds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(64, 256), nn.Linear(256, 64), nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x))) + x
        made: Tensor = ef.linear(x, self.last, epilogue="def act(accum, r): return silu(accum) + r", r=x)
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    model, x = Mlp().to(given.device).eval(), torch.randn(128, 64, device=given.device)
    start = time.perf_counter()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(model, (x,))
        path = f"{folder}/model.pt2"
        options = {"post_grad_custom_pre_pass": Fuse(sites="all")}
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
        seconds = time.perf_counter() - start
        got = torch._inductor.aoti_load_package(path)(x)
        error = (got - model(x)).abs().max().item()
        alone = subprocess.run([sys.executable, "-c", ALONE, path], capture_output=True, text=True)
    said = alone.stderr.strip().splitlines()[-1] if alone.returncode else "it was loaded"
    found = {"seconds": seconds, "max_error": error, "without_epifuse": said}
    print(*(f"{name:16} {value}" for name, value in found.items()), sep="\n")
    if given.save:
        save(given.save, {"machine": machine(given.device), **found})


if __name__ == "__main__":
    main()
