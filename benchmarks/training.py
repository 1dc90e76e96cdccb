"""Compare the loss curves of a small GPT in training: eager, torch.compile, ef.compile, and layers that call ef.linear.

    python benchmarks/training.py [--parallel alone ddp tp] [--steps 300] [--device cuda] [--save out.json]

Each is trained in one process, and in two processes by DDP and with tensor parallelism (gloo on CPUs; NCCL and bfloat16
autocast on GPUs). All get the same batches, of the text of Python's standard library. Rounding makes any two curves
differ, so this noise is measured: eager runs again from weights that are moved by one rounding, and with other batches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import command, machine, save
from torch import Tensor, nn

import epifuse as ef

PROCESSES = 2
TEXT = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "doctest.py", "inspect.py", "tarfile.py", "typing.py")
MOVED, REORDERED = 3, 3
"""The number of further eager runs from moved weights, and with other batches."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of a batch."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 16


SIZES, CPU = Sizes(), torch.device("cpu")


def shifted_gelu(accum: Any, bias: Any) -> Any:
    """The epilogue of the first layer of the MLP."""
    return ef.gelu(accum + bias)


class Linear(nn.Linear):
    """A linear layer, followed by gelu if `gelu` is set. It calls epifuse if `fused` is set."""

    fused = False
    gelu = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            made = F.linear(x, self.weight, self.bias)
            return F.gelu(made) if self.gelu else made
        if self.gelu:
            return ef.linear(x, self.weight, epilogue=shifted_gelu, bias=self.bias)
        return ef.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Attention, then an MLP. With tensor parallelism each process has a part of the heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head = width // sizes.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)
        self.up.gelu = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.between(x)))


class Gpt(nn.Module):
    """A model whose output is the loss of predicting the next byte."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.last, self.logits = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, 256)

    def forward(self, text: Tensor) -> Tensor:
        read, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(read) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.logits(self.last(x)).flatten(0, 1), wanted.flatten())


def text_of_python() -> Tensor:
    """The bytes of some modules of the standard library."""
    folder = Path(os.__file__).parent
    text = b"".join((folder / name).read_bytes() for name in TEXT)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: Tensor, sizes: Sizes, step: int, order: int) -> Tensor:
    """The batch of a step, of shape (batch, length + 1). Each `order` gives other batches."""
    generator = torch.Generator().manual_seed(1_000_000 * order + step)
    starts = torch.randint(len(text) - sizes.length, (sizes.batch, 1), generator=generator)
    return text[starts + torch.arange(sizes.length + 1)]


# --- ways to run and to spread ----------------------------------------------------------------------------------------

Compile = Callable[[nn.Module], Any]
WAYS: dict[str, Compile] = {
    "eager": lambda model: model,
    "torch.compile": lambda model: torch.compile(model, dynamic=False),
    "ef.compile": lambda model: ef.compile(model, dynamic=False, sites="all"),
    "ef.linear": lambda model: model,
}
"""By way, the function that makes a callable step of the model. In the last way the layers call epifuse."""


def made(sizes: Sizes, device: torch.device, fused: bool, moved: int) -> Gpt:
    """The model, with the same weights each time. If `moved` is not 0, it is the seed of random moves of the weights by
    at most one rounding."""
    torch.manual_seed(0)
    model = Gpt(sizes).to(device)
    for module in model.modules():
        if isinstance(module, Linear):
            module.fused = fused
    if moved:
        torch.manual_seed(moved)
        eps = torch.finfo(torch.bfloat16 if device.type == "cuda" else torch.float32).eps
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1 + eps * (2 * torch.rand_like(weight) - 1)
    return model


def in_parallel(model: Gpt, device: torch.device) -> Gpt:
    """Split the first layers of attention and MLP in each block by columns, and the layers that follow by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (PROCESSES,))
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


class Curve(NamedTuple):
    """The loss of each step, and the number of products that `ef.compile` fused; None for other ways."""

    losses: list[float]
    fused: int | None = None


def train(
    way: str,
    parallel: str = "alone",
    *,
    steps: int,
    sizes: Sizes = SIZES,
    device: torch.device = CPU,
    moved: int = 0,
    order: int = 0,
    compile: Compile | None = None,  # noqa: A002 - it replaces WAYS[way]
) -> Curve:
    """Train. The curve has the loss of the whole batch, in every process."""
    import torch.distributed as dist

    torch.compiler.reset()
    model, text = made(sizes, device, way == "ef.linear", moved), text_of_python()
    if parallel == "tp":
        model = in_parallel(model, device)
    step = compiled = (compile or WAYS[way])(model)
    if parallel == "ddp":
        step = nn.parallel.DistributedDataParallel(step)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # DTensors and other tensors together
    losses = []
    for each in range(steps):
        taken = batch(text, sizes, each, order)
        if parallel == "ddp":
            taken = taken.chunk(PROCESSES)[dist.get_rank()]
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext():
            loss = step(taken.to(device))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        loss = loss.detach().float()
        if parallel == "ddp":
            dist.all_reduce(loss)
            loss /= PROCESSES
        losses.append(loss.item())
    return Curve(losses, len(ef.report(compiled).fused) if way == "ef.compile" and compile is None else None)


# --- comparison -------------------------------------------------------------------------------------------------------


def distance(first: list[float], second: list[float]) -> float:
    """The root of the mean square of the difference of two curves."""
    return float((torch.tensor(first) - torch.tensor(second)).square().mean().sqrt())


def last(losses: list[float]) -> float:
    """The mean of the last tenth of a curve."""
    count = max(len(losses) // 10, 1)
    return sum(losses[-count:]) / count


def _process(rank: int, given: argparse.Namespace, parallel: str, meet: str, out: str) -> None:
    import torch.distributed as dist

    device = torch.device(given.device, rank) if given.device == "cuda" else torch.device("cpu")
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if parallel != "alone":
        backend = "nccl" if given.device == "cuda" else "gloo"
        if sys.platform == "linux":  # otherwise Gloo looks up the address of the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=PROCESSES)
    # If PyTorch found a graph on disk, epifuse's pass would not run, and the report would be empty.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    curves = {}
    for way in WAYS:
        curves[way] = train(way, parallel, steps=given.steps, device=device)
        if rank == 0:
            losses, fused = curves[way]
            told = f", {fused} products fused" if fused is not None else ""
            print(f"{parallel:6} {way:14} {losses[0]:.4f} to {last(losses):.4f}{told}", flush=True)
    if parallel == "alone":
        for i in range(MOVED):
            curves[f"eager, moved {i + 1}"] = train("eager", steps=given.steps, device=device, moved=i + 1)
        for i in range(REORDERED):
            curves[f"eager, other batches {i + 1}"] = train("eager", steps=given.steps, device=device, order=i + 1)
    if rank == 0:
        torch.save({way: tuple(each) for way, each in curves.items()}, out)
    if parallel != "alone":
        dist.destroy_process_group()


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways. Return the curves, and their distances from the eager curve in one process."""
    curves: dict[str, dict[str, Curve]] = {}
    for parallel in given.parallel:
        with tempfile.TemporaryDirectory() as folder:
            files = str(Path(folder, "meet")), str(Path(folder, "curves"))
            count = 1 if parallel == "alone" else PROCESSES
            torch.multiprocessing.spawn(_process, (given, parallel, *files), nprocs=count)
            curves[parallel] = {way: Curve(*each) for way, each in torch.load(files[1]).items()}
    eager = curves["alone"]["eager"].losses
    rows = [
        {
            "parallel": parallel,
            "way": way,
            "first": losses[0],
            "last": last(losses),
            "distance": distance(losses, eager),
            "fused": fused,
        }
        for parallel, found in curves.items()
        for way, (losses, fused) in found.items()
    ]
    noise = max(row["distance"] for row in rows if "moved" in row["way"])
    ours = [row for row in rows if "moved" not in row["way"] and "other" not in row["way"]]
    return {"noise": noise, "farthest": max(row["distance"] for row in ours), "rows": rows, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", nargs="+", default=["alone", "ddp", "tp"], choices=["alone", "ddp", "tp"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    if "alone" not in given.parallel:
        given.parallel.insert(0, "alone")
    found = measured(given)
    print(f"\n{'':6} {'':24} {'last tenth':>10}  distance from eager's, alone")
    for row in found["rows"]:
        print(f"{row['parallel']:6} {row['way']:24} {row['last']:10.4f}  {row['distance']:.2e}")
    print(f"noise {found['noise']:.2e}: eager's own, from weights moved by one rounding")
    if given.save:
        curves = {
            parallel: {way: [round(loss, 5) for loss in losses[::10]] for way, (losses, _) in each.items()}
            for parallel, each in found["curves"].items()
        }
        save(
            given.save,
            {**machine(given.device), "steps": given.steps, "command": command(sys.argv), **found, "curves": curves},
        )


if __name__ == "__main__":
    main()
