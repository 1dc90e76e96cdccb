"""The rows of the error catalogue about an epilogue itself: its source, names, calls, kinds and shapes."""

from __future__ import annotations

from typing import NamedTuple

from epifuse.base.exceptions import (
    ArgumentError,
    ArgumentTypeError,
    EpifuseError,
    EpilogueSyntaxError,
    EpilogueTypeError,
)


class Sentence(NamedTuple):
    """One row: the exception's class, what happened, and a hint what to do about it."""

    kind: type[EpifuseError]
    what: str
    hint: str = ""


_S, _T, _A, _AT = EpilogueSyntaxError, EpilogueTypeError, ArgumentError, ArgumentTypeError

EPILOGUE: dict[str, Sentence] = {
    # --- finding and reading the source
    "not_python": Sentence(_S, "this is not Python: {detail}"),
    "too_deep": Sentence(
        _S, "the source is nested too deeply for Python's own parser", "split it into several statements"
    ),
    "string_not_a_function": Sentence(
        _S,
        "the source string must hold one function and nothing else",
        "write 'def epi(accum, C): return accum + C'; pass a function that exists without quotes: epilogue=ef.relu",
    ),
    "decorated": Sentence(
        _S,
        "{name} is wrapped by {wrapper}, which is not read",
        "take the decorator off, or pass the function that it wraps: an epilogue is parsed, never called",
    ),
    "not_a_function": Sentence(
        _AT, "an epilogue is a Python function or its source as a string, not {value}", "{hint}"
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
        "this index is not supported: an index may hold None, and slices and integers that are constants or follow "
        "from shapes",
        "to select by position write where(index_n(x) < 64, x, 0.0), with index_m or index_n",
    ),
    "sliced_parts": Sentence(
        _S,
        "a slice of the parts does not say how many parts there are",
        "unpack all parts, and use those that you need: a, b, c, d = x.split(64, dim=-1)",
    ),
    "item_range": Sentence(_S, "there is no item {place} of {have}"),
    "defined_twice": Sentence(
        _S, "Variable '{name}' cannot be defined twice.", "use a new name, or @ef.epilogue(reassign=True)"
    ),
    "augmented_assignment": Sentence(
        _S,
        "Variable '{name}' cannot be defined twice, and an augmented assignment would define it again",
        "assign the result to a new name: new = {plain}",
    ),
    "augmented_in_place": Sentence(
        _S, "an augmented assignment changes '{name}' in place, under every name it has", "write {name} = {plain}"
    ),
    "chained_assignment": Sentence(_S, "chained assignment is not supported", "assign each name on a line of its own"),
    "assignment_target": Sentence(_S, "cannot assign to {syntax} in an epilogue", "assign to a plain name"),
    "cannot_unpack": Sentence(
        _S, "cannot unpack {what}", "only a tuple, or a helper that returns one, can be unpacked; x.unbind(0) gives one"
    ),
    "unpack_count": Sentence(_S, "cannot unpack {have} values into {want} names"),
    "result_unused": Sentence(_S, "this result is not used", "assign it to a name, or remove the line"),
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
    "returns_input": Sentence(_S, "the input '{name}' cannot be an output", "do not return it: the caller has it"),
    "unnamed_clash": Sentence(
        _S,
        "the result has no name, so its name is D, which is also the name of an operand",
        "assign the result to another name, or rename the operand",
    ),
    "fx_signature": Sentence(
        _A, "a torch.fx graph is an epilogue if it takes the product first, and returns tensors that it computes"
    ),
    "fx_operation": Sentence(
        _S,
        "this torch.fx graph is no epilogue: {reason}",
        "trace the function with make_fx and the decompositions of torch._inductor.decomposition",
    ),
    # --- the signature
    "no_accum": Sentence(
        _S,
        "accum must be an input to the epilogue function",
        "name the first parameter accum; for a function of a library write lambda accum: function(accum)",
    ),
    "accum_not_first": Sentence(
        _S,
        "accum must be the first positional parameter",
        "move accum to the front; a method is taken from an object, or is a staticmethod, without self",
    ),
    "accum_default": Sentence(_S, "accum is the product, and has no default"),
    "star_parameters": Sentence(_S, "the parameter {star} is not supported", "name each operand"),
    "star_in_helper": Sentence(
        _S, "{name} cannot be inlined: its parameter {star} is not supported", "name each parameter"
    ),
    "default_not_a_number": Sentence(_S, "the default of '{name}' must be a number, None or a string"),
    "partial_accum": Sentence(
        _AT,
        "this functools.partial fixes the first parameter of {name} by position, which is accum",
        "fix the others by name: functools.partial({name}, alpha=2.0)",
    ),
    "default_not_supported": Sentence(_S, "{function} cannot be inlined: a default may not be {value}"),
    # --- names
    "undefined": Sentence(_S, "the name '{name}' is not defined", "{near}"),
    "used_before_assignment": Sentence(_S, "'{name}' is used before it is assigned"),
    "no_attribute": Sentence(_S, "{module} has no '{name}'", "{near}"),
    "unknown_function": Sentence(_S, "{name} is not in the epilogue vocabulary", "{near}"),
    "unknown_method": Sentence(_S, "a value in an epilogue has no '{name}'", "{near}"),
    "attribute_of": Sentence(_S, "cannot take '{name}' of {what}"),
    "captured_tensor": Sentence(
        _S,
        "'{name}' is a tensor from outside the epilogue",
        "make it a parameter of the epilogue, and pass it by name: ef.gemm(a, b, epilogue=fn, w=tensor)",
    ),
    "altered_module": Sentence(
        _S,
        "{name} has hooks, or a forward of its own, which an epilogue does not run",
        "write what it computes as a function",
    ),
    "captured_module": Sentence(
        _S,
        "'{name}' is {type} from outside the epilogue",
        "call the function, as F.gelu(x) for nn.GELU()(x), and make its weights parameters",
    ),
    "captured_object": Sentence(
        _S,
        "'{name}' is {type}, which an epilogue cannot use",
        "make it a parameter, or capture a number; a tuple of integers may be dims or sizes; take a function out of a "
        "dict or list before the epilogue: act = ACTIVATIONS['silu']",
    ),
    "not_a_value": Sentence(_S, "{what} cannot be used as a value here", "{hint}"),
    "identity": Sentence(_S, "`is` compares with None only", "use =="),
    # --- calls
    "not_callable": Sentence(_S, "{what} cannot be called"),
    "recursion": Sentence(_S, "{name} calls itself", "an epilogue has no recursion; write the steps out"),
    "too_many_calls": Sentence(
        _S, "the helpers of this epilogue make more than {limit} calls", "call a helper once and use its result again"
    ),
    "star_arguments": Sentence(
        _S,
        "* and ** are not supported here",
        "write the items out; for x.view(*x.shape[:-1], -1, 64) write x.unflatten(-1, (-1, 64))",
    ),
    "missing_argument": Sentence(
        _S, "{function}() misses the argument '{name}': its parameters are {want}", "write {name}=..."
    ),
    "too_many_arguments": Sentence(_S, "{function}() got {have} arguments; its parameters are {want}"),
    "unexpected_argument": Sentence(_S, "{function}() has no parameter '{name}': its parameters are {want}", "{hint}"),
    "argument_twice": Sentence(_S, "{function}() got the argument '{name}' twice"),
    "clamp_bounds": Sentence(_S, "{function}() has neither min nor max", "give it one of them"),
    "by_name": Sentence(_S, "{function}() takes '{name}' by name only", "write {name}=..."),
    "not_static": Sentence(
        _S,
        "'{name}' of {function} must be known when the epilogue is parsed",
        "write it as a literal, or as a number from outside: a global, or a variable of the enclosing function; a mask "
        "chooses by where(mask, x, 0.0)",
    ),
    "length_unknown": Sentence(
        _S,
        "'{name}' of {function}() is a tuple, and how long it is, is not known when the epilogue is parsed",
        "write its items out, as in x.view(y.shape[0], y.shape[1])",
    ),
    "wrong_static": Sentence(_S, "'{name}' of {function}() must be {want}"),
    "wrong_choice": Sentence(_S, "'{name}' of {function}() must be {want}, not {value!r}", "{hint}"),
    "choice_from_operand": Sentence(
        _S,
        "'{name}' of {function}() must be known when the epilogue is parsed, and '{operand}' is an operand",
        "give the parameter a default, as in {operand}='none', or fix it by functools.partial(function, {operand}=...)",
    ),
    "max_pair": Sentence(
        _S, "{function} with dim returns a pair in torch, values and indices", "use torch.a{name}(x, dim=...)"
    ),
    "activation_body": Sentence(
        _S,
        "the body of the activation {name} contains {operation}: an activation is computed element by element",
        "write this function in src/epifuse/fusion/composites.py, whose functions may contain it",
    ),
    "norm_order": Sentence(_S, "only the Euclidean norm is supported", "{hint}"),
    "reinterpreted": Sentence(
        _S,
        "an epilogue does not reinterpret bits, and {dtype} is a dtype",
        "store the value, and write .view({dtype}) on the output; .to({dtype}) converts",
    ),
    # --- kinds
    "host_wanted": Sentence(_T, "'{what}' works on host numbers, and this is a tensor", "{hint}"),
    "tensor_wanted": Sentence(
        _T,
        "{what} takes a tensor, and this is a host number",
        "use Python's own arithmetic or math, or pass a tensor: one without dims will do",
    ),
    "number_wanted": Sentence(
        _T,
        "{what} takes a number here in PyTorch, and this is a tensor",
        "pass a number, or call epifuse's own function of this name",
    ),
    "not_held": Sentence(
        _T,
        "full_like makes {dtype} here, which does not hold {number}",
        "give it a dtype that does, as dtype=torch.int64 or dtype=torch.float32",
    ),
    "computed_number": Sentence(
        _T,
        "full_like makes {dtype} here, and this number is no literal: it may have a fraction, or not fit",
        "give it dtype=torch.float32, and convert the result",
    ),
    "select_shapes": Sentence(
        _T,
        "the branches of this conditional have different shapes, {left} and {right}",
        "give both branches the larger shape; where(mask, a, b) broadcasts them",
    ),
    "prelu_weight": Sentence(
        _T,
        "{what} takes a float (M, N) and a weight of shape (1,) or (N,) in PyTorch; here the shapes are {shapes}",
        "call ef.prelu, which broadcasts the weight",
    ),
    "bounds_differ": Sentence(
        _T,
        "{what} takes two numbers or two tensors as bounds in PyTorch, and these are one of each",
        "call ef.clamp, which takes one of each",
    ),
    "wraps": Sentence(
        _T,
        "this integer is computed in int32, and its value may be {most}, which does not fit",
        "write where(mask, x, y).to(torch.int64), which is PyTorch's dtype, or use a float",
    ),
    "literal_range": Sentence(
        _T,
        "an integer of {bits} bits does not fit the integers that it stands beside",
        "write x.to(torch.int64) for what it stands beside; beside a float write it as a float",
    ),
    "host_not": Sentence(_T, "~ inverts the bits of a host number, and does not negate a condition", "use 'not'"),
    "masks_in_arithmetic": Sentence(
        _T, "{op} does not work on masks", "combine masks with & | ~, or make them numbers with where(mask, 1.0, 0.0)"
    ),
    "logits_wanted": Sentence(
        _T,
        "{op} takes an integer for each row, (M,), of logits (M, N), not shapes {shapes}",
        "of batches write ef.cross_entropy or ef.nll_loss; of probabilities -(y * x.log_softmax(-1)).sum(-1)",
    ),
    "mask_wanted": Sentence(_T, "{op} takes masks, and this is {kind}", "compare first, as in x > 0"),
    "roll_parts": Sentence(
        _T,
        "a roll by {shift} cuts {size} elements into {count} equal parts, and at most {most} are supported",
        "roll by a shift that cuts the dim into fewer parts, such as half of its size",
    ),
    "size_wanted": Sentence(_T, "a size must be an integer, and this is {value}", "divide with //"),
    "gather_index": Sentence(
        _T,
        "gather takes one element along dim {dim}: its index has the shape {want}, and this is {shape}",
        "index by labels[:, None], or gather each column by itself",
    ),
    "bits_wanted": Sentence(
        _T, "{op} takes masks or integers, and this is {kind}", "compare first, as in x > 0, or write .to(torch.int32)"
    ),
    "integers_wanted": Sentence(
        _T,
        "{op} takes integers, and this is {kind}",
        "write .to(torch.int32), which cuts the fraction; with q = ef.floor(x / y) floats leave the rest x - y * q",
    ),
    "dtypes_differ": Sentence(
        _T, "{op} takes floats of one dtype", "write .float() for integers and for what was cast to another dtype"
    ),
    "float_wanted": Sentence(_T, "{op} takes floats, and this is {kind}", "write .float() first"),
    "negative_power": Sentence(
        _T, "an integer to this power is not an integer", "write .float() first, or use a literal exponent >= 0"
    ),
    "storage_only": Sentence(
        _T, "a value of {dtype} can be stored or cast, but not computed with", "write .{cast} first"
    ),
    "cast_unsupported": Sentence(_T, "cannot cast to {dtype} here", "{hint}"),
    "dtype_of_operand": Sentence(
        _T,
        "'{name}' has the dtype {dtype}, and what is computed of it has another one inside an epilogue",
        "name the dtype, as in .to({dtype})",
    ),
    "host_arithmetic": Sentence(_T, "host arithmetic failed: {detail}"),
    "host_range": Sentence(_T, "this host number does not fit the {kind} it is used as: {value}"),
    "output_is_host": Sentence(
        _T,
        "the output '{name}' is a host number",
        "an output must depend on accum or a tensor: compute a number where you call",
    ),
    # --- shapes inside the epilogue
    "operand_shape": Sentence(_T, "operand '{name}' of shape {shape} does not broadcast to accum's {accum}", "{hint}"),
    "operand_met": Sentence(
        _T, "operand '{name}' of shape {shape} does not broadcast to {met}, the shape of what it meets", "{hint}"
    ),
    "shapes_differ": Sentence(_T, "{op} of shapes {left} and {right}: the dims do not broadcast", "{hint}"),
    "dims_differ": Sentence(_T, "{op} of values whose dims run along different axes, {left} and {right}", "{hint}"),
    "ranges_differ": Sentence(
        _T,
        "{op} of columns {ranges} of a row, which was split into ranges of several sizes",
        "take both as one range, and its parts: for sizes [32, 32, 48] write ab, c = x.split([64, 48], dim=-1), then "
        "a, b = ab.chunk(2, dim=-1)",
    ),
    "dim_range": Sentence(_T, "dim {dim} is out of range, which is {range}"),
    "too_many_dims": Sentence(
        _T, "this value has more than {most} dims", "merge some of them: PyTorch has the same limit"
    ),
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
        "two reshapes or parts cut the axis {axis} in ways that do not nest, by {first} and by {second}",
        "make one a multiple of the other, as 4 and 8, write the parts as one split([...]) with their sizes, or "
        "compute one of the two in a second call",
    ),
    "index_rank": Sentence(
        _T, "index_{axis} needs a value with that dim; this one has shape {shape}", "write index_{axis}(accum)"
    ),
    "parts_uneven": Sentence(_T, "{size} elements cannot be divided into {parts}", "{hint}"),
    "part_unequal": Sentence(_T, "{told} of {size} elements is not one of several equal parts", "{hint}"),
    "transpose_rank": Sentence(_T, ".T of the shape {shape} has no meaning", "write .mT, or permute"),
    "flatten_order": Sentence(_T, "flatten from dim {start} to {end}: the second is before the first"),
    "join_differs": Sentence(
        _T,
        "{how} takes equal parts, as chunk gives them; the shapes of these are {left} and {right}",
        "take parts of one size, as x.chunk(2, dim=-1), or return each part as an output, which may be a view of one "
        "tensor: out={{'D': out[:, :n], 'E': out[:, n:]}}",
    ),
    "join_too_wide": Sentence(
        _T,
        "{count} values of the shape {shape} do not fit side by side into the {size} columns of accum, as equal parts "
        "of all of them",
        "join all parts, or a number of them that divides all parts evenly, as two of four; or return each value as an "
        "output of its own, which may be a view of one tensor: out={{'D': out[:, :n], 'E': out[:, n:]}}",
    ),
    "part_empty": Sentence(_T, "{start}:{stop} of {size} elements is empty", "leave it out"),
    "part_axis": Sentence(
        _T,
        "an epilogue can take a part of the columns, and not of the rows or batches",
        "take those rows of A before the call: ef.gemm(a[:64], b, ...)",
    ),
    "max_of_nothing": Sentence(_A, "{name} of no elements has no value", "each dim that it reduces needs an element"),
}
