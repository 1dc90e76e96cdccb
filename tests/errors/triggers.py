"""The smallest thing a person can do to read each sentence: source text, or a call."""

import functools
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import epifuse as ef
from epifuse.base import store
from epifuse.base.config import Config
from epifuse.fusion import vocabulary
from epifuse.passes.verify import verify
from epifuse.plan.settle import Settled
from epifuse.providers.cutedsl.clusters import _call
from epifuse.providers.cutedsl.kernel_text import _plain
from epifuse.providers.cutedsl.load import _version, too_old
from epifuse.providers.guarded import Guarded
from epifuse.runtime.run import launch
from epifuse.runtime.tuned import merge
from epifuse.runtime.workers import Workers
from epifuse.tools import debug, described
from tests.errors.facade_triggers import FACADES
from tests.errors.tree_triggers import TREES
from tests.frontend.sources import function_from

M, N, K = 6, 10, 4
OPERANDS = "accum, C, row, col, alpha, index, narrow"


def values() -> dict[str, Any]:
    return {
        "C": torch.ones(M, N),
        "row": torch.ones(N),
        "col": torch.ones(M, 1),
        "alpha": 2.0,
        "index": torch.ones(M, N, dtype=torch.int32),
        "narrow": torch.ones(N, dtype=torch.bfloat16),
    }


def epilogue(body: str, parameters: str = OPERANDS) -> str:
    return f"def epi({parameters}):\n    {body}\n"


def gemm(epilogue: Any, a: Any = None, b: Any = None, **named: Any) -> Any:
    return ef.gemm(
        torch.ones(M, K) if a is None else a, torch.ones(K, N) if b is None else b, epilogue=epilogue, **named
    )


def _by_blocks(a: torch.Tensor, scales: torch.Tensor) -> Any:
    narrow = torch.float8_e4m3fn
    return gemm("lambda accum: accum", ef.Scaled(a.to(narrow), scales), torch.ones(a.shape[-1], N).to(narrow))


def run_source(text: str) -> Any:
    names = text[text.find("(") + 1 : text.find(")")]
    return gemm(
        text, **{name: value for name, value in values().items() if name in names.replace("=", ",").split(", ")}
    )


def run_function(text: str, **names: Any) -> Callable[[], Any]:
    """`text` as a function in a module, where names mean objects."""
    return lambda: gemm(function_from(text, file="user.py", **names))


def _reducing_activation() -> Any:
    text = "def row_sum(x: 'Value'):\n    return sum(x)\n\ndef epi(accum):\n    return row_sum(accum)\n"
    epi = function_from(text, file="user.py", sum=ef.sum)
    row_sum = epi.__globals__["row_sum"]
    entry = vocabulary.Entry("row_sum", "activation", row_sum)
    names = mock.patch.dict(vocabulary.VOCABULARY, row_sum=entry)
    with names, mock.patch.dict(vocabulary._OUR_OBJECTS, {id(row_sum): "row_sum"}):
        return gemm(epi)


def _scaled(accum: Any, alpha: Any) -> Any:
    return accum * alpha


def reassigning(body: str) -> Any:
    """An epilogue whose names may be assigned again."""
    return ef.epilogue(reassign=True)(function_from(epilogue(body, "accum, C"), file="user.py"))


SOURCES: dict[str, str] = {
    "not_python": epilogue("D = accum +"),
    "too_deep": epilogue("return " + "-" * 20_000 + "accum"),
    "string_not_a_function": "import os",
    "async_function": "async def epi(accum): return accum",
    "generator": epilogue("yield accum"),
    "unsupported_syntax": epilogue("for i in range(3): D = accum"),
    "unsupported_literal": epilogue("return accum * 1j"),
    "unsupported_operator": epilogue("return accum @ C"),
    "unsupported_subscript": epilogue("return accum[:, ::-1]"),
    "sliced_parts": epilogue("a, b = accum.split(1, dim=-1)[::2]; return a"),
    "item_range": epilogue("return accum[:, 99]"),
    "parts_uneven": epilogue("a, b, c = accum.chunk(3, dim=-1); D = a; return D"),
    "part_unequal": epilogue("return accum[:, 1:7:2]"),
    "part_empty": epilogue("return accum[:, 4:4]"),
    "part_axis": epilogue("return accum[0]"),
    "join_differs": epilogue("return torch.cat([accum[:, :5], accum[:, :2]], dim=-1)"),
    "join_too_wide": epilogue("return torch.cat([accum, C], dim=-1)"),
    "transpose_rank": epilogue("return accum.reshape(-1, 2, 5).T"),
    "flatten_order": epilogue("return accum.flatten(1, 0)"),
    "defined_twice": epilogue("D = accum\n    D = D + C\n    return D"),
    "augmented_assignment": epilogue("D = accum\n    D += C\n    return D"),
    "chained_assignment": epilogue("D = E = accum\n    return D"),
    "assignment_target": epilogue("accum[0] = C\n    return accum"),
    "cannot_unpack": epilogue("D, E = accum\n    return D"),
    "unpack_count": epilogue("D, E = accum, C, row\n    return D"),
    "result_unused": epilogue("accum.relu()\n    return accum"),
    "printed_value": epilogue("D = debug_print('{}', accum)\n    return D"),
    "after_return": epilogue("return accum\n    D = accum"),
    "returns_nothing": epilogue("D = accum * 2"),
    "unnamed_output": epilogue("D = accum * 2\n    return D, accum + 1"),
    "returned_twice": epilogue("D = accum * 2\n    return D, D"),
    "returns_input": epilogue("D = accum * 2\n    return D, C"),
    "unnamed_clash": "lambda accum, D: accum + D",
    "no_accum": "def epi(x): return x * 2",
    "accum_not_first": "def epi(C, accum): return accum + C",
    "accum_default": "def epi(accum=1.0): return accum",
    "star_parameters": "def epi(accum, **rest): return accum",
    "default_not_a_number": "def epi(accum, scale=[1, 2]): return accum * scale",
    "undefined": epilogue("return rellu(accum)"),
    "used_before_assignment": epilogue("D = tanh(accum)\n    tanh = D\n    return D"),
    "no_attribute": epilogue("return torch.rellu(accum)"),
    "unknown_function": epilogue("return torch.zeros(4)"),
    "unknown_method": epilogue("return accum.rellu()"),
    "attribute_of": epilogue("return torch.float16.itemsize * accum"),
    "captured_object": epilogue("return accum * torch.default_generator"),
    "not_a_value": epilogue("return accum * 'two'"),
    "identity": epilogue("return accum if alpha is 2.0 else C"),
    "not_callable": epilogue("return accum(C)"),
    "star_arguments": epilogue("return maximum(*accum)"),
    "missing_argument": epilogue("return maximum(accum)"),
    "too_many_arguments": epilogue("return relu(accum, C)"),
    "unexpected_argument": epilogue("return relu(accum, inplace=True)"),
    "clamp_bounds": epilogue("return accum.clamp()"),
    "logits_wanted": epilogue("return F.cross_entropy(accum, index_m(accum))"),
    "argument_twice": epilogue("return maximum(accum, x=C)"),
    "by_name": epilogue("return F.gelu(accum, 'tanh')"),
    "not_static": epilogue("return accum.sum(dim=alpha)"),
    "length_unknown": epilogue("return accum.reshape(C.shape)"),
    "wrong_static": epilogue("return accum.to(C)"),
    "choice_from_operand": epilogue("return ef.gelu(accum, approximate=row)"),
    "wrong_choice": epilogue("return ef.block_scale(accum, rounding='stochastic')"),
    "max_pair": epilogue("return torch.max(accum, dim=1)"),
    "norm_order": epilogue("return accum.norm(1)"),
    "reinterpreted": epilogue("return accum.view(torch.int32)"),
    "host_wanted": epilogue("return accum if accum > 0 else C"),
    "tensor_wanted": epilogue("return accum * torch.sqrt(alpha)"),
    "number_wanted": epilogue("return F.leaky_relu(accum, C)"),
    "not_held": epilogue("return accum + torch.full_like(index, 3000000000)"),
    "computed_number": epilogue("return accum + torch.full_like(index, alpha)"),
    "select_shapes": epilogue("return accum if alpha else row"),
    "prelu_weight": epilogue("return F.prelu(accum, col)"),
    "bounds_differ": epilogue("return torch.clamp(accum, C, 1.0)"),
    "wraps": epilogue("return where(accum > 0, 100000, 0) * 100000"),
    "literal_range": epilogue("return accum * 100000000000000000000"),
    "host_not": epilogue("return accum if ~(alpha > 1) else C"),
    "masks_in_arithmetic": epilogue("return (accum > 0) + (C > 0)"),
    "mask_wanted": epilogue("return where(accum, C, 0.0)"),
    "roll_parts": epilogue("return accum.flatten().roll(1, 0)"),
    "size_wanted": epilogue("return accum[:, :accum.shape[1] / 2]"),
    "gather_index": epilogue("return accum.gather(0, index)"),
    "bits_wanted": epilogue("return accum & C"),
    "integers_wanted": epilogue("return accum % 2"),
    "dtypes_differ": epilogue("return torch.lerp(accum, C.half(), 0.5)"),
    "float_wanted": epilogue("return index.mean()"),
    "negative_power": epilogue("return index ** index"),
    "storage_only": epilogue("return accum.to(torch.float8_e4m3fn) + 1"),
    "cast_unsupported": epilogue("return accum.to(torch.float64)"),
    "dtype_of_operand": epilogue("return accum.to(narrow.dtype)"),
    "host_arithmetic": epilogue("return accum * math.sqrt(-alpha)"),
    "host_range": epilogue("return accum * (alpha and 10 ** 30 * 10 ** 400)"),
    "output_is_host": epilogue("D = alpha * 2\n    return D"),
    "shapes_differ": epilogue("return accum + accum.sum(dim=1)"),
    "dim_range": epilogue("return accum.sum(dim=2)"),
    "too_many_dims": epilogue("return accum.reshape(" + "1, " * 65 + "6, 10)"),
    "dim_twice": epilogue("return accum.sum(dim=(0, -2))"),
    "permute_dims": epilogue("return accum.permute(0, 0)"),
    "reshape_size": epilogue("return accum.reshape(7, -1)"),
    "reshape_split": epilogue("return accum.reshape(4, 15)"),
    "factors_differ": epilogue("D = accum.reshape(6, 5, 2)\n    E = (accum + 1).reshape(6, 2, 5)\n    return D, E"),
    "index_rank": epilogue("return accum + index_m(row)"),
}


def _in_another_grad_mode() -> Any:
    return ef.GemmArguments(torch.ones(M, K, requires_grad=True), torch.ones(K, N))


def _weight() -> torch.Tensor:
    return torch.ones(K, N, requires_grad=True)


def _differentiated_twice() -> Any:
    a = torch.ones(M, K, requires_grad=True)
    (gradient,) = torch.autograd.grad(ef.gemm(a, _weight(), epilogue=ef.silu).sum(), a, create_graph=True)
    return gradient.sum().backward()


class _Tensor(torch.Tensor):
    pass


def _of_dtensors(call: Callable[..., Any]) -> Callable[[], Any]:
    """A call with DTensors of a mesh of this process alone."""

    def run() -> Any:
        import torch.distributed as dist
        from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            meshes = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
            a, b = distribute_tensor(torch.ones(M, K), meshes[0]), distribute_tensor(torch.ones(K, N), meshes[0])
            other = distribute_tensor(torch.ones(K, N), meshes[1], [Replicate(), Replicate()])
            return call(a, b, other)
        finally:
            dist.destroy_process_group()

    return run


def _outside_of_the_mesh(a: Any, b: Any, other: Any) -> Any:
    with mock.patch.object(type(a.device_mesh), "get_coordinate", return_value=None):
        return ef.gemm(a, b)


def _stale() -> Any:
    function = function_from("def epi(accum):\n    return accum * 2\n", file="edited.py")
    other = "def epi(accum):\n    return accum * 3\n"
    with mock.patch("linecache.getlines", return_value=other.splitlines(keepends=True)):
        return gemm(function)


def _without_positions() -> Any:
    """As on Python 3.10, where code objects know no columns."""
    pair = function_from("pair = lambda accum: accum, lambda accum: accum * 2\n", file="user.py")
    with mock.patch("epifuse.frontend.source._same_position", return_value=[]):
        return gemm(pair[1])


def _doubling() -> Any:
    helpers = [f"def h{i}(x): return h{i + 1}(x) + h{i + 1}(x)\n" for i in range(20)]
    return run_function("".join(helpers) + "def h20(x): return x\ndef epi(accum): return h0(accum)\n")()


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(M, K)


def _fake(*shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(shape)


def _hooked() -> Any:
    module = torch.nn.ReLU()
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    return ef.gemm(torch.ones(M, K), torch.ones(K, N), epilogue=module)


def _arguments(**named: Any) -> ef.GemmArguments:
    return ef.GemmArguments(torch.ones(M, K), torch.ones(K, N), **named)


def _failed_launch() -> Any:
    def no_driver() -> None:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    with mock.patch("epifuse.providers.cpu.CpuProvider.build", return_value=lambda *bound: no_driver):
        return ef.get_kernels(_arguments())[0].run(_arguments())


def _not_built() -> Any:
    made: dict[str, Any] = {}
    exec(compile("def build(plan):\n    raise KeyError('tile')\n", "mine.py", "exec"), made)
    provider: Any = SimpleNamespace(name="mine", build=made["build"])
    plan: Any = SimpleNamespace(spec=SimpleNamespace(name="mine_gemm"))
    return Guarded(provider, ()).build(plan)


_DOUBLED = "def epi(accum): D = 2 * accum; return D"


def _symbolic_size() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        rows = mode.shape_env.create_unbacked_symint()
        return ef.GemmArguments(torch.empty(rows, K), torch.empty(K, N))


def _inference_output() -> Any:
    with torch.inference_mode():
        out = torch.empty(M, N)
    return ef.gemm(torch.ones(M, K), torch.ones(K, N), out=out)


def _artifact() -> Any:
    args = _arguments()
    kernel = ef.get_kernels(args)[0]
    other = ef.GemmArguments(torch.ones(M, K), torch.ones(K, 2 * N))
    return kernel.run(args, compiled_artifact=kernel.compile(other))


def _without_a_gpu(call: Callable[[], Any]) -> Callable[[], Any]:
    """As on a machine without one: what a sentence says of the device does not depend on where the test runs."""

    def run() -> Any:
        with mock.patch("torch.cuda.is_available", return_value=False):
            return call()

    return run


def _kernel_device() -> Any:
    kernel = ef.get_kernels(_arguments())[0]
    other = ef.Plan(**{**vars(kernel.plan), "problem": ef.GemmArguments(*_on_another_target()).problem})
    return type(kernel)(kernel.spec, other).run(_arguments())


def _on_another_target() -> tuple[torch.Tensor, torch.Tensor]:
    with FakeTensorMode():
        return torch.ones(M, K, device="cuda"), torch.ones(K, N, device="cuda")


def _pinned() -> ef.GemmArguments:
    return _arguments(constraints=ef.Constraints(cluster=(2, 1)))


def _no_kernel() -> Any:
    with mock.patch("epifuse.providers.NAMES", ("cpu",)):
        args = ef.GemmArguments(*_on_another_target())
        return launch(args.call, Settled(args.problem, args.structure))


def _unwrap(status: ef.Status) -> Any:
    raise status.error  # type: ignore[misc]


def _overlapping() -> Any:
    buffer = torch.ones(M + 1, N)
    return gemm("lambda accum, C: accum + C", C=buffer[1:], out=buffer[:-1])


def _compiling_forbidden() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        config = Config(no_compile=True, cache_dir=Path(folder))
        with mock.patch.object(store, "CONFIG", config):
            return store.fetch(store.key_of("never made"), ".so", lambda path: None, kernel="cpu_native")


def _without_source() -> Any:
    """As from an archive."""
    with mock.patch.object(store, "__file__", "/nowhere/epifuse.zip/epifuse/base/store.py"):
        return store._own_source.__wrapped__()


def _resized() -> None:
    a = torch.ones(M, K)
    args = ef.GemmArguments(a, torch.ones(K, N))
    a.resize_(M - 1, K)
    ef.get_kernels(args)[0].run(args)


def _old_driver() -> None:
    raise too_old(11, (13, 12))


def _picture_without_the_package() -> Any:
    with mock.patch.dict(sys.modules, {"pygraphviz": None}):
        return debug.to_svg(_arguments().graph, "nowhere.svg")


CALLS: dict[str, Callable[[], Any]] = {
    "decorated": run_function("@torch.no_grad()\ndef epi(accum):\n    return accum * 2\n", torch=torch),
    "augmented_in_place": lambda: gemm(reassigning("D = accum\n    D += C\n    return D"), C=torch.ones(M, N)),
    "returns_operand_name": lambda: gemm(reassigning("C = C + accum\n    return C"), C=torch.ones(M, N)),
    "not_a_function": lambda: gemm(torch.nn.Dropout()),
    "not_importable": lambda: pickle.dumps(ef.EpilogueArguments(lambda accum: accum * 2, D=torch.ones(M, N))),
    "fx_operation": lambda: gemm(make_fx(lambda accum: accum.cumsum(-1))(torch.randn(8, 8))),
    "fx_signature": lambda: gemm(make_fx(lambda: torch.ones(8, 8))()),
    "partial_accum": lambda: gemm(functools.partial(_scaled, 2.0)),
    "no_source": lambda: gemm(eval("lambda accum: accum * 2")),
    "stale_source": _stale,
    "lambdas_share_a_line": _without_positions,
    "unnamed_outputs": run_function("def pair(x): return x, x * 2\ndef epi(accum): return pair(accum)\n"),
    "star_in_helper": run_function("def h(*x): return x\ndef epi(accum): return h(accum)\n"),
    "default_not_supported": run_function("def h(x, y=[]): return x\ndef epi(accum): return h(accum)\n"),
    "captured_tensor": run_function("def epi(accum): return accum + W\n", W=torch.ones(3)),
    "captured_module": run_function("def epi(accum): return layer(accum)\n", layer=torch.nn.Linear(2, 2)),
    "altered_module": _hooked,
    "recursion": run_function("def h(x): return h(x)\ndef epi(accum): return h(accum)\n"),
    "too_many_calls": _doubling,
    "operand_shape": lambda: gemm("lambda accum, v: accum + v", v=torch.ones(M)),
    "operand_met": lambda: gemm(f"lambda accum, v: accum[:, :{N // 2}] + v", v=torch.ones(N)),
    "dims_differ": lambda: gemm("lambda accum: accum + accum.permute(1, 0)", torch.ones(N, K)),
    "ranges_differ": lambda: gemm("lambda accum: accum.split([3, 3, 4], -1)[0] * accum.split([3, 3, 4], -1)[1]"),
    "integer_division": lambda: gemm("lambda accum: accum + index_m(accum) // index_n(accum)"),
    "max_of_nothing": lambda: gemm("lambda accum: accum.amax()", torch.ones(0, K)),
    "missing_operand": lambda: ef.EpilogueArguments("lambda accum, C: accum + C"),
    "operand_not_given": lambda: gemm("lambda accum, C: accum + C"),
    "output_by_name": lambda: gemm("lambda accum: accum * 2", D=torch.ones(M, N)),
    "extra_operand": lambda: gemm("lambda accum: accum * 2", C=torch.ones(M, N)),
    "name_clash": lambda: gemm("lambda accum, precision: accum * precision", precision=2.0),
    "operand_twice": lambda: gemm("lambda accum, C: accum + C", operands={"C": torch.ones(M, N)}, C=torch.ones(M, N)),
    "operand_names": lambda: gemm("lambda accum, C: accum + C", operands=[torch.ones(M, N)]),
    "linear_bias": lambda: ef.linear(torch.ones(M, K), torch.ones(N, K), epilogue="lambda accum, bias: accum + bias"),
    "operand_type": lambda: gemm("lambda accum, C: accum + C", C="text"),
    "tensor_type": lambda: gemm("lambda accum: accum", [[1.0]]),
    "tensor_subclass": lambda: gemm("lambda accum, C: accum + C", C=torch.ones(M, N).as_subclass(_Tensor)),
    "transformed": lambda: torch.vmap(lambda a: ef.GemmArguments(a, torch.ones(K, N)))(torch.ones(2, M, K)),
    "requires_grad": _in_another_grad_mode,
    "grad_out": lambda: gemm("lambda accum: accum", b=_weight(), out=torch.empty(M, N)),
    "grad_inference": lambda: gemm("lambda accum: accum", _inference(), b=_weight()),
    "grad_accumulate": lambda: gemm("lambda accum: accum", b=_weight(), accumulate="D"),
    "grad_print": lambda: gemm(epilogue('debug_print("{}", accum); D = accum; return D', "accum"), b=_weight()),
    "grad_dtype": lambda: ef.gemm(
        torch.ones(M, K).to(torch.float8_e4m3fn), _weight().detach().to(torch.float8_e4m3fn).requires_grad_()
    ),
    "grad_twice": _differentiated_twice,
    "distributed_beside": _of_dtensors(lambda a, b, other: ef.gemm(a, torch.ones(K, N))),
    "distributed_meshes": _of_dtensors(lambda a, b, other: ef.gemm(a, other)),
    "distributed_outside": _of_dtensors(_outside_of_the_mesh),
    "distributed_option": _of_dtensors(lambda a, b, other: ef.gemm(a, b, out=torch.empty(M, N))),
    "tensor_layout": lambda: gemm("lambda accum, C: accum + C", C=torch.ones(M, N).to_sparse()),
    "host_number": lambda: gemm("lambda accum, s: accum * s", s=10**400),
    "rank": lambda: gemm("lambda accum: accum", torch.ones(K)),
    "linear_bias_shape": lambda: ef.linear(torch.ones(M, K), torch.ones(N, K), torch.ones(N + 1)),
    "linear_shapes": lambda: ef.linear(torch.ones(2, K), torch.ones(K)),
    "leading_strides": lambda: gemm("lambda accum: accum", torch.ones(3, 2, M, K).transpose(0, 1)),
    "leading_broadcast": lambda: gemm("lambda accum: accum", torch.ones(2, 3, M, K), torch.ones(3, K, N)),
    "operand_dims": lambda: ef.linear(torch.ones(K), torch.ones(N, K), torch.ones(1, N)),
    "leading_operand": lambda: gemm("lambda accum, C: accum + C", torch.ones(2, 3, M, K), C=torch.ones(3, M, N)),
    "leading_dims": lambda: gemm("lambda accum: accum.sum(0)", torch.ones(2, 3, M, K)),
    "inner_extent": lambda: gemm("lambda accum: accum", torch.ones(M, K + 1)),
    "batch_extent": lambda: gemm("lambda accum: accum", torch.ones(2, M, K), torch.ones(3, K, N)),
    "gemm_dtype": lambda: gemm("lambda accum: accum", torch.ones(M, K, dtype=torch.int64)),
    "gemm_dtypes": lambda: gemm("lambda accum: accum", torch.ones(M, K, dtype=torch.float16)),
    "gemm_narrow_a": lambda: gemm(
        "lambda accum: accum", torch.ones(M, K, dtype=torch.int8), torch.ones(K, N, dtype=torch.bfloat16)
    ),
    "scaled_batches": lambda: _by_blocks(torch.ones(2, M, K), torch.ones(2, M, 1)),
    "scaled_dtype": lambda: gemm("lambda accum: accum", ef.Scaled(torch.ones(M, K), torch.ones(M, 1))),
    "scales_dtype": lambda: _by_blocks(torch.ones(M, K), torch.ones(M, 1, dtype=torch.float16)),
    "scales_shape": lambda: _by_blocks(torch.ones(M, K), torch.ones(1, M)),
    "scaled_where": lambda: _by_blocks(torch.ones(M, K), torch.ones(M, 1, requires_grad=True)),
    "accumulator": lambda: gemm("lambda accum: accum", accumulator_type=torch.int32),
    "operand_dtype": lambda: gemm("lambda accum, C: accum + C", C=torch.ones(M, N, dtype=torch.complex64)),
    "operand_float64": lambda: gemm("lambda accum, C: accum + C", C=torch.ones(M, N, dtype=torch.float64)),
    "device": lambda: gemm("lambda accum, C: accum + C", C=torch.ones(M, N, device="meta")),
    "no_output_d": lambda: _arguments(
        out=torch.ones(M, N), epilogue=ef.EpilogueArguments("def epi(accum): E = accum; return E", E=torch.ones(M, N))
    ),
    "out_shape": lambda: _arguments(out=torch.ones(N, M), epilogue=ef.EpilogueArguments.partial(_DOUBLED, {})),
    "traced": lambda: make_fx(lambda a: ef.GemmArguments(a, torch.ones(K, N)))(torch.ones(M, K)),
    "symbolic_size": _symbolic_size,
    "inference_output": _inference_output,
    "out_type": lambda: gemm("lambda accum: accum", out=[torch.ones(M, N)]),
    "out_single": lambda: gemm("def epi(accum): E = accum; G = accum; return E, G", out=torch.ones(M, N)),
    "unknown_result": lambda: gemm("def epi(accum): D = accum; E = accum; return D, E")["F"],
    "unknown_output": lambda: gemm("lambda accum: accum", out_dtypes={"X": torch.float16}),
    "output_shape": lambda: gemm("def epi(accum): D = accum; return D", out=torch.ones(N, M)),
    "reduced_shape": lambda: gemm("def epi(accum): r = accum.sum(dim=0); return r", out=torch.ones(M)),
    "accumulate_new": lambda: gemm("def epi(accum): D = accum; return D", accumulate="D"),
    "accumulate_mask": lambda: gemm("def epi(accum): D = accum > 0; return D", out=torch.ones(M, N), accumulate="D"),
    "accumulate_dtype": lambda: gemm(
        "def epi(accum): D = accum; return D", out=torch.ones(M, N, dtype=torch.float64), accumulate="D"
    ),
    "output_dtype": lambda: gemm("def epi(accum): D = accum; return D", out=torch.ones(M, N, dtype=torch.complex64)),
    "positions": lambda: gemm(
        "lambda accum: accum.argmax()", torch.ones(1, K).expand(1 << 16, K), torch.ones(K, 1).expand(K, 1 << 16)
    ),
    "output_expanded": lambda: gemm("def epi(accum): D = accum; return D", out=torch.ones(1, N).expand(M, N)),
    "overlap": _overlapping,
    "transport": lambda: ef.Load(torch.ones(2), via="pigeon"),
    "transport_side": lambda: ef.EpilogueArguments("lambda accum, C: accum + C", C=ef.Store(torch.ones(2)), D=None),
    "option": lambda: gemm("lambda accum: accum", precision="sloppy"),
    "not_compiled": lambda: ef.report(torch.nn.Linear(2, 2)),
    "leaf_spec": lambda: torch.ops.epifuse.fused1(torch.ones(M, K), torch.ones(K, N), [], "abc"),
    "launch": _failed_launch,
    "fake_beside_real": lambda: gemm("lambda accum: accum", _fake(M, K)),
    "no_data": lambda: gemm("lambda accum: accum", torch.ones(M, K, device="meta"), torch.ones(K, N, device="meta")),
    "changed": _resized,
    "wrong_arguments": lambda: ef.get_kernels(torch.ones(2)),
    "no_kernel": _without_a_gpu(_no_kernel),
    "filter_type": lambda: ef.get_kernels(_arguments(), 90),
    "artifact": _artifact,
    "workspace": lambda: ef.get_kernels(_arguments())[0].run(_arguments(), workspace=torch.ones(2, device="meta")),
    "not_supported": lambda: _unwrap(ef.get_kernels(_arguments())[0].supports(_pinned())),
    "not_built": _not_built,
    "kernel_device": _without_a_gpu(_kernel_device),
    "missing_package": _picture_without_the_package,
    "old_driver": _old_driver,
    "no_compile": _compiling_forbidden,
    "no_fingerprint": _without_source,
    "device_cc": _without_a_gpu(lambda: _unwrap(ef.utils.is_device_cc_supported({100}))),
    "epilogue_file": lambda: described.epilogue("no_such.py:epi"),
    "epilogue_name": lambda: described.epilogue("types:no_such"),
    "not_described": lambda: described.Operands.of("lambda accum, bias, x1: accum + bias * x1", {}),
    "tuned_file": lambda: merge(Path("no_such.json")),
    "operator_spec": lambda: torch.ops.epifuse.gemm(torch.ones(M, K), torch.ones(K, N), [], [], "NOSPEC"),
    "cc_type": lambda: ef.get_kernels(_arguments(), cc=42),
    "activation_body": _reducing_activation,
    "kernel_text": lambda: _plain(object),
    "worker": lambda: Workers(1, [sys.executable, "-c", ""]).submit("cpu", "").result(),
    "no_version": lambda: _version("no-such-package"),
    "driver": lambda: _call(SimpleNamespace(cuModuleLoadData=lambda: 201), "cuModuleLoadData"),
    "verify": lambda: verify("prune", _arguments().graph, replace(_arguments().graph, types={})),
    **TREES,
    **FACADES,
}
