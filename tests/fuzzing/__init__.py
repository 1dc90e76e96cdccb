"""Random epilogues. They are written as Python source, run fused, and compared with the same source run by PyTorch.

`case.make(seed)` makes a whole problem from one number, `check.run(case)` judges it, and `shrink.smallest(case)` cuts a
failing one down. The generator takes the language from the registries, so it draws a new row of the vocabulary without
an edit here.
"""
