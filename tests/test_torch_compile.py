"""Under torch.compile a call of ours is one node, and nothing that an epilogue captured goes stale."""

import functools
import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import epifuse as ef

M, K, N = 6, 4, 8
A, B, C = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
OPERATOR = torch.ops.epifuse.gemm.default

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def add(accum: Any, C: Any) -> Any:
    D = accum + C
    return D


# --- one node --------------------------------------------------------------------------------------------------------


def nodes_of(function: Call, *args: Any, **options: Any) -> list[Any]:
    """What Dynamo's only graph calls; the compiled function is run, and gives what the plain one does."""
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    torch.testing.assert_close(compiled(*args), function(*args))
    (nodes,) = found
    return list(nodes)


def gelu_of(accum: Any, r: Any, alpha: float = 2.0) -> Any:
    D = ef.gelu(alpha * accum) + r
    total = D.sum(dim=-1)
    return D, total


class Doubled:
    def __call__(self, accum: Any) -> Any:
        return accum * 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.weight = torch.nn.Parameter(torch.randn(N, K), requires_grad=False)

    def act(self, accum: Any) -> Any:
        return ef.silu(accum) * self.scale

    def forward(self, x: Any) -> Any:
        return ef.linear(x, self.weight, epilogue=self.act)


CALLS: dict[str, Call] = {
    "a product": lambda a: ef.gemm(a, B),
    "a function": lambda a: ef.gemm(a, B, epilogue=add, C=C),
    "several outputs": lambda a: tuple(ef.gemm(a, B, epilogue=gelu_of, r=C)),
    "outputs by name": lambda a: ef.gemm(a, B, epilogue=gelu_of, r=C).total,
    "a number handed over": lambda a: ef.gemm(a, B, epilogue=gelu_of, r=C, alpha=0.5)["D"],
    "a text": lambda a: ef.gemm(a, B, epilogue="def epi(accum, C): return relu(accum) + C", C=C),
    "a text with defaults": lambda a: ef.gemm(
        a, B, epilogue="def epi(accum, C, k=2.5, n=3): return k * accum + n * C", C=C
    ),
    "a lambda": lambda a: ef.gemm(a, B, epilogue=lambda accum, r: ef.gelu(accum) + r, r=C),
    "a function of the vocabulary": lambda a: ef.gemm(a, B, epilogue=ef.silu),
    "a function of torch": lambda a: ef.gemm(a, B, epilogue=F.silu),
    "a module": lambda a: ef.gemm(a, B, epilogue=GELU),
    "an object": lambda a: ef.gemm(a, B, epilogue=DOUBLED),
    "a layer": lambda a: ef.linear(a, B.t(), C[0]),
    "a layer's bias as an operand": lambda a: ef.linear(
        a, B.t(), C[0], epilogue="def e(accum, bias): return accum * bias"
    ),
    "operands by a mapping": lambda a: ef.gemm(a, B, epilogue=add, operands={"C": C}),
    "another dtype": lambda a: ef.gemm(a, B, epilogue=add, C=C, out_dtypes=torch.float64),
}
GELU, DOUBLED = torch.nn.GELU(), Doubled()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_node(name: str) -> None:
    assert nodes_of(CALLS[name], A).count(OPERATOR) == 1


@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 5, K), (2, 3, 5, K)])
def test_a_layer_takes_any_rank(shape: tuple[int, ...]) -> None:
    assert OPERATOR in nodes_of(Layer(), torch.randn(shape))


def test_batches_broadcast() -> None:
    a, b = torch.randn(2, 3, 5, K), torch.randn(1, 1, K, N)
    assert OPERATOR in nodes_of(lambda a: ef.gemm(a, b, epilogue="lambda accum: relu(accum)"), a)


def test_sizes_may_change() -> None:
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, K)
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("numbers", [(2.5, 3.5, -1.0), (2, 3, 7), (True, False)])
def test_numbers_where_all_may_change(numbers: tuple[Any, ...]) -> None:
    def step(a: Any, by: Any) -> Any:
        return ef.gemm(a, B, epilogue="lambda accum, by: accum * by", by=by)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for number in numbers:
        torch.testing.assert_close(compiled(A, number), A @ B * number)


def test_destinations_are_written() -> None:
    out = torch.zeros(M, N)

    def step(a: Any, out: Any) -> Any:
        first = ef.gemm(a, B, epilogue=add, C=C, out=out)
        ef.gemm(a, B, out={"D": out}, accumulate="D")
        return first + out

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(A, out), 2 * (2 * (A @ B) + C))
    torch.testing.assert_close(out, 2 * (A @ B) + C)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_inductor_trains() -> None:
    def loss(x: Any, w: Any, r: Any) -> Any:
        D, total = ef.linear(x, w, epilogue=gelu_of, r=r)
        return D.square().sum() + total.sum()

    def plain(x: Any, w: Any, r: Any) -> Any:
        D = F.gelu(2 * (x @ w.t())) + r
        return D.square().sum() + D.sum()

    leaves = [tensor.clone().requires_grad_() for tensor in (A, B.t(), C)]
    double = [tensor.detach().double().requires_grad_() for tensor in leaves]
    compiled = torch.compile(loss, fullgraph=True)
    exact = torch.autograd.grad(plain(*double), double)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), exact, strict=True):
        # Each element is a sum of products that cancel, so its error is measured by the largest one.
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_autocast_casts_the_product_and_not_the_operands() -> None:
    def step(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return tuple(ef.linear(x, B.t(), C[0], epilogue=gelu_of, r=C))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got, want = compiled(A), step(A)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in want] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)  # of a product that is rounded to bfloat16


# --- nothing goes stale ----------------------------------------------------------------------------------------------


def relu_of(x: Any) -> Any:
    return ef.relu(x)


def square_of(x: Any, by: float = 1.0) -> Any:
    return x * x * FACTOR * by


def minus(accum: Any, C: Any) -> Any:
    D = accum - C
    return D


FACTOR, HELPER, ACT, AXES = 2.0, relu_of, ef.gelu, -1


class Scales:
    def __init__(self) -> None:
        self.inner = type("Inner", (), {"k": 2.0})()


SCALES = Scales()


def closure(value: Any) -> Any:
    def epi(accum: Any, C: Any) -> Any:
        return accum * value + C

    return epi


def closure_calling(helper: Any) -> Any:
    def epi(accum: Any, C: Any) -> Any:
        return helper(accum) + C

    return epi


def of_globals(accum: Any, C: Any) -> Any:
    return accum * FACTOR + C


def of_helper(accum: Any, C: Any) -> Any:
    return HELPER(ACT(accum)) + C


def of_defaults(accum: Any, C: Any, alpha: float = 2.0, *, beta: float = 1.0) -> Any:
    return accum * alpha + C * beta


def of_object(accum: Any, C: Any) -> Any:
    return accum * SCALES.inner.k + C


def of_arithmetic(accum: Any, C: Any) -> Any:
    return accum * math.exp(FACTOR) + C if FACTOR > 2.5 else accum


def of_dims(accum: Any, C: Any) -> Any:
    total = (accum + C).sum(dim=AXES)
    return total


def set_global(name: str, value: Any) -> Call:
    return lambda epilogue: globals().__setitem__(name, value)


def set_cell(value: Any) -> Call:
    def change(epilogue: Any) -> None:
        epilogue.__closure__[0].cell_contents = value

    return change


def raised(x: Any, *, power: Any = 2.0) -> Any:
    return ef.relu(x) ** power


def of_raised(accum: Any, C: Any) -> Any:
    return raised(accum) + C


def set_attribute(holder: Any, name: str, value: Any) -> Call:
    return lambda epilogue: setattr(epilogue if holder is None else holder, name, value)


CHANGES: dict[str, tuple[Call, list[Call]]] = {
    "a number in a cell": (lambda: closure(2.0), [set_cell(3.0), set_cell(4.0), set_cell(5), set_cell(True)]),
    "a function in a cell": (
        lambda: closure_calling(relu_of),
        [set_cell(square_of), set_global("FACTOR", 3.0), set_attribute(square_of, "__defaults__", (5.0,))],
    ),
    "a global number": (lambda: of_globals, [set_global("FACTOR", value) for value in (3.0, 4.0, 7, -0.0)]),
    "a global function": (lambda: of_helper, [set_global("HELPER", square_of), set_global("ACT", ef.silu)]),
    "the code of a helper": (lambda: of_helper, [set_attribute(relu_of, "__code__", (lambda x: ef.tanh(x)).__code__)]),
    "a default": (lambda: of_defaults, [set_attribute(None, "__defaults__", (value,)) for value in (3.0, 4.0, 5.0)]),
    "a helper's default by name": (
        lambda: of_raised,
        [set_attribute(raised, "__kwdefaults__", {"power": value}) for value in (3.0, 4)],
    ),
    "a default by name": (
        lambda: of_defaults,
        [set_attribute(None, "__kwdefaults__", {"beta": value}) for value in (3.0, 4.0)],
    ),
    "its code": (lambda: add, [set_attribute(None, "__code__", minus.__code__)]),
    "an attribute of an object": (lambda: of_object, [set_attribute(SCALES.inner, "k", value) for value in (3.0, 4)]),
    "a number of Python's arithmetic": (lambda: of_arithmetic, [set_global("FACTOR", v) for v in (2.75, 3.0, 1.0)]),
    "the dims of a reduction": (lambda: of_dims, [set_global("AXES", value) for value in (0, (0, 1), -1)]),
}


@pytest.fixture
def as_before() -> Iterator[None]:
    """Puts back what the changes changed."""
    functions = relu_of, square_of, of_defaults, raised, add
    made_of = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions]
    held = {name: globals()[name] for name in ("FACTOR", "HELPER", "ACT", "AXES")}
    yield
    globals().update(held)
    SCALES.inner.k = 2.0
    for function, *made in made_of:
        function.__code__, function.__defaults__, function.__kwdefaults__ = made


@pytest.mark.sweep
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_captured_is_read_again(name: str, backend: str) -> None:
    make, changes = CHANGES[name]
    epilogue = make()

    def step(a: Any) -> Any:
        return ef.gemm(a, B, epilogue=epilogue, C=C) + 1

    compiled, differs = torch.compile(step, backend=backend, fullgraph=True), False
    before = compiled(A)
    torch.testing.assert_close(before, step(A))
    for change in changes:
        change(epilogue)
        want = step(A)
        differs |= want.shape != before.shape or not torch.allclose(want, before)
        torch.testing.assert_close(compiled(A), want)
    assert differs  # else the changes prove nothing


def test_another_function_of_the_same_code_has_its_own_numbers() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda a, epi: ef.gemm(a, B, epilogue=epi, C=C), backend=counter, fullgraph=True)
    for value in (2.0, 3.0, 4.0, 5.0, 6.0):
        torch.testing.assert_close(compiled(A, closure(value)), value * (A @ B) + C)
    assert counter.frame_count == 2  # after a second value every float is an input


def test_numbers_that_are_handed_over_may_change() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda a, alpha: ef.gemm(a, B, epilogue=of_defaults, C=C, alpha=alpha), backend=counter, fullgraph=True
    )
    for alpha in (2.0, 3.0, 4.0, 5.0, 6.0):
        torch.testing.assert_close(compiled(A, alpha), alpha * (A @ B) + C)
    assert counter.frame_count == 2
    torch.testing.assert_close(compiled(A, torch.tensor(7.0)), 7 * (A @ B) + C)


def test_a_layers_own_number_is_read_again() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for layer.scale in (2.0, 3.0, 4.0):
        torch.testing.assert_close(compiled(A), layer.scale * F.silu(A @ layer.weight.t()))


# --- what breaks the graph -------------------------------------------------------------------------------------------


def by_kernel(a: torch.Tensor) -> Any:
    args = ef.GemmArguments(a * 2, B, epilogue=ef.EpilogueArguments(add, C=C, D=torch.empty(M, N)))
    return ef.get_kernels(args)[0].run(args)["D"] + 1


def by_step(a: torch.Tensor) -> Any:
    return STEP()["D"] + 1


def by_closure(a: torch.Tensor) -> Any:
    two = float(FACTOR)
    return ef.gemm(a * 2, B, epilogue=lambda accum: accum * two, out_dtypes=None) / two + C + 1


def by_partial(a: torch.Tensor) -> Any:
    return ef.gemm(a * 2, B, epilogue=functools.partial(of_defaults, alpha=1.0), C=C) + 1


def by_functor(a: torch.Tensor) -> Any:
    return ef.gemm(a * 2, B, epilogue=ef.thread.LinearCombination(alpha=1.0), C=C) + C + 1


DOUBLED_A = A * 2
_ARGS = ef.GemmArguments(DOUBLED_A, B, epilogue=ef.EpilogueArguments(add, C=C, D=torch.empty(M, N)))
STEP = ef.get_kernels(_ARGS)[0].bind(_ARGS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", [by_kernel, by_step, by_closure, by_partial, by_functor])
def test_other_calls_run_outside_of_the_graph(function: Call) -> None:
    compiled, want = torch.compile(function, backend="eager"), function(A)
    for _ in range(2):
        torch.testing.assert_close(compiled(A), want)
    torch.testing.assert_close(want, (A * 2) @ B + C + 1)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="epifuse"):
        torch.compile(function, backend="eager", fullgraph=True)(A)


WRONG: dict[str, tuple[Call, str]] = {
    "an operand is missing": (lambda a: ef.gemm(a, B, epilogue=add), "C is not provided"),
    "a name too many": (lambda a: ef.gemm(a, B, epilogue=add, C=C, E=C), "'E'"),
    "a destination of another shape": (lambda a: ef.gemm(a, B, out=torch.empty(N, M)), "must have the shape"),
    "nothing to accumulate onto": (lambda a: ef.gemm(a, B, epilogue=add, C=C, accumulate="D"), "D"),
    "no weight": (lambda a: ef.linear(a, [1.0]), "weight"),
    "a list": (lambda a: ef.gemm(a, B, epilogue=add, C=[1.0]), "C"),
    "an option": (lambda a: ef.gemm(a, B, fallback="numpy"), "fallback"),
    "outside the language": (lambda a: ef.gemm(a, B, epilogue="lambda accum: unknown(accum)"), "unknown"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_ours_passes_through(name: str) -> None:
    function, match = WRONG[name]
    with pytest.raises(ef.errors.EpifuseError, match=match):
        torch.compile(function, backend="eager")(A)


def test_a_bad_epilogue_in_a_full_graph_is_told_as_such() -> None:
    """No graph break would help, so no sentence speaks of what runs outside of the graph."""

    def function(a: torch.Tensor) -> Any:
        return ef.gemm(a, B, epilogue="def epi(accum):\n    if accum > 0:\n        D = accum\n    return D")

    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot run this call: an if statement") as caught:
        torch.compile(function, backend="eager", fullgraph=True)(A)
    assert "outside the compiled graph" not in str(caught.value)


def test_the_compiler_is_not_imported_for_it() -> None:
    program = "import sys, epifuse; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["gemm", "linear"])
def test_what_dynamo_traces_takes_the_same_arguments(name: str) -> None:
    traced = getattr(ef, name)._torchdynamo_inline
    declared = {key: (each.kind, each.default) for key, each in inspect.signature(getattr(ef, name)).parameters.items()}
    assert {key: (each.kind, each.default) for key, each in inspect.signature(traced).parameters.items()} == declared


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own
@pytest.mark.parametrize("is_known", [False, True], ids=["traced within", "known before"])
def test_compiled_autograd_runs_a_backward_outside_of_its_graph(is_known: bool) -> None:
    weight = torch.randn(N, K, requires_grad=True)

    @torch.compiler.disable
    def layer(x: torch.Tensor) -> torch.Tensor:
        return ef.linear(x, weight, epilogue=lambda accum: ef.silu(accum) * 2)

    if is_known:
        layer(A).sum().backward()
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(lambda x: layer(x).square().sum().backward(), backend="aot_eager")
        for rows in (M, M + 1, M + 2):
            x, weight.grad = torch.randn(rows, K), None
            step(x)
            want = torch.autograd.grad((F.silu(x @ weight.t()) * 2).square().sum(), weight)
            torch.testing.assert_close((weight.grad,), want)
