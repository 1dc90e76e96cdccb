"""Fusing one product of a graph: find the cone that saves most and that a kernel can run, and put a leaf in its place.

The *form* of a cone is its epilogue (see `write`). A *leaf* is the node that replaces the cone (see `leaves`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from epifuse import providers
from epifuse.base.errors import EpifuseError
from epifuse.frontend.fx import Boundary, Numerics, value_of
from epifuse.plan import Plan, select
from epifuse.pytorch.cone import (
    Cone,
    Level,
    Refusals,
    below,
    grow,
    is_cut,
    is_join,
    is_reduction,
    is_view,
    name_of,
    pull,
    tensors_of,
)
from epifuse.pytorch.flat import Layout, layouts
from epifuse.pytorch.leaves import MOST_OUTPUTS, Value, encoded, leaf_operator, options_of, parsed_of, shape_of
from epifuse.pytorch.outside import why_nothing
from epifuse.pytorch.payoff import peel
from epifuse.pytorch.prediction import Site, seconds_gained, site_of
from epifuse.pytorch.sized import Size, Sized
from epifuse.pytorch.write import Operand, Written, alike, written
from epifuse.request.problem import tf32_allowed
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.runtime.launch import outputs_of

aten = torch.ops.aten
LEVELS: tuple[Level, ...] = ("rows", "sums", "points")


class Fused(NamedTuple):
    """A cone that a kernel can run, with its form, its plan and what its prediction depends on."""

    cone: Cone
    form: Written
    plan: Plan
    site: Site


class Unfused(NamedTuple):
    """Why a product is not fused. `why` may be a function, because the refusals of thirty designs take 10 ms to say."""

    why: str | Callable[[], str]

    @property
    def reason(self) -> str:
        """The reason as text."""
        return self.why() if callable(self.why) else self.why


Form = tuple[Written, Plan]
"""The epilogue of a cone, and the plan of its kernel."""


class Known(NamedTuple):
    """What is known about one graph so far.

    `refusals` says of nodes why no epilogue holds them, `forms` has the answer for cones that are `alike`, and `sized`
    the sizes that are symbols.
    """

    refusals: Refusals
    forms: dict[Hashable, Form | Unfused]
    sized: Sized

    @staticmethod
    def nothing(refusals: Refusals | None = None, sized: Sized | None = None) -> Known:
        """The start for a graph: nothing is known except what is given."""
        return Known({**(refusals or {})}, {}, sized or Sized())


def cannot(product: FxNode) -> str | None:
    """The reason why nothing can be fused into `product`, whatever is around it; None if there is no such reason."""
    values = [value for node in (product, *product.all_input_nodes) for value in tensors_of(node)]
    for value in values:
        if any(isinstance(extent, torch.SymInt) for extent in (*value.shape, *value.stride())):
            return "its sizes are symbols"
        if not value.dtype.is_floating_point:
            return f"a product of {str(value.dtype).removeprefix('torch.')}"
    if len({value.device for value in values}) > 1:
        return "its tensors are on several devices"
    if any(value.numel() == 0 for value in values):
        return "it is empty"
    if any(_is_collective(node) for node in _near(product)):
        return "it stands beside a collective operation, which PyTorch overlaps with it"
    return None


def _near(product: FxNode) -> Iterator[FxNode]:
    """Yield the nodes that compute the operands of `product` and those that read it, also through views and casts."""
    for side in ("all_input_nodes", "users"):
        waiting = [*getattr(product, side)]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += getattr(node, side) if is_view(node) or name_of(node) == _CAST else ()


_CAST = "convert_element_type"


def _is_collective(node: FxNode) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("_c10d_functional", "c10d")


def find(product: FxNode, known: Known, numerics: Numerics, *, predicted: bool) -> Fused | Unfused:
    """The cone of `product` that is predicted to save most, of those that a kernel can run.

    With `predicted`, the product is left unless that cone is predicted to save time.
    """
    found = every(product, known, numerics)
    if isinstance(found, Unfused):
        return found
    gain = seconds_gained(found[0].site)
    return Unfused(f"fusing is predicted to lose {-gain * 1e6:.3g} us") if predicted and gain <= 0 else found[0]


def every(product: FxNode, known: Known, numerics: Numerics) -> list[Fused] | Unfused:
    """All cones of `product` that a kernel can run. Those that are predicted to save most come first."""
    dependent = below(product)
    cones: dict[tuple[FxNode, ...], Cone] = {}
    for level in LEVELS:
        grown = [grow(product, level, known.refusals, dependent, cuts=True)]
        if any(is_cut(node) or is_join(node) for node in grown[0].inside):
            grown.append(grow(product, level, known.refusals, dependent, cuts=False))
        reduces = any(is_reduction(node) for cone in grown for node in cone.inside)
        for cone in grown:
            peel(cone)
            if cone.work or _slow_in_pytorch(product):
                cones.setdefault(tuple(cone.inside), cone)
        if not reduces:  # without reductions the further levels give the same cones
            break
    answers = [_shrunk(cone, known, numerics) for cone in cones.values()]
    found = {tuple(each.cone.inside): each for each in answers if isinstance(each, Fused)}
    if not found:
        why = next((each for each in answers if isinstance(each, Unfused)), None)
        return why or Unfused(why_nothing(product, known.refusals))
    return sorted(found.values(), key=lambda each: -seconds_gained(each.site))


_MOST_ATTEMPTS = 40


def _shrunk(cone: Cone, known: Known, numerics: Numerics) -> Fused | Unfused:
    """Drop the last values of `cone` until a kernel can run it. If none ever can, return the first reason."""
    first = None
    for _ in range(_MOST_ATTEMPTS):
        answer = _planned(cone, known, numerics)
        if isinstance(answer, Fused):
            return answer
        first = first or answer
        if not cone.work:
            break
        cone.drop_last()
        if not (cone.work or _slow_in_pytorch(cone.product)):
            break
    return first or Unfused("it has no neighbour")


def _slow_in_pytorch(product: FxNode) -> bool:
    """Whether a cone of the product alone may pay: without tf32, cuBLAS multiplies float32 without tensor cores."""
    (value, *_) = tensors_of(product)
    return value.dtype == torch.float32 and value.device.type == "cuda" and not tf32_allowed()


def _planned(cone: Cone, known: Known, numerics: Numerics) -> Fused | Unfused:
    if not cone.outputs:
        return Unfused("nothing reads what is computed of it")
    if len(cone.outputs) > MOST_OUTPUTS:
        return Unfused(f"it would have {len(cone.outputs)} outputs")
    if any(name_of(reader) == "as_strided" for node in cone.outputs for reader in cone.readers(node)):
        return Unfused("its memory is read by as_strided")
    first = None
    for flat in _forms(cone, known.refusals):
        answer = known.forms.get(key := (alike(cone, flat), known.sized.extents(cone)))
        if answer is None:
            answer = known.forms[key] = _form(cone, numerics, flat, known.sized)
        if not isinstance(answer, Unfused):
            form, plan = answer
            form = form.of(cone)
            if None not in _reshape_arguments(cone, form, known.sized):
                return Fused(cone, form, plan, site_of(cone, plan))
            answer = Unfused("before it the graph lacks the sizes that its operands and outputs are shaped by")
        first = first or answer
    return first or Unfused("it has no form")


def _form(cone: Cone, numerics: Numerics, flat: Mapping[FxNode, Layout] | None, sized: Sized) -> Form | Unfused:
    try:
        form = written(cone, numerics, flat)
    except Boundary as boundary:
        return Unfused(boundary.reason)
    if not sized.serves(cone, form, numerics, flat):
        return Unfused("what is written of it serves one size alone, and its sizes are symbols")
    plan = _plan(cone, form)
    return plan if isinstance(plan, Unfused) else (form, plan)


def _forms(cone: Cone, known: Refusals) -> Iterator[Mapping[FxNode, Layout] | None]:
    """Yield the layouts with which the cone may be written, best first; None stands for the shapes of the graph.

    `cone.pulled` is set for each of them. For the shapes of the graph only constants are pulled in: the language would
    align values that are computed from operands alone with the product.
    """
    pull(cone, known, lambda node: True)
    if (flat := layouts(cone)) is not None:
        yield flat
    pull(cone, known, lambda node: False)
    yield layouts(cone) if flat is None else flat
    if flat is not None or layouts(cone) is not None:
        yield None


def _plan(cone: Cone, form: Written) -> Plan | Unfused:
    """The plan of the kernel that would run the cone. It depends on sizes, strides and dtypes only, not on data."""
    a, b = map(value_of, cone.a_and_b)
    parsed = parsed_of(form.graph, form.values)
    try:
        with torch.no_grad():
            given = {name: value_of(node).reshape(shape_of(shape, a, b)) for node, name, shape in form.operands}
            epilogue, constraints = EpilogueArguments.partial(parsed, given), options_of(a, b).constraints
            args = GemmArguments(a, b, epilogue=epilogue, constraints=constraints)
    except EpifuseError as error:
        return Unfused(str(error).partition("\n")[0])
    everywhere, device = providers.candidates(), args.problem.target.device
    here = [(provider, specs) for provider, specs in everywhere if any(spec.device == device for spec in specs)]
    selection = select(args.structure, args.problem, here or everywhere)
    if (best := selection.best) is None:
        return Unfused(lambda: "; ".join(selection.reasons))
    if best.spec.name == _BY_OPERATIONS and any(map(is_cut, cone.inside)):
        return Unfused("parts of a row, one operation after the other, take longer than PyTorch's loops")
    shapes = {each.name: each.shape for each in outputs_of(args.graph, args.problem)}
    for value in form.values:
        if shapes[value.name] != shape_of(value.shape, a, b):
            return Unfused(f"{value.name} would have the shape {shapes[value.name]}")
    return best


_BY_OPERATIONS = "cpu_panel"
"""The CPU kernel that runs one operation after the other. For SwiGLU on a stacked weight it took 1.23 to 1.28 times as
long as torch.compile (float32, 256 x 1024 x 256 and 512 x 5632 x 1024); the vectorised kernel took 0.68 to 1.03 times
as long."""


# --- the leaf in place of the cone ----------------------------------------------------------------------------------

_COPIED_META = ("stack_trace", "original_aten", "from_node", "seq_nr", "nn_module_stack", "custom")


def replace(graph: FxGraph, fused: Fused, sized: Sized) -> bool:
    """Replace the cone by a leaf. Returns whether `graph` has to be sorted topologically afterwards.

    The leaf is inserted behind the last of its operands, and a reader of the cone may stand before that operand.
    `sized` are the sizes of the graph.
    """
    cone, form = fused.cone, fused.form
    last = max(*cone.a_and_b, *cone.operands)
    kept = cone.kept
    readers = [user for old in form.outputs for user in old.users if user not in cone.inside or user in kept]
    place = cone.product if last < cone.product else last.next
    views = [view or () for view in _reshape_arguments(cone, form, sized)]
    with (
        graph.inserting_before(place),
        value_of(cone.product).fake_mode,  # type: ignore[attr-defined]  # of a FakeTensor
    ):
        given = [_handed(graph, *each, cone) for each in zip(form.operands, views, strict=False)]
        target, several = leaf_operator(len(form.outputs)), len(form.outputs) > 1
        values = [_made(old, value, cone) for old, value in zip(form.outputs, form.values, strict=True)]
        handed = (*cone.a_and_b, given, encoded(form.graph, form.values))
        leaf = _node(graph, target, handed, cone.product, tuple(values) if several else values[0])
        parts = [
            _node(graph, operator.getitem, (leaf, i), cone.product, values[i]) for i in range(len(values) * several)
        ]
        new = [
            _reshaped(graph, part, tuple(value_of(old).shape), sizes, old)
            for part, old, sizes in zip(parts or [leaf], form.outputs, views[len(given) :], strict=True)
        ]
    for old, made in zip(form.outputs, new, strict=True):
        old.replace_all_uses_with(made, delete_user_cb=lambda user: user not in cone.inside or user in kept)
    for node in reversed(cone.body):
        if node not in kept and not node.users:
            graph.erase_node(node)
    return any(user < last for user in readers)


def _reshape_arguments(cone: Cone, form: Written, sized: Sized) -> list[Sequence[int | Size] | None]:
    """The arguments of the views that give operands the shapes the leaf takes, and outputs the shapes the graph has.

    An item is None if the graph does not have the sizes for it before the product.
    """
    factors = [*map(sized.value, cone.a_and_b)]
    shapes = [shape_of(operand.shape, *factors) for operand in form.operands]
    shapes += [sized.value(node).shape for node in form.outputs]
    return [sized.view(shape, cone.product) for shape in shapes]


def _handed(graph: FxGraph, operand: Operand, view: Sequence[int | Size], cone: Cone) -> FxNode:
    """The node of an operand in the shape that the leaf takes.

    A seed that is looked up in a tensor of seeds becomes a view of that tensor, because Inductor would run the look-up
    as a kernel.
    """
    node, product = operand.node, cone.product
    if name_of(node) == "inductor_lookup_seed":
        return _node(graph, aten.select.int, (node.args[0], 0, node.args[1]), product)
    return _reshaped(graph, node, shape_of(operand.shape, *map(value_of, cone.a_and_b)), view, product)


def _reshaped(graph: FxGraph, node: FxNode, shape: tuple[int, ...], view: Sequence[int | Size], like: FxNode) -> FxNode:
    """The value of `node` in another `shape`, by a reshape to `view`, which is right at every size of the graph."""
    if tuple(value_of(node).shape) == shape:
        return node
    given = [size if isinstance(size, int) else _size(graph, size, like) for size in view]
    return _node(graph, aten.reshape.default, (node, given), like)


def _size(graph: FxGraph, size: Size, like: FxNode) -> FxNode:
    return size.node if size.dim is None else _node(graph, aten.sym_size.int, tuple(size), like)


def _made(old: FxNode, value: Value, cone: Cone) -> torch.Tensor:
    """The fake tensor of an output of the leaf: that of `old` if it looks the same, or a new one.

    Running the operator on fake tensors would take 2 ms.
    """
    shape, own = shape_of(value.shape, *map(value_of, cone.a_and_b)), value_of(old)
    if own.shape == shape and own.dtype == value.dtype and own.is_contiguous():
        return own
    return own.new_empty(shape, dtype=value.dtype)


def _node(graph: FxGraph, target: Any, args: tuple[Any, ...], like: FxNode, value: Any = None) -> FxNode:
    """A new node at the insertion point of `graph`. `value` is its fake tensor; if None, `target` computes one."""
    made = graph.call_function(target, args)
    made.meta.update({key: like.meta[key] for key in _COPIED_META if key in like.meta})
    made.meta["val"] = target(*torch.fx.map_arg(args, lambda node: node.meta["val"])) if value is None else value
    return made
