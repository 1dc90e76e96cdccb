"""Under torch.compile: epifuse plans and launches outside the compiled graph, which breaks around its entry points.

Of `gemm` and `linear` Dynamo traces what stands in `pytorch.dynamo` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

Entry = TypeVar("Entry", bound=Callable[..., Any])

_REASON = "epifuse plans and launches outside the compiled graph"


def outside_graph(function: Entry) -> Entry:
    """Mark `function`: torch.compile breaks its graph here, and traces neither it nor what it calls.

    `torch.compiler.disable` says the same, but imports the compiler (a second) and wraps the function (0.3 us a call).
    """
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-any-return,no-untyped-call]  # untyped
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
