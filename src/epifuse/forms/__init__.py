"""The forms that people know from CUTLASS: visitor trees, thread functors, classes, the plan object."""

from epifuse.forms import evt, thread
from epifuse.forms.dense_gemm import DenseGemm
from epifuse.forms.gemm_plan import Gemm, LayoutType, TileDescription, trace

__all__ = ["DenseGemm", "Gemm", "LayoutType", "TileDescription", "evt", "thread", "trace"]
