"""The store rule and the casts on the device: every pattern of 16 bits, edges of the wider kinds, to every dtype."""

from typing import Any

import pytest
import torch
from gpu.harness import LAYOUTS, Machine, run

import epifuse as ef
from epifuse.providers.cutedsl.refusals import CASTS, LOADS, OUTPUTS
from epifuse.tools.store_rule import store_reference
from tests.test_store import INPUTS, same

SOURCES = [name for name, x in INPUTS.items() if x.dtype in LOADS]
GROUPS = [OUTPUTS[i : i + 3] for i in range(0, len(OUTPUTS), 3)]
N = 272  # a multiple of 16 elements: rows of one byte an element travel by TMA too


@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("source", SOURCES)
def test_every_value_is_stored_by_the_rule(source: str, group: int, machine: Machine) -> None:
    """Layouts go round with the sources: each dtype leaves by TMA, in pairs and element by element."""
    values = INPUTS[source]
    m = -(-len(values) // N)
    x = values.repeat(-(-m * N // len(values)))[: m * N].view(m, N)
    names = [f"D{i}" for i in range(len(GROUPS[group]))]
    value = "x | (accum != 0)" if source == "mask" else "where(accum == 0, x, 0)"
    lines = "".join(f"    {name} = {value}\n" for name in names)
    a, b = (torch.zeros(shape, dtype=torch.bfloat16, device=machine.device) for shape in ((m, 64), (64, N)))
    turn = SOURCES.index(source) + group
    found = run(
        machine,
        f"def epi(accum, x):\n{lines}    return {', '.join(names)}\n",
        a,
        b,
        {"x": machine.laid_out(x, LAYOUTS[(turn + 1) % len(LAYOUTS)])},
        out_dtypes=dict(zip(names, GROUPS[group], strict=True)),
        layouts=LAYOUTS[turn % len(LAYOUTS) :] + LAYOUTS[: turn % len(LAYOUTS)],
    )
    for name, dtype in zip(names, GROUPS[group], strict=True):
        wrong = ~same(found[name], store_reference(x.reshape(-1), dtype).view(m, N))
        shown = [t[wrong][:4].to(torch.float64).tolist() for t in (x, found[name])]
        assert not wrong.any(), f"{int(wrong.sum())} of {m * N} to {dtype}: values {shown[0]}, stored {shown[1]}"


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_a_cast_is_torchs(dtype: torch.dtype, machine: Machine) -> None:
    """Whole numbers, of which fp8 rounds and overflows some and bytes wrap, and their quarters."""
    a, b = machine.whole(136, 64, most=8), machine.whole(64, 136, most=8)
    source = f"def epi(accum): D = accum.to({dtype}).float(); E = (accum * 0.25).to({dtype}).float(); return D, E"
    found = run(machine, source, a, b, {}, out_dtypes=torch.float32)
    accum = a.cpu().float() @ b.cpu().float()
    assert same(found["D"], accum.to(dtype).float()).all()
    assert same(found["E"], (accum * 0.25).to(dtype).float()).all()


@pytest.mark.parametrize("held", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_a_cast_of_integers_is_torchs(dtype: torch.dtype, held: torch.dtype, machine: Machine) -> None:
    """Those of 25 bits show that a narrow float is rounded by way of float32."""
    a, b = machine.whole(136, 64), machine.whole(64, 136)
    x = torch.randint(-(2**25), 2**25, (136, 136), dtype=held)
    x[0] = torch.arange(-68, 68)
    source = f"def epi(accum, x): D = where(accum == accum, x, 0).to({dtype}).float(); return D"
    found = run(machine, source, a, b, {"x": x.to(machine.device)}, out_dtypes=torch.float32)
    assert same(found["D"], x.to(dtype).float()).all()


def test_a_vector_of_operands_alone_is_stored_once(machine: Machine) -> None:
    """A result that does not vary over an axis has one place there."""
    a, b = machine.whole(200, 64), machine.whole(64, 136)
    row, column = machine.whole(136, dtype=torch.float32), machine.whole(200, 1, dtype=torch.float32)
    source = "def epi(accum, row, column): D = accum + row; E = row * 2; F = column * 3; return D, E, F"
    found = run(machine, source, a, b, {"row": row, "column": column}, out_dtypes=torch.float32)
    assert torch.equal(found["E"].flatten(), (row * 2).cpu())
    assert torch.equal(found["F"].flatten(), (column * 3).cpu().flatten())


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_printed_is_what_the_cpu_prints(
    batched: bool, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    lead = (2,) if batched else ()
    a, b = machine.whole(*lead, 4, 8), machine.whole(*lead, 8, 16)
    source = """def epi(accum, row):
    debug_print('accum {}', accum)
    debug_print('positive {}', accum > 0)
    debug_print('total {}', sum(accum > 0))
    D = accum + row
    return D"""
    run(machine, source, a, b, {"row": machine.whole(16)}, out_dtypes=torch.float32)
    accum = a.cpu().float() @ b.cpu().float()
    text = capsys.readouterr().out
    assert f"accum {accum}\n" in text
    assert f"positive {accum > 0}\n" in text
    assert f"{int((accum > 0).sum())}" in text.split("total ")[1]


FAR = 2**40


def beyond_32_bits(accum: Any, C: Any) -> Any:
    D = ef.where(accum == accum, C + FAR, 0)
    return D


def test_a_captured_number_of_64_bits(machine: Machine) -> None:
    a, b, C = machine.whole(136, 64), machine.whole(64, 72), torch.arange(136 * 72).view(136, 72) * 2**30
    found = run(machine, beyond_32_bits, a, b, {"C": C.to(machine.device)}, out_dtypes={"D": torch.int64})
    assert torch.equal(found["D"], C + FAR)
