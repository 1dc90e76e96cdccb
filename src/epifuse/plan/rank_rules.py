"""For each operation, which dims its value has once leading dims are folded, and how its node counts dims then.

Folding sees all leading dims of a value as one dim, see `ranks`. *Eager's* dims are those that the value has in
PyTorch, before folding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from epifuse.base.errors import EpifuseError, fail
from epifuse.frontend import Parsed
from epifuse.ir import Load, Node
from epifuse.passes.dims import normalise, permuted


class Form(NamedTuple):
    """The dims of a folded value. Its first dim stands for so many `leading` dims of eager's, None if it has no such
    dim. The `kept` dims behind it are not changed. With `leading` 0 the first dim is a single row of a vector."""

    leading: int | None
    kept: int

    @property
    def rank(self) -> int:
        """The number of dims that the value has in eager PyTorch."""
        return (self.leading or 0) + self.kept


NUMBER = Form(None, 0)


class Unfit(Exception):  # noqa: N818 - it is no error: another way may fit
    """Raised for what cannot be folded: `key` and `values` of an error of the catalogue, and the node it is about."""

    def __init__(self, key: str, node: Node | None = None, **values: object) -> None:
        super().__init__(key)
        self.key, self.node, self.values = key, node, values

    def error(self, parsed: Parsed) -> EpifuseError:
        """The error for the user, on the line of the node."""
        return fail(self.key, None if self.node is None else parsed.graph.loc(self.node), **self.values)


def needs_leading(node: Node, what: str) -> Unfit:
    """The error for a node that needs one of the leading dims by itself; `what` says what for."""
    return Unfit("leading_dims", node, what=what)


def form_of(node: Node, args: list[Form], accum: Form, operands: Mapping[str, Form]) -> tuple[Form, Any]:
    """The form of a value, and the `attr` of its node with dims counted after folding.

    `args` are the forms of the node's arguments, `operands` those of operands by name.
    """
    if node.op == "accum":
        return accum, node.attr
    if isinstance(node.attr, Load):
        return operands.get(node.attr.name, NUMBER), node.attr
    if node.op in ("access", "reduce_axes"):
        return _tree_value(node, args[0], accum), node.attr
    if (rule := _RULES.get(node.op)) is not None:
        return rule(node, args[0])
    if node.op == "torch" and node.attr[0] == "prelu weight" and args[0].leading not in (None, 1):
        raise needs_leading(node, "a weight for each of its channels")
    joined = _joined(node, args)
    return args[0] if node.op == "torch" else joined, node.attr


def _joined(node: Node, args: list[Form]) -> Form:
    """The form to which values broadcast. A value with folded dims must have as many kept dims as any other value."""
    folded = [form for form in args if form.leading is not None]
    kept = max((form.kept for form in args), default=0)
    if not folded:
        return Form(None, kept)
    if any(form.kept != kept for form in folded):
        raise needs_leading(node, "values whose leading dims stand at different places")
    return Form(max(form.leading or 0 for form in folded), kept)


def _tree_value(node: Node, form: Form, accum: Form) -> Form:
    """The form of a value of a visitor tree, which counts the axes l, m and n of its product.

    A reduction has to be over all of the folded axes or over none of them.
    """
    if node.op == "access":
        if node.attr[0] != "column" or form != Form(None, 1):
            return form
        if accum.kept == 1:
            raise needs_leading(node, "a column of one dim")
        return Form(None, 2)
    folded, rest = set("lmn"[: 3 - accum.kept]), "lmn"[3 - accum.kept :]
    gone = folded & set(node.attr[1])
    if gone and gone != folded:
        raise needs_leading(node, f"{node.attr[0]} over some of its leading dims")
    return Form(None if gone else accum.leading, sum(axis not in node.attr[1] for axis in rest))


def _reduced(node: Node, form: Form) -> tuple[Form, Any]:
    name, dims, keepdim = node.attr
    if dims is None:
        return (form if keepdim else NUMBER), node.attr
    chosen = [normalise(dim, form.rank) for dim in dims]
    leading = form.leading or 0
    gone = {dim for dim in chosen if dim < leading}
    kept = form.kept if keepdim else form.kept - len(chosen) + len(gone)
    if gone and len(gone) != leading:
        raise needs_leading(node, f"{name} over some of its leading dims")
    # The single row of a vector is no dim of eager's: once all other dims are reduced, the value is one number.
    whole = bool(gone) or (form.leading == 0 and not kept)
    new = (*([-form.kept - 1] if whole else []), *(dim - form.rank for dim in chosen if dim >= leading))
    return Form(form.leading if keepdim or not whole else None, kept), (name, new, keepdim)


def _behind(node: Node, form: Form, dim: int, rank: int, what: str) -> int:
    """The dim `dim` of `rank` dims, counted from the front. Raises `Unfit`, about `what`, for a leading dim."""
    at = normalise(dim, rank)
    if at < (form.leading or 0):
        raise needs_leading(node, what)
    return at


def _unsqueezed(node: Node, form: Form) -> tuple[Form, Any]:
    at = _behind(node, form, node.attr, form.rank + 1, "a new dim among its leading dims")
    return Form(form.leading, form.kept + 1), at - form.rank - 1


def _permuted(node: Node, form: Form) -> tuple[Form, Any]:
    if form.leading is None:
        return form, node.attr
    order, leading = permuted(node.attr, form.rank), form.leading
    if order[:leading] != tuple(range(leading)):
        raise needs_leading(node, "another order of its leading dims")
    return form, (0, *(dim - leading + 1 for dim in order[leading:]))


def _reshaped(node: Node, form: Form) -> tuple[Form, Any]:
    if form.leading is not None:
        raise needs_leading(node, "a reshape of its leading dims")
    return Form(None, len(node.attr)), node.attr


def _part(node: Node, form: Form) -> tuple[Form, Any]:
    dim, how, numbers = node.attr
    at = _behind(node, form, dim, form.rank, "a part of one of its leading dims")
    return Form(form.leading, form.kept - (how == "element")), (at - form.rank, how, numbers)


def _rolled(node: Node, form: Form) -> tuple[Form, Any]:
    dim, shift = node.attr
    at = _behind(node, form, dim, form.rank, "a roll along one of its leading dims")
    return form, (at - form.rank, shift)


def _join(node: Node, form: Form) -> tuple[Form, Any]:
    dim, how = node.attr
    stacks = how == "stack"
    at = _behind(node, form, dim, form.rank + stacks, f"{how} along its leading dims")
    return Form(form.leading, form.kept + stacks), (at - form.rank - stacks, how)


def _rearranged(node: Node, form: Form) -> tuple[Form, Any]:
    how, numbers = node.attr
    dims = [normalise(dim, form.rank) for dim in numbers[: 1 if how in ("unflatten", "squeeze") else 2]]
    if any(dim < (form.leading or 0) for dim in dims) or how == "t":
        raise needs_leading(node, f"{how} of its leading dims")
    kept = {"transpose": 0, "flatten": dims[0] - dims[-1], "unflatten": len(numbers) - 2, "squeeze": -1}[how]
    return Form(form.leading, form.kept + kept), (how, (*(dim - form.rank for dim in dims), *numbers[len(dims) :]))


def _extent(node: Node, form: Form) -> tuple[Form, Any]:
    dims, count = node.attr
    if count not in (0, form.rank):
        raise Unfit("unpack_count", node, have=form.rank, want=count)
    if dims is None:
        return NUMBER, (None, 0)
    chosen, leading = [normalise(dim, form.rank) for dim in dims], form.leading or 0
    gone = {dim for dim in chosen if dim < leading}
    if gone and len(gone) != leading:
        raise needs_leading(node, "the extent of some of its leading dims")
    folded = [-form.kept - 1] if gone else []
    return NUMBER, ((*folded, *(dim - form.rank for dim in chosen if dim >= leading)), 0)


def _along(node: Node, form: Form) -> tuple[Form, Any]:
    """The rule of operations along one dim: a coordinate, or a gather."""
    dim = _behind(node, form, node.attr, form.rank, f"a {node.op} along its leading dims")
    return form, dim - form.rank


def _coordinate(node: Node, form: Form) -> tuple[Form, Any]:
    if isinstance(node.attr, int):
        _, dim = _along(node, form)
        return Form(None, -dim), dim
    position = {"n": 1, "m": 2, "l": 3}[node.attr]
    if form.kept < position:
        raise needs_leading(node, "a coordinate along its leading dims")
    return Form(None, position), node.attr


def _one_hot(node: Node, form: Form) -> tuple[Form, Any]:
    dim = _behind(node, form, node.attr, form.rank, "a claim about one of its leading dims")
    return form, dim - form.rank


def _claimed(node: Node, form: Form) -> tuple[Form, Any]:
    spelled, rank = node.attr
    if form.rank < rank:
        raise needs_leading(node, f"{spelled} of more dims than it has")
    return form, (spelled, min(rank, form.kept + (form.leading is not None)))


_RULES: dict[str, Callable[[Node, Form], tuple[Form, Any]]] = {
    "reduce_dims": _reduced,
    "unsqueeze": _unsqueezed,
    "permute": _permuted,
    "reshape": _reshaped,
    "part": _part,
    "join": _join,
    "roll": _rolled,
    "rearrange": _rearranged,
    "coordinate": _coordinate,
    "extent": _extent,
    "limit": lambda node, form: (NUMBER, node.attr),
    "gather": _along,
    "assume_one_hot": _one_hot,
    **dict.fromkeys(("rounded_like", "cast_like"), lambda node, form: (form, node.attr)),
    "tensor": _claimed,
}
"""The rules of operations whose form is not the one that their arguments broadcast to."""
