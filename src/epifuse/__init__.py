"""epifuse fuses your own epilogue into a GEMM: write it as a Python function over tensors, run it in one kernel."""

from typing import TYPE_CHECKING

from epifuse import errors, evt, thread, utils
from epifuse.api import Explanation, epilogue, explain, gemm, get_kernels, linear, precompile
from epifuse.arguments import EpilogueArguments, GemmArguments, Load, Store
from epifuse.dense_gemm import DenseGemm
from epifuse.frontend.hints import absent as _absent
from epifuse.fusion.vocabulary import VOCABULARY as _VOCABULARY
from epifuse.gemm_plan import Gemm, LayoutType, TileDescription, trace
from epifuse.kernel import CompiledArtifact, Kernel, Status
from epifuse.plan import Plan
from epifuse.problem import Constraints
from epifuse.reference import reference
from epifuse.results import Results
from epifuse.runtime.precompile import Precompiled

__version__ = "0.1.0"

# The vocabulary by name: ef.relu, ef.where ... Callable on tensors, where each is plain PyTorch.
globals().update({name: entry.function for name, entry in _VOCABULARY.items()})

if TYPE_CHECKING:  # the same for type checkers and editors, which run nothing: a new function is known without a list
    from epifuse.fusion.activation import *  # noqa: F403
    from epifuse.fusion.forms import *  # noqa: F403
    from epifuse.fusion.primitives import *  # noqa: F403
    from epifuse.fusion.reduction import *  # noqa: F403
else:
    _INSTEAD = {
        "DenseGemmEFC": "write epifuse.DenseGemm",
        "PerformanceControls": "write epifuse.Constraints",
        "get_operators": "write epifuse.get_kernels",
    }
    __getattr__ = _absent(globals(), _INSTEAD)

__all__ = [
    "CompiledArtifact",
    "Constraints",
    "DenseGemm",
    "EpilogueArguments",
    "Explanation",
    "Gemm",
    "GemmArguments",
    "Kernel",
    "LayoutType",
    "Load",
    "Plan",
    "Precompiled",
    "Results",
    "Status",
    "Store",
    "TileDescription",
    "epilogue",
    "errors",
    "evt",
    "explain",
    "gemm",
    "get_kernels",
    "linear",
    "precompile",
    "reference",
    "thread",
    "trace",
    "utils",
    *_VOCABULARY,
]
