"""The forms that people know from CUTLASS: visitor trees, thread functors, classes, the plan object."""
