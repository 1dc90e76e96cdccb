"""Every sentence a person can read in an error of ours, in one catalogue.

`fail(key, loc, **values)` builds an exception from it; the place, the source line and a caret are added here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from epifuse.exceptions import (
    ArgumentError,
    ArgumentTypeError,
    EpifuseError,
    EpilogueSyntaxError,
    EpilogueTypeError,
    InternalError,
    LaunchError,
    UnsupportedError,
    rebuild,
)
from epifuse.places import Loc

__all__ = [
    "CATALOGUE",
    "ArgumentError",
    "ArgumentTypeError",
    "EpifuseError",
    "EpilogueSyntaxError",
    "EpilogueTypeError",
    "InternalError",
    "LaunchError",
    "Loc",
    "UnsupportedError",
    "fail",
    "kind_of",
]


class Sentence(NamedTuple):
    """One row: the class, what happened, and what to do about it."""

    kind: type[EpifuseError]
    what: str
    hint: str = ""


def kind_of(value: object) -> str:
    """The Python type of `value` with its article: "an int", "a Tensor"; None is itself."""
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def fail(key: str, loc: Loc | None = None, /, **values: Any) -> EpifuseError:
    """The exception for `key`, to be raised by the caller."""
    sentence = CATALOGUE[key]
    parts = [sentence.what.format(**values)]
    if loc is not None:
        parts.append(str(loc))
    if hint := sentence.hint.format(**values):
        parts.append(f"  hint: {hint}")
    error = rebuild(sentence.kind, key, loc, "\n".join(parts))
    if isinstance(error, SyntaxError) and loc is not None:
        error.filename, error.lineno, error.offset, error.text = loc.file, loc.line, loc.column + 1, loc.text
    return error


_S, _T, _A, _AT, _U = EpilogueSyntaxError, EpilogueTypeError, ArgumentError, ArgumentTypeError, UnsupportedError

CATALOGUE: dict[str, Sentence] = {
    # --- finding and reading the source
    "not_python": Sentence(_S, "this is not Python: {detail}"),
    "too_deep": Sentence(
        _S, "the source is nested too deeply for Python's own parser", "split it into several statements"
    ),
    "string_not_a_function": Sentence(
        _S, "the source string must hold one function and nothing else", "write 'def epi(accum, C): return accum + C'"
    ),
    "decorated": Sentence(
        _S,
        "{name} is wrapped by {wrapper}, which is not read",
        "take the decorator off: an epilogue is parsed, never called",
    ),
    "not_a_function": Sentence(
        _AT, "an epilogue is a Python function or its source as a string, not {value}", "write a def or a lambda"
    ),
    "no_source": Sentence(
        _S,
        "the source of {name} ({file}) cannot be found",
        "pass the source as a string: functions made in a REPL, by exec or in C have none",
    ),
    "stale_source": Sentence(
        _S,
        "the source of {name} ({file}) is not what the function was compiled from",
        "reload its module, or pass the source as a string",
    ),
    "async_function": Sentence(_S, "{name} is an async function", "write a plain def"),
    "generator": Sentence(_S, "{name} is a generator function", "return the result instead of yielding it"),
    "lambdas_share_a_line": Sentence(_S, "several lambdas stand on this line", "put each on a line of its own"),
    # --- statements
    "unsupported_syntax": Sentence(_S, "{syntax} is not supported in an epilogue", "{hint}"),
    "unsupported_literal": Sentence(_S, "a literal of type {type} is not supported", "use int, float or bool"),
    "unsupported_operator": Sentence(_S, "the operator {operator} is not supported here", "{hint}"),
    "unsupported_subscript": Sentence(
        _S,
        "an index may only insert dims, as in x[:, None]",
        "use index_m(x), index_n(x) with where to select elements",
    ),
    "defined_twice": Sentence(
        _S, "Variable '{name}' cannot be defined twice.", "use a new name, or @ef.epilogue(reassign=True)"
    ),
    "augmented_assignment": Sentence(
        _S,
        "Variable '{name}' cannot be defined twice: an augmented assignment redefines it, in place in PyTorch",
        "assign to a new name",
    ),
    "augmented_in_place": Sentence(
        _S, "an augmented assignment changes '{name}' in place, under every name it has", "write {name} = {plain}"
    ),
    "chained_assignment": Sentence(_S, "chained assignment is not supported", "assign each name on a line of its own"),
    "assignment_target": Sentence(_S, "cannot assign to {syntax} in an epilogue", "assign to a plain name"),
    "cannot_unpack": Sentence(
        _S, "cannot unpack {what}", "only a tuple, or a helper that returns one, can be unpacked"
    ),
    "unpack_count": Sentence(_S, "cannot unpack {have} values into {want} names"),
    "result_unused": Sentence(_S, "the result of this call is not used", "assign it to a name, or remove the line"),
    "printed_value": Sentence(_S, "debug_print has no result", "write it on a line of its own"),
    "after_return": Sentence(_S, "nothing may follow the return statement"),
    "returns_nothing": Sentence(_S, "{name} must return at least one value", "end it with 'return D'"),
    "unnamed_outputs": Sentence(
        _S, "several results must have names", "unpack them first: 'D, Aux = helper(accum)', then 'return D, Aux'"
    ),
    "unnamed_output": Sentence(
        _S, "each of several results must be a plain name", "assign the expression to a name, then return the name"
    ),
    "returned_twice": Sentence(_S, "'{name}' is returned twice"),
    "returns_operand_name": Sentence(
        _S, "the output '{name}' has the name of an operand", "return it under another name: an output has its own"
    ),
    "returns_input": Sentence(_S, "the input '{name}' cannot be an output", "the caller has it already"),
    "unnamed_clash": Sentence(
        _S, "the unnamed result is called D, and so is an operand", "assign it to another name, or rename the operand"
    ),
    # --- the signature
    "no_accum": Sentence(_S, "accum must be an input to the epilogue function", "write 'def epi(accum, ...)'"),
    "accum_not_first": Sentence(_S, "accum must be the first positional parameter"),
    "star_parameters": Sentence(_S, "the parameter *{name} is not supported", "name each operand"),
    "star_in_helper": Sentence(
        _S, "{name} cannot be inlined: its parameter *{star} is not supported", "name each parameter"
    ),
    "default_not_a_number": Sentence(_S, "the default of '{name}' must be a number"),
    "default_not_supported": Sentence(_S, "{function} cannot be inlined: a default may not be {value}"),
    # --- names
    "undefined": Sentence(_S, "the name '{name}' is not defined", "{near}"),
    "used_before_assignment": Sentence(_S, "'{name}' is used before it is assigned"),
    "no_attribute": Sentence(_S, "{module} has no '{name}'", "{near}"),
    "unknown_function": Sentence(_S, "{name} is not in the epilogue vocabulary", "{near}"),
    "unknown_method": Sentence(_S, "a value in an epilogue has no '{name}'", "{near}"),
    "attribute_of": Sentence(_S, "cannot take '{name}' of {what}"),
    "captured_tensor": Sentence(_S, "'{name}' is a tensor from outside the epilogue", "make it a parameter"),
    "captured_module": Sentence(_S, "'{name}' is {type} from outside the epilogue", "make its weights parameters"),
    "captured_object": Sentence(
        _S, "'{name}' is {type}, which an epilogue cannot use", "make it a parameter, or capture a plain number"
    ),
    "not_a_value": Sentence(_S, "{what} cannot be used as a value here"),
    "identity": Sentence(_S, "`is` compares with None only", "use =="),
    # --- calls
    "not_callable": Sentence(_S, "{what} cannot be called"),
    "recursion": Sentence(_S, "{name} calls itself", "an epilogue has no recursion; write the steps out"),
    "too_many_calls": Sentence(
        _S, "the helpers of this epilogue make more than {limit} calls", "call a helper once and use its result again"
    ),
    "star_arguments": Sentence(_S, "* and ** in a call are not supported", "write the arguments out"),
    "missing_argument": Sentence(_S, "{function}() misses the argument '{name}': its parameters are {want}"),
    "too_many_arguments": Sentence(_S, "{function}() got {have} arguments; its parameters are {want}"),
    "unexpected_argument": Sentence(_S, "{function}() has no parameter '{name}': its parameters are {want}", "{hint}"),
    "argument_twice": Sentence(_S, "{function}() got the argument '{name}' twice"),
    "clamp_bounds": Sentence(_S, "{function}() has neither min nor max", "give it one of them"),
    "by_name": Sentence(_S, "{function}() takes '{name}' by name only", "write {name}=..."),
    "not_static": Sentence(
        _S, "'{name}' of {function}() must be known when the epilogue is parsed", "write it as a literal"
    ),
    "wrong_static": Sentence(_S, "'{name}' of {function}() must be {want}"),
    "max_pair": Sentence(
        _S, "{function} with dim returns a pair in torch, values and indices", "use torch.a{name}(x, dim=...)"
    ),
    "norm_order": Sentence(_S, "only the Euclidean norm is supported", "write norm(x, dim=..., keepdim=...)"),
    # --- kinds
    "host_wanted": Sentence(_T, "'{what}' works on host numbers, and this is a tensor", "{hint}"),
    "tensor_wanted": Sentence(
        _T, "{what} takes a tensor, and this is a host number", "use Python's own arithmetic or math"
    ),
    "number_wanted": Sentence(
        _T, "in torch {what} takes a number here, and this is a tensor", "epifuse's own function takes both"
    ),
    "select_shapes": Sentence(
        _T,
        "the branches of this conditional have the shapes {left} and {right}, and its result only one",
        "make both the larger shape: where(mask, a, b) broadcasts",
    ),
    "prelu_weight": Sentence(
        _T,
        "in torch {what} takes a weight of shape (1,) or (N,) beside a float (M, N); here the shapes are {shapes}",
        "epifuse's own prelu broadcasts",
    ),
    "bounds_differ": Sentence(
        _T, "in torch {what} takes two numbers or two tensors as bounds", "epifuse's own clamp takes one of each"
    ),
    "literal_range": Sentence(_T, "an integer of {bits} bits does not fit here", "write it as a float"),
    "host_not": Sentence(_T, "~ inverts the bits of a host number", "use 'not'"),
    "masks_in_arithmetic": Sentence(
        _T, "{op} does not work on masks", "combine masks with & | ~, or make them numbers with where(mask, 1.0, 0.0)"
    ),
    "mask_wanted": Sentence(_T, "{op} takes masks, and this is {kind}", "compare first, as in x > 0"),
    "integers_wanted": Sentence(
        _T,
        "{op} takes integers, and this is {kind}",
        "a number handed as an operand is a float; write .to(torch.int32)",
    ),
    "float_wanted": Sentence(_T, "{op} takes floats, and this is {kind}", "write .float() first"),
    "negative_power": Sentence(
        _T, "an integer to this power is not an integer", "write .float() first, or use a literal exponent >= 0"
    ),
    "storage_only": Sentence(
        _T, "a value of {dtype} can be stored or cast, but not computed with", "write .float() first"
    ),
    "cast_unsupported": Sentence(_T, "cannot cast to {dtype} here", "{hint}"),
    "host_arithmetic": Sentence(_T, "host arithmetic failed: {detail}"),
    "host_range": Sentence(_T, "this host number does not fit the {kind} it is used as: {value}"),
    "output_is_host": Sentence(
        _T, "the output '{name}' is a host number", "an output must depend on accum or an operand"
    ),
    # --- shapes inside the epilogue
    "operand_shape": Sentence(_T, "operand '{name}' of shape {shape} does not broadcast to accum's {accum}", "{hint}"),
    "shapes_differ": Sentence(_T, "{op} of shapes {left} and {right}: the dims do not broadcast", "{hint}"),
    "dims_differ": Sentence(_T, "{op} of values whose dims run along different axes, {left} and {right}", "{hint}"),
    "dim_range": Sentence(_T, "dim {dim} is out of range for a value of {rank} dims, shape {shape}"),
    "too_many_dims": Sentence(_T, "a value of more than {most} dims", "torch has no more"),
    "dim_twice": Sentence(_T, "dim {dim} is named twice"),
    "permute_dims": Sentence(_T, "permute{dims} does not name each of the {rank} dims once"),
    "reshape_size": Sentence(_T, "cannot reshape {shape} to {want}"),
    "reshape_split": Sentence(
        _T,
        "reshape of {shape} to {want} would cut across an axis",
        "split or merge whole dims: (M, N) to (M, N/64, 64)",
    ),
    "factors_differ": Sentence(
        _T,
        "two reshapes split the axis {axis} in ways that do not nest, by {first} and by {second}",
        "it needs another tile",
    ),
    "index_rank": Sentence(_T, "index_{axis} needs a value with that dim; this one has shape {shape}"),
    "max_of_nothing": Sentence(_A, "{name} of no elements has no value"),
    # --- arguments
    "missing_operand": Sentence(
        _A, "Argument {name} is not provided in the kwargs of the EpilogueArguments constructor"
    ),
    "extra_operand": Sentence(
        _A, "Unexpected argument '{name}': the epilogue's operands are {operands}, its outputs {outputs}"
    ),
    "name_clash": Sentence(
        _A, "the epilogue's '{name}' is also an option of gemm", "pass it as operands={{'{name}': ...}}, or rename it"
    ),
    "operand_names": Sentence(_AT, "operands must be a mapping, not {type}", "pass operands={{'name': value}}"),
    "linear_bias": Sentence(
        _A, "the epilogue takes 'bias', and bias is None", "pass a bias, or leave the parameter out of the epilogue"
    ),
    "operand_type": Sentence(_AT, "operand '{name}' must be a tensor or a number, not {type}", "{hint}"),
    "tensor_type": Sentence(_AT, "{name} must be a torch.Tensor, not {type}", "{hint}"),
    "tensor_subclass": Sentence(_AT, "{name} is {type}; tensor subclasses are not supported", "pass a plain tensor"),
    "requires_grad": Sentence(
        _A, "{name} requires grad, and there is no backward yet", "use torch.no_grad() or .detach()"
    ),
    "tensor_layout": Sentence(_A, "{name} is not a plain dense tensor: it is {what}", "{hint}"),
    "host_number": Sentence(_A, "the scalar '{name}' is out of range: {value}"),
    "rank": Sentence(
        _A, "{name} must have 2 or 3 dims, (L,{rows},{columns}) or ({rows},{columns}); its shape is {shape}"
    ),
    "linear_shapes": Sentence(_A, "x must be (..., K) and weight (N, K); their shapes are {x} and {weight}"),
    "linear_out": Sentence(
        _A,
        "output '{name}' of shape {shape} and strides {strides} is not stored by rows",
        "pass one whose leading dims can be seen as one",
    ),
    "inner_extent": Sentence(_A, "A of shape {a} and B of shape {b}: the inner extents {k_a} and {k_b} differ"),
    "batch_extent": Sentence(_A, "A of shape {a} and B of shape {b}: the batch extents differ"),
    "gemm_dtype": Sentence(
        _A, "{name} of dtype {dtype} is not a GEMM input", "use float, bfloat16, fp8 or 8-bit integers"
    ),
    "gemm_dtypes": Sentence(
        _A, "{first} is {a} and {second} is {b}: the two dtypes must agree", "fp8 and 8-bit integer kinds may be mixed"
    ),
    "accumulator": Sentence(
        _A, "accumulator_type {dtype} does not go with inputs of {a} and {b}", "use one of {allowed}"
    ),
    "operand_dtype": Sentence(_A, "operand '{name}' has dtype {dtype}, which an epilogue cannot load"),
    "declared_dtype": Sentence(_A, "'{name}' has dtype {dtype}, and {epilogue} was made for {want}"),
    "operand_float64": Sentence(
        _A, "operand '{name}' is float64 beside a float32 accumulator", "cast it, or use accumulator_type=torch.float64"
    ),
    "device": Sentence(_A, "{name} is on {device}, but the GEMM is on {expected}"),
    "no_output_d": Sentence(
        _A, "the epilogue returns no output named D, but out= was given", "return D, or leave out= away"
    ),
    "out_shape": Sentence(_A, "out must have the shape {want}; its shape is {shape}"),
    "out_single": Sentence(_A, "out is one tensor, but the epilogue returns {outputs}", "pass out={{'name': tensor}}"),
    "unknown_result": Sentence(_A, "there is no output '{name}'; the outputs are {outputs}"),
    "unknown_output": Sentence(_A, "{option} names '{name}', but the outputs are {outputs}"),
    "output_shape": Sentence(_A, "output '{name}' must have the shape {want}; the tensor given has {shape}"),
    "output_dtype": Sentence(_A, "output '{name}' cannot be stored as {dtype}"),
    "output_expanded": Sentence(_A, "output '{name}' has elements that share one address", "pass a tensor of its own"),
    "overlap": Sentence(
        _A, "'{first}' and '{second}' overlap in memory", "an output may share storage with one full operand, exactly"
    ),
    "transport": Sentence(_A, "{hint} transport must be one of {allowed}, got {value!r}"),
    "transport_width": Sentence(_A, "{hint} num_bits_per_copy is only valid for non-TMA transports, not via={via!r}"),
    "transport_width_type": Sentence(_AT, "{hint} num_bits_per_copy must be an int, not {type}"),
    "transport_side": Sentence(_A, "'{name}' is an {side}; it takes a {want} hint"),
    "option": Sentence(_A, "{name} must be {want}, got {value!r}"),
    "integer_division": Sentence(_A, "an integer was divided by zero", "guard the divisor: x // where(y == 0, 1, y)"),
    "launch": Sentence(LaunchError, "the launch of {kernel} failed: {detail}\n{plan}"),
    "no_data": Sentence(_A, "{name} has no data: it serves for discovery only", "run with real tensors"),
    "wrong_arguments": Sentence(_AT, "{function} takes {want}, not {type}"),
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
    "tree_edges": Sentence(_A, "TopologicalVisitor has edges for {have} nodes, and {want} nodes"),
    "tree_edge": Sentence(_A, "node {position}, {node}, takes the value of {source}: nodes are numbered 0 to {last}"),
    "tree_order": Sentence(
        _A,
        "node {position}, {node}, takes the value of node {source}, {other}, which is visited later",
        "list nodes in topological order: each after those whose values it takes",
    ),
    "tree_cycle": Sentence(_A, "the edges of this TopologicalVisitor are a cycle: {cycle}"),
    "tree_name": Sentence(_A, "{name!r} is no name for an operand or output", "use a Python name"),
    "tree_name_twice": Sentence(
        _A, "'{name}' is an output, and also another output or an operand of this tree", "give each its own name"
    ),
    "tree_reduction": Sentence(
        _A,
        "{node}: {first} and {second} are not one reduction",
        "use plus with atomic_add, maximum with atomic_maximum, or one reduction of the vocabulary",
    ),
    "tree_identity": Sentence(
        _A, "{node} cannot start from {identity}: the result would depend on the tiles", "{neutral} changes nothing"
    ),
    "tree_stride": Sentence(_A, "the strides of {node} are {want}, and cannot be {stride}"),
    "tree_pointer": Sentence(
        _A, "{node}: the strides (dM, dN, dL) = {stride} do not fit a tensor of shape {shape} and strides {strides}"
    ),
    "tree_arguments": Sentence(_A, "the arguments of {node} are {want}, and not {value}"),
    "tree_argument_twice": Sentence(_A, "the argument '{name}' is given twice, and differently"),
    "tree_null": Sentence(_A, "the pointer of {node} is null, and there is no value to use instead"),
    "tree_access": Sentence(_T, "{node} loads a {want}, and the operand has shape {shape}", "{hint}"),
    "tree_reduced_dims": Sentence(
        _T, "the reduction of a visitor tree takes a value with accum's dims; this one has shape {shape}"
    ),
    # --- functors, the class form, plan objects
    "undefined_functor": Sentence(_A, "{functor} is not defined for {what}: {why}"),
    "unknown_parameter": Sentence(_A, "{function} has no parameter '{name}'; it has {parameters}"),
    "parameter_twice": Sentence(_A, "{function} got the parameter '{name}' twice"),
    "missing_parameter": Sentence(_A, "{function} needs {name}", "pass it here or to the constructor"),
    "plan_tensor": Sentence(_A, "{name} is {have}, and this plan is for {want}", "make another plan for it"),
    "class_epilogue": Sentence(
        _A,
        "{name}.epilogue_operation is not a method of an object and an accumulator",
        "write 'def epilogue_operation(self, accumulator, ...)'",
    ),
    "mismatch": Sentence(
        InternalError, "output '{name}' differs from PyTorch in {wrong} of {total} elements, {detail}"
    ),
    "positional": Sentence(_A, "{function} takes {want} by position, not {have} arguments"),
    # --- planning and running
    "filter_type": Sentence(_AT, "metadata_filter must be a function of a kernel's metadata, not {type}"),
    "no_kernel": Sentence(_U, "no kernel can run this:\n{reasons}", "{hint}"),
    "artifact": Sentence(_A, "this compiled artifact was built for other arguments: {why}"),
    "workspace": Sentence(_A, "the workspace must be {want}"),
    "not_supported": Sentence(_U, "the kernel {kernel} cannot run these arguments: {reason}"),
    "kernel_device": Sentence(_A, "the kernel {kernel} is built for {target}; the tensors are on {device}"),
    "missing_package": Sentence(_U, "{what} needs the package {package}", "pip install 'epifuse[{extra}]'"),
    "device_cc": Sentence(_U, "compute capability {current} is not one of {wanted}"),
    "cc_type": Sentence(_A, "cc must be one of {known}, got {value!r}", "90 is Hopper, 0 the CPU"),
    # --- ours
    "verify": Sentence(
        InternalError, "after the pass {name!r} the graph is not valid: {rule}\nbefore:\n{before}\nafter:\n{after}"
    ),
}
