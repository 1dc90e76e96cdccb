"""Leading dims seen as one: how a product of two or three dims gives eager's result for tensors of any rank.

A graph as written counts eager's dims. Folded, the leading dims of every value are one dim, so its reductions and
layouts are rewritten to count folded dims. What would need one of the leading dims alone does not fit, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import EpifuseError, fail
from epifuse.frontend import Parsed
from epifuse.frontend.remembered import remembered
from epifuse.ir import Builder, Graph, Load, Node
from epifuse.ir.graph import topological
from epifuse.passes.dims import DimsError, normalise, permuted
from epifuse.request.checks import check_plain
from epifuse.request.signature import Request, new
from epifuse.request.transports import Hint

Shape = tuple[int, ...]


class Form(NamedTuple):
    """Which of eager's dims a folded value has: `leading` ones are its first dim, None where it has no such dim, and
    `kept` ones follow as they are."""

    leading: int | None
    kept: int

    @property
    def rank(self) -> int:
        """How many dims eager counts."""
        return (self.leading or 0) + self.kept


NUMBER = Form(None, 0)
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


class Unfit(Exception):  # noqa: N818 - it is no error: another way may fit
    """What cannot be seen so: the catalogue's `key` and `values`, and the node that asks for it."""

    def __init__(self, key: str, node: Node | None = None, **values: object) -> None:
        super().__init__(key)
        self.key, self.node, self.values = key, node, values

    def error(self, parsed: Parsed) -> EpifuseError:
        """As a person reads it."""
        return fail(self.key, None if self.node is None else parsed.graph.loc(self.node), **self.values)


class Fold(NamedTuple):
    """An epilogue, its operands and its destinations with the dims `lead` seen as one; `forms` are its outputs'."""

    lead: Shape
    parsed: Parsed
    given: Mapping[str, Any]
    forms: Mapping[str, Form]

    def restored(self, outputs: Mapping[str, torch.Tensor], handed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The outputs in eager's shapes: destinations as they were `handed`, and views of what was allocated."""
        found = {}
        for name, form in self.forms.items():
            given, made = handed.get(name), outputs[name]
            if given is not None:
                made = given.tensor if isinstance(given, Hint) else given
            elif form.leading is not None:
                first, *rest = made.shape
                whole = form.leading == len(self.lead) and first == math.prod(self.lead)
                shape = (*(self.lead if whole else (1,) * form.leading), *rest)
                # As PyTorch's layers, no view to autograd: what hooks such outputs, as FSDP, warns of views.
                made = _UNSAFE_VIEW(made, shape) if made.requires_grad else made.view(shape)
            found[name] = made
        return found


def fold(parsed: Parsed, handed: Mapping[str, Any], lead: Shape, kept: int, *, copies: bool = False) -> Fold:
    """`parsed` beside a product whose leading dims `lead` are one, before `kept` others. Raises `Unfit`.

    Operands that cannot be seen so are copied where that is allowed; destinations never are.
    """
    written = parsed.output_names
    given: dict[str, Any] = {}
    seen: dict[str, tuple[int | None, int]] = {}
    for name, value in {**parsed.defaults, **handed}.items() if parsed.defaults else handed.items():
        tensor = value.tensor if isinstance(value, Hint) else value
        if name in written or not isinstance(tensor, torch.Tensor):
            given[name] = value
            continue
        folded, seen[name] = _operand(name, tensor, lead, kept, copies=copies)
        given[name] = replace(value, tensor=folded) if isinstance(value, Hint) else folded
    further = len(lead), kept, *seen.items()
    found = remembered("folded", parsed.key, lambda: _folded(parsed, further), further)
    if found.unfit is not None:
        raise Unfit(found.unfit.key, found.unfit.node, **found.unfit.values)
    for name in written:
        if (value := given.get(name)) is None:
            continue
        tensor = value.tensor if isinstance(value, Hint) else value
        if isinstance(tensor, torch.Tensor):
            folded = _destination(name, tensor, lead, kept, found.forms[name])
            given[name] = replace(value, tensor=folded) if isinstance(value, Hint) else folded
    if found.graph is not None:
        parsed = parsed.changed(graph=found.graph, key=found.key)
    return new(Fold, (lead, parsed, given, found.forms))


# --- calls -----------------------------------------------------------------------------------------------------------


def fold_linear(request: Request) -> tuple[Request, Fold | None]:
    """The request with x (..., K) as (M,K), or as (L,M,K) where M alone would not give eager's result.

    The fold is None where x has three dims and is taken as it is. Raises `EpifuseError` for what fits neither.
    """
    x, rank, shape = request.a, request.a.dim(), tuple(request.a.shape)
    for kept in (1,) if rank == 1 else (1, 2):
        if (rank, kept) == (3, 2):
            return (request if x.is_cpu else by_rows(request)), None
        try:
            # More than three dims have no other way, and are copied as PyTorch copies them.
            made = fold(request.parsed, request.given, shape[: rank - kept], kept, copies=rank > 3)
            seen = rows("x", x, rank - kept, copies=rank > 3)
        except Unfit as error:
            unfit = error
        else:
            return new(Request, (seen, request.b, made.parsed, made.given, request.options, request.names)), made
    raise unfit.error(request.parsed)


def by_rows(request: Request) -> Request:
    """The request with x (B,S,K) as S batches of B rows, where it reduces over B alone.

    A GPU's tile holds rows of one batch, so that no kernel there reduces over batches alone.
    """
    parsed = request.parsed
    graph = remembered("by rows", parsed.key, lambda: _reordered(parsed.graph))
    if graph is None:
        return request
    parsed = parsed.changed(graph=graph, key=f"by rows {parsed.key}")
    return request._replace(a=request.a.transpose(0, 1), parsed=parsed)


def _reordered(graph: Graph) -> Graph | None:
    """The graph whose accum is (M,L,N), where it reduces over its first dim alone and nowhere over its second."""
    over = {node.attr[1] for node in graph.nodes if node.op == "reduce_dims"}
    if not over & {(0,), (-3,)} or over & {(1,), (-2,)}:
        return None
    return _with_attributes(graph, {node: "mln" for node in graph.nodes if node.op == "accum"})


def fold_gemm(request: Request) -> tuple[Request, Fold]:
    """The request with the leading dims of A and B, which broadcast, as L. Raises `EpifuseError` for what does not."""
    a, b = request.a, request.b
    for name, tensor in zip(request.names, (a, b), strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            check_plain(name, tensor, None)
    shapes = {"a": tuple(a.shape), "b": tuple(b.shape)}
    try:
        lead = tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]  # untyped
    except RuntimeError:
        raise fail("batch_extent", None, **shapes) from None
    if a.dim() > 1 and b.dim() > 1 and a.shape[-1] != b.shape[-2]:
        raise fail("inner_extent", None, **shapes, k_a=a.shape[-1], k_b=b.shape[-2])
    try:
        made = fold(request.parsed, request.given, lead, 2)
        a, b = (_batches(name, tensor, lead) for name, tensor in zip(request.names, (a, b), strict=True))
    except Unfit as unfit:
        raise unfit.error(request.parsed) from None
    return request._replace(a=a, b=b, parsed=made.parsed, given=made.given), made


def _batches(name: str, matrices: torch.Tensor, lead: Shape) -> torch.Tensor:
    """(L,M,K), or (M,K) for one matrix that serves every batch."""
    first, matrix = matrices.shape[:-2], matrices.shape[-2:]
    if first != lead and _ones(first):
        return matrices.view(matrix) if first else matrices
    return rows(name, matrices.expand(*lead, *matrix), len(lead))


# --- tensors ---------------------------------------------------------------------------------------------------------


def rows(name: str, tensor: torch.Tensor, cut: int, *, copies: bool = False) -> torch.Tensor:
    """`tensor` with its first `cut` dims as one. Raises `Unfit` where that would be a copy, unless it may be one."""
    shape = tuple(tensor.shape)
    try:
        return (tensor.reshape if copies else tensor.view)(math.prod(shape[:cut]), *shape[cut:])
    except RuntimeError:
        check_plain(name, tensor, None)
        raise Unfit("leading_strides", name=name, shape=shape, strides=tensor.stride()) from None


def _operand(name: str, tensor: torch.Tensor, lead: Shape, kept: int, *, copies: bool) -> tuple[torch.Tensor, Form]:
    if tensor.dim() <= kept:
        # A tensor of one number stands beside leading dims at any place, as a number does.
        return tensor, NUMBER if lead and tensor.shape == (1,) else Form(None, tensor.dim())
    shape = tuple(tensor.shape)
    first = shape[:-kept]
    if len(first) > len(lead):
        raise Unfit("operand_dims", name=name, shape=shape, rank=len(lead) + kept)
    if first != lead and not (_ones(first) and len(first) <= len(lead)):
        raise Unfit("leading_operand", name=name, shape=shape, lead=lead)
    return rows(f"operand '{name}'", tensor, len(first), copies=copies), Form(len(first), kept)


def _destination(name: str, tensor: torch.Tensor, lead: Shape, kept: int, form: Form) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if form.leading is not None and shape[: len(lead)] == lead:
        return rows(f"output '{name}'", tensor, len(lead))
    if form.leading is None and len(shape) <= kept:
        return tensor
    if not _ones(shape[:-kept]):
        raise Unfit("leading_operand", name=name, shape=shape, lead=lead)
    return rows(f"output '{name}'", tensor, len(shape) - kept)


def _ones(shape: Sequence[int]) -> bool:
    return all(extent == 1 for extent in shape)


# --- the graph -------------------------------------------------------------------------------------------------------


class _Folded(NamedTuple):
    """A graph that counts folded dims and its key, None where it is the one as written; or what does not fit."""

    forms: Mapping[str, Form]
    graph: Graph | None = None
    key: str = ""
    unfit: Unfit | None = None


def _folded(parsed: Parsed, further: tuple[Any, ...]) -> _Folded:
    """The epilogue beside an accum of `leading` and `kept` dims and operands of some forms, all in `further`."""
    (leading, kept, *operands), graph = further, parsed.graph
    accum, known = Form(leading, kept), {name: Form(*form) for name, form in operands}
    forms: dict[Node, Form] = {}
    attributes: dict[Node, Any] = {}
    for node in topological((*graph.roots, *graph.checked)):
        try:
            forms[node], attributes[node] = _form(node, [forms[arg] for arg in node.args], accum, known)
        except Unfit as unfit:
            return _Folded({}, unfit=unfit)
        except DimsError:
            return _Folded({}, unfit=_unfit(node, "a dim that is not there"))
    outputs = {output.name: forms[output.node] for output in graph.outputs}
    if all(node.attr == attribute for node, attribute in attributes.items()):
        return _Folded(outputs)
    return _Folded(outputs, _with_attributes(graph, attributes), f"folded {further} {parsed.key}")


def _with_attributes(graph: Graph, attributes: Mapping[Node, Any]) -> Graph:
    """The graph as written with other attributes of its nodes."""
    builder = Builder()
    new: dict[Node, Node] = {}
    for node in topological((*graph.roots, *graph.checked)):
        args, attribute = [new[arg] for arg in node.args], attributes.get(node, node.attr)
        new[node] = builder.node(node.op, *args, attr=attribute, locs=graph.locs.get(node, ()))
    made = graph.with_roots(
        (output._replace(node=new[output.node]) for output in graph.outputs),
        (new[effect] for effect in graph.effects),
    )
    return replace(made, locs=builder.locs, checked=tuple(new[node] for node in graph.checked))


def _unfit(node: Node, what: str) -> Unfit:
    return Unfit("leading_dims", node, what=what)


def _form(node: Node, args: list[Form], accum: Form, operands: Mapping[str, Form]) -> tuple[Form, Any]:
    """The form of a value, and its node's `attr` where dims are counted as folded."""
    if node.op == "accum":
        return accum, node.attr
    if isinstance(node.attr, Load):
        return operands.get(node.attr.name, NUMBER), node.attr
    if node.op in ("access", "reduce_axes"):
        return _tree_value(node, args[0], accum), node.attr
    if (rule := _RULES.get(node.op)) is not None:
        return rule(node, args[0])
    if node.op == "torch" and node.attr[0] == "prelu weight" and args[0].leading not in (None, 1):
        raise _unfit(node, "a weight for each of its channels")
    joined = _joined(node, args)
    return args[0] if node.op == "torch" else joined, node.attr


def _joined(node: Node, args: list[Form]) -> Form:
    """What values broadcast to: folded dims stand at one place from the end only beside as many kept ones."""
    folded = [form for form in args if form.leading is not None]
    kept = max((form.kept for form in args), default=0)
    if not folded:
        return Form(None, kept)
    if any(form.kept != kept for form in folded):
        raise _unfit(node, "values whose leading dims stand at different places")
    return Form(max(form.leading or 0 for form in folded), kept)


def _tree_value(node: Node, form: Form, accum: Form) -> Form:
    """A visitor tree counts the axes of its product: those that are folded are reduced together, or not at all."""
    if node.op == "access":
        if node.attr[0] != "column" or form != Form(None, 1):
            return form
        if accum.kept == 1:
            raise _unfit(node, "a column of one dim")
        return Form(None, 2)
    folded, rest = set("lmn"[: 3 - accum.kept]), "lmn"[3 - accum.kept :]
    gone = folded & set(node.attr[1])
    if gone and gone != folded:
        raise _unfit(node, f"{node.attr[0]} over some of its leading dims")
    return Form(None if gone else accum.leading, sum(axis not in node.attr[1] for axis in rest))


def _reduced(node: Node, form: Form) -> tuple[Form, Any]:
    name, dims, keepdim = node.attr
    if dims is None:
        return (form if keepdim else NUMBER), node.attr
    chosen = [normalise(dim, form.rank, ()) for dim in dims]
    leading = form.leading or 0
    gone = {dim for dim in chosen if dim < leading}
    kept = form.kept if keepdim else form.kept - len(chosen) + len(gone)
    if gone and len(gone) != leading:
        raise _unfit(node, f"{name} over some of its leading dims")
    # Of one row no dim is left where its numbers are one number.
    whole = bool(gone) or (form.leading == 0 and not kept)
    new = (*([-form.kept - 1] if whole else []), *(dim - form.rank for dim in chosen if dim >= leading))
    return Form(form.leading if keepdim or not whole else None, kept), (name, new, keepdim)


def _unsqueezed(node: Node, form: Form) -> tuple[Form, Any]:
    at = normalise(node.attr, form.rank + 1, ())
    if at < (form.leading or 0):
        raise _unfit(node, "a new dim among its leading dims")
    return Form(form.leading, form.kept + 1), at - form.rank - 1


def _permuted(node: Node, form: Form) -> tuple[Form, Any]:
    if form.leading is None:
        return form, node.attr
    order, leading = permuted(node.attr, form.rank), form.leading
    if order[:leading] != tuple(range(leading)):
        raise _unfit(node, "another order of its leading dims")
    return form, (0, *(dim - leading + 1 for dim in order[leading:]))


def _reshaped(node: Node, form: Form) -> tuple[Form, Any]:
    if form.leading is not None:
        raise _unfit(node, "a reshape of its leading dims")
    return Form(None, len(node.attr)), node.attr


def _coordinate(node: Node, form: Form) -> tuple[Form, Any]:
    position = {"n": 1, "m": 2, "l": 3}[node.attr]
    if form.kept < position:
        raise _unfit(node, "a coordinate along its leading dims")
    return Form(None, position), node.attr


def _one_hot(node: Node, form: Form) -> tuple[Form, Any]:
    dim = normalise(node.attr, form.rank, ())
    if dim < (form.leading or 0):
        raise _unfit(node, "a claim about one of its leading dims")
    return form, dim - form.rank


def _claimed(node: Node, form: Form) -> tuple[Form, Any]:
    spelled, rank = node.attr
    if form.rank < rank:
        raise _unfit(node, f"{spelled} of more dims than it has")
    return form, (spelled, min(rank, form.kept + (form.leading is not None)))


_RULES: dict[str, Callable[[Node, Form], tuple[Form, Any]]] = {
    "reduce_dims": _reduced,
    "unsqueeze": _unsqueezed,
    "permute": _permuted,
    "reshape": _reshaped,
    "coordinate": _coordinate,
    "assume_one_hot": _one_hot,
    "tensor": _claimed,
}
"""Operations whose form is not what their arguments broadcast to."""
