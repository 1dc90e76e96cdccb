"""Under torch.compile, epifuse plans and launches outside the compiled graph, which breaks around its entry points.

`gemm` and `linear` are different: Dynamo traces the functions in `pytorch.dynamo` in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

Entry = TypeVar("Entry", bound=Callable[..., Any])

_REASON = "epifuse plans and launches outside the compiled graph"


def outside_graph(function: Entry) -> Entry:
    """Mark `function`, so that torch.compile breaks its graph at a call and traces neither it nor what it calls.

    `torch.compiler.disable` does the same, but imports the compiler (1 s) and wraps the function (0.3 us a call).
    """
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        # `disable` has no types.
        return torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-any-return,no-untyped-call]
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
