"""A test of a provider's kernels: each function of the language is computed as by PyTorch, or refused with a reason.

Use it for a provider that you write (docs/own_kernel.md), in a test of your own:

    import pytest
    from epifuse.tools.conformance import FUNCTIONS, check

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_function(name):
        check("mine", name)
"""

from __future__ import annotations

import torch

from epifuse import providers
from epifuse.api import explain, get_kernels
from epifuse.base.errors import EpifuseError, fail
from epifuse.fusion.vocabulary import VOCABULARY, is_static
from epifuse.providers.guarded import failure
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments

FUNCTIONS: tuple[str, ...] = tuple(VOCABULARY)
"""The names of all functions of the language."""


def check(provider: str, name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> str | None:
    """Check the function `name` on `accum` and a matrix C. A is (6, 4) and B is (4, 5), of multiples of 1/8, whose
    products are exact.

    Return None if the result of each kernel that can run is close to PyTorch's. If no kernel can run, return the
    reasons, a line for each kernel; if the function does not take such values, return why. Raises `AssertionError` if a
    result is wrong, an input was written, a kernel refuses without a reason, the provider failed, or none of its
    kernels is for the device. Raises `ArgumentError` if there is no such provider or function.
    """
    if not dtype.is_floating_point:
        raise fail("option", None, name="dtype", want="a floating dtype", value=dtype)
    if name not in FUNCTIONS:
        raise fail("option", None, name="the function", want="one of epifuse.tools.conformance.FUNCTIONS", value=name)
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-16, 17, shape, generator=drawn) / 8 for shape in ((6, 4), (4, 5)))
    a, b, c = (x.to(device, dtype) for x in (a, b, torch.randn(6, 5, generator=drawn)))
    _not_left_out(provider, GemmArguments(a, b))
    values = _values(name)
    source = f"def epilogue(accum, C):\n    D = {name}({', '.join(values)})\n    return D\n"
    try:
        args = GemmArguments(a, b, epilogue=EpilogueArguments.partial(source, {"C": c}))
    except EpifuseError as error:
        return str(error)
    own = {spec.name for spec in providers.load(provider).specs()}
    told = [refusal for refusal in explain(args).refusals if refusal.kernel in own]
    if failed := [refusal for refusal in told if refusal.reason.startswith(failure(provider))]:
        raise AssertionError("\n".join(map(str, failed)))
    kernels = get_kernels(args, providers=[provider])
    if not kernels:
        if {refusal.kernel for refusal in told if refusal.reason} != own:
            raise AssertionError(f"not every kernel of '{provider}' says why it refuses {name}: {told}")
        return "\n".join(map(str, told))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    accum, other = (a.double() @ b.double()).to(wide), c.to(wide)
    given = {"accum": accum, "C": other, "accum > C": accum > other}
    want = VOCABULARY[name].function(*(given[value] for value in values))
    before = [x.clone() for x in (a, b, c)]
    for kernel in kernels:
        found = kernel.run(args)["D"]
        _assert_close(found, want.to(found.dtype))
        for which, x, then in zip("ABC", (a, b, c), before, strict=True):
            if not torch.equal(x, then):
                raise AssertionError(f"{kernel.metadata.kernel_name} wrote to {which}, which is an input of {name}")
    return None


def _not_left_out(provider: str, args: GemmArguments) -> None:
    get_kernels(args, providers=[provider])
    target = args.problem.target
    if not any(spec.device == target.device and target.cc in spec.ccs for spec in providers.load(provider).specs()):
        raise AssertionError(f"no kernel of '{provider}' is for {target.name}: pass another device")


def _assert_close(found: torch.Tensor, want: torch.Tensor) -> None:
    if not found.dtype.is_floating_point or found.dtype.itemsize > 1:
        torch.testing.assert_close(found, want, equal_nan=True)
    else:  # both are rounded, so they may differ by one step of the dtype
        step = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.float(), want.float(), equal_nan=True, rtol=step, atol=step)


def _values(name: str) -> list[str]:
    """The arguments for a function: a value for each parameter without a default. `where` gets a mask first."""
    if name == "where":
        return ["accum > C", "accum", "C"]
    parameters = VOCABULARY[name].signature.parameters.values()
    count = sum(one.default is one.empty and not is_static(one) for one in parameters)
    return (["accum", "C"] * count)[:count]
