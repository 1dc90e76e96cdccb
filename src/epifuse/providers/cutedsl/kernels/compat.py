"""Names that CuTe DSL 4.7 has in other modules than later versions."""

try:
    from cutlass.memory import SmemAllocator as SmemAllocator
    from cutlass.memory import TmemAllocator as TmemAllocator
    from cutlass.tensor_utils import LayoutEnum as LayoutEnum
except ImportError:
    from cutlass.utils import LayoutEnum as LayoutEnum
    from cutlass.utils import SmemAllocator as SmemAllocator
    from cutlass.utils import TmemAllocator as TmemAllocator
