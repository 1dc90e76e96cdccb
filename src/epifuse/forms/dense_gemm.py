"""The class form: a GEMM as a class whose method `epilogue_operation` is its epilogue.

    class AlphaBeta(DenseGemm):
        def epilogue_operation(self, accumulator, c, alpha: float, beta: float):
            d = accumulator * alpha + c * beta
            return d

The method is parsed like an epilogue function. Only `verify` calls it. In the method a name may be assigned again, and
attributes of `self` may be numbers, functions and methods. An `AlphaBeta(...)` is accepted wherever an epilogue is.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar

import torch

from epifuse.base.dtypes import ACCUMULATORS, is_storable
from epifuse.base.dynamo import outside_graph
from epifuse.base.errors import fail
from epifuse.base.results import Results
from epifuse.frontend import Parsed, parsed_method
from epifuse.plan.settle import Settled
from epifuse.pytorch.kept_calls import run
from epifuse.request.options import Options
from epifuse.request.problem import Constraints
from epifuse.request.scaled import unscaled
from epifuse.request.signature import Request
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments
from epifuse.runtime.reference import reference
from epifuse.runtime.run import launch
from epifuse.tools.testing import Verdict, verified, wanted

Tensors = tuple[torch.Tensor, ...]


class DenseGemm:
    """`(L, M, K) @ (L, K, N)`, accumulated in `acc_dtype`, then `epilogue_operation`.

    `mma_tiler_mn` and `cluster_shape_mn` pin the tile and the cluster: only kernels with these are used. None leaves
    the choice to the planner. `device` is where `create_arguments` puts tensors, by default the GPU if there is one.
    Raises `ArgumentError` for options that no kernel could have.
    """

    allow_recompute: ClassVar[bool] = True
    """Whether a further launch may compute the product again for a value that needs a finished reduction."""

    def __init__(
        self,
        acc_dtype: torch.dtype | None = None,
        use_2cta_instrs: bool = False,
        mma_tiler_mn: tuple[int, int] | None = None,
        cluster_shape_mn: tuple[int, int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        accumulators = {dtype for allowed in ACCUMULATORS.values() for dtype in allowed}
        if acc_dtype is not None and acc_dtype not in accumulators:
            want = f"None or one of {', '.join(sorted(map(str, accumulators)))}"
            raise fail("option", None, name="acc_dtype", want=want, value=acc_dtype)
        if use_2cta_instrs:
            want = "False, as no kernel here multiplies by instructions of two CTAs"
            raise fail("option", None, name="use_2cta_instrs", want=want, value=use_2cta_instrs)
        self.acc_dtype = acc_dtype
        self.device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.constraints = Constraints(
            tile=whole_pair("mma_tiler_mn", mma_tiler_mn),
            cluster=whole_pair("cluster_shape_mn", cluster_shape_mn),
            allow_recompute=self.allow_recompute,
        )
        self._options = Options(acc_dtype, pinned=self.constraints, hint=_HINT)

    # --- what a class of your own overrides ----------------------------------------------------------------------

    def epilogue_operation(self, accumulator: Any) -> Any:
        """The epilogue. Its outputs are identified by position, in the order of the return statement."""
        D = accumulator
        return D

    def create_arguments(
        self, l: int, m: int, n: int, k: int, a_major: str, b_major: str, cd_major: str, ab_dtype: torch.dtype
    ) -> Tensors:
        """Random A (l, m, k) and B (l, k, n), contiguous along the axes `a_major` and `b_major`. Override this method
        to add operands and outputs."""
        for name, value, allowed in (
            ("a_major", a_major, "mk"),
            ("b_major", b_major, "kn"),
            ("cd_major", cd_major, "mn"),
        ):
            if value not in tuple(allowed):
                raise fail("option", None, name=name, want=" or ".join(map(repr, allowed)), value=value)
        a = self.matrix(l, m, k, a_major == "m", ab_dtype)
        return a, self.matrix(l, k, n, b_major == "k", ab_dtype)

    # --- using it ------------------------------------------------------------------------------------------------

    def matrix(self, l: int, rows: int, columns: int, rows_contiguous: bool, dtype: torch.dtype) -> torch.Tensor:
        """A random tensor (l, rows, columns) of small integers. Every dtype holds them exactly, and their sums are the
        same in any order."""
        if not is_storable(dtype):
            raise fail("option", None, name="dtype", want="a torch dtype that can be stored", value=dtype)
        for name, extent in (("l", l), ("rows", rows), ("columns", columns)):
            if type(extent) is not int or extent < 0:
                raise fail("option", None, name=name, want="a whole number", value=extent)
        shape = (l, columns, rows) if rows_contiguous else (l, rows, columns)
        low = 0 if dtype in (torch.uint8, torch.bool) else -2
        made = torch.randint(low, 3, shape, device=self.device).to(dtype)
        return made.mT if rows_contiguous else made

    def arguments(self, *tensors: Any, **named: Any) -> GemmArguments:
        """The arguments for `explain` and `get_kernels`. `tensors` are A, B, the operands of `epilogue_operation` in
        order except those in `named` and those with a default, and then all outputs or none."""
        a, b, parsed, given = self._by_name(tensors, named)
        epilogue = EpilogueArguments.partial(parsed, given)
        return GemmArguments(a, b, accumulator_type=self.acc_dtype, epilogue=epilogue, constraints=self.constraints)

    @outside_graph
    def run(self, *tensors: Any, **named: Any) -> Any:
        """Launch once; the parameters are those of `arguments`. Outputs that are not given are allocated.

        Returns the output, or all of them by name if there are several. Raises `UnsupportedError`, before anything is
        written, if no kernel has the tile and cluster asked for.
        """
        a, b, parsed, given = self._by_name(tensors, named)
        a, b, scales = unscaled(a, b)
        outputs = run(Request(a, b, parsed, {**given, **scales}, self._options))
        return next(iter(outputs.values())) if len(outputs) == 1 else Results(outputs)

    def _by_name(self, tensors: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any, Parsed, dict[str, Any]]:
        """A, B, the parsed epilogue, and its operands and outputs by name."""
        if "_options" not in vars(self):
            raise fail("not_constructed", None, name=type(self).__name__)
        parsed = self.__epifuse__()
        operands = [name for name in parsed.parameters if name not in named and name not in parsed.defaults]
        outputs = [name for name in parsed.output_names if name not in named]
        count = len(tensors) - 2 - len(operands)
        if count not in (0, len(outputs)):
            want = f"{', '.join(('A', 'B', *operands))}, and then {' and '.join(outputs)} or nothing,"
            raise fail("positional", None, function=type(self).__name__, want=want, have=len(tensors))
        a, b, *rest = tensors
        return a, b, parsed, dict(zip((*operands, *outputs), rest, strict=False)) | named

    @outside_graph
    def verify(self, *tensors: Any, **named: Any) -> dict[str, Verdict]:
        """Run, and compare each output with `epilogue_operation` computed by PyTorch in float64, within an error bound.

        Returns a `Verdict` for each output by name, with the number of elements that could be judged. Raises
        `InternalError` if an output differs.
        """
        args = self.arguments(*tensors, **named)
        wants = wanted(args, partial(reference(type(self).epilogue_operation), self))
        request = args.call.request._replace(options=self._options)
        return verified(launch(args.call._replace(request=request), Settled(args.problem, args.structure)), wants)

    def __epifuse__(self) -> Parsed:
        """The parsed `epilogue_operation`."""
        method = inspect.getattr_static(type(self), "epilogue_operation")
        names = method.__code__.co_varnames[: method.__code__.co_argcount] if inspect.isfunction(method) else ()
        if len(names) < 2:
            raise fail("class_epilogue", None, name=type(self).__name__)
        return parsed_method(self, method, names[1])


_HINT = "leave the tile and the cluster to the planner, or say the epilogue as a function and gemm(fallback='torch')"


def _device(value: Any) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        raise fail("option", None, name="device", want="a device of torch", value=value) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise fail("option", None, name="device", want="a device that this machine has", value=value)
    return device


def whole_pair(name: str, value: Any, *, optional: bool = True) -> tuple[int, int] | None:
    """`value` as a pair of positive extents, or None if it is None and `optional`. Raises `ArgumentError`."""
    if value is None and optional:
        return None
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(type(extent) is int and extent > 0 for extent in pair):
        raise fail("option", None, name=name, want="two whole numbers above 0", value=value)
    return pair[0], pair[1]
