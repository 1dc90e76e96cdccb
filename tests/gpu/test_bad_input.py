"""What the Hopper kernel cannot do, or not so: refused with its reason before anything is written, or done right.

A reason is planned, so that it is tested without a GPU too. What is refused there would be a crash or a wrong number.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.harness import Machine, check, place, refusal

import epifuse as ef
from epifuse.request.problem import Constraints

BF16, F32 = torch.bfloat16, torch.float32
TF32 = Constraints(precision="tf32")


def described(
    a: torch.Tensor, b: torch.Tensor, source: str = "def epi(accum): D = accum; return D", **options: Any
) -> ef.GemmArguments:
    """Arguments; `operands`, `constraints` and `dtypes` among the options."""
    operands = ef.EpilogueArguments.partial(source, options.pop("operands", {}))
    return ef.GemmArguments(a, b, epilogue=operands, **options)


def matrix(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def of_bytes(rows: int, columns: int, row: int, first: int = 0) -> torch.Tensor:
    """A matrix of int8 whose rows are `row` bytes apart, the first one `first` bytes into its memory."""
    return torch.empty(first + rows * row, dtype=torch.int8)[first:].as_strided((rows, columns), (row, 1))


WEIGHT = of_bytes(128, 64, 64).t()

REFUSED: dict[str, tuple[Callable[[], ef.GemmArguments], str]] = {
    "rows of A": (
        lambda: described(of_bytes(64, 100, 100), of_bytes(128, 100, 112).t()),
        "A has a stride of 100 bytes",
    ),
    "rows of B": (
        lambda: described(of_bytes(64, 100, 112), of_bytes(128, 100, 100).t()),
        "B has a stride of 100 bytes",
    ),
    "gaps in A": (lambda: described(of_bytes(64, 64, 65), WEIGHT), "A has a stride of 65 bytes"),
    "A repeated": (lambda: described(of_bytes(1, 64, 64).expand(64, 64), WEIGHT), "A is expanded, and TMA"),
    "steps in A": (lambda: described(of_bytes(64, 128, 128)[:, ::2], WEIGHT), "pass A.contiguous()"),
    "base of A": (lambda: described(of_bytes(64, 64, 64, 1), WEIGHT), "A does not start"),
    "base of B": (lambda: described(of_bytes(64, 64, 64), of_bytes(128, 64, 64, 4).t()), "B does not start"),
    "batches of A": (
        lambda: described(torch.empty(2 * 4100, dtype=torch.int8).as_strided((2, 64, 64), (4100, 64, 1)), WEIGHT),
        "A has a stride of 4100 bytes",
    ),
    "float64": (lambda: described(matrix(64, 64, dtype=torch.float64), matrix(64, 64, dtype=torch.float64)), "A is"),
    "int8 of B by rows": (
        lambda: described(matrix(64, 64, dtype=torch.int8), matrix(64, 64, dtype=torch.int8)),
        "8-bit numbers needs B by columns (K contiguous): store the weight as (N, K) and pass weight.T",
    ),
    "8 bits of an odd length": (
        lambda: described(matrix(64, 72, dtype=torch.uint8), matrix(64, 72, dtype=torch.uint8).t()),
        "A has a stride of 72 bytes, and TMA needs a multiple of 16",
    ),
    "a reshape that copies": (
        lambda: described(
            matrix(64, 64),
            matrix(64, 64),
            "def epi(accum, C): D = accum + C.reshape(64, 64); return D",
            operands={"C": torch.zeros(64, 8, 16)[:, :, :8]},
        ),
        "it cannot reshape 'C' where it lies",
    ),
    "a part of an axis": (
        lambda: described(
            matrix(64, 64), matrix(64, 64), "def epi(accum): D = sum(accum.reshape(4, 16, 64), dim=0); return D"
        ),
        "sum reduces a part of an axis that a reshape cut",
    ),
    "the batches alone": (
        lambda: described(matrix(3, 64, 64), matrix(3, 64, 64), "def epi(accum): D = sum(accum, dim=0); return D"),
        "no sum over the batches alone",
    ),
    "whole rows": (
        lambda: described(
            matrix(64, 64), matrix(64, 4096), "def epi(accum): D = accum / sum(accum, dim=1, keepdim=True); return D"
        ),
        "sum over N = 4096 does not fit one cluster's 2048 columns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name: str) -> None:
    make, reason = REFUSED[name]
    args = make()
    assert reason in refusal(args)
    with pytest.raises(ef.errors.UnsupportedError):
        compiled_anyway(args)


def compiled_anyway(args: ef.GemmArguments) -> None:
    """A kernel found for other arguments does not take these either."""
    other = ef.get_kernels(described(matrix(64, 64), matrix(64, 64)), cc=90, limit=1)[0]
    assert not other.supports(args)
    other.compile(args)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_launched_where_it_is_refused(name: str, hopper: Machine) -> None:
    """On the device there is no other kernel, so the call says all reasons, and `out` keeps its contents."""
    meant = REFUSED[name][0]()
    a, b = (on_device(x) for x in (meant.A, meant.B))
    given = {n: on_device(x) for n, x in meant.epilogue.tensors.items() if x is not None}
    out = torch.full((*a.shape[:-1], b.shape[-1]), 7.0, device="cuda")
    options = {"accumulator_type": meant.accumulator_type, "precision": meant.problem.constraints.precision}
    with pytest.raises((ef.errors.UnsupportedError, ef.errors.ArgumentError)):
        ef.gemm(a, b, epilogue=meant.epilogue.epilogue_fn, **options, **given, out=out)
    torch.cuda.synchronize()
    assert (out == 7.0).all()


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The same geometry in device memory."""
    span = 1 + x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if n)
    memory = torch.zeros(span, dtype=x.dtype, device="cuda")
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


# --- what cannot be addressed by TMA, but by hand ----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["odd", "shifted", "columns", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_operands_and_outputs_lie_anywhere(dtype: torch.dtype, layout: str, machine: Machine) -> None:
    """Misaligned rows and bases, steps, repeated rows: read and written right, with nothing around them touched."""
    m, n, k = 130, 72, 64
    a, b = machine.whole(m, k), machine.whole(k, n)
    operands = {
        "C": machine.laid_out(machine.whole(m, n, most=8, dtype=dtype), layout),
        "step": machine.whole(m, 2 * n, dtype=dtype)[:, ::2],
        "same": machine.whole(1, n, dtype=dtype).expand(m, n),
        "back": machine.whole(n, m, dtype=dtype).t(),
        "vector": machine.laid_out(machine.whole(2 * n, dtype=dtype), "shifted")[1::2],
    }
    source = "def epi(accum, C, step, same, back, vector): D = accum + C - step; E = (same + back) * vector + accum"
    check(machine, source + "; return D, E", a, b, operands, out_dtypes=dtype, layouts=[layout])


@pytest.mark.parametrize(
    "shape", [(1, 1, 8), (1, 8, 8), (7, 1, 64), (65, 9, 16), (129, 257, 8), (3, 1000, 24)], ids=str
)
def test_ragged_extents(shape: tuple[int, int, int], machine: Machine) -> None:
    """Any M; any N where B lies by columns; any K that is a multiple of 8."""
    m, n, k = shape
    a, b = machine.whole(m, k), machine.whole(n, k).t()
    operands = {"C": machine.whole(m, n, dtype=torch.float32), "row": machine.whole(n, dtype=torch.float32)}
    source = "def epi(accum, C, row): D = accum + C * row; E = accum * row; return D, E"
    check(machine, source, a, b, operands, out_dtypes={"D": torch.float32, "E": BF16}, layouts=["rows"])


@pytest.mark.parametrize(("l", "m", "n"), [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_nothing_is_launched_for_no_elements(l: int, m: int, n: int, machine: Machine) -> None:
    a, b = machine.whole(l, m, 64), machine.whole(l, 64, n)
    args = described(a, b)
    assert machine.kernel(args).run(args)["D"].shape == (l, m, n)


@pytest.mark.parametrize("where", ["A", "C", "D"])
def test_memory_of_another_library_that_starts_anywhere(where: str, machine: Machine) -> None:
    """DLPack hands over an address, not an offset: found when planning, it goes direct or is refused."""
    tensors = {"A": machine.whole(64, 64), "C": machine.whole(64, 64), "D": machine.whole(64, 64)}
    b, odd = machine.whole(64, 64), torch.zeros(64 * 64 + 1, dtype=BF16, device=machine.device)[1:]
    tensors[where] = torch.from_dlpack(odd.copy_(tensors[where].flatten())).view(64, 64)
    assert tensors[where].data_ptr() % 16
    assert tensors[where].storage_offset() == 0
    epilogue = ef.EpilogueArguments("def epi(accum, C): D = accum + C; return D", C=tensors["C"], D=tensors["D"])
    args = ef.GemmArguments(tensors["A"], b, epilogue=epilogue)
    told = str(ef.explain(args, cc=90))
    assert told.count("A is copied first") == (where == "A")
    assert ("2 bytes at a time" in told) == (where != "A")
    machine.kernel(args).run(args)
    assert torch.equal(tensors["D"], (tensors["A"].double() @ b.double() + tensors["C"].double()).to(BF16))


# --- designs that are asked for ----------------------------------------------------------------------------------

PINNED = {
    "tile": Constraints(tile=(128, 128)),
    "wide tile": Constraints(tile=(128, 256)),
    "cluster": Constraints(cluster=(1, 2)),
    "schedule": Constraints(schedule="cooperative"),
    "all": Constraints(tile=(64, 128), cluster=(2, 1), schedule="pingpong"),
}
IMPOSSIBLE = {
    "tile": (Constraints(tile=(96, 96)), "its tile is"),
    "cluster": (Constraints(cluster=(4, 4)), "its cluster is"),
    "schedule": (Constraints(schedule="stream-k"), "its schedule is"),
    "together": (Constraints(tile=(128, 256), schedule="pingpong"), "not the one asked for"),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_design_is_honoured(name: str) -> None:
    asked = PINNED[name]
    kernels = ef.get_kernels(described(matrix(512, 64), matrix(64, 512), constraints=asked), cc=90)
    designs = [kernel.spec.design for kernel in kernels]
    assert designs
    for field in ("tile", "cluster", "schedule"):
        wanted = getattr(asked, field)
        assert wanted is None or {getattr(design, field) for design in designs} == {wanted}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_design_runs(name: str, hopper: Machine) -> None:
    a, b = hopper.whole(300, 64), hopper.whole(64, 520)
    out = place((300, 520), torch.float32, "cuda")
    epilogue = ef.EpilogueArguments("def epi(accum): D = accum * 2.0; return D", D=out.view)
    args = ef.GemmArguments(a, b, epilogue=epilogue, constraints=PINNED[name])
    kernel = hopper.kernel(args)
    kernel.run(args)
    assert torch.equal(out.view.double(), 2.0 * (a.double() @ b.double()))
    assert out.intact()
    assert PINNED[name].tile in (None, kernel.metadata.tile_shape)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_design_is_refused(name: str) -> None:
    asked, reason = IMPOSSIBLE[name]
    assert reason in refusal(described(matrix(512, 64), matrix(64, 512), constraints=asked))


def test_a_pinned_tile_that_leaves_no_room_is_refused() -> None:
    """Vectors lie in shared memory, which a tile of 128 x 256 leaves less of than others do."""
    names = [f"v{i}" for i in range(44)]
    source = f"def epi(accum, {', '.join(names)}): D = accum + {' + '.join(names)}; return D"
    operands = {name: torch.empty(512) for name in names}
    pinned = described(matrix(512, 64), matrix(64, 512), source, operands=operands, constraints=PINNED["wide tile"])
    assert "its tile leaves too little shared memory for 3 stages of A and B" in refusal(pinned)
    assert ef.get_kernels(described(pinned.A, pinned.B, source, operands=operands), cc=90, limit=1)


@pytest.mark.parametrize("field", ["tile", "cluster"])
@pytest.mark.parametrize("value", [128, (128,), (128, 128, 1), ("128", "128"), (True, True), [128, 128]], ids=str)
def test_what_is_no_design_is_an_error(value: Any, field: str) -> None:
    with pytest.raises(ef.errors.ArgumentError, match=field):
        Constraints(**{field: value})


# --- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stray", ["A", "B", "C", "D"])
def test_tensors_of_two_devices_are_refused(stray: str, machine: Machine) -> None:
    tensors = {name: torch.zeros(64, 64, dtype=BF16, device=machine.device) for name in "ABCD"}
    other = "cpu" if machine.gpu else "meta"
    tensors[stray] = tensors[stray].to(other)
    with pytest.raises(ef.errors.ArgumentError, match=other):
        ef.gemm(
            tensors["A"],
            tensors["B"],
            epilogue="def epi(accum, C): D = accum + C; return D",
            C=tensors["C"],
            out=tensors["D"],
        )


@pytest.mark.gpu
def test_a_workspace_that_does_not_serve_is_refused(hopper: Machine) -> None:
    out = torch.full((512,), 7.0, device="cuda")
    source = "def epi(accum): r = sum(accum, dim=1); return r"
    epilogue = ef.EpilogueArguments(source, r=out)
    args = ef.GemmArguments(hopper.whole(512, 64), hopper.whole(64, 512), epilogue=epilogue)
    kernel = hopper.kernel(args)
    need = kernel.get_workspace_size(args)
    assert need > 0
    for workspace in (torch.empty(need - 1, dtype=torch.uint8, device="cuda"), torch.empty(need, dtype=torch.uint8)):
        with pytest.raises(ef.errors.ArgumentError, match="workspace must be"):
            kernel.run(args, workspace=workspace)
    torch.cuda.synchronize()
    assert (out == 7.0).all()
    kernel.run(args, workspace=torch.empty(need, dtype=torch.uint8, device="cuda"))
    assert torch.equal(out, (args.A.float() @ args.B.float()).sum(1))
