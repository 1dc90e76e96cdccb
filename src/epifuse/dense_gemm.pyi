from epifuse.forms.dense_gemm import *
