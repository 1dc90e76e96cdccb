"""The public functions, which go the whole way: source, graph, plan, kernel, tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch._C import _is_any_autocast_enabled

from epifuse import providers
from epifuse.base.autocast import followed
from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import EpifuseError, fail, kind_of
from epifuse.base.results import Results
from epifuse.base.target import TARGETS, Target, target_for
from epifuse.frontend import FrontEnd
from epifuse.frontend import parsed as parse_cached
from epifuse.frontend.biased import with_bias
from epifuse.kernel import Kernel, Metadata
from epifuse.plan import Plan, Refusal, Selection, select
from epifuse.plan.ranks import Fold, fold_gemm, fold_linear
from epifuse.pytorch import dynamo
from epifuse.pytorch.aten import is_selective
from epifuse.pytorch.distributed import is_distributed
from epifuse.pytorch.kept_calls import Tensors, Written, kept_result, run, written
from epifuse.pytorch.ops import computed, recorded
from epifuse.request.checks import PLAIN, shape_of
from epifuse.request.options import Options, given_by_name
from epifuse.request.scaled import Scaled, unscaled
from epifuse.request.signature import Request, make_tuple
from epifuse.runtime import tuning
from epifuse.runtime.arguments import GemmArguments, check_arguments, plain
from epifuse.runtime.background import note
from epifuse.runtime.launch import require_data
from epifuse.runtime.precompile import Precompiled, compile_ahead
from epifuse.runtime.tuning import Tuned

EpilogueFunction = Callable[..., Any] | str | FrontEnd


def epilogue(function: Callable[..., Any] | None = None, /, *, reassign: bool = False) -> Any:
    """Decorator: parse early, so that an epilogue outside the language fails where it is defined.

    The function stays callable; a call of it is plain PyTorch. `reassign=True` allows a name to be assigned again.
    Raises `EpilogueSyntaxError`, and `ArgumentTypeError` for a value that is not a function.
    """
    if not isinstance(reassign, bool):
        raise fail("option", None, name="reassign", want="True or False", value=reassign)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(function, FunctionType):
            raise fail("wrong_arguments", None, function="epilogue", want="a Python function", type=kind_of(function))
        function.__epifuse_reassign__ = reassign  # type: ignore[attr-defined]  # read back by arguments.parsed
        parse_cached(function)
        return function

    return mark if function is None else mark(function)


# --- discovery ---------------------------------------------------------------------------------------------------


@outside_graph
def get_kernels(
    args: GemmArguments,
    metadata_filter: Callable[[Metadata], bool] | None = None,
    *,
    cc: int | None = None,
    providers: Iterable[str] | None = None,
    limit: int | None = None,
) -> list[Kernel]:
    """The kernels that can run `args`, best first. If there are none, `explain(args)` says why.

    `cc` plans for a target (90 = Hopper, 0 = the CPU) instead of A's device. Raises `ArgumentError` for wrong options.
    """
    check_arguments("get_kernels", args)
    if metadata_filter is not None and not callable(metadata_filter):
        raise fail("filter_type", None, type=kind_of(metadata_filter))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise fail("option", None, name="limit", want="a whole number above 0", value=limit)
    found = [Kernel(plan.spec, plan) for plan in _selection(args, cc, providers).plans]
    kept = [kernel for kernel in found if metadata_filter is None or metadata_filter(kernel.metadata)]
    return kept[:limit]


def _selection(args: GemmArguments, cc: int | None = None, names: Iterable[str] | None = None) -> Selection:
    problem = args.problem if cc is None else args.problem._replace(target=_target(cc, args.problem.target))
    if isinstance(names, str) or not isinstance(names, (Iterable, type(None))):
        raise fail("option", None, name="providers", want="a list of names", value=names)
    known = providers.names()
    wanted = known if names is None else tuple(names)
    for name in wanted:
        if name not in known:
            raise fail("option", None, name="providers", want=f"among {', '.join(known)}", value=name)
    return tuning.known(select(args.structure, problem, providers.candidates(wanted)))


def _target(cc: int, own: Target) -> Target:
    """The target of the architecture `cc`: the device's `own` target if it is of that one, else its default model's."""
    known = {*TARGETS, *providers.installed_ccs()}
    if not isinstance(cc, int) or isinstance(cc, bool) or cc not in known:
        raise fail("cc_type", None, known=", ".join(map(str, sorted(known))), value=cc)
    return own if own.cc == cc else target_for(cc)


@outside_graph
def precompile(
    args: GemmArguments | Sequence[GemmArguments] | Iterator[GemmArguments],
    *,
    cc: int | Sequence[int] | None = None,
    progress: bool = True,
    workers: int | None = None,
) -> Precompiled:
    """Compile what `gemm` runs for each of `args`, in `workers` processes, and keep it on disk. Needs no GPU.

    Tensors may be FakeTensors or on meta. `cc` is a target or several, as `get_kernels` takes one. `progress` is shown
    if standard error is a terminal. The result lists what no kernel can run, and what does not compile. Raises
    `ArgumentError` for wrong options, and `UnsupportedError` if the compiler for a target is not installed.
    """
    several: list[Any] = list(args) if isinstance(args, (Sequence, Iterator)) else [args]
    targets = cc if isinstance(cc, Sequence) and not isinstance(cc, str) else [cc]
    _check_work(progress, workers)
    plans: list[Plan] = []
    refused: list[tuple[str, str]] = []
    for one, target in product(several, targets):
        check_arguments("precompile", one)
        selection = _selection(one, target)
        if selection.best is None:
            refused.append((selection.problem.describe(), "; ".join(selection.reasons)))
        else:
            plans.append(selection.best)
    done = compile_ahead(plans, workers, progress=progress)
    return replace(done, failed=(*refused, *done.failed))


@outside_graph
def tune(
    args: GemmArguments | Sequence[GemmArguments] | Iterator[GemmArguments],
    *,
    anew: bool = False,
    progress: bool = True,
    workers: int | None = None,
) -> Tuned:
    """Time every kernel that can run each of `args`, and keep on disk which is the fastest, for `gemm(tune=True)`.

    Kernels are first compiled in `workers` processes. They run on random values: only the shapes of the tensors count,
    and nothing is written to them. Earlier measurements by this version on such a GPU are used, unless `anew` is True.
    `progress` is shown if standard error is a terminal. Raises `ArgumentError` for wrong options.
    """
    several: list[Any] = list(args) if isinstance(args, (Sequence, Iterator)) else [args]
    _check_work(progress, workers)
    if not isinstance(anew, bool):
        raise fail("option", None, name="anew", want="True or False", value=anew)
    asked, refused = [], []
    for one in several:
        check_arguments("tune", one)
        require_data(one.call)
        selection = _selection(one)
        if selection.best is None:
            refused.append((selection.problem.describe(), "; ".join(selection.reasons)))
        else:
            asked.append((one.call, selection))
    with torch.no_grad():
        results, failed = tuning.tune_all(asked, workers, anew=anew, progress=progress)
    return Tuned(tuple(results), (*refused, *failed))


def _check_work(progress: object, workers: object) -> None:
    if not isinstance(progress, bool):
        raise fail("option", None, name="progress", want="True or False", value=progress)
    if workers is not None and (type(workers) is not int or workers < 1):
        raise fail("option", None, name="workers", want="a whole number above 0, or None", value=workers)


@dataclass(frozen=True)
class Explanation:
    """The graph, the plans and the refusals for one set of arguments; `print` it."""

    args: GemmArguments
    selection: Selection
    meanwhile: str | None = None
    """Which kernel runs while the plan's own kernel is compiled in the background."""
    tuned: tuple[str, ...] = ()
    """If the call is to be tuned: what was measured, and which measurements are ignored."""

    @property
    def plan(self) -> Plan | None:
        """The plan that would run, or None if no kernel can."""
        return self.selection.plans[0] if self.selection.plans else None

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """For each kernel that cannot run this: the reason."""
        return self.selection.refusals

    def __str__(self) -> str:
        is_invariant = self.selection.problem.constraints.batch_invariant  # PyTorch's product is not batch-invariant
        unfused = "" if is_invariant else "; gemm(..., fallback='torch') would run it unfused in PyTorch"
        parts = [str(self.args.graph), str(self.plan or f"no kernel can run this{unfused}")]
        notes = (*self.args.epilogue.parsed.notes, *([self.meanwhile] if self.meanwhile else []), *self.tuned)
        parts += [f"note     {note}" for note in notes]
        parts += [f"model    {line}" for line in self._estimates()]
        parts += [f"refused  {reason}" for reason in self.selection.reasons]
        parts += [str(self.selection.loc)] if self.selection.loc else []
        return "\n".join(parts)

    def _estimates(self) -> Iterator[str]:
        """Yield, for each of the best plans, what its cost consists of, if its provider says so."""
        plans = self.selection.plans[:3]
        if plans and plans[0].allocation.estimate is None:  # several launches, a CPU, or an empty result
            return
        for plan in plans:
            if plan.allocation.estimate is not None:
                yield f"{plan.spec.name}: {plan.allocation.estimate().text}"


@outside_graph
def explain(args: GemmArguments, *, cc: int | None = None) -> Explanation:
    """What would run for `args`, and why nothing else does. Raises `ArgumentError` for a `cc` that is not known."""
    check_arguments("explain", args)
    selection = _selection(args, cc)
    return Explanation(args, selection, note(selection.best, selection), tuning.note(selection))


# --- one call ----------------------------------------------------------------------------------------------------


@outside_graph
def gemm(
    a: torch.Tensor | Scaled,
    b: torch.Tensor | Scaled,
    /,
    *,
    epilogue: EpilogueFunction | None = None,
    out: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
    operands: Mapping[str, Any] | None = None,
    accumulate: str | Iterable[str] = (),
    accumulator_type: torch.dtype | None = None,
    precision: str | None = None,
    fast_math: bool = False,
    allow_recompute: bool = False,
    fallback: str | None = None,
    save: str = "auto",
    tune: bool = False,
    fast_accum: bool = False,
    **by_name: Any,
) -> Any:
    """`a @ b` with an epilogue: plans, builds once, launches. Outputs that are not given are allocated.

    `a` is (M,K) or (L,M,K), `b` (K,N) or (L,K,N). More batch dims broadcast as in `torch.matmul`; it must be possible
    to view them as one dim. Under autocast `a` and `b` are cast as by `torch.nn.functional.linear`.
    Operands are passed by name, or in `operands` if the name is also that of an option. `out` is written: a tensor for
    D or the only output, a mapping for several. `out_dtypes` chooses the dtype of outputs that are allocated. A mapping
    chooses by name. One dtype holds for all outputs, also for an absmax beside fp8. One output is returned as it is,
    several as a tuple with names. The outputs that `accumulate` names are added onto the content of their destinations:
    in float32, rounded once.
    `allow_recompute` lets a GPU compute the product again for values that need a finished reduction of all tiles.
    `fast_accum` leaves all sums of 8-bit floats to a GPU's tensor cores, which add up with 14 bits. Without it, float32
    adds up their sums of 128 products.
    `tune` runs the kernel that was measured to be the fastest. If nothing was measured yet, it measures now, once for a
    GPU, a structure and a class of shapes; this takes seconds.
    `fallback="torch"` runs unfused PyTorch if no kernel can run the call, and warns. The call is differentiable in A, B
    and all floating operands. For the backward `save` stores the product ("preactivation"), has it computed again
    ("recompute"), or chooses what takes less time ("auto"). Raises `EpilogueSyntaxError`, `EpilogueTypeError`,
    `ArgumentError`, and `UnsupportedError` if no kernel can run the call.
    """
    scales: dict[str, torch.Tensor] = {}
    if isinstance(a, Scaled) or isinstance(b, Scaled):
        a, b, scales = unscaled(a, b)
    if _is_any_autocast_enabled():
        a, b = followed(a, b)
    parsed = plain() if epilogue is None else parse_cached(epilogue, by_name, operands)
    options = Options.of(
        accumulator_type,
        precision,
        fast_math,
        allow_recompute,
        fallback,
        out_dtypes,
        accumulate,
        save,
        tune,
        fast_accum,
    )
    handed = {**by_name, **scales} if scales else by_name
    call = written(a, b, parsed, options, handed, b_is_transposed=False) if out is operands is None else None
    if call is not None and (made := kept_result(call, parsed.output_names)) is not None:
        return made
    given = given_by_name(parsed, by_name, operands, out)
    given = {**given, **scales} if scales else given
    request, fold = make_tuple(Request, (a, b, parsed, given, options, ("A", "B"), None)), None
    elsewhere = type(a) not in PLAIN and is_distributed(a, b)
    if (getattr(a, "ndim", 0) > 3 or getattr(b, "ndim", 0) > 3) and not elsewhere:
        request, fold = fold_gemm(request)
    if elsewhere:
        return _returned(computed(request, "gemm"))
    return _returned(_outputs(request, call, fold, given))


@outside_graph
def linear(
    x: torch.Tensor | Scaled,
    weight: torch.Tensor | Scaled,
    bias: torch.Tensor | None = None,
    *,
    epilogue: EpilogueFunction | None = None,
    out: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    out_dtypes: Mapping[str, torch.dtype] | torch.dtype | None = None,
    operands: Mapping[str, Any] | None = None,
    accumulate: str | Iterable[str] = (),
    accumulator_type: torch.dtype | None = None,
    precision: str | None = None,
    fast_math: bool = False,
    allow_recompute: bool = False,
    fallback: str | None = None,
    save: str = "auto",
    tune: bool = False,
    fast_accum: bool = False,
    **by_name: Any,
) -> Any:
    """`torch.nn.functional.linear` with an epilogue: x (..., K), weight (N, K), bias (N,).

    The bias is added to the product before the epilogue, unless the epilogue has a parameter of that name. Results are
    those of eager mode: operands broadcast against (..., N), and `dim` counts these dims. With more than three dims the
    product treats the leading ones as one; an epilogue that needs one of them alone raises `UnsupportedError`. Under
    autocast x, weight and an added bias are cast as by PyTorch, in each call; operands are not. The rest is as in
    `gemm`.
    """
    scales: dict[str, torch.Tensor] = {}
    if isinstance(x, Scaled) or isinstance(weight, Scaled):
        x, weight, scales = unscaled(x, weight, b_is_transposed=True)
    by_name = by_name if bias is None else {**by_name, "bias": bias}
    parsed = plain() if epilogue is None else parse_cached(epilogue, by_name, operands)
    options = Options.of(
        accumulator_type,
        precision,
        fast_math,
        allow_recompute,
        fallback,
        out_dtypes,
        accumulate,
        save,
        tune,
        fast_accum,
    )
    if _is_any_autocast_enabled():
        x, weight = followed(x, weight)
        if bias is not None and "bias" not in parsed.parameters:
            (by_name["bias"],) = followed(bias)
    handed = {**by_name, **scales} if scales else by_name
    call = written(x, weight, parsed, options, handed, b_is_transposed=True) if out is operands is None else None
    if call is not None and (made := kept_result(call, parsed.output_names)) is not None:
        return made
    shape, matrix = shape_of("x", x), shape_of("weight", weight)
    if len(matrix) != 2 or not shape or shape[-1] != matrix[1]:
        raise fail("linear_shapes", None, x=tuple(shape), weight=tuple(matrix))
    if bias is not None:
        if "bias" not in parsed.parameters:
            if isinstance(bias, torch.Tensor) and bias.dim() == 1 and len(bias) not in (1, matrix[0]):
                raise fail("linear_bias_shape", None, want=(matrix[0],), bias=tuple(bias.shape))
            parsed = with_bias(parsed)
    elif "bias" in parsed.parameters and "bias" not in parsed.defaults and "bias" not in (operands or {}):
        raise fail("linear_bias", None)
    given = given_by_name(parsed, by_name, operands, out, "linear")
    given = {**given, **scales} if scales else given
    elsewhere = type(x) not in PLAIN and is_distributed(x, weight)
    weight_t = weight.mT if elsewhere else weight.t()  # `t` fails for DTensors in inference mode
    saved = weight if type(weight) in PLAIN else None
    request, fold = make_tuple(Request, (x, weight_t, parsed, given, options, ("x", "weight"), saved)), None
    if len(shape) != 2 and not elsewhere:
        request, fold = fold_linear(request)
    if elsewhere:
        return _returned(computed(request, "linear"))
    return _returned(_outputs(request, call, fold, given))


def _outputs(request: Request, call: Written | None, fold: Fold | None, given: Mapping[str, Any]) -> Tensors:
    """The outputs by name, in the shapes of eager mode. While PyTorch traces, they are nodes of the trace."""
    if call is None and is_selective():
        outputs = recorded(request)
    else:
        try:
            outputs = run(request, call, fold)
        except EpifuseError as error:
            outputs = recorded(request, error if fold is None else fold.unfolded(error, given))
    return outputs if fold is None else fold.restored(outputs, given)


def _returned(outputs: Tensors) -> Any:
    return next(iter(outputs.values())) if len(outputs) == 1 else Results(outputs)


# When Dynamo meets a call, it traces these functions instead. A launch outside of Dynamo pays nothing for that.
gemm._torchdynamo_inline = dynamo.gemm  # type: ignore[attr-defined]
linear._torchdynamo_inline = dynamo.linear  # type: ignore[attr-defined]
