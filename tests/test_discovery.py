"""Discovery: tensors without data, targets, filters, Status, artifacts, workspace, bind, and what never replans."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import epifuse as ef
from epifuse import providers
from epifuse.base import cache

SOURCE = "def epi(accum, C, alpha): D = relu(accum * alpha) + C; return D"
A, B, C = torch.arange(12.0).reshape(4, 3) - 5, torch.arange(15.0).reshape(3, 5) - 7, torch.arange(20.0).reshape(4, 5)


def arguments(a: Any = A, b: Any = B, c: Any = C, alpha: Any = 2.0, **named: Any) -> ef.GemmArguments:
    epilogue = ef.EpilogueArguments.partial(SOURCE, {"C": c, "alpha": alpha})
    return ef.GemmArguments(a, b, epilogue=epilogue, **named)


def expected(alpha: float = 2.0) -> torch.Tensor:
    return torch.relu(A @ B * alpha) + C


def fakes(device: str = "cpu") -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.empty(x.shape, device=device) for x in (A, B, C)]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every plan that a provider builds from here on."""
    built: list[Any] = []

    loaded = providers.load
    monkeypatch.setattr(providers, "load", lambda name: _Forward(loaded(name), built))
    cache.forget()
    return built


class _Forward:
    """A provider that counts what it builds."""

    def __init__(self, provider: Any, built: list[Any]) -> None:
        self._provider, self._built = provider, built

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def build(self, plan: Any) -> Any:
        self._built.append(plan)
        return self._provider.build(plan)


# --- tensors without data -----------------------------------------------------------------------------------------


def test_fake_tensors_give_the_plan_that_real_ones_give() -> None:
    kernel = ef.get_kernels(arguments(*fakes()))[0]
    assert kernel.plan == ef.get_kernels(arguments())[0].plan
    artifact = kernel.compile(arguments(*fakes()))
    assert torch.equal(kernel.run(arguments(), compiled_artifact=artifact)["D"], expected())


def test_a_kernel_prints_as_one_line() -> None:
    kernel = ef.get_kernels(arguments())[0]
    assert repr(kernel) == f"<Kernel {kernel.spec.name}: M=4 N=5 K=3, A f32, B f32, accumulator f32, on cpu>"


def test_a_missing_destination_says_how_it_is_allocated() -> None:
    with pytest.raises(ef.errors.ArgumentError, match=r"'D' is an output .* or use EpilogueArguments\.partial"):
        ef.EpilogueArguments(SOURCE, C=C, alpha=2.0)
    with pytest.raises(ef.errors.ArgumentError, match=r"hint: pass C=\.\.\.$"):
        ef.EpilogueArguments(SOURCE, D=C, alpha=2.0)


def test_meta_tensors_discover() -> None:
    args = arguments(*(x.to("meta") for x in (A, B, C)))
    kernels = ef.get_kernels(args, cc=0)
    assert kernels
    assert "M=4 N=5 K=3" in str(ef.explain(args, cc=0))


@pytest.mark.parametrize("make", [fakes, lambda: [x.to("meta") for x in (A, B, C)]], ids=["fake", "meta"])
def test_what_has_no_data_does_not_run(make: Callable[[], list[torch.Tensor]]) -> None:
    args = arguments(*make())
    with pytest.raises(ef.errors.ArgumentError, match="has no data"):
        ef.get_kernels(args)[0].run(args)


def test_fake_tensors_of_a_gpu_this_machine_may_lack() -> None:
    args = arguments(*fakes("cuda"))
    assert "cuda" in args.problem.a.device
    assert all(kernel.metadata.provider != "cpu" for kernel in ef.get_kernels(args, cc=90))
    assert any("runs on the CPU, and the target is sm_90a" in str(r) for r in ef.explain(args, cc=90).refusals)


@pytest.mark.parametrize("name", ["A", "C"])
def test_memory_that_was_given_back_is_refused(name: str) -> None:
    given = {"A": torch.randn(4, 4), "C": torch.randn(4, 4)}
    bound = ef.EpilogueArguments("lambda accum, C: accum + C", C=given["C"], D=torch.empty(4, 4))
    arguments = ef.GemmArguments(given["A"], torch.randn(4, 4), epilogue=bound)
    kernel = ef.get_kernels(arguments)[0]
    kernel.run(arguments)
    given[name].untyped_storage().resize_(0)
    for launch in (kernel.run, kernel.bind):
        with pytest.raises(ef.errors.ArgumentError, match=f"{name} has no data"):
            launch(arguments)


def test_fake_and_real_mixed_is_refused_where_it_runs() -> None:
    args = arguments(A, B, fakes()[2])
    with pytest.raises(ef.errors.ArgumentError, match="C has no data"):
        ef.get_kernels(args)[0].run(args)


# --- targets, filters, limits -------------------------------------------------------------------------------------


def test_another_target_keeps_every_reason() -> None:
    explanation = ef.explain(arguments(), cc=90)
    specs = [spec.name for name in providers.NAMES for spec in providers.load(name).specs()]
    offered = [plan.spec.name for plan in explanation.selection.plans]
    assert sorted({refusal.kernel for refusal in explanation.refusals} | set(offered)) >= sorted(
        name for name in specs if name.startswith("cpu")
    )
    assert all("the target is sm_90a" in r.reason for r in explanation.refusals if r.kernel.startswith("cpu"))
    assert "no kernel can run this" in str(explanation) or explanation.plan


@pytest.mark.parametrize("cc", [1, 9, "90", 90.0, True, (9, 0)])
def test_an_unknown_target(cc: Any) -> None:
    with pytest.raises(ef.errors.ArgumentError, match="cc must be one of"):
        ef.get_kernels(arguments(), cc=cc)


def test_metadata_filter() -> None:
    kernels = ef.get_kernels(arguments())
    assert ef.get_kernels(arguments(), lambda metadata: False) == []
    assert ef.get_kernels(arguments(), metadata_filter=lambda metadata: metadata.provider == "cpu") == kernels
    metadata = kernels[0].metadata
    assert (metadata.kernel_name, metadata.provider, metadata.target) == ("cpu_panel", "cpu", "cpu")
    assert metadata.min_cc == 0
    assert metadata.digest == kernels[0].plan.digest


def test_providers_by_name() -> None:
    assert ef.get_kernels(arguments(), providers=["cpu"])
    assert ef.get_kernels(arguments(), providers=[]) == []
    with pytest.raises(ef.errors.ArgumentError, match="providers must be among"):
        ef.get_kernels(arguments(), providers=["gpu"])


def test_limit() -> None:
    assert len(ef.get_kernels(arguments(), limit=1)) == 1
    for limit in (0, -1, 1.5, "1", True):
        with pytest.raises(ef.errors.ArgumentError, match="limit must be a whole number above 0"):
            ef.get_kernels(arguments(), limit=limit)


def test_not_arguments() -> None:
    with pytest.raises(ef.errors.ArgumentTypeError, match="get_kernels takes GemmArguments, not a dict"):
        ef.get_kernels({})  # type: ignore[arg-type]
    with pytest.raises(
        ef.errors.ArgumentTypeError, match=r"takes epilogue=ef.EpilogueArguments\(fn, \.\.\.\), not a str"
    ):
        ef.GemmArguments(A, B, epilogue=SOURCE)  # type: ignore[arg-type]


def test_every_kernel_found_supports_its_arguments() -> None:
    for kernel in ef.get_kernels(arguments()):
        assert kernel.supports(arguments())
        assert torch.equal(kernel.run(arguments())["D"], expected())


# --- explain, Status, utils ---------------------------------------------------------------------------------------


def test_explain(golden: Callable[[str], None]) -> None:
    explanation = ef.explain(arguments())
    golden(f"{explanation.args.graph}\n{explanation.plan}")
    assert str(explanation).startswith(f"{explanation.args.graph}\n{explanation.plan}")
    assert explanation.refusals
    shown = [line for line in str(explanation).splitlines() if line.startswith("refused  ")]
    assert sorted(line.partition(": ")[2] for line in shown) == sorted({r.reason for r in explanation.refusals})


def test_explain_names_what_is_not_used() -> None:
    source = "def epi(accum, C, alpha): D = accum * alpha; return D"
    args = ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments.partial(source, {"C": C, "alpha": 2.0}))
    assert "operand 'C' is not used and not loaded" in str(ef.explain(args))


def test_status() -> None:
    kernel = ef.get_kernels(arguments())[0]
    good, bad = kernel.supports(arguments()), kernel.supports(arguments(constraints=ef.Constraints(cluster=(2, 1))))
    assert good
    assert good.error is None
    assert str(good) == "ok"
    good.raise_on_error()
    assert not bad
    assert "cluster" in str(bad.error)
    with pytest.raises(ef.errors.UnsupportedError, match="cluster"):
        bad.raise_on_error()
    with pytest.raises(ef.errors.UnsupportedError, match="cluster"):
        kernel.compile(arguments(constraints=ef.Constraints(cluster=(2, 1))))


def test_is_device_cc_supported() -> None:
    current = 0 if not torch.cuda.is_available() else int("{}{}".format(*torch.cuda.get_device_capability()))
    assert ef.utils.is_device_cc_supported({current, 100})
    status = ef.utils.is_device_cc_supported({1})
    assert not status
    assert f"compute capability {current} is not one of [1]" in str(status.error)


@pytest.mark.parametrize(
    ("constraints", "reason"),
    [
        ({"cluster": (2, 1)}, "no cluster to choose"),
        ({"schedule": "pingpong"}, "no schedule to choose"),
        ({"tile": (0, 8)}, "a tile needs"),
    ],
)
def test_a_constraint_is_honoured_or_refuses(constraints: dict[str, Any], reason: str) -> None:
    args = arguments(constraints=ef.Constraints(**constraints))
    assert ef.get_kernels(args) == []
    assert any(reason in refusal.reason for refusal in ef.explain(args).refusals)


def test_a_pinned_tile_is_the_plans() -> None:
    args = arguments(constraints=ef.Constraints(tile=(2, 3)))
    assert ef.get_kernels(args)[0].metadata.tile_shape == (2, 3)
    assert torch.equal(ef.get_kernels(args)[0].run(args)["D"], expected())


# --- artifacts, workspace, bind -----------------------------------------------------------------------------------


def test_an_artifact_serves_other_tensors_and_numbers(builds: list[Any]) -> None:
    kernel = ef.get_kernels(arguments())[0]
    artifact = kernel.compile(arguments())
    for alpha in (1.0, -1.0, 0.0):
        args = arguments(A.clone(), B.clone(), C.clone(), alpha)
        assert torch.equal(kernel.run(args, compiled_artifact=artifact)["D"], expected(alpha))
    assert len(builds) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: arguments(A[:2], B, C[:2]),
        lambda: arguments(A, B, C[0]),
        lambda: arguments(A, B, C.half()),
        lambda: arguments(A, B, C.T.contiguous().T),
        lambda: arguments(A.half(), B.half()),
        lambda: ef.GemmArguments(
            A, B, epilogue=ef.EpilogueArguments.partial(SOURCE.replace("relu", "abs"), {"C": C, "alpha": 2.0})
        ),
    ],
    ids=["shape", "broadcast", "operand dtype", "strides", "input dtype", "epilogue"],
)
def test_an_artifact_refuses_what_it_was_not_built_for(other: Callable[[], ef.GemmArguments]) -> None:
    kernel = ef.get_kernels(arguments())[0]
    artifact = kernel.compile(arguments())
    with pytest.raises(ef.errors.ArgumentError, match="was built for other arguments"):
        kernel.run(other(), compiled_artifact=artifact)
    assert kernel.run(other())["D"].shape[-1] == 5, "without the artifact it is planned anew"


def test_an_artifact_does_not_confuse_names() -> None:
    """The same digest, other operands in its places."""
    sources = ["def epi(accum, C, E): D = accum * C + E; return D", "def epi(accum, C, E): D = accum * E + C; return D"]
    E = C.flip(0)
    both = [ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments.partial(s, {"C": C, "E": E})) for s in sources]
    kernels = [ef.get_kernels(args)[0] for args in both]
    assert kernels[0].plan.digest == kernels[1].plan.digest
    with pytest.raises(ef.errors.ArgumentError, match="was built for other arguments"):
        kernels[0].run(both[1], compiled_artifact=kernels[0].compile(both[0]))


def test_workspace() -> None:
    kernel = ef.get_kernels(arguments())[0]
    need = kernel.get_workspace_size(arguments())
    assert need >= 0
    assert torch.equal(kernel.run(arguments(), workspace=torch.empty(need, dtype=torch.uint8))["D"], expected())
    with pytest.raises(ef.errors.ArgumentError, match="the workspace must be"):
        kernel.run(arguments(), workspace="big")  # type: ignore[arg-type]
    with pytest.raises(ef.errors.ArgumentError, match="the workspace must be contiguous"):
        kernel.run(arguments(), workspace=torch.empty(need + 8, 2)[:, 0])
    with pytest.raises(ef.errors.ArgumentError, match="the workspace must be on cpu"):
        kernel.run(arguments(), workspace=torch.empty(need, dtype=torch.uint8, device="meta"))


def test_run_without_arguments() -> None:
    kernel = ef.get_kernels(arguments())[0]
    with pytest.raises(ef.errors.ArgumentTypeError, match="cpu_panel takes GemmArguments, not None"):
        kernel.run(None)  # type: ignore[arg-type]
    with pytest.raises(ef.errors.ArgumentTypeError, match="fits takes GemmArguments, not None"):
        kernel.compile(arguments()).fits(None)  # type: ignore[arg-type]


def test_bind_decides_everything_once(builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    a, c, D = A.clone(), C.clone(), torch.zeros(4, 5)
    epilogue = ef.EpilogueArguments(SOURCE, C=c, alpha=2.0, D=D)
    args = ef.GemmArguments(a, B, epilogue=epilogue)
    step = ef.get_kernels(args)[0].bind(args)
    monkeypatch.setattr("epifuse.kernel.select", None)  # planning again would fail
    assert step()["D"] is D
    assert torch.equal(D, expected())
    a.mul_(-1)
    c.add_(1)
    step()
    assert torch.equal(D, torch.relu(-A @ B * 2) + C + 1)
    assert len(builds) == 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", ["A", "C", "D"])
@pytest.mark.parametrize("change", [lambda x: x.resize_(2, x.shape[1]), lambda x: x.t_(), lambda x: x.resize_(9, 9)])
def test_what_lies_in_another_way_by_now_is_refused(name: str, change: Callable[[Any], Any]) -> None:
    tensors = {"A": A.clone(), "C": C.clone(), "D": torch.zeros(4, 5)}
    epilogue = ef.EpilogueArguments(SOURCE, C=tensors["C"], alpha=2.0, D=tensors["D"])
    args = ef.GemmArguments(tensors["A"], B, epilogue=epilogue)
    kernel = ef.get_kernels(args)[0]
    kernel.run(args)
    tensors["D"].zero_()
    change(tensors[name])
    before = tensors["D"].contiguous().view(torch.int32).clone()
    for launch in (lambda: kernel.run(args), lambda: kernel.bind(args)):
        with pytest.raises(ef.errors.ArgumentError, match=f"{name} was .* when GemmArguments was made, and is"):
            launch()
    assert torch.equal(tensors["D"].contiguous().view(torch.int32), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: setattr(x, "data", x.data.view(torch.int32)),
        lambda x: x.set_(torch.zeros(64).untyped_storage(), 1, x.shape, x.stride()),
    ],
)
def test_strides_dtype_and_alignment_count(change: Callable[[Any], Any]) -> None:
    square = torch.randn(4, 4)
    args = ef.GemmArguments(square, torch.randn(4, 5))
    kernel = ef.get_kernels(args)[0]
    kernel.run(args)
    change(square)
    with pytest.raises(ef.errors.ArgumentError, match=r"A was .* when GemmArguments was made, and is"):
        kernel.run(args)


def test_what_is_bound_in_inference_mode_runs_outside_of_it() -> None:
    args = arguments()
    with torch.inference_mode():
        step = ef.get_kernels(args)[0].bind(args)
        step()
    assert torch.equal(step()["D"], expected())


# --- numbers never replan -----------------------------------------------------------------------------------------


def test_numbers_never_build_again(builds: list[Any]) -> None:
    for alpha in (1.0, 2, -0.5, float("inf"), torch.tensor(3.0), torch.tensor(1), np.float32(2.5)):
        got = ef.gemm(A, B, epilogue=SOURCE, C=C, alpha=alpha)
        torch.testing.assert_close(got, expected(float(alpha)), equal_nan=True)
    # A 0-d integer tensor says what it is and counts as int32; all others are floats.
    assert len(builds) == 2


def test_captured_numbers_are_read_again_and_never_build_again(builds: list[Any]) -> None:
    scale = 1.0

    def epi(accum: Any, C: Any) -> Any:
        D = accum * scale + C
        return D

    assert torch.equal(ef.gemm(A, B, epilogue=epi, C=C), A @ B + C)
    scale = 3.0
    assert torch.equal(ef.gemm(A, B, epilogue=epi, C=C), A @ B * 3 + C)
    assert len(builds) == 1


def test_host_expressions_never_build_again(builds: list[Any]) -> None:
    source = "def epi(accum, a, b): D = accum * (a / b if b != 0 else 0.0); return D"
    for a, b in ((1.0, 2.0), (3.0, 4.0), (1.0, 0.0)):
        assert torch.equal(ef.gemm(A, B, epilogue=source, a=a, b=b), A @ B * (a / b if b else 0.0))
    assert len(builds) == 1


def test_the_same_call_builds_once(builds: list[Any]) -> None:
    for _ in range(3):
        ef.gemm(A, B, epilogue=SOURCE, C=C, alpha=2.0)
        ef.gemm(A.clone(), B.clone(), epilogue=SOURCE, C=C.clone(), alpha=2.0)
    assert len(builds) == 1
