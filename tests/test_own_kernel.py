"""A provider of another package: examples/own_kernel, found by its entry point, and what cannot be used of others."""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fuzzing.check import function_of

import epifuse as ef
from epifuse import providers
from epifuse.base.cache import forget
from epifuse.fusion.vocabulary import VOCABULARY, is_static
from epifuse.providers.cpu import CpuProvider
from epifuse.tools import doctor

FOLDER = Path(__file__).parents[1] / "examples" / "own_kernel"
# Products and sums of eighths are exact, so NumPy and PyTorch compute the same product in any order. A division by a
# small sum magnified the difference once.
A, B = (torch.randint(-16, 17, shape) / 8 for shape in ((6, 4), (4, 5)))
C = torch.randn(6, 5)
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package whose entry point has this name and value."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)

    def install(name: str, value: str) -> None:
        package = tmp_path / "own_kernel-1.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own-kernel\nVersion: 1\n")
        (package / "entry_points.txt").write_text(f"[{providers.GROUP}]\n{name} = {value}\n")
        importlib.invalidate_caches()
        providers._installed.cache_clear()

    yield install
    providers._installed.cache_clear()
    forget()


@pytest.fixture
def own(install: Install) -> ModuleType:
    """The example's module, installed as its pyproject.toml says."""
    project = (FOLDER / "pyproject.toml").read_text()
    name, value = re.findall(rf'"{providers.GROUP}"\]\n(\w+) = "(.*)"', project)[0]
    install(name, value)
    assert providers.names() == (*providers.NAMES, "numpy")
    return sys.modules["own_kernel"]


def kernels(source: str, **operands: torch.Tensor | float) -> tuple[list[ef.Kernel], ef.GemmArguments]:
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments.partial(source, operands))
    return ef.get_kernels(args, providers=["numpy"]), args


def test_it_is_found_last_and_runs_where_it_is_asked_for(own: ModuleType) -> None:
    args = ef.GemmArguments(A, B)
    assert [kernel.metadata.provider for kernel in ef.get_kernels(args)][-1] == "numpy"
    (kernel,) = ef.get_kernels(args, providers=["numpy"])
    torch.testing.assert_close(kernel.run(args)["D"], A @ B)
    assert own.KERNEL.summary in str(kernel.plan)


def test_the_cheapest_kernel_runs(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "COST", 0.1)
    ran = []
    monkeypatch.setattr(own.Program, "run", lambda *given: ran.append(given))
    ef.gemm(A, B, epilogue="lambda accum: relu(accum) * 3")
    assert ran


def test_what_it_lacks_is_refused_on_the_line(own: ModuleType) -> None:
    found, args = kernels("def epi(accum):\n    x = accum * 2\n    D = erf(x)\n    return D\n")
    assert found == []
    (refusal,) = (one for one in ef.explain(args).refusals if one.kernel == own.KERNEL.name)
    assert "erf" in refusal.reason
    assert "D = erf(x)" in str(refusal.loc)


@pytest.mark.parametrize("constraint", [{"tile": (64, 64)}, {"split": 2}, {"batch_invariant": True}], ids=str)
def test_constraints_are_refused(constraint: dict[str, object], own: ModuleType) -> None:
    args = ef.GemmArguments(A, B, constraints=ef.Constraints(**constraint))
    assert ef.get_kernels(args, providers=["numpy"]) == []


def arguments_of(name: str) -> list[str]:
    """Values that a function may take: those without a default, masks first where it chooses."""
    if name == "where":
        return ["accum > C", "accum", "C"]
    parameters = VOCABULARY[name].signature.parameters.values()
    count = sum(one.default is one.empty and not is_static(one) for one in parameters)
    return (["accum", "C"] * count)[:count]


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_function_is_right_or_refused_by_name(name: str, own: ModuleType) -> None:
    source = f"def epi(accum, C): D = {name}({', '.join(arguments_of(name))}); return D"
    try:
        found, args = kernels(source, C=C)
    except ef.errors.EpifuseError:  # it takes no such values
        return
    if not found:
        reasons = {one.kernel: one.reason for one in ef.explain(args).refusals}
        assert reasons[own.KERNEL.name].startswith("it ")
        assert name not in own.FUNCTIONS
        return
    torch.testing.assert_close(found[0].run(args)["D"], ef.reference(function_of(source, {}))(A @ B, C), equal_nan=True)


@pytest.mark.parametrize("body", ["accum.t()", "accum.permute(1, 0)", "(accum + 1).transpose(0, 1)"])
def test_a_permuted_result_is_refused(body: str, own: ModuleType) -> None:
    """A square one too, whose shape does not tell."""
    square = torch.randn(4, 7) @ torch.randn(7, 4)
    args = ef.GemmArguments(
        square, square, epilogue=ef.EpilogueArguments.partial(f"def epi(accum): D = {body}; return D", {})
    )
    assert ef.get_kernels(args, providers=["numpy"]) == []
    (refusal,) = (one for one in ef.explain(args).refusals if one.kernel == own.KERNEL.name)
    assert refusal.reason == "it stores rows as rows, and 'D' is permuted"


OPERANDS = {
    "number": 0.5,
    "row": torch.randn(5),
    "column": torch.randn(6, 1),
    "matrix": C,
    "transposed": torch.randn(5, 6).t(),
    "every second": torch.randn(6, 10)[:, ::2],
    "mask": torch.randn(6, 5) > 0,
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_every_shape(name: str, own: ModuleType) -> None:
    source = "def epi(accum, x): D = accum * x; m = D > 0; alone = x * 2.0; return D, m, alone"
    source = source if name not in ("mask", "number") else "def epi(accum, x): D = accum * x; m = D > 0; return D, m"
    found, args = kernels(source, x=OPERANDS[name])
    result = found[0].run(args)
    want = ef.reference(function_of(source, {}))(A @ B, OPERANDS[name])
    for got, value in zip(result.values(), want, strict=True):
        torch.testing.assert_close(got, torch.as_tensor(value))


def test_batches_and_an_output_in_the_place_of_an_operand(own: ModuleType) -> None:
    a, b, c = torch.randn(3, 6, 4), torch.randn(3, 4, 5), torch.randn(3, 6, 5)
    want = torch.relu(a @ b) + c
    bound = ef.EpilogueArguments("def epi(accum, C): D = relu(accum) + C; return D", C=c, D=c)
    args = ef.GemmArguments(a, b, epilogue=bound)
    ef.get_kernels(args, providers=["numpy"])[0].run(args)
    torch.testing.assert_close(c, want)


def test_it_runs_forward_and_backward(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "COST", 0.1)
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    got = torch.autograd.grad(ef.gemm(a, b, epilogue="lambda accum: tanh(accum) * 2").sum(), (a, b))
    want = torch.autograd.grad((torch.tanh(a @ b) * 2).sum(), (a, b))
    torch.testing.assert_close(got, want)


def test_the_doctor_lists_it(own: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(argparse.Namespace())
    assert own.KERNEL.name in capsys.readouterr().out


def test_the_example_runs(own: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    own.main()
    assert "sums = ef.gelu(accum).sum(dim=1)" in capsys.readouterr().out


# --- block scales -----------------------------------------------------------------------------------------------------


def scaled() -> tuple[ef.GemmArguments, torch.Tensor]:
    """A product with block scales, and what it is."""
    a, b = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((4, 256), (256, 6)))
    scales = torch.tensor([[0.5, 4.0]]).expand(4, 2).contiguous()
    return ef.GemmArguments(ef.Scaled(a, scales), b), (a.float() * scales.repeat_interleave(128, 1)) @ b.float()


def reasons(args: ef.GemmArguments, **named: Any) -> dict[str, str]:
    return {one.kernel: one.reason for one in ef.explain(args, **named).refusals}


def test_block_scales_are_refused_by_who_does_not_know_them(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "COST", 0.1)
    monkeypatch.setattr(own, "unfit", lambda problem: None)
    args, want = scaled()
    assert reasons(args)[own.KERNEL.name] == "it does not apply block scales"
    kernel = ef.get_kernels(args)[0]
    torch.testing.assert_close(kernel.run(args)["D"].float(), want, atol=1e-3, rtol=1e-3)
    (other,) = ef.get_kernels(ef.GemmArguments(A, B), providers=["numpy"])
    assert "block scales" in str(other.supports(args).error)
    monkeypatch.setattr(own.NumpyProvider, "scales_blocks", True)
    assert ef.get_kernels(args)[0].spec == own.KERNEL


OLDER = """
from epifuse.providers import Allocation, Answers, KernelSpec, Provider
class Older:
    name = "older"
    lacks, lower, build, kernels = Provider.lacks, Provider.lower, Provider.build, Provider.kernels
    is_loaded, is_stored, prepare, compile = Provider.is_loaded, Provider.is_stored, Provider.prepare, Provider.compile
    def specs(self):
        return (KernelSpec("older_gemm", "older", "cpu", (0,)),)
    def supports(self, specs, work, problem):
        return Answers.of([(spec, Allocation((1, 1), 0.1)) for spec in specs])
"""


def test_a_provider_that_is_no_subclass_has_no_block_scales(install: Install, tmp_path: Path) -> None:
    (tmp_path / "older_provider.py").write_text(OLDER)
    install("older", "older_provider:Older")
    assert ef.get_kernels(ef.GemmArguments(A, B))[0].spec.name == "older_gemm"
    assert reasons(scaled()[0])["older_gemm"] == "it does not apply block scales"


# --- GPUs that epifuse has no kernel for ------------------------------------------------------------------------------


def test_a_gpu_that_only_its_kernels_are_for(
    own: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own, "KERNEL", replace(own.KERNEL, device="cuda", ccs=(75,)))
    args = ef.GemmArguments(A, B)
    (kernel,) = ef.get_kernels(args, cc=75)
    assert (kernel.spec, kernel.metadata.target) == (own.KERNEL, "sm_75")
    assert reasons(args, cc=75)["cpu_panel"] == "runs on the CPU, and the target is sm_75"
    assert ef.precompile(args, cc=75, progress=False)
    with pytest.raises(ef.errors.ArgumentError, match=r"cc must be one of 0, 75, 80, .*, got 76"):
        ef.explain(args, cc=76)
    doctor.run(argparse.Namespace())
    assert "7.5 (sm_75)" in " ".join(capsys.readouterr().out.split())


# --- providers that fail ----------------------------------------------------------------------------------------------


def failing(*given: object) -> Any:
    raise KeyError("l")


@pytest.mark.parametrize(
    ("method", "replaced", "failure"),
    [
        ("lower", failing, "KeyError: 'l'"),
        ("supports", failing, "KeyError: 'l'"),
        ("supports", lambda *given: None, "supports returned None, and not Answers"),
    ],
    ids=["lower", "supports", "no answers"],
)
def test_where_it_fails_other_kernels_run(
    method: str, replaced: Any, failure: str, own: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own.NumpyProvider, method, replaced)
    why, source = f"the provider 'numpy' failed: {failure}", "def epi(accum): D = accum - 3.5; return D"
    with pytest.warns(UserWarning, match=re.escape(why)):
        torch.testing.assert_close(ef.gemm(A, B, epilogue=source), A @ B - 3.5)
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments.partial(source, {}))
    with pytest.warns(UserWarning, match=re.escape(why)):
        assert reasons(args)[own.KERNEL.name] == why


def test_what_it_cannot_build_is_named(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ef.GemmArguments(A, B)
    (kernel,) = ef.get_kernels(args, providers=["numpy"])
    monkeypatch.setattr(own.NumpyProvider, "build", failing)
    with pytest.raises(ef.errors.UnsupportedError, match=r"numpy_gemm of the provider 'numpy' .* KeyError: 'l'"):
        kernel.run(args)


@pytest.mark.parametrize("method", ["lower", "supports"])
def test_a_fault_of_ours_is_raised(method: str, own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuProvider, method, failing)
    with pytest.raises(KeyError):
        ef.gemm(A, B, epilogue="def epi(accum): D = accum - 4.5; return D")


BAD = """
from epifuse.providers import KernelSpec, Provider
class Other(Provider):
    name = "other"
    def specs(self):
        return ()
class Foreign(Provider):
    name = "foreign"
    def specs(self):
        return (KernelSpec("its", "another", "cpu", (0,)),)
class No:
    pass
"""


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("gone", "no_such_module:Provider", "ModuleNotFoundError"),
        ("mine", "bad_provider:Other", "it calls itself 'other'"),
        ("foreign", "bad_provider:Foreign", "is of the provider 'another'"),
        ("none", "bad_provider:No", "it is no epifuse.providers.base.Provider"),
        ("cpu", "epifuse.providers.cpu:CpuProvider", "there is another one of this name"),
    ],
)
def test_one_that_cannot_be_used_is_left_out(name: str, value: str, why: str, install: Install, tmp_path: Path) -> None:
    (tmp_path / "bad_provider.py").write_text(BAD)
    install(name, value)
    with pytest.warns(UserWarning, match=f"'{name}' .* is left out: .*{why}"):
        assert providers.names() == providers.NAMES
    torch.testing.assert_close(ef.gemm(A, B), A @ B)
