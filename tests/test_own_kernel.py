"""A provider of another package: examples/own_kernel, found by its entry point, and what cannot be used of others."""

import argparse
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
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
from epifuse.plan import Allocation, Answers, Details, Refusal
from epifuse.providers.cpu import CpuProvider
from epifuse.tools import doctor
from epifuse.tools.conformance import FUNCTIONS, check

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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_right_or_refused_by_name(name: str, own: ModuleType) -> None:
    refused = check("numpy", name)
    assert refused is None or name not in own.FUNCTIONS


def test_the_check_finds_what_is_wrong(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ef.errors.ArgumentError, match="nobody"):
        check("nobody", "relu")
    with pytest.raises(ef.errors.ArgumentError, match=r"one of .*FUNCTIONS"):
        check("numpy", "nosuch")
    monkeypatch.setitem(own.FUNCTIONS, "relu", lambda x: x)
    with pytest.raises(AssertionError, match="not close"):
        check("numpy", "relu")
    monkeypatch.setattr(
        own.NumpyProvider, "supports", lambda *given: Answers.of([(own.KERNEL, Refusal(own.KERNEL.name, ""))])
    )
    with pytest.raises(AssertionError, match="not every kernel of 'numpy' says why"):
        check("numpy", "tanh")


@pytest.mark.filterwarnings("ignore:the provider")
@pytest.mark.parametrize("method", ["lower", "supports"])
def test_the_check_finds_what_fails(method: str, own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(own.NumpyProvider, method, fails, raising=False)
    with pytest.raises(AssertionError, match="the provider 'numpy' failed: ValueError: not today"):
        check("numpy", "relu")


def test_the_check_finds_what_computes_nothing(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers.load("numpy"), "_specs", ())
    with pytest.raises(AssertionError, match="no kernel of 'numpy' is for cpu"):
        check("numpy", "relu")


def test_the_check_finds_who_writes_its_inputs(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(x: Any, y: Any) -> Any:
        found = x + y
        y[...] = 0
        return found

    monkeypatch.setitem(own.FUNCTIONS, "add", add)
    with pytest.raises(AssertionError, match="numpy_gemm wrote to C, which is an input of add"):
        check("numpy", "add")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_check_takes_floating_dtypes(name: str, dtype: torch.dtype) -> None:
    """Of our kernels, each of which is right or refuses."""
    check("cpu", name, dtype)


def test_the_check_takes_no_integers() -> None:
    with pytest.raises(ef.errors.ArgumentError, match="a floating dtype"):
        check("cpu", "relu", torch.int8)


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
    lacks, lower, kernels = Provider.lacks, Provider.lower, Provider.kernels
    is_loaded, is_stored, prepare, compile = Provider.is_loaded, Provider.is_stored, Provider.prepare, Provider.compile
    def specs(self):
        return (KernelSpec("older_gemm", "older", "cpu", (0,)),)
    def supports(self, specs, work, problem):
        return Answers.of([(spec, Allocation((1, 1), 0.1)) for spec in specs])
    def build(self, plan):
        raise NotImplementedError
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
    providers._installed.cache_clear()
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


def allocated(specs: Sequence[providers.KernelSpec], tile: Any, cost: Any) -> Answers:
    return Answers.of([(spec, Allocation(tile, cost)) for spec in specs])


@pytest.mark.parametrize(
    ("method", "replaced", "failure"),
    [
        ("lower", failing, "KeyError: 'l'"),
        ("supports", failing, "KeyError: 'l'"),
        ("supports", lambda *given: None, "supports returned None, and not Answers"),
        ("supports", lambda *given: Answers.of([]), "supports answered nothing about this kernel"),
        ("supports", lambda self, specs, *_: allocated(specs, (8, 8), None), "its cost is None, and has to be"),
        ("supports", lambda self, specs, *_: allocated(specs, (8, 8), math.nan), "its cost is nan, and has to be"),
        ("supports", lambda self, specs, *_: allocated(specs, None, 0.1), "its tile is None, and has to be"),
    ],
    ids=["lower", "supports", "no answers", "no answer", "no cost", "no number", "no tile"],
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
        assert reasons(args)[own.KERNEL.name].startswith(why)


def test_what_it_says_for_people_is_checked(
    own: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, provider = ef.GemmArguments(A, B), own.NumpyProvider
    with monkeypatch.context() as patched:
        patched.setattr(own, "COST", 1e-9)
        patched.setattr(provider, "kernels", failing)
        (failed,) = ef.precompile(args, cc=0, progress=False).failed
        assert "KeyError: 'l'" in failed[1]
    with monkeypatch.context() as patched:
        odd = Details(transports=("x",))  # type: ignore[arg-type]  # what is tested
        answer = Answers.of([(own.KERNEL, Allocation((8, 8), 1e-9, details=odd))])
        patched.setattr(provider, "supports", lambda *given: answer)
        assert "the provider 'numpy' failed: ValueError" in str(ef.explain(args))
    monkeypatch.setattr(provider, "lacks", lambda self, spec: 7)
    doctor.run(argparse.Namespace())
    assert "lacks returned" in " ".join(capsys.readouterr().out.split())


def test_what_it_cannot_build_is_named(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ef.GemmArguments(A, B)
    (kernel,) = ef.get_kernels(args, providers=["numpy"])
    monkeypatch.setattr(own.NumpyProvider, "build", failing)
    with pytest.raises(
        ef.errors.UnsupportedError, match=r"of the provider 'numpy' .* KeyError: 'l' \(.*kernel.py:\d+\)"
    ):
        kernel.run(args)
    forget()
    monkeypatch.setattr(own.NumpyProvider, "build", lambda self, plan: None)
    with pytest.raises(ef.errors.UnsupportedError, match=r"build returned None, and no function"):
        kernel.run(args)


def test_a_launch_that_fails_names_it(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own bind or step, and tuning goes on with the others."""
    monkeypatch.setattr(own, "COST", 0.1)
    args = ef.GemmArguments(A, B)
    for runner in (failing, lambda *given: failing):
        forget()
        monkeypatch.setattr(own.NumpyProvider, "build", lambda self, plan, runner=runner: runner)
        for call in (lambda: ef.gemm(A, B), lambda: ef.get_kernels(args)[0].run(args)):
            with pytest.raises(ef.errors.LaunchError, match=r"the provider 'numpy' raised KeyError: 'l'"):
                call()
        done = ef.tune(args, anew=True, progress=False)
        assert [name.split(",")[0] for name, _ in done.failed] == [own.KERNEL.name]
        assert done.results


def test_what_is_told_late_may_fail(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan says for people, and a reason."""
    args = ef.GemmArguments(A, B)
    told = Allocation((8, 8), 0.1, details=failing)
    monkeypatch.setattr(own.NumpyProvider, "supports", lambda self, specs, *_: Answers.of([(specs[0], told)]))
    assert "the provider 'numpy' failed: KeyError: 'l'" in str(ef.explain(args))
    forget()
    refusal = Refusal(own.KERNEL.name, failing)
    monkeypatch.setattr(own.NumpyProvider, "supports", lambda self, specs, *_: Answers.of([(specs[0], refusal)]))
    assert "the provider 'numpy' failed: KeyError: 'l'" in reasons(args)[own.KERNEL.name]


def test_what_it_never_ran_on_is_refused(own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(own.KERNEL, device="cuda", ccs=(75,), never_on=(75,))
    monkeypatch.setattr(own, "KERNEL", elsewhere)
    providers._installed.cache_clear()
    args = ef.GemmArguments(A, B)
    assert (
        "has never run on a GPU of sm_75"
        in {r.kernel: r.reason for r in ef.explain(args, cc=75).refusals}["numpy_gemm"]
    )


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
    def supports(self, specs, work, problem): ...
    def build(self, plan): ...
class Foreign(Other):
    name = "foreign"
    def specs(self):
        return (KernelSpec("its", "another", "cpu", (0,)),)
class No:
    pass
class Listed(Provider):
    name = "mine"
    def specs(self):
        return [KernelSpec("its", "mine", "cpu", (0,))]
    def supports(self, specs, work, problem): ...
    def build(self, plan): ...
class Nowhere(Listed):
    def specs(self):
        return (KernelSpec("its", "mine", "cpu", 0),)
class Twice(Listed):
    def specs(self):
        return 2 * (KernelSpec("its", "mine", "cpu", (0,)),)
class Ours(Listed):
    def specs(self):
        return (KernelSpec("cpu_panel", "mine", "cpu", (0,)),)
class Elsewhere(Listed):
    def specs(self):
        return (KernelSpec("its", "mine", "tpu", (0,)),)
class Negative(Listed):
    def specs(self):
        return (KernelSpec("its", "mine", "cuda", (-5,), ""),)
class Hopper(Listed):
    def specs(self):
        return (KernelSpec("its", "mine", "cpu", (90,), ""),)
class Wordless(Listed):
    def specs(self):
        return (KernelSpec("its", "mine", "cpu", (0,), None),)
class Half(Listed):
    build = Provider.build
"""


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("gone", "no_such_module:Provider", "ModuleNotFoundError: No module named 'no_such_module'$"),
        ("torn", "torn_provider:Provider", r"KeyError: 'torn' \(.*torn_provider.py:1\)"),
        ("mine", "bad_provider:Other", "it calls itself 'other'"),
        ("foreign", "bad_provider:Foreign", "is of the provider 'another'"),
        ("none", "bad_provider:No", "it is no whole epifuse.providers.base.Provider: it has no 'name'"),
        ("mine", "bad_provider:Half", "it has no 'build'"),
        ("mine", "bad_provider:Listed", r"its specs\(\) are a list, and no tuple of KernelSpec"),
        ("mine", "bad_provider:Nowhere", "the ccs of its kernel 'its' are 0, and no tuple"),
        ("mine", "bad_provider:Twice", "there is another kernel of the name 'its'"),
        ("mine", "bad_provider:Ours", "there is another kernel of the name 'cpu_panel'"),
        ("mine", "bad_provider:Elsewhere", "is for the device 'tpu', and there are 'cpu' and 'cuda'"),
        ("mine", "bad_provider:Negative", r"the ccs of its kernel 'its' are \(-5,\), and those of a kernel for GPUs"),
        ("mine", "bad_provider:Hopper", r"the ccs of its kernel 'its' are \(90,\), and those of a kernel for the CPU"),
        ("mine", "bad_provider:Wordless", "the summary of its kernel 'its' is None, and no text"),
        ("cpu", "epifuse.providers.cpu:CpuProvider", "there is another one of this name"),
    ],
)
def test_one_that_cannot_be_used_is_left_out(name: str, value: str, why: str, install: Install, tmp_path: Path) -> None:
    (tmp_path / "bad_provider.py").write_text(BAD)
    (tmp_path / "torn_provider.py").write_text("raise KeyError('torn')")
    install(name, value)
    with pytest.warns(UserWarning, match=f"'{name}' .* is left out: .*{why}"):
        assert providers.names() == providers.NAMES
    torch.testing.assert_close(ef.gemm(A, B), A @ B)
