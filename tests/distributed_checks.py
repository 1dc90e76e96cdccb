"""What one of several processes runs: python distributed_checks.py rank processes device folder.

Each check compares what the processes compute together with what this one computes alone, and both with float64. What
failed is written to the folder, by the name of the check.
"""

import copy
import json
import re
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_models import interpreted
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import epifuse as ef
from epifuse.base.errors import EpifuseError
from epifuse.pytorch.fuse import Fuse

ROWS, WIDTH, HIDDEN = 64, 64, 128
ALL, S = Replicate(), Shard

Check = Callable[["World"], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class World:
    """The processes: their mesh, this one's rank, the device and the dtype that its kernels take."""

    def __init__(self, rank: int, count: int, device: str) -> None:
        self.rank, self.count, self.type = rank, count, device
        self.device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.mesh: DeviceMesh = init_device_mesh(device, (count,))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype).to(self.device)


def assert_as_exact(got: Tensor, alone: Tensor, exact: Tensor) -> None:
    """Both have the same values but for rounding: `got` is as near to them as what one process computes."""
    assert got.shape == alone.shape == exact.shape
    room = 2 * (alone.double() - exact).norm() + torch.finfo(alone.dtype).eps * exact.norm()
    assert (got.double() - exact).norm() <= room


# --- single calls -----------------------------------------------------------------------------------------------------


def act(accum: Any, bias: Any) -> Any:
    D = ef.gelu(accum + bias)
    total = D.sum(dim=0)
    return D, total


def soft(accum: Any, bias: Any) -> Any:
    return ef.softmax(accum + bias, dim=-1)


def indexed(accum: Any, bias: Any) -> Any:
    return accum + bias * ef.index_n(accum)


def highest(accum: Any, bias: Any) -> Any:
    return (accum + bias).amax(dim=0)


def scaled(accum: Any, bias: Any) -> Any:
    total = accum.sum(dim=0, keepdim=True)
    return accum / (1 + total.abs()) + bias


def kept(accum: Any, bias: Any) -> Any:
    D = accum + bias
    doubled = 2 * bias
    return D, doubled


CALLS = {
    "rows": (act, S(0), ALL, ALL, [S(0), Partial()]),
    "columns": (act, ALL, S(1), S(0), [S(1), S(0)]),
    "columns, a whole bias": (act, ALL, S(1), ALL, [S(1), S(0)]),
    "K": (act, S(1), S(0), ALL, [ALL, ALL]),
    "K of A alone": (act, S(1), ALL, S(0), [ALL, ALL]),
    "rows and more columns": (act, S(0), S(1), S(0), [S(1), S(0)]),
    "nothing": (act, ALL, ALL, S(0), [ALL, ALL]),
    "a row reduction of rows": (soft, S(0), ALL, ALL, [S(0)]),
    "a row reduction of columns": (soft, ALL, S(1), S(0), [ALL]),
    "a coordinate": (indexed, ALL, S(1), S(0), [ALL]),
    "the highest of each column": (highest, S(0), ALL, ALL, [ALL]),
    "a sum that is used": (scaled, S(0), ALL, ALL, [ALL]),
    "an output of operands": (kept, S(0), ALL, ALL, [ALL, ALL]),
}
"""An epilogue, how A, B and its bias are split, and how its outputs are then."""


def _called(epilogue: Any, a: Tensor, b: Tensor, bias: Tensor) -> list[Any]:
    """A GPU computes the product again where a sum of all tiles is used."""
    return _backward(ef.gemm(a, b, epilogue=epilogue, bias=bias, allow_recompute=True))


def _apart(epilogue: Any, a: Tensor, b: Tensor, bias: Tensor) -> list[Any]:
    """The epilogue of a product that is rounded to its dtype, as PyTorch adds up parts of K."""
    return _backward(ef.reference(epilogue)(a @ b, bias=bias))


def _backward(found: Any) -> list[Any]:
    outputs = list(found) if isinstance(found, tuple) else [found]
    sum((each.float() ** 2).sum() for each in outputs).backward()  # type: ignore[union-attr]  # not empty
    return outputs


def _compare_call(world: World, name: str, rows: int, columns: int) -> None:
    epilogue, *splits, want = CALLS[name]
    torch.manual_seed(1)
    whole = [world.randn(rows, WIDTH) / 8, world.randn(WIDTH, columns), world.randn(columns)]
    alone = [each.clone().requires_grad_() for each in whole]
    exact = [each.double().requires_grad_() for each in whole]
    given = [distribute_tensor(each, world.mesh, [split]) for each, split in zip(whole, splits, strict=True)]
    given = [each.requires_grad_() for each in given]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outputs = _called(epilogue, *given)
    placements = [placement for each in outputs for placement in each.placements]
    assert placements == want, (name, placements)
    is_whole = want == [ALL] * len(want) and name not in ("K", "K of A alone", "nothing")
    assert (
        not is_whole or (rows, columns) != (ROWS, HIDDEN) or any("computes the whole" in str(w.message) for w in said)
    )
    product = exact[0] @ exact[1]
    reference = ef.reference(epilogue)(product, bias=exact[2])
    references = list(reference) if isinstance(reference, tuple) else [reference]
    sum((each**2).sum() for each in references).backward()
    singles = (_apart if name.startswith("K") else _called)(epilogue, *alone)
    for got, single, right in zip(outputs, singles, references, strict=True):
        assert_as_exact(got.full_tensor(), single, right)
    for got, single, right in zip(given, alone, exact, strict=True):
        if (rows, columns) == (ROWS, HIDDEN):  # PyTorch 2.11 gathers the gradient of what is split unevenly
            assert got.grad.placements == got.placements
        assert_as_exact(got.grad.full_tensor(), single.grad, right.grad)


@check
def single_calls(world: World) -> None:
    for name in CALLS:
        _compare_call(world, name, ROWS, HIDDEN)


@check
def uneven_parts(world: World) -> None:
    """A GPU's kernels take no odd number of columns, whole or split."""
    columns = HIDDEN if world.type == "cuda" else HIDDEN - 3
    for name in ("rows", "columns", "K", "a row reduction of columns"):
        _compare_call(world, name, ROWS - 1, columns)


def _exact_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.linear(x.double(), weight.double(), bias.double()))


@check
def more_dims(world: World) -> None:
    """x (B,S,K), split along its batch and its sequence; and batches of products."""
    torch.manual_seed(2)
    x, weight, bias = world.randn(2, 8, WIDTH), world.randn(HIDDEN, WIDTH), world.randn(HIDDEN)
    want, exact = ef.linear(x, weight, bias, epilogue=ef.gelu), _exact_layer(x, weight, bias)
    for split, of_weight, result in ((S(0), ALL, S(0)), (S(1), ALL, S(1)), (ALL, S(0), S(2)), (S(2), S(1), ALL)):
        given = [distribute_tensor(x, world.mesh, [split]), distribute_tensor(weight, world.mesh, [of_weight])]
        got = ef.linear(*given, distribute_tensor(bias, world.mesh, [ALL]), epilogue=ef.gelu)
        assert list(got.placements) == [result]
        assert_as_exact(got.full_tensor(), want, exact)
    a, b = world.randn(2, 8, WIDTH), world.randn(2, WIDTH, HIDDEN)
    got = ef.gemm(distribute_tensor(a, world.mesh, [S(0)]), distribute_tensor(b, world.mesh, [ALL]))
    assert list(got.placements) == [S(0)]
    assert_as_exact(got.full_tensor(), a @ b, (a.double() @ b.double()))


FACTOR = 2.0


def scaled_twice(accum: Any, alpha: Any) -> Any:
    return accum * alpha * FACTOR


def added(accum: Any, r: Any) -> Any:
    return accum + r


@check
def numbers_and_awaited_tensors(world: World) -> None:
    """A captured number, a learnt one, and what a collective operation has yet to write."""
    torch.manual_seed(5)
    a, b = world.randn(ROWS, WIDTH), world.randn(WIDTH, HIDDEN)
    da, db = distribute_tensor(a, world.mesh, [S(0)]), distribute_tensor(b, world.mesh, [ALL])
    product = a.double() @ b.double()
    assert_as_exact(ef.gemm(da, db, epilogue=scaled_twice, alpha=3.0).full_tensor(), a @ b * 6, product * 6)
    alpha = distribute_tensor(torch.tensor(3.0).to(world.device), world.mesh, [ALL]).requires_grad_()
    ef.gemm(da, db, epilogue=scaled_twice, alpha=alpha).float().sum().backward()
    alone = torch.tensor(3.0).to(world.device).requires_grad_()
    ef.gemm(a, b, epilogue=scaled_twice, alpha=alone).float().sum().backward()
    assert alpha.grad.placements == (ALL,)
    assert_as_exact(alpha.grad.full_tensor(), alone.grad, product.sum() * FACTOR)
    whole, part = torch.cat([a] * world.count), a @ b
    rows, rest = all_gather_tensor(a, 0, world.mesh), all_gather_tensor(part, 0, world.mesh)
    assert isinstance(rows, AsyncCollectiveTensor)
    want = torch.cat([product] * world.count)
    assert_as_exact(ef.gemm(rows, b, epilogue=ef.relu), torch.relu(whole @ b), torch.relu(want))
    assert_as_exact(ef.gemm(whole, b, epilogue=added, r=rest), 2 * (whole @ b), 2 * want)


@check
def two_dims_of_a_mesh(world: World) -> None:
    mesh = init_device_mesh(world.type, (1, world.count), mesh_dim_names=("data", "model"))
    torch.manual_seed(3)
    x, weight, bias = world.randn(ROWS, WIDTH), world.randn(HIDDEN, WIDTH), world.randn(HIDDEN)
    given = [distribute_tensor(x, mesh, [S(0), ALL]), distribute_tensor(weight, mesh, [ALL, S(0)])]
    got = ef.linear(*given, distribute_tensor(bias, mesh, [ALL, S(0)]), epilogue=ef.gelu)
    assert list(got.placements) == [S(0), S(1)]
    want = ef.linear(x, weight, bias, epilogue=ef.gelu)
    assert_as_exact(got.full_tensor(), want, _exact_layer(x, weight, bias))


def _refused(call: Callable[[], Any], key: str) -> None:
    with pytest.raises(EpifuseError) as caught:
        call()
    assert caught.value.key == key


@check
def refusals(world: World) -> None:
    a, b, bias = world.randn(ROWS, WIDTH), world.randn(WIDTH, HIDDEN), world.randn(HIDDEN)
    da, db = (distribute_tensor(each, world.mesh, [ALL]) for each in (a, b))
    other = distribute_tensor(b, init_device_mesh(world.type, (1, world.count)), [ALL, ALL])
    _refused(lambda: ef.gemm(da, b), "distributed_beside")
    _refused(lambda: ef.gemm(a, db), "distributed_beside")
    _refused(
        lambda: ef.gemm(a, b, epilogue=soft, bias=distribute_tensor(bias, world.mesh, [ALL])), "distributed_beside"
    )
    _refused(lambda: ef.gemm(da, db, epilogue=soft, bias=bias), "distributed_beside")
    _refused(lambda: ef.gemm(da, other), "distributed_meshes")
    _refused(lambda: ef.gemm(da, db, out=torch.empty_like(a @ b)), "distributed_option")
    _refused(lambda: ef.gemm(db, da[:, :3]), "inner_extent")
    # An operand whose parts would fit the parts of accum, but for the last.
    uneven = distribute_tensor(world.randn(HIDDEN + 1), world.mesh, [S(0)])
    _refused(lambda: ef.gemm(da, distribute_tensor(b, world.mesh, [S(1)]), epilogue=soft, bias=uneven), "operand_shape")


# --- a model ----------------------------------------------------------------------------------------------------------


def shifted_gelu(accum: Any, bias: Any) -> Any:
    return ef.gelu(accum + bias)


class Up(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return ef.linear(x, self.weight, epilogue=shifted_gelu, bias=self.bias)


class Down(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return ef.linear(x, self.weight, self.bias)


class Mlp(nn.Module):
    """Two layers that call epifuse; `plain` is the same in PyTorch, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Up(WIDTH, HIDDEN), Down(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))

    def plain(self, x: Tensor) -> Tensor:
        double = {name: value.detach().double().requires_grad_() for name, value in self.named_parameters()}
        hidden = nn.functional.gelu(nn.functional.linear(x.double(), double["up.weight"], double["up.bias"]))
        result = nn.functional.linear(hidden, double["down.weight"], double["down.bias"])
        result.square().mean().backward()
        self.exact = {name: value.grad for name, value in double.items()}
        return result.detach()


class Model:
    """A model that one process has run, and its batch: (B,S,K), of which each process may take a part."""

    def __init__(self, world: World, *, frozen: bool = False) -> None:
        torch.manual_seed(4)
        self.alone = Mlp().to(world.device, world.dtype)
        self.x = world.randn(4, 16, WIDTH)
        self.alone(self.x).square().mean().backward()
        self.exact = self.alone.plain(self.x)
        self.copy = copy.deepcopy(self.alone)
        self.copy.zero_grad()
        if frozen:
            self.copy.up.weight.requires_grad_(False)

    def compare(self, model: nn.Module) -> None:
        """The gradients of a model with those of one process."""
        for name, value in model.named_parameters():
            name = name.replace("module.", "").replace("_orig_mod.", "")
            if not value.requires_grad:
                assert value.grad is None
                continue
            found = value.grad
            if isinstance(found, DTensor):
                assert isinstance(value, DTensor)
                assert found.placements == value.placements
                found = found.full_tensor()
            assert_as_exact(found, self.alone.get_parameter(name).grad, self.alone.exact[name])


def _in_parallel(world: World, model: Mlp, along: Placement | None = None) -> Mlp:
    """The two layers split by columns and by rows; the sequence is split around them, where it is."""
    up = ColwiseParallel() if along is None else ColwiseParallel(input_layouts=along)
    down = RowwiseParallel() if along is None else RowwiseParallel(output_layouts=along)
    return parallelize_module(model, world.mesh, {"up": up, "down": down})


@check
def tensor_parallel(world: World) -> None:
    for frozen in (False, True):
        made = Model(world, frozen=frozen)
        model = _in_parallel(world, made.copy)
        model(made.x).square().mean().backward()
        made.compare(model)
        # PyTorch 2.11 moves no DTensor in inference mode.
        with torch.no_grad() if torch.__version__ < (2, 13) else torch.inference_mode():
            assert_as_exact(model(made.x), made.alone(made.x), made.exact)


@check
def sequence_parallel(world: World) -> None:
    made = Model(world)
    model = _in_parallel(world, made.copy, S(1))
    part = made.x.chunk(world.count, 1)[world.rank]
    (model(part).square().mean() / world.count).backward()
    made.compare(model)


def _compiled(world: World, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """A compiled model and its report. On the CPU without Inductor behind the pass, which compiles C++ for seconds."""
    if world.type == "cuda":
        step = ef.compile(model, sites="all", dynamic=False, **options)
        return step, ef.report(step)
    fuse = Fuse(sites="all")
    step = torch.compile(model, backend=interpreted(fuse), dynamic=False, **options)
    return step, fuse.report


@check
def tensor_parallel_compiled(world: World) -> None:
    """A product beside a collective operation is left to PyTorch, and no other."""
    made = Model(world)
    model = _in_parallel(world, made.copy)
    step, report = _compiled(world, model, fullgraph=True)
    step(made.x.requires_grad_()).square().mean().backward()
    made.compare(model)
    forward = [row for row in report.rows if row.graph == "forward"]
    assert [row.fused for row in forward] == [True, False]
    assert "collective" in forward[1].reason
    assert any("collective" in row.reason for row in report.rows if row.graph == "backward")


@check
def documented(world: World) -> None:
    """The program that docs/pytorch.md shows runs."""
    page = (Path(__file__).parents[1] / "docs" / "pytorch.md").read_text(encoding="utf-8")
    (program,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "init_device_mesh" in each)
    if world.type == "cuda":
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8")
        runpy.run_path(str(path))


def _by_data(world: World, made: Model, wrapped: nn.Module, step: nn.Module) -> None:
    step(made.x.chunk(world.count)[world.rank]).square().mean().backward()
    made.compare(wrapped)


@check
def data_parallel(world: World) -> None:
    made = Model(world)
    wrapped = DistributedDataParallel(made.copy)
    _by_data(world, made, wrapped, wrapped)


@check
def sharded_data_parallel(world: World) -> None:
    made = Model(world)
    for layer in (made.copy.up, made.copy.down, made.copy):
        fully_shard(layer, mesh=world.mesh)
    _by_data(world, made, made.copy, made.copy)


@check
def data_parallel_compiled(world: World) -> None:
    made = Model(world)
    wrapped = DistributedDataParallel(_compiled(world, made.copy)[0])
    _by_data(world, made, wrapped, wrapped)


@check
def sharded_data_parallel_compiled(world: World) -> None:
    made = Model(world)
    fully_shard(made.copy, mesh=world.mesh)
    _by_data(world, made, made.copy, _compiled(world, made.copy)[0])


def main(rank: int, count: int, device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    init = f"file://{folder / 'meet'}"
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    # A graph that PyTorch finds on disk does not meet the pass, and the report would be empty.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    world, failed = World(rank, count, device), {}
    for name, function in CHECKS.items():
        failed[name] = "it did not end"
        (folder / f"{rank}.json").write_text(json.dumps(failed))
        start = time.perf_counter()
        try:
            function(world)
            failed[name] = ""
        except Exception:  # told to the process that waits, whose test then fails
            failed[name] = traceback.format_exc()
        print(f"{time.perf_counter() - start:6.2f} s  {name}", flush=True)
    (folder / f"{rank}.json").write_text(json.dumps(failed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
