"""Folding: leading dims are seen as one, so that a product of two or three dims serves tensors of any rank.

The result is that of PyTorch's eager mode. The graph as written counts eager's dims. After folding, the leading dims of
every value are one dim, so reductions and layouts are rewritten to count the dims that are left. An epilogue that needs
one of the leading dims by itself does not fit, and the error says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from epifuse.base.errors import EpifuseError, fail
from epifuse.frontend import Parsed
from epifuse.frontend.names import NOTHING
from epifuse.frontend.remembered import remembered
from epifuse.ir import Graph, Node, rewrite
from epifuse.ir.graph import topological
from epifuse.passes.dims import DimsError, shape_hint
from epifuse.plan.rank_rules import NUMBER, Form, Unfit, form_of
from epifuse.request.checks import check_plain
from epifuse.request.scaled import SCALES, are_scaled
from epifuse.request.signature import Request, make_tuple
from epifuse.request.transports import Hint

Shape = tuple[int, ...]


_OF_A, _OF_B = SCALES  # the names of the scales of A and B; those of B have no leading dims
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


class Fold(NamedTuple):
    """A folded call: its epilogue, and `given` operands and destinations with the leading dims as one.

    `lead` are the extents of the leading dims, and `forms` are the forms of the outputs by name.
    """

    lead: Shape
    parsed: Parsed
    given: Mapping[str, Any]
    forms: Mapping[str, Form]

    def of_any(self) -> Fold:
        """The fold without the tensors of one call, which a cache would otherwise keep alive."""
        return self._replace(parsed=self.parsed.bound(NOTHING, {}), given={})

    def unfolded(self, error: EpifuseError, handed: Mapping[str, Any]) -> EpifuseError:
        """The error with the shapes that the caller knows in place of those of the folded product.

        `handed` are operands and destinations as the caller gave them.
        """
        if error.key == "scaled_batches":
            return _told_anew(error, {**error.values, "shape": (*self.lead, *error.values["shape"][-2:])})
        if error.key not in ("operand_shape", "output_shape", "reduced_shape"):
            return error
        values, name = dict(error.values), error.values["name"]
        shape = values["shape"] = self._shape_of(name, values["shape"], handed)
        leads = {"accum": True, "want": name in self.forms and self.forms[name].leading == len(self.lead)}
        for key in leads.keys() & values.keys():
            first, *rest = values[key] or (None,)
            if leads[key] and first == math.prod(self.lead) and (rest or key == "want"):
                values[key] = (*self.lead, *rest)
        if error.key == "operand_shape":
            accum = (1, 1, *values["accum"])[-3:]
            values["hint"] = shape_hint(name, shape, accum if len(self.lead) > 1 else accum[1:])
        return _told_anew(error, values)

    def _shape_of(self, name: str, shape: Shape, handed: Mapping[str, Any]) -> Shape:
        """The shape of a tensor as the caller handed it over; `shape` itself if the epilogue reshapes the tensor."""
        folded, whole = (values.get(name) for values in (self.given, handed))
        folded, whole = (value.tensor if isinstance(value, Hint) else value for value in (folded, whole))
        if not (isinstance(folded, torch.Tensor) and isinstance(whole, torch.Tensor)):
            return shape
        return tuple(whole.shape) if tuple(folded.shape) == shape else shape

    def restored(self, outputs: Mapping[str, torch.Tensor], handed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The outputs in eager's shapes: the destinations that were `handed` over, and views of allocated outputs."""
        found = {}
        for name, form in self.forms.items():
            given, made = handed.get(name), outputs[name]
            if given is not None:
                made = given.tensor if isinstance(given, Hint) else given
            elif form.leading is not None:
                first, *rest = made.shape
                whole = form.leading == len(self.lead) and first == math.prod(self.lead)
                shape = (*(self.lead if whole else (1,) * form.leading), *rest)
                # As in PyTorch's layers, the output is no view for autograd, because hooks on outputs, such as those of
                # FSDP, warn about views. A view that is made without grad mode cannot be changed in place with it. A
                # trace must hold the same operation as a trace without grad mode, which torch compares it with.
                is_traced = torch._C._get_tracing_state() is not None
                is_layer = made.requires_grad or is_traced or not torch.is_grad_enabled()
                made = _UNSAFE_VIEW(made, shape) if is_layer else made.view(shape)
            found[name] = made
        return found


def _told_anew(error: EpifuseError, values: Mapping[str, Any]) -> EpifuseError:
    """The error with other values in its sentence."""
    told = fail(error.key, error.loc, **values)
    told.__cause__, told.__suppress_context__ = error.__cause__, True
    return told.with_traceback(error.__traceback__)


_CUTTING = frozenset({"rearrange", "reshape"})
_CUT = (
    "where an epilogue cuts dims, flatten the leading ones before the call, and in it write accum.unflatten(0, {lead})"
)

_OF_A_VECTOR = "pass the vector as a row, x[None], so that the product has two dims"


def fold(parsed: Parsed, handed: Mapping[str, Any], lead: Shape, kept: int, *, copies: bool = False) -> Fold:
    """Fold `parsed` and `handed` for a product whose leading dims, of the extents `lead`, precede `kept` others.

    With `copies`, operands that no view can fold are copied; destinations never are. Raises `Unfit`.
    """
    written = parsed.output_names
    given: dict[str, Any] = {}
    seen: dict[str, tuple[int | None, int]] = {}
    for name, value in {**parsed.defaults, **handed}.items() if parsed.defaults else handed.items():
        tensor = value.tensor if isinstance(value, Hint) else value
        if name in written or name == _OF_B or not isinstance(tensor, torch.Tensor):
            given[name] = value
            continue
        if name == _OF_A and not lead:  # the scales of a vector, which is seen as one row
            given[name] = tensor if tensor.dim() > 1 else tensor[None]
            continue
        try:
            folded, seen[name] = _operand(name, tensor, lead, kept, copies=copies)
        except Unfit as error:
            if "hint" in error.values and not _CUTTING.isdisjoint(parsed.graph.ops):
                error.values["hint"] = _CUT.format(lead=lead) if lead else _OF_A_VECTOR
            raise
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
    return make_tuple(Fold, (lead, parsed, given, found.forms))


# --- calls -----------------------------------------------------------------------------------------------------------


def fold_linear(request: Request) -> tuple[Request, Fold | None]:
    """The request with x (..., K) seen as (M,K), or as (L,M,K) if the epilogue does not fit (M,K).

    The fold is None if x has three dims and is taken as it is. Raises `EpifuseError` if the epilogue fits neither.
    """
    x, rank, shape = request.a, request.a.dim(), tuple(request.a.shape)
    scaled = are_scaled(request.given)  # only a matrix can have block scales
    # x of more than three dims has to be folded, so it is copied, as in PyTorch. A trace has to serve any strides.
    copies = rank > 3 or scaled or torch._C._get_tracing_state() is not None
    for kept in (1,) if rank == 1 or scaled else (1, 2):
        if (rank, kept) == (3, 2):
            return (request if x.is_cpu else by_rows(request)), None
        try:
            made = fold(request.parsed, request.given, shape[: rank - kept], kept, copies=copies)
            seen = rows("x", x, rank - kept, copies=copies)
        except Unfit as error:
            unfit = error.with_traceback(None)  # its traceback has this frame: together they would stay, with x
        else:
            return request._replace(a=seen, parsed=made.parsed, given=made.given), made
    raise unfit.error(request.parsed)


def by_rows(request: Request) -> Request:
    """The request with x (B,S,K) as S batches of B rows, if its epilogue reduces over B alone.

    A tile on a GPU holds rows of one batch only, so no kernel there reduces over batches alone.
    """
    parsed = request.parsed
    graph = remembered("by rows", parsed.key, lambda: _reordered(parsed.graph))
    if graph is None:
        return request
    parsed = parsed.changed(graph=graph, key=f"by rows {parsed.key}")
    return request._replace(a=request.a.transpose(0, 1), parsed=parsed)


def _reordered(graph: Graph) -> Graph | None:
    """The graph with an accum of (M,L,N), or None. It has to reduce over the first dim alone, never over the second."""
    over = {node.attr[1] for node in graph.nodes if node.op == "reduce_dims"}
    if not over & {(0,), (-3,)} or over & {(1,), (-2,)}:
        return None
    return _with_attributes(graph, {node: "mln" for node in graph.nodes if node.op == "accum"})


def fold_gemm(request: Request) -> tuple[Request, Fold]:
    """The request with the leading dims of A and B, which may broadcast, folded to L. Raises `EpifuseError`."""
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
    """`matrices` as (L,M,K), or as (M,K) if it is one matrix that serves every batch."""
    first, matrix = matrices.shape[:-2], matrices.shape[-2:]
    if first != lead and _ones(first):
        return matrices.view(matrix) if first else matrices
    try:
        return rows(name, matrices.expand(*lead, *matrix), len(lead))
    except Unfit:
        if first == lead:
            raise
        raise Unfit("leading_broadcast", name=name, shape=tuple(matrices.shape), lead=lead) from None


# --- tensors ---------------------------------------------------------------------------------------------------------


def rows(name: str, tensor: torch.Tensor, cut: int, *, copies: bool = False) -> torch.Tensor:
    """`tensor` with its first `cut` dims as one. Raises `Unfit` if that needs a copy and `copies` is false."""
    shape = tuple(tensor.shape)
    try:
        if copies or tensor.numel() == 0 or _is_one(shape[:cut], tensor.stride()):
            # Not `view`, which a trace would record: it fails if a decomposition gives the tensor other strides.
            return tensor.reshape(math.prod(shape[:cut]), *shape[cut:])
    except RuntimeError:
        check_plain(name, tensor, None)
    raise Unfit("leading_strides", name=name, shape=shape, strides=tensor.stride())


def _is_one(shape: Shape, strides: Sequence[int]) -> bool:
    """Whether these dims can be viewed as one, with one stride. Trying a view would record it in torch's traces."""
    several = [(extent, stride) for extent, stride in zip(shape, strides, strict=False) if extent != 1]
    return all(outer == extent * inner for (_, outer), (extent, inner) in pairwise(several))


def _operand(name: str, tensor: torch.Tensor, lead: Shape, kept: int, *, copies: bool) -> tuple[torch.Tensor, Form]:
    if tensor.dim() <= kept:
        # A tensor of shape (1,) broadcasts against any dims, as a number does.
        return tensor, NUMBER if lead and tensor.shape == (1,) else Form(None, tensor.dim())
    shape = tuple(tensor.shape)
    first = shape[:-kept]
    if len(first) > len(lead):
        raise Unfit("operand_dims", name=name, shape=shape, rank=len(lead) + kept, hint="pass it without them")
    if first != lead and not (_ones(first) and len(first) <= len(lead)):
        whole = (*lead, *shape[-kept:])
        hint = f"an operand has all of them or none: pass {name}.expand{whole}.contiguous()"
        if any(own not in (1, given) for own, given in zip(reversed(first), reversed(lead), strict=False)):
            hint = f"an operand has all of them or none; those of '{name}' do not broadcast to them"
        raise Unfit("leading_operand", name=name, shape=shape, lead=lead, hint=hint)
    return rows(f"operand '{name}'", tensor, len(first), copies=copies), Form(len(first), kept)


def _destination(name: str, tensor: torch.Tensor, lead: Shape, kept: int, form: Form) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if form.leading is not None and shape[: len(lead)] == lead:
        return rows(f"output '{name}'", tensor, len(lead))
    if form.leading is None and len(shape) <= kept:
        return tensor
    if not _ones(shape[:-kept]):
        hint = "an output has all of them or none: pass a tensor that has"
        raise Unfit("leading_operand", name=name, shape=shape, lead=lead, hint=hint)
    return rows(f"output '{name}'", tensor, len(shape) - kept)


def _ones(shape: Sequence[int]) -> bool:
    return all(extent == 1 for extent in shape)


# --- the graph -------------------------------------------------------------------------------------------------------


class _Folded(NamedTuple):
    """The folded graph and its key, None if it equals the graph as written. `unfit` says why it cannot be folded."""

    forms: Mapping[str, Form]
    graph: Graph | None = None
    key: str = ""
    unfit: Unfit | None = None


def _folded(parsed: Parsed, further: tuple[Any, ...]) -> _Folded:
    """Fold the graph of an epilogue. `further` has `leading` and `kept` of accum, then each operand with its form."""
    (leading, kept, *operands), graph = further, parsed.graph
    accum, known = Form(leading, kept), {name: Form(*form) for name, form in operands}
    forms: dict[Node, Form] = {}
    attributes: dict[Node, Any] = {}
    for node in topological((*graph.roots, *graph.checked)):
        try:
            forms[node], attributes[node] = form_of(node, [forms[arg] for arg in node.args], accum, known)
        except Unfit as unfit:
            # A new one, because this is cached: a traceback keeps the tensors of all callers alive.
            return _Folded({}, unfit=Unfit(unfit.key, unfit.node, **unfit.values))
        except DimsError as error:
            return _Folded({}, unfit=Unfit(error.key, node, **error.values))
    outputs = {output.name: forms[output.node] for output in graph.outputs}
    if all(node.attr == attribute for node, attribute in attributes.items()):
        return _Folded(outputs)
    return _Folded(outputs, _with_attributes(graph, attributes), f"folded {further} {parsed.key}")


def _with_attributes(graph: Graph, attributes: Mapping[Node, Any]) -> Graph:
    """The graph as written, with these `attributes` in place of those of its nodes."""
    return rewrite(graph, lambda old, args, builder: builder.node(old.op, *args, attr=attributes.get(old, old.attr)))
