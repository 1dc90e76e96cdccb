"""What a launch hands to Hopper's kernel, on the CPU: a function stands in that records its arguments."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hopper import BF16, RANKED, hopper_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import epifuse as ef
from epifuse.providers.base import WORKSPACE
from epifuse.providers.cutedsl import launch
from epifuse.providers.cutedsl.partials import MOST_CTAS
from epifuse.runtime.launch import Prepared

CLUSTERS = 1000


@dataclass
class Kernel:
    """A kernel that launches nothing."""

    prepared: Prepared
    launched: list[Any] = field(default_factory=list)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a kernel for arguments on the CPU, whose device has no index."""
    kernels: list[Kernel] = []
    monkeypatch.setattr(launch, "function", lambda text, name: lambda *given: kernels[-1].launched.append(given))
    monkeypatch.setattr(launch, "resident_clusters", lambda index, size: CLUSTERS)
    monkeypatch.setattr(launch, "rank_table", lambda *_: RANKED)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)

    def build(args: ef.GemmArguments) -> Kernel:
        kernels.append(Kernel(Prepared.of(hopper_kernel(args).plan)))
        return kernels[-1]

    return build


def arguments(epilogue: Any, k: int = 64, **given: Any) -> ef.GemmArguments:
    a, b = torch.empty(128, k, dtype=BF16), torch.empty(k, 256, dtype=BF16)
    return ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments(epilogue, **given))


def scaled(accum: Any, C: Any, bias: Any, alpha: Any) -> Any:
    D = accum * alpha + bias + C
    positive = accum > 0
    return D, positive


def sums(accum: Any) -> Any:
    total = ef.sum(accum, dim=0)
    return total


def test_tensors_are_passed_as_they_are_or_as_views(built: Any) -> None:
    bias, C, D = torch.empty(256), torch.nn.Parameter(torch.empty(128, 256, dtype=BF16)), torch.empty(128, 256)
    positive = torch.empty(128, 256, dtype=torch.bool)
    with torch.no_grad():
        args = arguments(scaled, C=C, bias=bias, alpha=2.0, D=D, positive=positive)
        kernel = built(args)
        kernel.prepared.launch(args.call)
    ((a, b, operands, numbers, outputs, workspaces, clusters, _, _),) = kernel.launched
    assert (a is args.A, b is args.B, outputs[0] is D) == (True, True, True)
    assert any(tensor is C for tensor in operands)
    seen = next(tensor for tensor in operands if tensor is not C)
    assert (seen.data_ptr(), seen.shape[:2], seen.stride()[0]) == (bias.data_ptr(), (128, 256), 0)
    assert (outputs[1].data_ptr(), outputs[1].dtype) == (positive.data_ptr(), torch.uint8)
    assert (list(numbers), len(workspaces), clusters) == ([2.0], 0, CLUSTERS)


def test_a_tensor_that_wants_a_gradient_is_taken_as_it_is() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    given = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    assert len(tvm_ffi.get_global_func("ffi.Array")(*given, [*given])) == 3


def test_each_launch_has_its_own_workspace_unless_given_one(built: Any) -> None:
    args = arguments(sums, total=torch.empty(256))
    kernel = built(args)
    size = kernel.prepared.plan.allocation.workspace_bytes
    step = kernel.prepared.bind(args.call, args.allocate())
    step()
    step()
    own = torch.empty(size, dtype=torch.uint8)
    kernel.prepared.bind(args.call, args.allocate(), own)()
    (first,), (second,), (third,) = (workspaces for *_, workspaces, _, _, _ in kernel.launched)
    assert {first.nbytes, second.nbytes, third.nbytes} == {size}
    assert len({first.data_ptr(), second.data_ptr(), own.data_ptr()}) == 3
    assert third.data_ptr() == own.data_ptr()
    assert all(clusters <= MOST_CTAS for *_, clusters, _, _ in kernel.launched)


def looks(tensors: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


@pytest.mark.parametrize("b_is_transposed", [False, True])
@pytest.mark.parametrize(
    "epilogue",
    [
        "def epi(accum, C, bias): D = relu(accum + bias) + C; s = sum(D, dim=0); return D, s",
        "def epi(accum, C, bias): D = accum + bias + C; positive = D > 0; return D, positive",
    ],
)
def test_what_repeats_hands_over_what_a_launch_does(built: Any, epilogue: str, b_is_transposed: bool) -> None:
    bias, C = torch.randn(256), torch.randn(128, 256).to(BF16)
    a, b = torch.empty(128, 64, dtype=BF16), torch.empty(64, 256, dtype=BF16)
    args = ef.GemmArguments(a, b, epilogue=ef.EpilogueArguments.partial(epilogue, {"C": C, "bias": bias}))
    kernel = built(args)
    outputs = kernel.prepared.launch(args.call)
    repeat = kernel.prepared.repeated(("bias", "C"), b_is_transposed=b_is_transposed)
    repeated = repeat((a, b.t() if b_is_transposed else b, bias, C))
    assert looks(repeated) == looks(outputs.values())
    first, second = kernel.launched
    assert first[6:] == second[6:]
    for mine, theirs in zip((first[:2], *first[2:6]), (second[:2], *second[2:6]), strict=True):
        assert looks(mine) == looks(theirs)
    for mine, theirs in zip((first[:2], first[2]), (second[:2], second[2]), strict=True):
        assert [x.data_ptr() for x in mine] == [x.data_ptr() for x in theirs]
    assert {x.data_ptr() for x in second[4]} == {x.data_ptr() for x in repeated}
    assert {x.data_ptr() for x in first[5]}.isdisjoint(x.data_ptr() for x in second[5])


def test_a_mode_sees_what_a_repeated_launch_makes(built: Any) -> None:
    args = arguments(sums, total=torch.empty(256))
    repeat = built(args).prepared.repeated(())

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            made.append(function(*given, **(named or {})))
            return made[-1]

    made: list[torch.Tensor] = []
    with Seeing():
        (total,) = repeat((args.A, args.B))
    assert any(total is tensor for tensor in made)


def test_a_view_is_of_the_memory_there_is_now(built: Any) -> None:
    a, b = torch.empty(128, 64, dtype=BF16), torch.empty(64, 256, dtype=BF16)
    bias = torch.nn.Parameter(torch.randn(256))
    with torch.no_grad():
        epilogue = ef.EpilogueArguments.partial("def epi(accum, bias): D = accum + bias; return D", {"bias": bias})
        kernel = built(ef.GemmArguments(a, b, epilogue=epilogue))
    repeated, alive = kernel.prepared.repeated(("bias",)), weakref.ref(bias)
    for change in (None, torch.randn(256), torch.randn(256)):
        if change is not None:
            bias.data = change
        for _ in range(2):
            repeated((a, b, bias))
            (view,) = kernel.launched[-1][2]
            assert (view.data_ptr(), view.shape[:2], view.stride()[:2]) == (bias.data_ptr(), (128, 256), (0, 1))
    del bias, epilogue, kernel.prepared
    kernel.launched.clear()
    gc.collect()
    assert alive() is None


def test_zeros_stand_in_where_there_is_nothing_to_multiply(built: Any) -> None:
    args = arguments("def plain(accum): D = accum; return D", k=0, D=torch.empty(128, 256))
    kernel = built(args)
    kernel.prepared.launch(args.call)
    ((a, b, *_),) = kernel.launched
    assert (a.shape[0], b.shape[1], a.shape[1]) == (128, 256, b.shape[0])
    assert not a.any()
    assert not b.any()


def test_what_is_printed_is_an_output_of_the_launch(built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(accum: Any) -> Any:
        ef.debug_print("product {}", accum)
        D = accum + 1.0
        return D

    args = arguments(printed, D=torch.empty(128, 256))
    kernel = built(args)
    kernel.prepared.launch(args.call)
    ((*_, outputs, _, _, _, _),) = kernel.launched
    assert (len(outputs), any(tensor is args.epilogue.tensors["D"] for tensor in outputs)) == (2, True)
    assert "product" in capsys.readouterr().out


def test_a_workspace_is_ignored_where_none_is_needed(built: Any) -> None:
    args = arguments("def plain(accum): D = accum; return D", D=torch.empty(128, 256))
    kernel = built(args)
    kernel.prepared.bind(args.call, args.allocate(), torch.empty(64))()
    ((*_, workspaces, _, _, _),) = kernel.launched
    assert WORKSPACE not in args.call.tensors
    assert len(workspaces) == 0
