"""One catalogue of every sentence that epifuse's errors show to a person.

`fail(key, loc, **values)` builds an exception from a row, and adds the place, the source line and a caret.
"""

from __future__ import annotations

from typing import Any

from epifuse.base.exceptions import (
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
from epifuse.base.form_sentences import FORMS
from epifuse.base.places import Loc
from epifuse.base.sentences import EPILOGUE, Sentence

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


def kind_of(value: object) -> str:
    """The Python type of `value` with its article: "an int", "a Tensor"; None is itself."""
    name = type(value).__name__
    is_vowel = name[0] in "aeiouAEIOU" or name == "ndarray"  # "n" is spoken as a letter, "en"
    return "None" if value is None else f"{'an' if is_vowel else 'a'} {name}"


def fail(key: str, loc: Loc | None = None, /, **values: Any) -> EpifuseError:
    """Return the exception for `key`, for the caller to raise. `values` fill in its sentence; `loc` is the place."""
    sentence = CATALOGUE[key]
    parts = [sentence.what.format(**values)]
    if loc is not None:
        parts.append(str(loc))
    if hint := sentence.hint.format(**values):
        parts.append(f"  hint: {hint}")
    error = rebuild(sentence.kind, key, loc, "\n".join(parts))
    error.values = values
    if isinstance(error, SyntaxError) and loc is not None:
        error.filename, error.lineno, error.offset, error.text = loc.file, loc.line, loc.column + 1, loc.text
    return error


_S, _T, _A, _AT, _U = EpilogueSyntaxError, EpilogueTypeError, ArgumentError, ArgumentTypeError, UnsupportedError

CATALOGUE: dict[str, Sentence] = {
    **EPILOGUE,
    # --- arguments
    "missing_operand": Sentence(
        _A, "Argument {name} is not provided in the kwargs of the EpilogueArguments constructor", "{hint}"
    ),
    "operand_not_given": Sentence(_A, "Argument {name} is not provided, and the epilogue takes it", "pass {name}=..."),
    "extra_operand": Sentence(
        _A, "Unexpected argument '{name}': operands of the epilogue: {operands}; its outputs: {outputs}", "{hint}"
    ),
    "output_by_name": Sentence(
        _A, "'{name}' is an output of the epilogue, and gemm takes those by out=", "pass out={{'{name}': ...}}"
    ),
    "name_clash": Sentence(
        _A,
        "the epilogue's '{name}' is also a parameter of {function}",
        "pass it as operands={{'{name}': ...}}, or rename it",
    ),
    "operand_names": Sentence(_AT, "operands must be a mapping, not {type}", "pass operands={{'name': value}}"),
    "operand_twice": Sentence(_AT, "{function}() got '{name}' twice", "pass it by name or in operands={{...}}"),
    "linear_bias": Sentence(
        _A, "the epilogue has a parameter 'bias', and the call passes no bias", "pass a bias, or remove the parameter"
    ),
    "operand_type": Sentence(_AT, "operand '{name}' must be a tensor or a number, not {type}", "{hint}"),
    "tensor_type": Sentence(_AT, "{name} must be a torch.Tensor, not {type}", "{hint}"),
    "tensor_subclass": Sentence(_AT, "{name} is {type}; tensor subclasses are not supported", "pass a plain tensor"),
    "transformed": Sentence(
        _AT,
        "{name} is a tensor inside vmap, grad or another transform",
        "call epifuse outside the transform; for a batch of products pass tensors of 3 dims, (L, M, K)",
    ),
    "requires_grad": Sentence(
        _A,
        "{name} requires grad, and this call records no gradients",
        "call ef.gemm or ef.linear, which are differentiable; or use .detach() or torch.no_grad()",
    ),
    "grad_out": Sentence(
        _A,
        "output '{name}' is given, and it or an input requires grad: what is written to a given tensor is not "
        "differentiable",
        "omit out=, so that epifuse allocates the output; or use torch.no_grad()",
    ),
    "grad_inference": Sentence(
        _A,
        "{name} was made in torch.inference_mode(), and an input requires grad: it cannot be kept for the backward",
        "pass x.clone()",
    ),
    "grad_accumulate": Sentence(
        _A,
        "output '{name}' is accumulated, and an input requires grad: accumulate= is not differentiable",
        "add the result to the tensor outside, or use torch.no_grad()",
    ),
    "grad_print": Sentence(
        _U, "debug_print is not supported where an input requires grad", "call it within torch.no_grad(), or remove it"
    ),
    "grad_dtype": Sentence(
        _A,
        "{name} requires grad and is {dtype}, which has no gradient here",
        "use torch.no_grad() or {name}.detach() where nothing is trained, else a float of 16, 32 or 64 bits",
    ),
    "grad_twice": Sentence(
        _U,
        "second derivatives are not supported: the backward of an epilogue was differentiated again",
        "use ef.reference(epilogue)(a @ b, ...), which is plain PyTorch",
    ),
    "traced": Sentence(
        _U,
        "torch.jit.trace and make_fx cannot record this call: they would keep its memory and not its computation",
        "call ef.gemm or ef.linear, which they record, or call it outside what is traced",
    ),
    "epilogue_file": Sentence(_A, "{path} cannot be read as a Python file: {why}"),
    "epilogue_name": Sentence(_A, "{text} names no function", "{hint}"),
    "not_described": Sentence(
        _A,
        "the epilogue takes '{name}', and nothing says what that is",
        "add --arg {name}=N for a row, Mx1 for a column, MxN for a full tensor, or a number, as {name}=0.5",
    ),
    "tuned_file": Sentence(_A, "{path} holds no results of ef.tune: {why}"),
    "operator_spec": Sentence(
        _A, "the text of this call of epifuse::gemm is malformed: {detail}", "call ef.gemm or ef.linear, which write it"
    ),
    "distributed_beside": Sentence(
        _AT,
        "{name} is {type}, and {first} is a DTensor",
        "distribute it too: torch.distributed.tensor.distribute_tensor({name}, {first}.device_mesh)",
    ),
    "distributed_meshes": Sentence(
        _A, "{name} and {first} are DTensors of two meshes", "make all that one call takes on one DeviceMesh"
    ),
    "distributed_outside": Sentence(
        _A, "this process is not on the mesh of {name}, a DTensor", "call it on the processes of that mesh"
    ),
    "distributed_option": Sentence(
        _U,
        "DTensors cannot be combined with {what}",
        "leave it out, or pass local tensors: x.to_local()",
    ),
    "symbolic_size": Sentence(
        _A,
        "{name} of shape {shape} has a size that depends on data, so it is unknown while PyTorch traces",
        "give it a known size, or call epifuse outside what is traced, with real tensors",
    ),
    "inference_output": Sentence(
        _A, "output '{name}' was made in torch.inference_mode(), and cannot be written outside it", "pass x.clone()"
    ),
    "tensor_layout": Sentence(_A, "{name} is not a plain dense tensor: it is {what}", "{hint}"),
    "host_number": Sentence(
        _A,
        "the number '{name}' does not fit the {kind} that it is used as: {value}",
        "{hint}",
    ),
    "not_importable": Sentence(
        _A,
        "these arguments cannot be pickled: the epilogue {name} cannot be imported by its name",
        "define it at the top of a module, or give it as source text",
    ),
    "rank": Sentence(
        _A,
        "{name} must have {count}, (L,{rows},{columns}) or ({rows},{columns}); its shape is {shape}",
        "{hint}",
    ),
    "linear_bias_shape": Sentence(_A, "bias must be (N,), which is {want} for this weight; its shape is {bias}"),
    "linear_shapes": Sentence(_A, "x must be (..., K) and weight (N, K); their shapes are {x} and {weight}"),
    "leading_strides": Sentence(
        _A,
        "the leading dims of {name} cannot be merged into one without a copy: shape {shape}, strides {strides}",
        "pass a contiguous tensor; for an input that is x.contiguous()",
    ),
    "leading_broadcast": Sentence(
        _A,
        "{name} of shape {shape} broadcasts to the leading dims {lead}, which cannot be merged into one without a copy",
        "pass a tensor of all leading dims: x.expand({lead} + x.shape[-2:]).contiguous()",
    ),
    "operand_dims": Sentence(
        _A, "operand '{name}' of shape {shape} has more dims than the product, which has {rank}", "{hint}"
    ),
    "leading_operand": Sentence(
        _U,
        "'{name}' of shape {shape} has only some of the leading dims {lead}, which are merged into one dim",
        "{hint}",
    ),
    "leading_dims": Sentence(
        _U,
        "the leading dims are merged into one dim, so an epilogue cannot take {what}",
        "flatten them yourself in A, which is x in ef.linear, and in operands that have them: A.flatten(0, -3); "
        "in the epilogue accum.unflatten(0, (extent, extent)) has two of them again",
    ),
    "inner_extent": Sentence(
        _A,
        "A of shape {a} and B of shape {b}: the inner extents {k_a} and {k_b} differ",
        "A is (M, K) and B is (K, N); for a weight of shape (N, K) pass weight.T, or call ef.linear",
    ),
    "batch_extent": Sentence(_A, "A of shape {a} and B of shape {b}: the batch extents differ"),
    "gemm_dtype": Sentence(
        _A, "{name} is {dtype}, which no kernel multiplies", "cast it to a float, bfloat16, fp8 or 8-bit integer dtype"
    ),
    "gemm_dtypes": Sentence(
        _A,
        "{first} is {a} and {second} is {b}: the two dtypes must agree",
        "{hint}",
    ),
    "gemm_narrow_a": Sentence(_A, "{first} has fewer bits than {second}: {a} and {b}", "{hint}"),
    "scaled_batches": Sentence(
        _A,
        "{name} has block scales, so it must be one matrix; its shape is {shape}",
        "call once for each matrix; an x of more dims, in ef.linear, takes scales (..., K/128) or (M, K/128)",
    ),
    "scaled_dtype": Sentence(
        _A,
        "{name} is {dtype}, and block scales are those of 8-bit floats",
        "quantise {name} to torch.float8_e4m3fn, or multiply by scales of whole rows and columns in the epilogue",
    ),
    "scales_dtype": Sentence(
        _A, "the scales of {name} are {dtype}, and block scales are float32", "pass scales.float()"
    ),
    "scales_shape": Sentence(
        _A, "the scales of {name} must have the shape {rule}, which is {want} here; theirs is {shape}", "{hint}"
    ),
    "scaled_where": Sentence(_U, "block scales cannot be combined with {what}", "{hint}"),
    "accumulator": Sentence(
        _A, "accumulator_type {dtype} does not go with inputs of {a} and {b}", "use one of {allowed}"
    ),
    "operand_dtype": Sentence(_A, "operand '{name}' has dtype {dtype}, which an epilogue cannot load"),
    "declared_dtype": Sentence(_A, "'{name}' has dtype {dtype}, and {epilogue} was made for {want}"),
    "operand_float64": Sentence(
        _A,
        "operand '{name}' is float64 beside an accumulator of {accumulator}",
        "pass {name}.float(), or make both matrices float64",
    ),
    "device": Sentence(
        _A, "{name} is on {device}, but the GEMM is on {expected}", "move it there: {shown}.to('{expected}')"
    ),
    "no_output_d": Sentence(
        _A, "the epilogue returns no output named D, but out= was given", "name the output D, or omit out="
    ),
    "out_shape": Sentence(_A, "out must have the shape {want}; its shape is {shape}"),
    "out_type": Sentence(_AT, "out must be a tensor or a mapping, not {type}", "pass out={{'name': tensor}}"),
    "out_single": Sentence(_A, "out is one tensor, but the epilogue returns {outputs}", "pass out={{'name': tensor}}"),
    "unknown_result": Sentence(_A, "there is no output '{name}'; the outputs are {outputs}"),
    "unknown_output": Sentence(_A, "{option} names '{name}', but the outputs are {outputs}"),
    "output_shape": Sentence(_A, "output '{name}' must have the shape {want}; the tensor given has {shape}"),
    "reduced_shape": Sentence(
        _A,
        "output '{name}', of {reductions} over an accum of shape {accum}, must have the shape {want}; the tensor given "
        "has {shape}",
        "it may also keep the reduced dims, as ones",
    ),
    "output_dtype": Sentence(_A, "output '{name}' cannot be stored as {dtype}"),
    "accumulate_new": Sentence(
        _A, "output '{name}' is to be added onto old content, and no destination is given", "pass out={{'{name}': ...}}"
    ),
    "accumulate_dtype": Sentence(
        _A, "output '{name}' is {dtype}, and accumulate= does not support that with an accumulator of {accumulator}"
    ),
    "accumulate_mask": Sentence(
        _A, "output '{name}' is a mask, to which accumulate= cannot add", "return numbers: where(mask, 1.0, 0.0)"
    ),
    "output_expanded": Sentence(
        _A, "several elements of output '{name}' share one address", "pass a tensor that is not expanded"
    ),
    "overlap": Sentence(
        _A,
        "'{first}' and '{second}' overlap in memory",
        "pass separate tensors; an output may only have the memory of a full-size operand if all elements coincide",
    ),
    "transport": Sentence(_A, "{hint} transport must be 'tma' or None, got {value!r}"),
    "transport_side": Sentence(_A, "'{name}' is an {side}, whose hint is ef.{want}", "pass ef.{want}(tensor, 'tma')"),
    "not_compiled": Sentence(
        _A,
        "there is no report of {type} that epifuse.compile did not return",
        "write compiled = epifuse.compile(model), call compiled, and pass compiled here",
    ),
    "leaf_spec": Sentence(_A, "the text of a fused product is malformed: {detail}", "use ef.compile, which writes it"),
    "option": Sentence(_A, "{name} must be {want}, got {value!r}"),
    "positions": Sentence(
        _T,
        "positions are counted in int32, and there are {count} elements here",
        "count along one dim, as in argmax(x, dim=-1), or split the product into several calls",
    ),
    "integer_division": Sentence(_A, "an integer was divided by zero", "guard the divisor: x // where(y == 0, 1, y)"),
    "launch": Sentence(LaunchError, "the launch of {kernel} failed: {detail}\n{plan}"),
    "fake_beside_real": Sentence(
        _A, "some tensors of this call are FakeTensors, and others have data", "make all of them in one FakeTensorMode"
    ),
    "no_data": Sentence(_A, "{name} has no data, and a launch needs it", "pass real tensors, or use ef.explain"),
    "changed": Sentence(
        _A,
        "{name} was {was} when GemmArguments was made, and is {now} now",
        "make GemmArguments anew where a tensor was changed in place, as by resize_ or t_",
    ),
    "wrong_arguments": Sentence(_AT, "{function} takes {want}, not {type}"),
    **FORMS,
    # --- planning and running
    "filter_type": Sentence(_AT, "metadata_filter must be a function of a kernel's metadata, not {type}"),
    "no_kernel": Sentence(_U, "no kernel can run this:\n{reasons}", "{hint}"),
    "artifact": Sentence(_A, "this compiled artifact was built for other arguments: {why}"),
    "workspace": Sentence(_A, "the workspace must be {want}"),
    "not_supported": Sentence(_U, "the kernel {kernel} cannot run these arguments: {reason}"),
    "not_built": Sentence(_U, "the kernel {kernel} of the provider '{provider}' could not be built: {detail}"),
    "kernel_device": Sentence(_A, "the kernel {kernel} is built for {target}; the tensors are on {device}"),
    "missing_package": Sentence(
        _U,
        "{what} needs the package {package}",
        "in a checkout of epifuse: pip install '.[{extra}]'; from a wheel: pip install 'FILE.whl[{extra}]'",
    ),
    "old_driver": Sentence(
        _U,
        "the driver knows CUDA up to {newest}, and the package nvidia-cutlass-dsl has libraries for CUDA {known}",
        "update the driver of the GPU",
    ),
    "no_compile": Sentence(
        _U,
        "{kernel} is not compiled for these arguments, and EPIFUSE_NO_COMPILE=1 forbids compiling",
        "compile ahead with ef.precompile(...), or unset EPIFUSE_NO_COMPILE",
    ),
    "no_fingerprint": Sentence(
        _U,
        "no compiled kernel can be stored or found, because {what} cannot be identified: {why}",
        "install epifuse as a folder of .py files that can be read",
    ),
    "no_version": Sentence(
        _U, "compiled kernels cannot be told apart: the version of {package} is not known", "install it with pip"
    ),
    "driver": Sentence(LaunchError, "the CUDA driver failed: {call} returned {status}"),
    "device_cc": Sentence(_U, "compute capability {current} is not one of {wanted}"),
    "cc_type": Sentence(
        _A,
        "cc must be one of {known}, got {value!r}",
        "90 is Hopper, 0 the CPU; no GPU but these has a kernel, and fallback='torch' runs a call there unfused",
    ),
    # --- faults of epifuse
    "worker": Sentence(InternalError, "compiling a kernel in a worker process failed: {detail}"),
    "kernel_text": Sentence(InternalError, "{value} of type {type} cannot be part of a kernel's text"),
    "verify": Sentence(
        InternalError, "after the pass {name!r} the graph is not valid: {rule}\nbefore:\n{before}\nafter:\n{after}"
    ),
}
