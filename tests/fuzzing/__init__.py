"""Random epilogues: written as Python source, run fused, compared with the same source run by PyTorch.

`case.make(seed)` is a whole problem from one number, `check.run(case)` judges it, `shrink.smallest(case)` cuts it down.
The generator knows the language from the registries alone: a new row of the vocabulary is drawn without an edit here.
"""
