"""epifuse fuses your own epilogue into a GEMM: write it as a Python function over tensors, run it in one kernel."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from epifuse.api import Explanation, epilogue, explain, gemm, get_kernels, linear, precompile, tune
from epifuse.base import errors
from epifuse.base.aliases import install as _install
from epifuse.base.results import Results
from epifuse.frontend.hints import absent as _absent
from epifuse.fusion.vocabulary import VOCABULARY as _VOCABULARY
from epifuse.kernel import CompiledArtifact, Kernel, Status
from epifuse.plan import Plan
from epifuse.pytorch.compiling import compile, report
from epifuse.request.problem import Constraints
from epifuse.request.scaled import Scaled
from epifuse.runtime.arguments import EpilogueArguments, GemmArguments, Load, Store
from epifuse.runtime.precompile import Precompiled
from epifuse.runtime.reference import reference
from epifuse.runtime.tuning import Fastest, Tuned
from epifuse.tools import utils

__version__ = "0.1.0"

# The public paths of modules, wherever they lie within the package.
_ALIASES = {
    "epifuse.arguments": "epifuse.runtime.arguments",
    "epifuse.debug": "epifuse.tools.debug",
    "epifuse.dense_gemm": "epifuse.forms.dense_gemm",
    "epifuse.errors": "epifuse.base.errors",
    "epifuse.evt": "epifuse.forms.evt",
    "epifuse.testing": "epifuse.tools.testing",
    "epifuse.thread": "epifuse.forms.thread",
    "epifuse.utils": "epifuse.tools.utils",
}
_install(_ALIASES)

# The vocabulary by name: ef.relu, ef.where ... Called on tensors, each function is plain PyTorch.
globals().update({name: entry.function for name, entry in _VOCABULARY.items()})

_FORMS = frozenset({"DenseGemm", "Gemm", "LayoutType", "TileDescription", "evt", "thread", "trace"})

if TYPE_CHECKING:  # the same names for type checkers and editors, which run no code; no list has to name a new function
    from epifuse.forms import DenseGemm, Gemm, LayoutType, TileDescription, evt, thread, trace
    from epifuse.fusion.activation import *  # noqa: F403
    from epifuse.fusion.bits import *  # noqa: F403
    from epifuse.fusion.composites import *  # noqa: F403
    from epifuse.fusion.forms import *  # noqa: F403
    from epifuse.fusion.philox import *  # noqa: F403
    from epifuse.fusion.primitives import *  # noqa: F403
    from epifuse.fusion.reduction import *  # noqa: F403
    from epifuse.runtime import arguments as arguments
    from epifuse.tools import debug as debug
    from epifuse.tools import testing as testing
else:
    _INSTEAD = {
        "DenseGemmEFC": "write epifuse.DenseGemm",
        "PerformanceControls": "write epifuse.Constraints",
        "get_operators": "write epifuse.get_kernels",
    }
    _fail = _absent(globals() | dict.fromkeys(_FORMS), _INSTEAD)

    def __getattr__(name: str) -> object:
        """A form or a module. Forms are imported when one is first used, because they are a quarter of all imports."""
        if f"epifuse.{name}" in _ALIASES:
            return _import_module(f"epifuse.{name}")
        if name not in _FORMS:
            _fail(name)
        forms = _import_module("epifuse.forms")
        globals().update({form: getattr(forms, form) for form in _FORMS})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_FORMS})


__all__ = [
    "CompiledArtifact",
    "Constraints",
    "DenseGemm",
    "EpilogueArguments",
    "Explanation",
    "Fastest",
    "Gemm",
    "GemmArguments",
    "Kernel",
    "LayoutType",
    "Load",
    "Plan",
    "Precompiled",
    "Results",
    "Scaled",
    "Status",
    "Store",
    "TileDescription",
    "Tuned",
    "compile",
    "epilogue",
    "errors",
    "evt",
    "explain",
    "gemm",
    "get_kernels",
    "linear",
    "precompile",
    "reference",
    "report",
    "thread",
    "trace",
    "tune",
    "utils",
    *_VOCABULARY,
]
