"""Malformed epilogues, written by someone who knew PyTorch and the documentation but had not read the code.

Each must be refused with an error of ours that points, by a caret, at the line that is at fault. In functions that line
carries the comment `# fault`; the message must name it.
"""

# ruff: noqa: B008, E731, F821, F841, RUF059
import functools
import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import epifuse as ef

M, N, K = 8, 16, 4
BIAS, LAYER, SLOPES, CONFIG, EPS = torch.ones(N), torch.nn.Linear(N, N), [0.1, 0.2], {"scale": 2.0}, "1e-5"
HISTORY = []


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, accum):
        return accum * self.scale

    def epilogue(self, accum, bias):
        return accum * self.scale + bias


def negated(function):
    @functools.wraps(function)
    def negative(*operands, **named):  # fault
        return -function(*operands, **named)

    return negative


def operands_of(names):
    """What a case may name as its parameters."""
    generator = torch.Generator().manual_seed(0)
    C = torch.randint(-3, 4, (M, N), generator=generator).float()
    pool = {"C": C, "bias": C[0].clone(), "column": C[:, :1].clone(), "labels": torch.arange(M)[:, None], "mask": C > 0}
    pool |= {"alpha": 2.0, "rows": torch.ones(M), "weight": torch.randn(N, N), "wrong": torch.ones(5)}
    return {name: pool[name] for name in names if name in pool}


def run(epilogue, names):
    a, b = torch.ones(M, K), torch.ones(K, N)
    return ef.gemm(a, b, epilogue=epilogue, **operands_of(names))


def control(accum, C, bias, column, labels, mask, alpha):
    return ef.where(mask, alpha * accum + C * bias, column * labels)


def test_the_operands_of_the_cases_are_themselves_in_order():
    names = list(inspect.signature(control).parameters)
    assert torch.equal(run(control, names), ef.reference(control)(torch.full((M, N), float(K)), **operands_of(names)))


# fmt: off
def no_parameters():  # fault
    D = 1.0
    return D
def prints(accum):
    print(accum)  # fault
    return accum
def relu_in_place(accum): return accum.relu_()  # fault
def f_relu_inplace_flag(accum): return F.relu(accum, inplace=True)  # fault
def add_statement_in_place(accum, bias):
    accum.add_(bias)  # fault
    return accum
def first_row(accum): return accum - accum[0]  # fault
def slice_columns(accum):
    gate, up = accum[:, :7], accum[:, 7:]
    D = F.silu(gate) * up  # fault
    return D
def masked_fill_by_index(accum, mask):
    D = accum * 2
    D[mask] = -math.inf  # fault
    return D
def for_loop(accum):
    D = accum
    for slope in (0.1, 0.2):  # fault
        D = D * slope
    return D
def while_loop(accum, alpha):
    while alpha > 1:  # fault
        alpha = alpha / 2
    return accum
def numpy_exp(accum): return np.exp(accum)  # fault
def numpy_constant_array(accum): return accum * np.array([1.0, 2.0])  # fault
def f_string(accum):
    ef.debug_print(f"accum is {accum}", accum)  # fault
    return accum
def second_matmul(accum, weight): return torch.matmul(F.relu(accum), weight)  # fault
def functional_linear(accum, weight, bias): return F.linear(accum, weight, bias)  # fault
def nested_function(accum):
    def act(x):  # fault
        return x * x
    D = act(accum)
    return D
def walrus(accum): return (r := accum.sum(dim=-1, keepdim=True)) / r  # fault
def star_args(accum, *operands):  # fault
    D = accum + operands[0]
    return D
def star_kwargs(accum, **operands):  # fault
    D = accum + operands["bias"]
    return D
def default_tensor(accum, offset=torch.ones(N)):  # fault
    D = accum + offset
    return D
def if_tensor_is_none(accum, bias):
    if bias is not None:  # fault
        accum = accum + bias
    return accum
def truth_of_tensor(accum, C): return C or accum  # fault
def chained_comparison(accum): return torch.where(-1 <= accum <= 1, accum, 0.0)  # fault
def misspelt_dtype(accum): return accum.to(torch.flaot16)  # fault
def dtype_by_name(accum): return accum.to("float16")  # fault
def complex_dtype(accum): return accum.to(torch.complex64)  # fault
def to_device(accum): return accum.to("cuda", non_blocking=True)  # fault
def misspelt_keyword(accum): return accum / accum.sum(-1, keep_dim=True)  # fault
def unknown_approximation(accum): return F.gelu(accum, approximate="fast")  # fault
def where_without_other(accum, mask): return torch.where(mask, accum)  # fault
def exp_of_two(accum, C): return torch.exp(accum, C)  # fault
def same_argument_twice(accum): return torch.clamp(accum, 0.0, min=1.0)  # fault
def unknown_torch_function(accum): return torch.lgamma(accum)  # fault
def undefined_name(accum): return swish(accum)  # fault
def captured_tensor(accum): return accum + BIAS  # fault
def captured_module(accum): return LAYER(accum)  # fault
def captured_list(accum): return F.leaky_relu(accum, SLOPES[0])  # fault
def captured_dict(accum): return accum * CONFIG["scale"]  # fault
def captured_string(accum): return accum + EPS  # fault
def appends_to_a_list(accum):
    HISTORY.append(accum)  # fault
    return accum
def recursion(accum, alpha): return recursion(accum * 0.5, alpha - 1) if alpha > 0 else accum  # fault
def lambda_inside(accum):
    act = lambda x: x * torch.sigmoid(x)  # fault
    D = act(accum)
    return D
def comprehension(accum): return sum([accum * s for s in (0.1, 0.2)])  # fault
async def asynchronous(accum):  # fault
    D = accum * 2
    return D
def generator(accum):
    yield accum  # fault
def global_statement(accum):
    global EPS  # fault
    D = accum
    return D
def deletes(accum):
    D = accum * 2
    del accum  # fault
    return D
def tries(accum):
    try:  # fault
        D = accum.log()
    except ValueError:
        D = accum
    return D
def with_no_grad(accum):
    with torch.no_grad():  # fault
        D = accum * 2
    return D
def raises(accum):
    raise NotImplementedError  # fault
def unpacks_too_few(accum):
    a, b, c = accum, accum * 2  # fault
    D = a + b + c
    return D
def unpacks_a_pair_of_max(accum):
    values, indices = accum.max(dim=-1, keepdim=True)  # fault
    D = accum - values
    return D
def starred_unpacking(accum):
    a, *rest = accum, accum * 2, accum * 3  # fault
    return a
def returns_dict(accum): return {"D": accum}  # fault
def returns_nothing(accum):
    D = accum * 2
    return  # fault
def no_return(accum):  # fault
    D = accum * 2
def two_returns(accum):
    D = accum * 2
    return D
    return accum  # fault
def returns_operand(accum, bias): return bias  # fault
def returns_twice_the_same(accum):
    D = accum * 2
    return D, D  # fault
def returns_unknown(accum):
    Y = accum * 2
    return D  # fault
def returns_host_number(accum, alpha):
    D = alpha * 2  # fault
    return D
def bad_broadcast(accum, wrong): return accum * wrong  # fault
def column_without_none(accum, rows): return accum * rows  # fault
def reduction_dim_out_of_range(accum): return accum.softmax(dim=2)  # fault
def reduction_dims_repeated(accum): return accum.sum(dim=(0, -2))  # fault
def no_keepdim(accum): return accum - accum.mean(dim=1)  # fault
def mask_arithmetic(accum, mask): return accum + (1 - mask) * -1e9  # fault
def float_modulo(accum): return accum % 2.0  # fault
def reshape_does_not_divide(accum): return accum.reshape(-1, 3, 5).amax(dim=-1)  # fault
def reshape_two_unknowns(accum): return accum.reshape(-1, -1, 4)  # fault
def permute_repeats(accum): return accum.permute(0, 0)  # fault
def transposed(accum, C): return accum + C.T  # fault
def float_condition(accum, C): return torch.where(C, accum, 0.0)  # fault
def norm_of_other_extent(accum): return F.layer_norm(accum, (17,))  # fault
def norm_of_two_dims(accum): return F.rms_norm(accum, accum.shape)  # fault
def norm_of_a_number(accum): return F.layer_norm(accum, 16)  # fault
def group_norm(accum): return F.group_norm(accum, 4)  # fault
def random_dropout(accum): return F.dropout(accum, p=0.1, training=True)  # fault
def concatenation(accum): return torch.cat([accum, accum], dim=-1)  # fault
def item(accum): return accum / accum.amax().item()  # fault
def python_float(accum): return accum / float(accum.amax())  # fault
def mutates_attribute(accum):
    accum.requires_grad = True  # fault
    return accum
def imaginary(accum): return accum * 1j  # fault
def print_format_too_many(accum):
    ef.debug_print("{} {}", accum)  # fault
    return accum
def index_without_argument(accum): return torch.where(ef.index_n() < 4, accum, 0.0)  # fault
def used_before_assigned(accum):
    D = accum + r  # fault
    r = accum.sum()
    return D
def every_pair_of_rows(accum):
    s = accum.sum(dim=-1)
    return s[:, None] - s[None, :]  # fault
def every_pair_of_columns(accum):
    s = accum.amax(dim=0)
    return torch.where(s[:, None] > s, 1.0, 0.0)  # fault
def outer_sum(accum): return accum[:, None] + accum  # fault
def outer_product(accum, C): return accum[:, None, :] * C[None]  # fault
def remainder_of_zero(accum, labels): return accum * (labels % 0)  # fault
@negated
def decorated_away(accum):
    return accum * 2
def chained_assignment(accum):
    D = E = accum * 2  # fault
    return D, E
def indexes_a_tuple(accum):
    both = (accum, accum * 2)
    return both[0] + both[2]  # fault
def list_by_default(accum, C=(1, 2)):  # fault
    return accum + C
def sum_in_another_dtype(accum): return accum.sum(-1, dtype=torch.float64)  # fault
def starred_call(accum): return torch.clamp(accum, *(0.0, 1.0))  # fault
def operand_assigned_in_place(accum, C):
    C += accum  # fault
    return C
# fmt: on

FUNCTIONS = [
    value
    for value in list(globals().values())
    if inspect.isfunction(value) and value.__module__ == __name__ and "# fault" in inspect.getsource(value)
]
FUNCTIONS = [decorated_away, *(f for f in FUNCTIONS if f not in (negated, decorated_away))]

STRINGS = {
    "empty": "",
    "no function": "D = accum * 2",
    "missing colon": "def f(accum)\n    D = accum\n    return D",
    "unbalanced": "def f(accum):\n    D = (accum + 1\n    return D",
    "not indented": "def f(accum):\nreturn accum",
    "two functions": "def f(accum):\n    return accum\ndef g(accum):\n    return accum",
    "duplicate parameter": "def f(accum, C, C):\n    D = accum + C\n    return D",
    "times sign": "def f(accum):\n    D = accum × 2\n    return D",
    "smart quotes": "def f(accum):\n    D = gelu(accum, approximate=“tanh”)\n    return D",
    "cyrillic a": "def f(accum):\n    D = \u0430ccum * 2\n    return D",
    "nul byte": "def f(accum):\n    D = accum\0\n    return D",
    "deep parentheses": "def f(accum):\n    D = " + "(" * 3000 + "accum" + ")" * 3000 + "\n    return D",
    "deep calls": "def f(accum):\n    D = " + "abs(" * 90 + "accum[0]" + ")" * 90 + "\n    return D",
    "deep unary": "def f(accum):\n    D = " + "-" * 20000 + "accum\n    return D",
    "import os": "def f(accum):\n    import os\n    os.abort()\n    return accum",
    "dunder import": "def f(accum):\n    D = accum * __import__('os').getpid()\n    return D",
    "eval": "def f(accum):\n    D = eval('accum * 2')\n    return D",
    "open": "def f(accum):\n    D = accum + len(open('/etc/passwd').read())\n    return D",
    "default that runs": "def f(accum, x=__import__('os').abort()):\n    return accum",
    "dunder class": "def f(accum):\n    D = accum.__class__.__mro__\n    return D",
    "decorated": "@undefined(1)\ndef f(accum):\n    return accum",
    "assert": "def f(accum):\n    assert accum.shape == (8, 16)\n    return accum",
    "class": "class Epilogue:\n    def forward(self, accum):\n        return accum",
    "huge number": "def f(accum):\n    D = accum * 10 ** 10 ** 10\n    return D",
    "huge shift": "def f(accum):\n    D = accum * (1 << 10 ** 12)\n    return D",
    "divides by zero": "def f(accum):\n    D = accum * (1 / 0)\n    return D",
    "match": "def f(accum, alpha):\n    match alpha:\n        case 2.0:\n            D = accum\n    return D",
    "ellipsis": "def f(accum):\n    D = ...\n    return D",
    "none": "def f(accum):\n    D = accum + None\n    return D",
    "return yield": "def f(accum):\n    D = yield accum\n    return D",
    "lambda of nothing": "lambda: 0",
    "lambda of two results": "lambda accum: (accum, accum.sum())",
    "a sentence": "multiply by two and add the bias",
    "C": "__device__ float f(float accum) { return accum * 2; }",
}  # fmt: skip


def good(accum, C):
    return accum + C


A, B, C = torch.ones(M, K), torch.ones(K, N), torch.ones(M, N)
ARGUMENTS = {
    "a number": lambda: ef.gemm(A, B, epilogue=42),
    "a module": lambda: ef.gemm(A, B, epilogue=torch.nn.Linear(4, 4)),
    "a bound method without its operand": lambda: ef.gemm(A, B, epilogue=Head().epilogue),
    "a bound method of another signature": lambda: ef.gemm(A, B, epilogue=torch.nn.ReLU().forward),
    "a partial of another name": lambda: ef.gemm(A, B, epilogue=functools.partial(good, E=C)),
    "a cached function": lambda: ef.gemm(A, B, epilogue=functools.cache(good), C=C),
    "a builtin": lambda: ef.gemm(A, B, epilogue=len),
    "a function without grad": lambda: ef.gemm(A, B, epilogue=torch.no_grad()(good), C=C),
    "source as bytes": lambda: ef.gemm(A, B, epilogue=b"lambda accum: accum"),
    "a missing operand": lambda: ef.gemm(A, B, epilogue=good),
    "an extra operand": lambda: ef.gemm(A, B, epilogue=good, C=C, bias=BIAS),
    "accum as an operand": lambda: ef.gemm(A, B, epilogue=good, accum=C, C=C),
    "a NumPy operand": lambda: ef.gemm(A, B, epilogue=good, C=C.numpy()),
    "a list operand": lambda: ef.gemm(A, B, epilogue=good, C=[1.0] * N),
    "a string operand": lambda: ef.gemm(A, B, epilogue=good, C="1.0"),
    "an operand of None": lambda: ef.gemm(A, B, epilogue=good, C=None),
    "a complex operand": lambda: ef.gemm(A, B, epilogue=good, C=C + 1j),
    "a sparse operand": lambda: ef.gemm(A, B, epilogue=good, C=C.to_sparse()),
    "an operand on another device": lambda: ef.gemm(A, B, epilogue=good, C=C.to("meta")),
    "operands twice": lambda: ef.gemm(A, B, epilogue=good, C=C, operands={"C": 2 * C}),
    "inner extents": lambda: ef.gemm(A, B.T, epilogue=good, C=C),
    "vectors": lambda: ef.gemm(A[0], B, epilogue=good, C=C),
    "two dtypes": lambda: ef.gemm(A.half(), B, epilogue=good, C=C),
    "int64": lambda: ef.gemm(A.long(), B.long(), epilogue=good, C=C),
    "NumPy inputs": lambda: ef.gemm(A.numpy(), B.numpy(), epilogue=good, C=C),
    "out of another shape": lambda: ef.gemm(A, B, epilogue=good, C=C, out=torch.empty(N, M)),
    "out expanded": lambda: ef.gemm(A, B, epilogue=good, C=C, out=torch.empty(1, N).expand(M, N)),
    "out that is an input": lambda: ef.gemm(A, torch.ones(K, K), epilogue="lambda accum: accum", out=A),
    "out of an unknown name": lambda: ef.gemm(A, B, epilogue=good, C=C, out={"E": torch.empty(M, N)}),
    "out_dtypes by string": lambda: ef.gemm(A, B, epilogue=good, C=C, out_dtypes="float16"),
    "out_dtypes of an unknown name": lambda: ef.gemm(A, B, epilogue=good, C=C, out_dtypes={"E": torch.half}),
    "accumulator_type": lambda: ef.gemm(A, B, epilogue=good, C=C, accumulator_type=torch.bfloat16),
    "fallback": lambda: ef.gemm(A, B, epilogue=good, C=C, fallback="numpy"),
    "precision": lambda: ef.gemm(A, B, epilogue=good, C=C, precision="very high"),
    "linear's weight not transposed": lambda: ef.linear(A, B, epilogue=good, C=C),
    "EpilogueArguments without outputs": lambda: ef.GemmArguments(A, B, epilogue=ef.EpilogueArguments(good, C=C)),
}  # fmt: skip


def check(call, *arguments):
    with pytest.raises(ef.errors.EpifuseError) as caught:
        call(*arguments)
    assert not isinstance(caught.value, (KeyError, AssertionError, AttributeError, IndexError, RecursionError))
    assert type(caught.value) is not ef.errors.InternalError
    message = str(caught.value)
    assert message.strip()
    return message


def has_caret(message):
    return any(set(line.strip()) == {"^"} for line in message.splitlines())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_a_malformed_function_is_refused_on_its_line(function):
    message = check(run, function, inspect.signature(function).parameters)
    lines, first = inspect.getsourcelines(negated if function is decorated_away else function)
    [fault] = [first + i for i, line in enumerate(lines) if "# fault" in line]
    assert has_caret(message), message
    assert f"test_outsider.py:{fault}\n" in message, message


@pytest.mark.parametrize("source", STRINGS.values(), ids=STRINGS)
def test_a_malformed_string_is_refused(source):
    message = check(run, source, ["alpha"] if "alpha" in source else [])
    assert has_caret(message), message


@pytest.mark.parametrize("call", ARGUMENTS.values(), ids=ARGUMENTS)
def test_malformed_arguments_are_refused(call):
    check(call)
