"""The epilogue language on one page, written from the tables that the library itself uses: `python -m epifuse docs`.

While the page is made, every example is parsed and typed, and every refusal is provoked. So the page agrees with the
library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch

from epifuse.base.dtypes import ACCUMULATORS, BY_TORCH
from epifuse.base.errors import EpifuseError
from epifuse.fusion.primitives import PRIMITIVES, KindRule
from epifuse.fusion.vocabulary import BUILTINS, CAST_METHODS, METHODS, VOCABULARY, Entry
from epifuse.ir import Kind
from epifuse.passes.accesses import access_class
from epifuse.passes.kinds import KindError, primitive_kind
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments

M, N, K = 64, 128, 32

OPERANDS: dict[str, Any] = {
    "C": torch.empty(M, N, device="meta"),
    "bias": torch.empty(N, device="meta"),
    "column": torch.empty(M, 1, device="meta"),
    "labels": torch.empty(M, 1, dtype=torch.int64, device="meta"),
    "mask": torch.empty(M, N, dtype=torch.bool, device="meta"),
    "seed": torch.empty((), dtype=torch.int64, device="meta"),
    "alpha": 1.0,
}
"""The operands that the examples may use, beside an accum of (M, N). `alpha` is a host number."""

EXAMPLES: tuple[tuple[str, str], ...] = (
    ("D = alpha * accum + C / 2 - column ** 2", "arithmetic `+ - * / **`, unary `+ -`; everything broadcasts"),
    ("D = labels // 10 + labels % 10", "`//` and `%` of integers"),
    ("D = accum * (labels >> 3 & 1 ^ ~labels << 2)", "bits of integers: `& | ^ ~ << >>`"),
    ("D = where((accum > 0) & ~mask | (C <= bias), accum, 0.0)", "comparisons, masks by `& | ~`, `where`"),
    ("t, u = accum + bias, accum * 2; D = t * u", "several assignments, tuple unpacking"),
    ("D: float = accum", "annotations and docstrings, which mean nothing"),
    ("D = C * 2 if alpha > 1 and alpha < 3 else accum", "`if else`, `and or not`, chained comparison of host numbers"),
    ("D = accum * math.sqrt(alpha)", "`math.*` of host numbers, computed on the host at each launch"),
    ("D = silu(accum) + torch.relu(accum) + F.gelu(C, approximate='tanh')", "functions by our name, torch's, or `F`'s"),
    ("D = accum.sigmoid().clamp(min=0.1)", "tensor methods"),
    ("D = max(accum, 0) + abs(C)", "Python's `max min sum abs round any all pow`, on tensors"),
    ("r = accum.sum(dim=-1, keepdim=True); D = accum / r", "reductions, whose results are values like others"),
    ("D = accum.softmax(-1)", "`softmax`, `log_softmax` along a row"),
    ("D = accum.amax(0)[:, None]", "`x[:, None]`, `x.unsqueeze(-1)`: new dims of extent one"),
    ("D = accum.reshape(-1, 2, 64).permute(1, 0, 2)", "`reshape`, `permute`: split, merge and reorder dims"),
    (
        "D = accum.unflatten(-1, (2, -1)).transpose(1, 2)",
        "`view`, `flatten`, `unflatten`, `transpose`, `squeeze`, `.T`",
    ),
    ("gate, up = accum.chunk(2, dim=-1); D = silu(gate) * up", "parts of a row: `chunk`, `split`, `unbind`, `glu`"),
    ("D = accum[:, 0::2] * accum[..., 1::2]", "slices that are one of several equal parts; `accum[..., :64]` too"),
    (
        "q, k = accum.split([96, 32], dim=-1); D, E = silu(q), k * 2; return D, E",
        "any ranges of the columns, each with outputs of its own",
    ),
    (
        "x, y = accum.chunk(2, -1); D = accum + torch.cat([-y, x], -1)",
        "`cat`, `stack` of parts: they join to the row again",
    ),
    (
        "D = accum / accum.shape[-1] + index_n(accum) % accum.size(0)",
        "`x.shape`, `x.size(0)`, `x.numel()`: numbers that follow the shapes of a call",
    ),
    ("D = accum.logsumexp(-1, True) - accum.gather(-1, labels)", "`gather` of one column a row; 0 where there is none"),
    ("D = F.cross_entropy(accum, labels[:, 0])", "the mean loss of all rows, of logits that are not stored"),
    ("D = torch.where(mask, accum, torch.zeros_like(accum))", "`zeros_like`, `ones_like`, `full_like`: constants"),
    (
        "D = accum.masked_fill(mask, float('-inf'))",
        "`float('-inf')`, `torch.finfo(dtype).min` are constants; float32's minimum is `-inf` in an output of bfloat16",
    ),
    ("D = accum.to(torch.int32)", "casts by `.to`, `.float()`, `.half()` ...; towards zero for integers, as in torch"),
    ("D = where(index_n(accum) <= index_m(accum), accum, -math.inf)", "coordinates: a causal mask"),
    ("D = dropout(accum + bias, 0.1, seed) + C", "random numbers: functions of a seed and a position, stored nowhere"),
    ("debug_print('{}', accum); D = accum", "printing, for small problems; it is never optimised away"),
    ("D = accum; E = D.abs().sum(); return E, D", "several outputs, in any order, each a plain name"),
)
"""Statements of an epilogue, to which `return D` is added, and what they show."""

REFUSALS: tuple[str, ...] = (
    "D = accum if accum > 0 else 0",
    "if accum > 0:\n        D = accum",
    "D = (accum > 0) and mask",
    "D = where(0 < accum < 6, accum, 0.0)",
    "D = not mask",
    "D = accum; D = D + 1",
    "D = accum; D += C",
    "for i in range(3):\n        D = accum",
    "D = accum @ C",
    "D = accum[0]",
    "D = accum[:, 1:100:2]",
    "D = mask + mask",
    "D = accum & mask",
    "D = accum // 2",
    "D = accum.max(dim=-1)",
    "D = math.exp(accum)",
    "D = accum / accum.sum(dim=-1)",
    "D = torch.linalg.inv(accum)",
    "D = accum; return D, D * 2",
    "return C",
    "D = [accum for _ in range(2)]",
    "import os; D = accum",
    "D = 'text'",
)
"""Statements that are refused. The page quotes the error of each."""

SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("a number, `()`, `(1,)`", (1,)),
    ("`(N,)`, `(1, N)`", (N,)),
    ("`(M, 1)`", (M, 1)),
    ("`(M, N)`", (M, N)),
    ("`(M,)`", (M,)),
)
BATCHED: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("`(L, 1, 1)`", (3, 1, 1)),
    ("`(L, 1, N)`", (3, 1, N)),
    ("`(L, M, 1)`", (3, M, 1)),
    ("`(L, M, N)`", (3, M, N)),
    ("`(L, N)`", (3, N)),
)
KIND_PAIRS: tuple[tuple[Kind, Kind], ...] = (
    ("mask", "mask"),
    ("mask", "int32"),
    ("mask", "float"),
    ("int32", "int32"),
    ("int32", "float"),
    ("float", "float"),
)


def page() -> str:
    """The page, in Markdown."""
    return "\n".join(line.rstrip() for section in _SECTIONS for line in section()) + "\n"


def typed(statements: str, operands: Mapping[str, Any], lead: tuple[int, ...] = ()) -> GemmArguments:
    """Return a parsed and typed epilogue of these statements, which `; ` separates, with `operands` and an accum of
    (*lead, M, N)."""
    tail = "" if "return" in statements else "\n    return D"
    body = "\n    ".join(statements.split("; "))
    source = f"def epilogue(accum, {', '.join(operands)}):\n    {body}{tail}\n"
    a, b = torch.empty(*lead, M, K, device="meta"), torch.empty(K, N, device="meta")
    return GemmArguments(a, b, epilogue=EpilogueArguments.partial(source, operands))


def refusal(statements: str, operands: Mapping[str, Any], lead: tuple[int, ...] = ()) -> tuple[str, str]:
    """Return the first line of the error that these statements raise, and its hint, which may be empty."""
    try:
        typed(statements, operands, lead)
    except EpifuseError as error:
        sentence, _, rest = str(error).partition("\n")
        return sentence, rest.rpartition("hint: ")[2] if "hint: " in rest else ""
    raise AssertionError("nothing was refused")  # the page would be wrong; the tests make the page


# --- sections ----------------------------------------------------------------------------------------------------


def _intro() -> Iterator[str]:
    yield "# The epilogue language"
    yield ""
    yield "*Made by `python -m epifuse docs` from the library's own tables; edit those, not this page.*"
    yield ""
    yield "An epilogue is a Python function of `accum`, which is `A @ B`, and of operands by name. It is parsed, never"
    yield "called. Its result is what PyTorch would compute in float32 from the full-precision accumulator;"
    yield "`ef.reference(fn)` is that function. Outputs are stored by the rules of [numerics](numerics.md)."
    yield ""


def _syntax() -> Iterator[str]:
    yield "## What you may write"
    yield ""
    yield "In the examples `accum` and `C` have the shape `(M, N)`, `bias` has `(N,)`, `column` has `(M, 1)`, the"
    yield "integers `labels` have `(M, 1)`, the bools `mask` have `(M, N)`, and `alpha` is a number:"
    yield ""
    for statements, _ in EXAMPLES:
        typed(statements, OPERANDS)
    yield from _table(("epilogue", "shows"), ((_code(statements), words) for statements, words in EXAMPLES))
    yield "A name may be assigned only once, unless `@ef.epilogue(reassign=True)` allows more. Numbers of the enclosing"
    yield "scope and numbers that an object holds (`self.scale`) are read again at each call. Your own helper functions"
    yield "are inlined. An epilogue may also be a lambda, a bound method, a callable object, a source string, or an"
    yield "activation module of `torch.nn` without weights whose function is listed below. The epilogue itself, but not"
    yield "a helper, may be a `functools.partial`. A parameter whose default is None or a string is fixed while"
    yield "parsing, by what the call passes. So the epilogue may test it: `accum if C is None else accum + C`."
    yield ""


def _refused() -> Iterator[str]:
    yield "## What is refused, and what to write instead"
    yield ""
    rows = ((_code(text.split("\n")[0]), *refusal(text, OPERANDS)) for text in REFUSALS)
    yield from _table(("epilogue", "the error says", "hint"), rows)


def _vocabulary() -> Iterator[str]:
    yield "## Vocabulary"
    yield ""
    yield "Each function is also `ef.<name>`. Called on tensors, it runs plain PyTorch."
    yield ""
    for title, groups in _GROUPS:
        yield f"### {title}"
        yield ""
        entries = [entry for entry in VOCABULARY.values() if _heading(entry) in groups]
        yield from _table(("name", "meaning"), ((_code(_call(entry)), entry.summary) for entry in entries))


_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Primitives", ("primitive",)),
    ("Activations", ("activation",)),
    ("Reductions", ("reduction",)),
    ("Layout, coordinates, casts, printing", ("form",)),
)


def _heading(entry: Entry) -> str:
    """The group of an entry on the page. A macro is in the group of the functions that it becomes."""
    if entry.group != "macro":
        return entry.group
    home = str(entry.function.__module__).rpartition(".")[2]
    return home if home in ("activation", "reduction") else "primitive"


def _call(entry: Entry) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in entry.signature.parameters.values()]
    return entry.name + str(inspect.Signature(bare))


def _spellings() -> Iterator[str]:
    yield "### Other spellings"
    yield ""
    renamed = sorted(f"`.{name}` = `{ours}`" for name, ours in METHODS.items() if name != ours)
    plain = sorted(f"`.{name}`" for name, ours in METHODS.items() if name == ours)
    casts = [f"`.{name}()`" for name in CAST_METHODS]
    yield f"- Tensor methods: {', '.join(plain)}; {', '.join(renamed)}."
    yield f"- Casts: `.to(dtype)`, `.type(dtype)`, {', '.join(casts)}. An output whose last operation is a cast has the"
    yield "  dtype of the cast, unless `out` or `out_dtypes` says another."
    yield "  `.to(x.dtype)` casts to the dtype in which x is computed, or to which x was cast. It does not decide the"
    yield "  dtype of an output. x may not be an operand of less than 32 bits."
    yield "- `torch.*`, `torch.nn.functional.*`, `torch.special.*` functions of these names, with torch's parameters."
    yield f"- Python's own {', '.join(f'`{name}`' for name in BUILTINS.values())}."
    yield ""


def _kinds() -> Iterator[str]:
    yield "## Kinds"
    yield ""
    yield "A value is a *mask*, an *int32*, an *int64* (int64 operands and casts, sums of integers and masks) or a"
    yield "*float* (float32; float64 with a float64 accumulator). Literals are weak: `x * 2` keeps an int32, `x * 2.0`"
    yield "makes a float. A Python integer that is passed, captured or computed from numbers is exact in an operation"
    yield "with integers, and a float in an operation with floats; one epilogue may use it as both. The table gives the"
    yield "kind of a result; `–` means that the combination is refused."
    yield ""
    heads = ("functions", *(left if left == right else f"{left}, {right}" for left, right in KIND_PAIRS))
    yield from _table(heads, (_kind_row(rule) for rule in get_args(KindRule)))
    yield "`sum`, `prod` and `sum_of_squares` of integers are int64, and of floats float. `mean`, `norm` and"
    yield "`logsumexp` take floats. `amax`, `amin` and `absmax` keep the kind. `any` and `all` give masks."
    yield ""


def _kind_row(rule: str) -> Iterator[str]:
    rows = [row for row in PRIMITIVES.values() if row.rule == rule]
    yield " ".join(f"`{row.name}`" for row in rows)
    for pair in KIND_PAIRS:
        yield _kind(rows, pair)


def _kind(rows: Sequence[Any], pair: tuple[Kind, Kind]) -> str:
    row = max(rows, key=lambda row: row.arity)
    kinds: tuple[Kind, ...] = ("mask", *pair) if row.rule == "select" else (*pair, pair[1])[: row.arity]
    if row.arity == 1 and pair[0] != pair[1]:
        return ""
    try:
        return primitive_kind(row.name, kinds)
    except KindError:
        return "–"


def _shapes() -> Iterator[str]:
    yield "## Operands"
    yield ""
    yield "An operand broadcasts to accum's shape by NumPy's rule, whatever its name is. `accum` is `(M, N)`, or"
    yield "`(L, M, N)` if A or B has a batch. In `ef.linear` accum has the dims of `torch.nn.functional.linear`'s"
    yield "result, in `ef.gemm` those of `torch.matmul`'s: operands broadcast against them, and `dim` counts them. If"
    yield "there are more than three dims, the product treats all leading dims as one. They are reduced, reshaped or"
    yield "permuted together or not at all. An operand then has all leading dims or none: `s.expand(...).contiguous()`"
    yield "gives it all of them."
    yield ""
    yield "An operand, and an elementwise expression of operands alone, broadcasts to the value that it is combined"
    yield "with: in `accum.unflatten(-1, (-1, 64)) * (1 + w)`, `1 + w` is a row of 64 columns. If it is combined with"
    yield "no other value, it broadcasts to accum's shape."
    yield ""
    yield "An operand may have the same name as a parameter of the called function, such as `out` of `ef.gemm` and"
    yield "`ef.linear`, or `x` and `weight` of `ef.linear`. Then pass it as `operands={'x': ...}`, because `x=...`"
    yield "would be the parameter itself. If that is given twice, Python raises a `TypeError`."
    yield ""
    yield "A number, and a CPU tensor without dims that requires no gradient, are read on the host at each call, but"
    yield "for `GemmArguments` when these are made. A function that takes a tensor, such as `torch.tanh(gate)`, refuses"
    yield "a number. It accepts a tensor without dims, and the kernel then computes the function."
    yield ""
    rows = [(shape, _access(extents, ())) for shape, extents in SHAPES]
    rows += [(shape, _access(extents, (3,))) for shape, extents in BATCHED]
    yield from _table(("shape", "is read as"), rows)


def _access(shape: tuple[int, ...], lead: tuple[int, ...]) -> str:
    operand = {"x": torch.empty(shape, device="meta")}
    try:
        graph = typed("D = accum + x", operand, lead).graph
    except EpifuseError:
        sentence, hint = refusal("D = accum + x", operand, lead)
        return f"refused: {hint or sentence}"
    return "a " + access_class(graph.types[graph.loads()[0]])


def _dtypes() -> Iterator[str]:
    yield "## Dtypes"
    yield ""
    rows = (
        (
            _code(str(row.torch)),
            ", ".join(_code(_bare(dtype)) for dtype in ACCUMULATORS.get(row.torch, ())) or "",
            row.loads_as,
            "yes",
        )
        for row in BY_TORCH.values()
    )
    yield from _table(("dtype", "as A and B: accumulators", "as an operand: loads as", "as an output"), rows)
    yield ""
    yield "An operand may be float64 only if the accumulator is float64."
    yield ""
    yield "A and B have one dtype, with three exceptions: 8-bit floats may be mixed, 8-bit integers may be mixed, and B"
    yield "may have 8 bits while A has 16. In the last case B is converted to A's dtype, which is exact."


# --- Markdown ----------------------------------------------------------------------------------------------------


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        cells = (cell.replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


_SECTIONS: tuple[Callable[[], Iterator[str]], ...] = (
    _intro,
    _syntax,
    _refused,
    _vocabulary,
    _spellings,
    _kinds,
    _shapes,
    _dtypes,
)
