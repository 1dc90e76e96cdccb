"""The examples, run as a person would: on the CPU here, and on a GPU where there is one."""

import argparse
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import run_each

import epifuse as ef
from epifuse.runtime import background

EXAMPLES = Path(__file__).parents[1] / "examples"
CUSTOM, ACTIVATION, SYNTHETIC = (
    f"{kind}_epilogue_dense_gemm" for kind in ("custom", "activation_custom", "synthetic_custom")
)
LAYERS = {
    "binary_cross_entropy": "loss",
    "cross_entropy": "loss",
    "rms_norm": "x D",
    "bias_gradient": "dx dbias",
    "quantised_mlp": "D",
}
"""Examples written as functions, and what each makes."""
EVERY = (CUSTOM, ACTIVATION, SYNTHETIC, *LAYERS)
Load = Callable[[str], ModuleType]
SMALL = "--mnkl 48,40,32,2 --iterations 1 --warmup_iterations 0 --device cpu"
SMALL_LAYER = "--mnk 48,40,32 --iterations 1 --warmup_iterations 0 --device cpu"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def run(module: ModuleType, arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert module.main(f"{SMALL} {arguments}".split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "arguments", "outputs"),
    [
        (CUSTOM, "--alpha 2 --beta 0.5 --x_factor 0.25", "d y"),
        (CUSTOM, "--ab_dtype bfloat16 --c_dtype float32 --x_dtype bfloat16 --d_dtype float32 --y_dtype float32", "d y"),
        (CUSTOM, "--a_major m --b_major k --cd_major m --ab_dtype float32", "d y"),
        (CUSTOM, "--mma_tiler_mn 16,32 --cluster_shape_mn 1,1", "d y"),
        (CUSTOM, "--ab_dtype int8 --acc_dtype int32 --c_dtype int8 --d_dtype int8 --y_dtype int32", "d y"),
        (CUSTOM, "--ab_dtype float8_e4m3fn --d_dtype float8_e5m2", "d y"),
        *((ACTIVATION, f"--activation {name} --bias 0.5 --scale_a 0.5", "d aux") for name in ("relu", "gelu", "tanh")),
        (ACTIVATION, "--activation leaky_relu --leaky_relu_alpha 0.2 --beta -1 --scale_c 2", "d aux"),
        (SYNTHETIC, "--read_tensors 0 --written_tensors 1 --beta 2", "w0"),
        (SYNTHETIC, "--read_tensors 3 --written_tensors 2 --t_dtype float32", "w0 w1"),
    ],
)
def test_an_example_verifies_itself(
    example: str, arguments: str, outputs: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(load(example), arguments, capsys)
    for name in outputs.split():
        assert f"verified {name}: 3840 of 3840 elements" in printed
    assert re.search(r"epifuse +[\d.]+ ms, [\d.]+ TFLOP/s, median of 1; [\d.]+ MB allocated", printed)


def test_what_an_example_computes(load: Load) -> None:
    module = load(SYNTHETIC)
    common = load("common")
    parser = common.command_line("", "t")
    for name, value in {"read_tensors": 2, "written_tensors": 2, "alpha": 0.5, "beta": 1.0, "verbose": False}.items():
        parser.set_defaults(**{name: value})
    gemm, (a, b, t0, t1, _, w1), numbers = module.make(
        parser.parse_args(f"{SMALL} --ab_dtype float32 --t_dtype float32".split())
    )
    gemm.run(a, b, t0, t1, torch.empty_like(w1), w1, **numbers)
    read = 1.0 + 0.5 * t0 + 0.5 * t1
    read = torch.where(read < 1.0, read, 2.0 * read)
    torch.testing.assert_close(w1, ((a @ b) * 0.5 + read) * 0.5 + read)


def test_an_example_explains(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(load(CUSTOM), "--explain --no-verify", capsys)
    assert "return d[l, m, n]" in printed
    assert "refused" in printed
    assert "verified" not in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--mnk 48,40", "is not M,N,K, 3 whole numbers above 0"),
        ("--dtype half", "'half' is none of float32"),
        ("--dtype int8", "invalid choice: torch.int8"),
        ("--device nowhere", "nowhere"),
        ("--quantised bfloat16", "invalid choice"),
    ],
)
def test_a_wrong_command_line_of_a_layer(
    arguments: str, says: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load("quantised_mlp").main([*SMALL_LAYER.split(), *arguments.split()])
    assert caught.value.code != 0
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--mnkl 48,40,32", "is not M,N,K,L, 4 whole numbers above 0"),
        ("--mnkl 48,0,32,1", "is not M,N,K,L"),
        ("--ab_dtype half", "'half' is none of float32"),
        ("--cluster_shape_mn 2,1", "no cluster to choose"),
        ("--iterations -1", "'-1' is no whole number from 0"),
        ("--device cuda:99", "device must be a device that this machine has"),
        ("--mnkl 7000000,7000000,1,1", "allocate"),
        ("--acc_dtype float64", "accumulator_type torch.float64 does not go with inputs"),
    ],
)
def test_a_wrong_command_line(arguments: str, says: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(CUSTOM).main([*SMALL.split(), *arguments.split()])
    assert caught.value.code != 0
    assert says in capsys.readouterr().err


# --- layers and losses ----------------------------------------------------------------------------------------------


def options(load: Load, **named: Any) -> argparse.Namespace:
    common = load("common")
    parser = common.layer_command_line("", common.Sizes((), (), ()), "")
    parser.set_defaults(quantised=torch.int8, device="cpu", mnk=(48, 40, 32), **named)
    return parser.parse_args([])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("example", LAYERS)
def test_a_layer_verifies_itself(example: str, dtype: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(example).main([*SMALL_LAYER.split(), "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    for name in LAYERS[example].split():
        assert f"error of {name} against float64: epifuse " in printed
    assert printed.count("plan ") == printed.count("on cpu") >= 1
    assert "all right" in printed
    assert "PyTorch, eager  " in printed


@pytest.mark.parametrize("example", LAYERS)
def test_a_layer_computes_what_torch_does(example: str, load: Load) -> None:
    """In float64, where its own formula and torch's ready function agree to many digits; 8 bits in float32."""
    quantised = example == "quantised_mlp"
    layer = load(example).make(options(load, dtype=torch.float32 if quantised else torch.float64))
    made = layer.fused(ef.gemm)
    assert list(made) == LAYERS[example].split()
    for name, want in (layer.eager() if quantised else layer.exact()).items():
        torch.testing.assert_close(made[name], want, check_dtype=False)


@pytest.mark.parametrize("example", LAYERS)
def test_hopper_carries_each_product_of_a_layer(example: str, load: Load) -> None:
    """All of them but products of 8-bit values whose rows TMA cannot address: of 40 bytes."""
    common = load("common")

    def planned(a: torch.Tensor, b: torch.Tensor, **named: Any) -> Any:
        args = common.described(a, b, **named)
        assert bool(ef.get_kernels(args, cc=90)) == (a.dtype.itemsize == 2), ef.explain(args, cc=90)
        return ef.gemm(a, b, **named)

    load(example).make(options(load, dtype=torch.bfloat16)).fused(planned)


@pytest.mark.parametrize("quantised", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_8_bit_values_where_no_kernel_multiplies_them(
    quantised: str, load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{SMALL_LAYER} --quantised {quantised}".split()
    example, explain = load("quantised_mlp"), ef.explain
    assert example.main(run) == 0
    assert "multiplied as" not in capsys.readouterr().out
    monkeypatch.setattr(ef, "explain", lambda args: explain(args, cc=90))
    assert example.main(run) == 0
    printed = capsys.readouterr().out
    assert f"multiplied as bfloat16, for no kernel multiplies torch.{quantised} here:" in printed
    assert "A has a stride of 40 bytes, and TMA needs a multiple of 16" in printed
    assert "verified D: 1536 of 1536 elements" in printed
    assert example.main([word.replace("48,40,32", "48,64,32") for word in run]) == 0
    assert "multiplied as" not in capsys.readouterr().out


def test_a_layer_that_is_wrong_says_so(
    load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example, gemm = load("bias_gradient"), ef.gemm
    monkeypatch.setattr(ef, "gemm", lambda *args, **named: tuple(x * 1.01 for x in gemm(*args, **named)))
    with pytest.raises(SystemExit) as caught:
        example.main(SMALL_LAYER.split())
    assert caught.value.code == 1
    assert "'dx'" in capsys.readouterr().err


def test_by_default_a_small_size_is_verified_a_large_one_timed(
    load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = load("common")
    sizes = common.Sizes(checked=(16, 24, 8), cpu=(48, 40, 32), gpu=(64, 40, 32))
    assert sizes.checked_and_timed(None, torch.device("cuda:1")) == (sizes.checked, sizes.gpu)
    assert sizes.checked_and_timed(sizes.cpu, torch.device("cuda")) == (sizes.cpu, sizes.cpu)
    monkeypatch.setattr(common, "Sizes", lambda **_: sizes)
    monkeypatch.setattr(common, "CUTLASS", common.CUTLASS._replace(checked=(16, 24, 8, 1), cpu=(48, 40, 32, 1)))
    for example in ("bias_gradient", CUSTOM):
        assert load(example).main(["--device", "cpu", "--iterations", "1"]) == 0
        printed = capsys.readouterr().out
        assert "384 of 384 elements compared with PyTorch at 16 x 24 x 8" in printed
        assert "M=48 N=40 K=32" in printed


def test_no_iterations_time_nothing(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("bias_gradient").main([*SMALL_LAYER.split(), "--iterations", "0"]) == 0
    assert " ms" not in capsys.readouterr().out


# --- all of them ----------------------------------------------------------------------------------------------------


def test_as_programs() -> None:
    sizes = {example: SMALL_LAYER if example in LAYERS else SMALL for example in EVERY}
    printed = run_each([[str(EXAMPLES / f"{example}.py"), *size.split()] for example, size in sizes.items()])
    assert [program for program, text in printed.items() if "verified" not in text] == []
    assert len(printed) == len(EVERY)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        (CUSTOM, ""),
        *((ACTIVATION, f"--activation {name} --bias 0.5") for name in ("relu", "gelu", "silu", "tanh")),
        (SYNTHETIC, "--read_tensors 3 --written_tensors 2"),
    ],
)
def test_on_a_gpu(example: str, arguments: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"{SMALL} --device cuda --mnkl 512,256,128,1 --mma_tiler_mn 128,128 {arguments}"
    assert load(example).main(run.split()) == 0
    assert "131072 of 131072 elements" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("mnk", ["384,512,256", "200,264,136"])
@pytest.mark.parametrize("example", LAYERS)
def test_a_layer_on_a_gpu(example: str, mnk: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(example).main(f"{SMALL_LAYER} --device cuda --mnk {mnk}".split()) == 0
    printed = capsys.readouterr().out
    assert printed.count("plan ") == printed.count("on sm_90a") >= 1
    assert "all right" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("example", LAYERS)
def test_a_layer_is_faster_than_eager_at_its_own_size_on_a_gpu(
    example: str, load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONFIG", replace(background.CONFIG, background=False))
    assert load(example).main(["--device", "cuda"]) == 0
    ours, eager = (float(ms) for ms in re.findall(r"([\d.]+) ms, median", capsys.readouterr().out))
    assert ours < eager


def test_every_example_is_here() -> None:
    with_a_test_of_its_own = "quantised_llama"
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"common", with_a_test_of_its_own, *EVERY}
