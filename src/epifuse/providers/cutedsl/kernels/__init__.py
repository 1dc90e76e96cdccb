"""GPU kernels: a GEMM kernel for each architecture (`sm*_gemm.py`), small kernels beside it, and their parts."""
