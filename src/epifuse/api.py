"""The arrow, written out: source, graph, plan, kernel, tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from epifuse import ir, providers
from epifuse.arguments import PLAIN, EpilogueArguments, GemmArguments
from epifuse.arguments import parsed as parse_cached
from epifuse.errors import fail
from epifuse.frontend import Parsed
from epifuse.ir import Builder, Factor, Graph, Node, Output, rewrite
from epifuse.ir.graph import keep
from epifuse.kernel import Kernel, Metadata
from epifuse.plan import Plan, Refusal, Selection, select
from epifuse.problem import Constraints, Problem
from epifuse.reference import unfused
from epifuse.runtime import cache
from epifuse.runtime.launch import launch
from epifuse.target import TARGETS

EpilogueFunction = Callable[..., Any] | str


def epilogue(function: Callable[..., Any] | None = None, /, *, reassign: bool = False) -> Any:
    """Decorator: parse early, so that an epilogue outside the language fails where it is defined.

    The function stays callable, and then is plain PyTorch. `reassign=True` allows a name to be assigned again.
    Raises `EpilogueSyntaxError`.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__epifuse_reassign__ = reassign  # type: ignore[attr-defined]  # read back by arguments.parsed
        parse_cached(function)
        return function

    return mark if function is None else mark(function)


# --- discovery ---------------------------------------------------------------------------------------------------


def get_kernels(
    args: GemmArguments,
    metadata_filter: Callable[[Metadata], bool] | None = None,
    *,
    cc: int | None = None,
    providers: Iterable[str] | None = None,
    limit: int | None = None,
) -> list[Kernel]:
    """Kernels that can run `args`, best first; maybe none, and `explain(args)` says why.

    `cc` plans for a target (90 = Hopper, 0 = the CPU) instead of A's device. Raises `ArgumentError` for options.
    """
    if not isinstance(args, GemmArguments):
        raise fail("wrong_arguments", None, function="get_kernels", want="GemmArguments", type=type(args).__name__)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise fail("option", None, name="limit", want="a whole number above 0", value=limit)
    found = [Kernel(plan.spec, plan) for plan in _selection(args, cc, providers).plans]
    kept = [kernel for kernel in found if metadata_filter is None or metadata_filter(kernel.metadata)]
    return kept[:limit]


def _selection(args: GemmArguments, cc: int | None = None, names: Iterable[str] | None = None) -> Selection:
    problem = args.problem if cc is None else replace(args.problem, target=_target(cc))
    wanted = providers.NAMES if names is None else tuple(names)
    for name in wanted:
        if name not in providers.NAMES:
            raise fail("option", None, name="providers", want=f"among {', '.join(providers.NAMES)}", value=name)
    return _selected(args.graph, problem, wanted)


@lru_cache(maxsize=1024)
def _selected(graph: Graph, problem: Problem, names: tuple[str, ...]) -> Selection:
    """A pure function of its arguments; `arguments.typed_graph` gives the same graph for the same problem."""
    candidates, absent = [], []
    for name in names:
        provider = providers.load(name)
        if (missing := provider.available()) is not None:
            absent.append(Refusal(name, missing))
        else:
            candidates += [(spec, provider.supports) for spec in provider.specs()]
    selection = select(graph, problem, candidates)
    return replace(selection, refusals=(*selection.refusals, *absent))


def _target(cc: int) -> Any:
    if not isinstance(cc, int) or cc not in TARGETS:
        raise fail("cc_type", None, known=", ".join(map(str, TARGETS)), value=cc)
    return TARGETS[cc]


@dataclass(frozen=True)
class Explanation:
    """The graph, the plans and the refusals for one set of arguments; `print` it."""

    args: GemmArguments
    selection: Selection

    @property
    def plan(self) -> Plan | None:
        """The plan that would run."""
        return self.selection.plans[0] if self.selection.plans else None

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Why each other kernel cannot."""
        return self.selection.refusals

    def __str__(self) -> str:
        parts = [str(self.args.graph), str(self.plan) if self.plan else _NO_PLAN]
        parts += [f"note     {note}" for note in self.args.epilogue.parsed.notes]
        parts += [f"refused  {reason}" for reason in self.selection.reasons]
        return "\n".join(parts)


_NO_PLAN = "no kernel can run this; gemm(..., fallback='torch') would run it unfused in PyTorch"


def explain(args: GemmArguments, *, cc: int | None = None) -> Explanation:
    """What would run for `args`, and why nothing else does."""
    return Explanation(args, _selection(args, cc))


# --- one call ----------------------------------------------------------------------------------------------------


class Results(tuple):  # type: ignore[type-arg]  # a tuple of tensors
    """Outputs in the order of the return statement, also by name: `r.D`."""

    names: tuple[str, ...]

    def __new__(cls, named: Mapping[str, torch.Tensor]) -> Results:
        made = super().__new__(cls, named.values())
        made.names = tuple(named)
        return made

    def __getattr__(self, name: str) -> torch.Tensor:
        if name != "names" and name in self.names:
            return self[self.names.index(name)]  # type: ignore[no-any-return]  # a tensor
        raise AttributeError(f"no output named {name!r}; there are {', '.join(self.names)}")


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    /,
    *,
    epilogue: EpilogueFunction | None = None,
    out: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
    operands: Mapping[str, Any] | None = None,
    accumulator_type: torch.dtype | None = None,
    precision: str | None = None,
    deterministic: bool = True,
    fast_math: bool = False,
    fallback: str | None = None,
    **by_name: Any,
) -> Any:
    """`a @ b` with an epilogue: plans, builds once, launches; outputs not given are allocated.

    `a` is (M,K) or (L,M,K), `b` (K,N) or (L,K,N). Operands are handed by name, or through `operands` where a name is
    also an option. `out` is written: a tensor for D or the only output, a mapping for several. `out_dtypes` chooses the
    dtype of outputs that are allocated. One output is returned as it is, several as a tuple with names.
    `fallback="torch"` runs unfused PyTorch where no kernel can, and warns. Raises `EpilogueSyntaxError`,
    `EpilogueTypeError`, `ArgumentError`, and `UnsupportedError` where no kernel can.
    """
    parsed = parse_cached(PLAIN if epilogue is None else epilogue)
    given = _given(parsed, by_name, operands, out)
    options = _Options(accumulator_type, precision, deterministic, fast_math, fallback, out_dtypes)
    outputs, _ = _run(a, b, parsed, given, options)
    return next(iter(outputs.values())) if len(outputs) == 1 else Results(outputs)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: EpilogueFunction | None = None,
    out: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
    operands: Mapping[str, Any] | None = None,
    accumulator_type: torch.dtype | None = None,
    precision: str | None = None,
    deterministic: bool = True,
    fast_math: bool = False,
    fallback: str | None = None,
    **by_name: Any,
) -> Any:
    """`torch.nn.functional.linear` with an epilogue: x (..., K), weight (N, K), bias (N,).

    The bias is added to the product before the epilogue, unless the epilogue has a parameter of that name. Leading dims
    of x are flattened to M for the product, and restored on outputs that have x's rows. The rest is `gemm`'s.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, torch.Tensor):
            raise fail("tensor_type", None, name=name, type=type(tensor).__name__)
    if weight.dim() != 2 or x.dim() < 1:
        raise fail("linear_shapes", None, x=tuple(x.shape), weight=tuple(weight.shape))
    lead = tuple(x.shape[:-1])
    parsed = parse_cached(PLAIN if epilogue is None else epilogue)
    if bias is not None:
        by_name = {**by_name, "bias": bias}
        if "bias" not in parsed.parameters:
            parsed = _with_bias(parsed)
    written = {output.name for output in parsed.graph.outputs}
    given = {
        name: _rows(name, value, lead) if name in written else _flat(value, lead)
        for name, value in _given(parsed, by_name, operands, out).items()
    }
    options = _Options(accumulator_type, precision, deterministic, fast_math, fallback, out_dtypes)
    outputs, args = _run(_flat(x, lead) if lead else x.unsqueeze(0), weight.t(), parsed, given, options)
    shaped = {o.name: outputs[o.name].view(_leading(o, outputs[o.name], lead)) for o in args.graph.outputs}
    return next(iter(shaped.values())) if len(shaped) == 1 else Results(shaped)


def _flat(value: Any, lead: tuple[int, ...]) -> Any:
    if not isinstance(value, torch.Tensor) or len(lead) == 1 or value.dim() < 2 or tuple(value.shape[:-1]) != lead:
        return value
    return value.reshape(-1, value.shape[-1])


def _rows(name: str, value: Any, lead: tuple[int, ...]) -> Any:
    """A destination as the product's rows see it; a copy would not be written."""
    if not isinstance(value, torch.Tensor):
        return value
    if not lead:
        return value.unsqueeze(0)
    flat = _flat(value, lead)
    if flat is not value and flat.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        raise fail("linear_out", None, name=name, shape=tuple(value.shape), strides=value.stride())
    return flat


def _leading(output: Output, tensor: torch.Tensor, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The output's shape with x's leading dims where the product has M."""
    shape: list[int] = []
    for dim, extent in zip(output.dims or (), tensor.shape, strict=False):
        shape += lead if dim == (Factor("m"),) else (extent,)
    return tuple(shape)


@lru_cache(maxsize=256)
def _with_bias(parsed: Parsed) -> Parsed:
    """The epilogue on accum + bias."""

    def rule(old: Node, args: tuple[Node, ...], builder: Builder) -> Node:
        if old.op != "accum":
            return keep(old, args, builder)
        return builder.node("add", builder.node("accum"), builder.node("load", attr=ir.Load("bias")))

    graph = rewrite(parsed.graph, rule)
    return replace(
        parsed, graph=replace(graph, inputs=("bias", *graph.inputs)), parameters=("bias", *parsed.parameters)
    )


# --- shared ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    accumulator_type: torch.dtype | None
    precision: str | None
    deterministic: bool
    fast_math: bool
    fallback: str | None
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None

    def __post_init__(self) -> None:
        allowed: tuple[tuple[str, tuple[Any, ...], str], ...] = (
            ("precision", (None, "ieee", "tf32"), "None, 'ieee' or 'tf32'"),
            ("fallback", (None, "torch"), "None or 'torch'"),
            ("deterministic", (True, False), "True or False"),
            ("fast_math", (True, False), "True or False"),
        )
        for name, values, want in allowed:
            if getattr(self, name) not in values:
                raise fail("option", None, name=name, want=want, value=getattr(self, name))

    @property
    def constraints(self) -> Constraints:
        return Constraints(deterministic=self.deterministic, fast_math=self.fast_math, precision=self.precision)


_OPTIONS = frozenset(_Options.__dataclass_fields__) | {"epilogue", "out", "operands"}


def _given(parsed: Parsed, by_name: Mapping[str, Any], operands: Mapping[str, Any] | None, out: Any) -> dict[str, Any]:
    """Operands and destinations by name."""
    names = tuple(output.name for output in parsed.graph.outputs)
    for name in parsed.parameters:
        if name in _OPTIONS and name not in (operands or {}):
            raise fail("name_clash", None, name=name)
    for name in by_name.keys() & (operands or {}).keys():
        raise fail("argument_twice", None, function="gemm", name=name)
    given = parsed.named({**by_name, **(operands or {})})
    for name in given:
        if name not in parsed.parameters:
            shown = ", ".join(parsed.parameters) or "none"
            raise fail("extra_operand", None, name=name, operands=shown, outputs=", ".join(names))
    return given | _destinations(out, names)


def _destinations(out: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    if out is None:
        return {}
    if isinstance(out, Mapping):
        for name in out:
            if name not in names:
                raise fail("unknown_output", None, option="out", name=name, outputs=", ".join(names))
        return dict(out)
    if "D" in names:
        return {"D": out}
    if len(names) > 1:
        raise fail("out_single", None, outputs=", ".join(names))
    return {names[0]: out}


def _run(
    a: torch.Tensor, b: torch.Tensor, parsed: Parsed, given: Mapping[str, Any], options: _Options
) -> tuple[dict[str, torch.Tensor], GemmArguments]:
    args = GemmArguments(
        a,
        b,
        accumulator_type=options.accumulator_type,
        epilogue=EpilogueArguments.partial(parsed, given),
        out_dtypes=options.out_dtypes,
        constraints=options.constraints,
    )
    return execute(args, options.fallback), args


def execute(
    args: GemmArguments, fallback: str | None = None, hint: str = "fallback='torch' runs it unfused in PyTorch"
) -> dict[str, torch.Tensor]:
    """Run `args` on the best kernel; the outputs by name. Raises `UnsupportedError` with `hint` where there is none."""
    selection = _selected(args.graph, args.problem, providers.NAMES)
    if not selection.plans:
        return _fall_back(fallback, hint, args, selection)
    outputs = args.allocate()
    launch(cache.get_or_build(selection.plans[0]), args, outputs)
    return outputs


def _fall_back(fallback: str | None, hint: str, args: GemmArguments, selection: Selection) -> dict[str, torch.Tensor]:
    reasons = "\n".join(f"  {reason}" for reason in selection.reasons)
    if fallback is None:
        raise fail("no_kernel", None, reasons=reasons, hint=hint)
    warnings.warn(f"no kernel can run this, so PyTorch runs it unfused:\n{reasons}", stacklevel=5)
    outputs = args.allocate()
    unfused(args, outputs)
    return outputs
