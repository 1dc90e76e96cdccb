"""Every class of Python syntax is in the language, and then means what PyTorch makes of it, or is refused by us."""

import ast

import pytest
import torch

import epifuse as ef
from epifuse.base.errors import EpifuseError, EpilogueSyntaxError
from tests.frontend.sources import compare, function_from

SUPPORTED: dict[type[ast.AST], str] = {
    # statements
    ast.FunctionDef: "D = accum",
    ast.Return: "D = accum * 2",
    ast.Assign: "D = accum + C",
    ast.AnnAssign: "t: torch.Tensor\n    D: torch.Tensor = accum * C",
    ast.Expr: "D = accum\n    ef.debug_print('{}', D)",
    ast.Pass: "pass\n    D = accum",
    # expressions
    ast.BoolOp: "D = accum * (alpha > 0 and alpha < 5)",
    ast.BinOp: "D = accum - C",
    ast.UnaryOp: "D = -accum",
    ast.IfExp: "D = accum if alpha > 1 else C",
    ast.Compare: "D = accum < C",
    ast.Call: "D = torch.relu(accum)",
    ast.Constant: "D = accum * 0.5",
    ast.Attribute: "D = accum * math.pi",
    ast.Subscript: "D = accum + row[None, :]",
    ast.Name: "D = C",
    ast.List: "[a, b] = [accum, C]\n    D = a - b",
    ast.Tuple: "a, b = accum, C\n    D = a - b",
    ast.Slice: "D = accum + row[None, :]",
    # operators
    ast.Add: "D = accum + C",
    ast.Sub: "D = accum - C",
    ast.Mult: "D = accum * C",
    ast.Div: "D = accum / C",
    ast.Mod: "D = ef.index_n(accum) % 3",
    ast.Pow: "D = accum ** 3",
    ast.FloorDiv: "D = ef.index_m(accum) // 2",
    ast.BitOr: "D = (accum > 0) | (C > 0)",
    ast.BitAnd: "D = (accum > 0) & (C > 0)",
    ast.Invert: "D = ~(accum > 0)",
    ast.Not: "D = accum * (not alpha)",
    ast.UAdd: "D = +accum",
    ast.USub: "D = -C",
    ast.And: "D = accum if alpha and beta else C",
    ast.Or: "D = accum if alpha or beta else C",
    # comparisons
    ast.Eq: "D = accum == C",
    ast.NotEq: "D = accum != C",
    ast.Lt: "D = accum < C",
    ast.LtE: "D = accum <= C",
    ast.Gt: "D = accum > C",
    ast.GtE: "D = accum >= C",
    ast.Is: "D = accum if None is None else C",
    ast.IsNot: "D = accum if alpha is not None else C",
    # the rest of the tree
    ast.Load: "D = accum",
    ast.Store: "D = accum",
    ast.arguments: "D = accum",
    ast.arg: "D = accum",
    ast.keyword: "D = accum.clamp(min=0.5)",
    ast.LShift: "D = ef.index_m(accum) << 1",
    ast.RShift: "D = ef.index_m(accum) >> 1",
    ast.BitXor: "D = (accum > 0) ^ (C > 0)",
}

REFUSED: dict[type[ast.AST], str] = {
    ast.AsyncFunctionDef: "async def g(): pass",
    ast.ClassDef: "class X: pass",
    ast.Delete: "del C",
    ast.AugAssign: "accum += C",
    ast.For: "for i in (1, 2): pass",
    ast.AsyncFor: "async for i in C: pass",
    ast.While: "while alpha: pass",
    ast.If: "if alpha: pass",
    ast.With: "with torch.no_grad(): pass",
    ast.AsyncWith: "async with torch.no_grad(): pass",
    ast.Match: "match alpha:\n        case 1: pass",
    ast.Raise: "raise ValueError",
    ast.Try: "try: pass\n    except ValueError: pass",
    ast.Assert: "assert alpha",
    ast.Import: "import os",
    ast.ImportFrom: "from os import path",
    ast.Global: "global S",
    ast.Nonlocal: "nonlocal S",
    ast.Break: "for i in (1, 2): break",
    ast.Continue: "for i in (1, 2): continue",
    ast.NamedExpr: "D = (t := accum) + 1",
    ast.Lambda: "D = (lambda x: x)(accum)",
    ast.Dict: "D = {}",
    ast.Set: "D = {accum}",
    ast.ListComp: "D = [x for x in (accum, C)]",
    ast.SetComp: "D = {x for x in (accum, C)}",
    ast.DictComp: "D = {x: x for x in (accum, C)}",
    ast.GeneratorExp: "D = sum(x for x in (accum, C))",
    ast.Await: "D = await accum",
    ast.Yield: "yield accum",
    ast.YieldFrom: "yield from accum",
    ast.FormattedValue: "ef.debug_print(f'{alpha}', accum)",
    ast.JoinedStr: "ef.debug_print(f'{alpha}', accum)",
    ast.Starred: "D = torch.relu(*accum)",
    ast.MatMult: "D = accum @ C",
    ast.In: "D = accum in (C, C)",
    ast.NotIn: "D = accum not in (C, C)",
    ast.Del: "del C",
    ast.comprehension: "D = [x for x in (accum, C)]",
    ast.ExceptHandler: "try: pass\n    except ValueError: pass",
    ast.alias: "import os",
    ast.withitem: "with torch.no_grad(): pass",
    ast.match_case: "match alpha:\n        case 1: pass",
    ast.MatchValue: "match alpha:\n        case 1: pass",
    ast.MatchSingleton: "match alpha:\n        case None: pass",
    ast.MatchSequence: "match alpha:\n        case [1]: pass",
    ast.MatchMapping: "match alpha:\n        case {}: pass",
    ast.MatchClass: "match alpha:\n        case int(): pass",
    ast.MatchStar: "match alpha:\n        case [*a]: pass",
    ast.MatchAs: "match alpha:\n        case _: pass",
    ast.MatchOr: "match alpha:\n        case 1 | 2: pass",
}
for name, example in {
    "TryStar": "try: pass\n    except* ValueError: pass",
    "TypeAlias": "type X = int",
    "TemplateStr": "ef.debug_print(t'{alpha}', accum)",
    "Interpolation": "ef.debug_print(t'{alpha}', accum)",
}.items():
    if hasattr(ast, name):
        REFUSED[getattr(ast, name)] = example

# Never in the tree of a function: roots of other kinds of source, and what newer Pythons keep for old code.
ELSEWHERE = {
    *("AST", "mod", "Module", "Interactive", "Expression", "FunctionType", "stmt", "expr", "expr_context", "boolop"),
    *("operator", "unaryop", "cmpop", "excepthandler", "pattern", "type_ignore", "TypeIgnore", "slice"),
    *("Num", "Str", "Bytes", "NameConstant", "Ellipsis", "Index", "ExtSlice", "Suite", "Param", "AugLoad", "AugStore"),
    # A generic helper's type parameters are an annotation: read by nobody.
    *("type_param", "TypeVar", "ParamSpec", "TypeVarTuple"),
}


def syntax_classes() -> list[type[ast.AST]]:
    found = [value for value in vars(ast).values() if isinstance(value, type) and issubclass(value, ast.AST)]
    return [value for value in found if value.__name__ not in ELSEWHERE]


def source(body: str) -> str:
    return f"def epi(accum, C, row, alpha, beta):\n    {body}\n    return D\n"


@pytest.mark.parametrize("syntax", syntax_classes(), ids=lambda c: c.__name__)
def test_every_class_is_placed(syntax: type[ast.AST]) -> None:
    assert (syntax in SUPPORTED) != (syntax in REFUSED), f"ast.{syntax.__name__} needs an example in one of the tables"
    example = {**SUPPORTED, **REFUSED}[syntax]
    tree = ast.parse(source(example))
    assert any(isinstance(node, syntax) for node in ast.walk(tree)), f"{example!r} holds no {syntax.__name__}"


@pytest.mark.parametrize("syntax", SUPPORTED, ids=lambda c: c.__name__)
def test_supported_means_what_pytorch_means(syntax: type[ast.AST]) -> None:
    names = {"C": torch.randn(6, 10) + 3, "row": torch.randn(10), "alpha": 2.0, "beta": 0.0}
    compare(function_from(source(SUPPORTED[syntax])), **names)


@pytest.mark.parametrize("syntax", REFUSED, ids=lambda c: c.__name__)
def test_refused_on_the_line(syntax: type[ast.AST]) -> None:
    text = source(REFUSED[syntax])
    operands = {"C": torch.ones(6, 10), "row": torch.ones(10), "alpha": 2.0, "beta": 1.0}
    with pytest.raises(EpifuseError) as caught:
        ef.gemm(torch.ones(6, 4), torch.ones(4, 10), epilogue=text, **operands)
    error = caught.value
    assert isinstance(error, EpilogueSyntaxError)
    assert error.loc is not None
    assert error.loc.file == "<epilogue>"
    assert not str(error).startswith(syntax.__name__), "the name of the class is no word that people know"
    assert error.loc.line in (1, 2, 3)
    assert "^" in str(error)
    assert "hint: " in str(error) or error.key == "not_python"
