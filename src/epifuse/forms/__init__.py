"""The forms of an epilogue or a GEMM that CUTLASS users know: visitor trees, thread functors, a class, a plan."""

from epifuse.forms import evt, thread
from epifuse.forms.dense_gemm import DenseGemm
from epifuse.forms.gemm_plan import Gemm, LayoutType, TileDescription, trace

__all__ = ["DenseGemm", "Gemm", "LayoutType", "TileDescription", "evt", "thread", "trace"]
