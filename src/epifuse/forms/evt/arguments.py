"""Arguments of a tree: nested as in CUTLASS, or flat by name with pointers and strides. Both become values by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from epifuse import api
from epifuse.base.errors import EpifuseError, fail
from epifuse.forms.evt.outline import Line, outline
from epifuse.forms.evt.part import Part
from epifuse.request.problem import info
from epifuse.runtime.arguments import GemmArguments, Load, Store

# --- nested ------------------------------------------------------------------------------------------------------


def from_nested(tree: Part, nested: Any) -> dict[str, Any]:
    """Operands and outputs by name, from nested arguments. Raises `ArgumentError` that names the node whose part does
    not fit. A part is what the nested arguments hold for one node."""
    lines = outline(tree)
    found: dict[str, Any] = {}
    for line, part in _parts(tree, lines, nested):
        for name, value in line.node.handed(line, _fields(part), part):
            if name in found and not _same(found[name], value):
                raise fail("tree_argument_twice", line.place, name=name)
            found[name] = value
    return found


def _parts(tree: Part, lines: Sequence[Line], nested: Any) -> Iterator[tuple[Line, Any]]:
    """Yield each line with the part for its own node. The part of a tree visitor's operator is its last one."""
    rest = iter(lines)
    stack = [(tree, nested)]
    while stack:
        node, part = stack.pop()
        line = next(rest)
        children = node.below
        if not children:
            yield line, part
            continue
        has_own = node.operator is not node
        want = len(children) + has_own
        if not isinstance(part, (tuple, list)) or len(part) != want:
            shape = f"a tuple of {want}, one for each child" + (" and its own last" if has_own else "")
            raise fail("tree_arguments", line.place, node=line.label, want=shape, value=_shown(part))
        if has_own:
            yield line, part[-1]
        stack.extend(reversed(list(zip(children, part, strict=False))))


def _fields(part: Any) -> tuple[Any, ...]:
    return tuple(part) if isinstance(part, (tuple, list)) else () if part == {} else (part,)


def padded(line: Line, fields: tuple[Any, ...], names: tuple[str, ...], part: Any) -> tuple[Any, ...]:
    """The fields, with None for those that are left out at the end. Raises if there are more fields than `names`."""
    if len(fields) > len(names):
        raise misfit(line, f"({', '.join(names)})", part)
    return (*fields, *(None,) * (len(names) - len(fields)))


def misfit(line: Line, want: str, part: Any) -> EpifuseError:
    """The error for a part that does not have the form `want` of the node at `line`."""
    return fail("tree_arguments", line.place, node=line.label, want=want, value=_shown(part))


def _shown(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        return f"a tensor of shape {tuple(part.shape)}"
    return f"a {type(part).__name__} of {len(part)}" if isinstance(part, (tuple, list)) else repr(part)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal numbers, or tensors with the same elements in the same memory, with equal
    hints."""
    if isinstance(one, (Load, Store)) and type(one) is type(other):
        return one == replace(other, tensor=one.tensor) and _same(one.tensor, other.tensor)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or _memory(one) == _memory(other)
    return not isinstance(one, _POINTERS) and not isinstance(other, _POINTERS) and same_number(one, other)


def same_number(one: Any, other: Any) -> bool:
    """Whether two numbers are equal, or both NaN."""
    return bool(one == other or (one != one and other != other))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), info(tensor)


# --- flat --------------------------------------------------------------------------------------------------------


def prepared(lines: Sequence[Line], names: frozenset[str], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`given` by the names of operands and outputs: `x_ptr` and `dX` are read as the pointer and strides of x.

    None is a null pointer. `names` are the operands and outputs. If only these are given, and none as None, `given` is
    returned as it is.
    """
    if names.issuperset(given) and not any(value is None for value in given.values()):
        return given
    rest = dict(given)
    found: dict[str, Any] = {}
    for line in lines:
        outputs = ((line.node.name, None),) if line.node.drawn == "store" else ()
        for name, default in (*line.node.slots, *outputs):
            keys = (name, f"{name}_ptr", _stride_name(name))
            if name in found or not any(key in rest for key in keys):
                continue
            value, pointer, stride = (rest.pop(key, None) for key in keys)
            if pointer is not None and isinstance(value, _POINTERS):
                raise fail("tree_argument_twice", line.place, name=name)
            if pointer is None and value is not None and not isinstance(value, _POINTERS):
                found[name] = value
            else:
                found[name] = pointed(line, value if pointer is None else pointer, stride, default)
    return found | rest


def _stride_name(name: str) -> str:
    """The name of an operand's strides: scale_a -> dScaleA."""
    return "d" + "".join(word[:1].upper() + word[1:] for word in name.split("_"))


# --- pointers ----------------------------------------------------------------------------------------------------


_POINTERS = (torch.Tensor, Load, Store)
_STRIDES = {"row": ("(0, dN, dL)", (0,)), "column": ("(dM, 0, dL)", (1,)), "scalar": ("(0, 0, dL)", (0, 1))}
"""By access class: how the strides are written, and the positions of those that have to be 0."""


def pointed(line: Line, pointer: Any, stride: Any, default: float | None) -> Any:
    """The operand at a pointer, with strides if these are not None; `default` if the pointer is null."""
    if pointer is None:
        if default is None:
            raise fail("tree_null", line.place, node=line.label)
        return default
    if not isinstance(pointer, _POINTERS):
        want = "a tensor, or None where it is null"
        raise fail("tree_field", line.place, field="a pointer", node=line.label, want=want, value=_shown(pointer))
    if stride is None:
        return pointer
    if isinstance(pointer, (Load, Store)):
        return replace(pointer, tensor=_strided(line, pointer.tensor, stride))
    return _strided(line, pointer, stride)


def _strided(line: Line, tensor: torch.Tensor, stride: Any) -> torch.Tensor:
    """`tensor` as a view with dims ((L,) M, N), where a dim has extent 1 if its stride is 0. `stride` is (dM, dN, dL).

    Raises if it is not a view of the tensor, or if the node at `line` wants a 0 elsewhere."""
    whole = isinstance(stride, (tuple, list)) and len(stride) == 3 and all(type(d) is int for d in stride)
    if whole:
        want, zeros = _STRIDES.get(getattr(line.node, "access", ""), ("", ()))
        if any(stride[axis] for axis in zeros):
            raise fail("tree_stride", line.place, node=line.label, want=want, stride=stride)
        d_m, d_n, d_l = stride
        wanted = [(0, d_l), (1, d_m), (2, d_n)]
        varying = [axis for axis, d in wanted if d]
        # A stride of the batch may be given although the tensor has no batch.
        for axes in (varying, [axis for axis in varying if axis]):
            if tensor.dim() == len(axes) or (tensor.numel() == 1 and not axes):
                shape, strides = [1, 1, 1], [0, 0, 0]
                for axis, extent, step in zip(axes, tensor.shape, tensor.stride(), strict=False):
                    shape[axis], strides[axis] = extent, step
                if all(e == 1 or s == d for e, s, (_, d) in zip(shape, strides, wanted, strict=True)):
                    return tensor.reshape(shape[1:] if 0 not in axes else shape) if axes else tensor.reshape(())
        if tensor.dim() in (2, 3) and _fits(tensor, (d_l, d_m, d_n)[-tensor.dim() :]):
            return tensor
    shown = {"shape": tuple(tensor.shape), "strides": tuple(tensor.stride())}
    raise fail("tree_pointer", line.place, node=line.label, stride=stride, **shown)


def _fits(tensor: torch.Tensor, wanted: Sequence[int]) -> bool:
    """Whether a tensor already has dims with these strides. The stride of a dim of extent 1 does not matter."""
    return all(e == 1 or s == d for e, s, d in zip(tensor.shape, tensor.stride(), wanted, strict=True))


# --- workspace ---------------------------------------------------------------------------------------------------


def workspace_size(args: GemmArguments) -> int:
    """The bytes of workspace that the best kernel for `args` needs. Raises `UnsupportedError` if there is no kernel."""
    explanation = api.explain(args)
    if explanation.plan is None:
        reasons = "\n".join(f"  {reason}" for reason in explanation.selection.reasons)
        raise fail("no_kernel", explanation.selection.loc, reasons=reasons, hint="fallback='torch' needs no workspace")
    return explanation.plan.allocation.workspace_bytes
