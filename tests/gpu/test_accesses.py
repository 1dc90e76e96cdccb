"""Every dtype an operand may have, in every access, to every dtype and layout of output: eight in one kernel."""

import pytest
import torch
from gpu.harness import LAYOUTS, Machine, check
from gpu.test_vocabulary import ACCESSES, K, L, M, N

import epifuse as ef
from epifuse.providers.cutedsl.refusals import LOADS, OUTPUTS

DTYPES = LOADS
OUT_DTYPES = OUTPUTS
GROUPS = [list(ACCESSES)[:6], list(ACCESSES)[6:]]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers; fp8 rounds some of them before they are loaded."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 101, shape).to(dtype)


def read(name: str, dtype: torch.dtype) -> str:
    return f"where({name}, accum, -1.0)" if dtype == torch.bool else f"accum + {name}"


@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("turn", range(len(DTYPES)))
def test_every_dtype_in_every_access(turn: int, group: int, machine: Machine) -> None:
    """The dtypes go round: after all turns each has met each access."""
    a, b = machine.whole(L, M, K, most=1), machine.whole(L, K, N, most=1)
    dtypes = {name: DTYPES[(turn + i) % len(DTYPES)] for i, name in enumerate(ACCESSES) if name in GROUPS[group]}
    operands = {
        name: machine.laid_out(values(ACCESSES[name][0], dtype), ACCESSES[name][1]) for name, dtype in dtypes.items()
    }
    lines = "".join(f"    {name}_ = {read(name, dtype)}\n" for name, dtype in dtypes.items())
    source = f"def epi(accum, {', '.join(dtypes)}):\n{lines}    return {', '.join(f'{name}_' for name in dtypes)}\n"
    outs = {f"{name}_": OUT_DTYPES[(turn + 5 * i) % len(OUT_DTYPES)] for i, name in enumerate(dtypes)}
    check(machine, source, a, b, operands, out_dtypes=outs, layouts=LAYOUTS[turn % 6 :] + LAYOUTS[: turn % 6])


@pytest.mark.parametrize("transposed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_and_b_by_rows_and_by_columns(dtype: torch.dtype, transposed: int, machine: Machine) -> None:
    """Batched, shared by all batches, and slices of something larger."""
    a = machine.normal(L, K, M, dtype=dtype).mT if transposed & 1 else machine.normal(L, M, K, dtype=dtype)
    b = machine.normal(N, K, dtype=dtype).t() if transposed & 2 else machine.normal(K, N, dtype=dtype)
    wide = machine.normal(L, 3 * M, 2 * K, dtype=dtype)
    slices = wide[:, M : 2 * M, K:]
    for left, right in ((a, b), (a[0], b), (slices, b), (a[:1], b.expand(1, K, N))):
        check(machine, "def epi(accum): D = accum; return D", left, right, {}, exact=False, out_dtypes=torch.float32)


MANY = {
    "float32 makes room for A and B": (2, torch.float32, 4096, (128, 128)),
    "float32 in 128 x 256": (2, torch.float32, 1024, (128, 256)),
    "a smaller tile": (8, torch.bfloat16, 1024, (64, 128)),
}


@pytest.mark.parametrize("case", MANY)
def test_many_operands_and_outputs(case: str, machine: Machine) -> None:
    """Some travel in tiles, some direct, in one kernel."""
    count, dtype, k, tile = MANY[case]
    a, b = machine.whole(200, k, most=1), machine.whole(k, 272, most=1)
    names = [f"C{i}" for i in range(count)]
    operands = {name: machine.whole(200, 272, dtype=dtype) for name in names}
    lines = "".join(f"    D{i} = accum + {names[i]} * {names[i - 1]}\n" for i in range(count))
    returned = ", ".join(f"D{i}" for i in range(count))
    source = f"def epi(accum, {', '.join(names)}):\n{lines}    return {returned}\n"
    constraints = ef.Constraints(tile=tile)
    check(machine, source, a, b, operands, out_dtypes=dtype, layouts=("rows",), constraints=constraints)
