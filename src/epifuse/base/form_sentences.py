"""The rows of the error catalogue about an epilogue's other forms: visitor trees, functors, classes, plan objects."""

from __future__ import annotations

from epifuse.base.exceptions import (
    ArgumentError,
    ArgumentTypeError,
    EpilogueSyntaxError,
    EpilogueTypeError,
    InternalError,
)
from epifuse.base.sentences import Sentence

_S, _T, _A, _AT = EpilogueSyntaxError, EpilogueTypeError, ArgumentError, ArgumentTypeError

FORMS: dict[str, Sentence] = {
    # --- visitor trees
    "compute_function": Sentence(
        _AT,
        "Compute takes a function of the epilogue language, and {what} is none",
        "pass ef.<name>, one of torch's functions of the same name, or a Python function of values",
    ),
    "tree_node": Sentence(
        _AT, "{visitor} takes nodes of a visitor tree, not {what}", "write AccFetch(), Compute(fn), EVT(op, ...)"
    ),
    "tree_field": Sentence(_AT, "{field} of {node} must be {want}, not {value}"),
    "tree_operator": Sentence(
        _AT, "{node} computes nothing, so it can have no children", "EVT takes Compute, AuxStore or a reduction first"
    ),
    "tree_arity": Sentence(
        _A, "{node} takes {want} inputs, and has {have}", "join an operator to its inputs: EVT(operator, *children)"
    ),
    "tree_edges": Sentence(
        _A,
        "TopologicalVisitor was given edges for {have} nodes and a list of {want} nodes",
        "give one tuple of edges for each node",
    ),
    "tree_edge": Sentence(_A, "node {position}, {node}, takes the value of {source}: nodes are numbered 0 to {last}"),
    "tree_order": Sentence(
        _A,
        "node {position}, {node}, takes the value of node {source}, {other}, which is visited later",
        "list nodes in topological order: each after those whose values it takes",
    ),
    "tree_cycle": Sentence(_A, "the edges of this TopologicalVisitor are a cycle: {cycle}"),
    "tree_name": Sentence(_A, "{name!r} is no name for an operand or output", "use a Python name"),
    "tree_default": Sentence(
        _A,
        "two nodes named '{name}' have different defaults for a null pointer, {first:g} and {second:g}",
        "give both nodes the same default, or different names",
    ),
    "tree_name_twice": Sentence(
        _A, "'{name}' is an output, and also another output or an operand of this tree", "give each its own name"
    ),
    "tree_reduction": Sentence(
        _A,
        "{node}: {first} and {second} are not one reduction",
        "use plus with atomic_add, maximum with atomic_maximum, or one reduction of the vocabulary",
    ),
    "tree_identity": Sentence(
        _A, "{node} cannot start from {identity}: the result would depend on the tiles", "{hint}"
    ),
    "tree_stride": Sentence(_A, "the strides of {node} are {want}, and cannot be {stride}"),
    "tree_pointer": Sentence(
        _A, "{node}: the strides (dM, dN, dL) = {stride} do not fit a tensor of shape {shape} and strides {strides}"
    ),
    "tree_batches": Sentence(
        _A,
        "{node} reduces {how}, but the strides among its arguments are {stride}",
        "write stride={stride} in the node: what is reduced is known before arguments are",
    ),
    "tree_arguments": Sentence(_A, "the arguments of {node} are {want}, and not {value}"),
    "tree_argument_twice": Sentence(_A, "the argument '{name}' is given twice, and differently"),
    "tree_null": Sentence(_A, "the pointer of {node} is null, and there is no value to use instead"),
    "tree_access": Sentence(_T, "{node} loads a {want}, and the operand has shape {shape}", "{hint}"),
    "tree_reduced_dims": Sentence(
        _T, "the reduction of a visitor tree takes a value with accum's dims; this one has shape {shape}"
    ),
    # --- functors, the class form, plan objects
    "held_parameter": Sentence(
        _A,
        "{name} of {functor} was fixed when it was made, and cannot be assigned",
        "make a new {functor}, or pass {name}=... to the call",
    ),
    "undefined_functor": Sentence(_A, "{functor} is not defined for {what}: {why}"),
    "unknown_parameter": Sentence(_A, "{function} has no parameter '{name}'; it has {parameters}"),
    "parameter_twice": Sentence(_A, "{function} got the parameter '{name}' twice"),
    "missing_parameter": Sentence(_A, "{function} needs {name}", "pass it here or to the constructor"),
    "plan_tensor": Sentence(_A, "{name} is {have}, and this plan is for {want}", "make another plan for it"),
    "class_epilogue": Sentence(
        _A,
        "{name}.epilogue_operation must be a method that takes self and an accumulator",
        "write 'def epilogue_operation(self, accumulator, ...)'",
    ),
    "not_constructed": Sentence(_A, "{name} was not initialised", "call super().__init__() in its __init__"),
    "mismatch": Sentence(
        InternalError, "output '{name}' differs from PyTorch in {wrong} of {total} elements, {detail}"
    ),
    "positional": Sentence(_A, "{function} takes {want} by position, not {have} arguments"),
}
