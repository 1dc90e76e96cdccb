"""A user's other module: helpers that tests inline from here."""

SCALE = 0.5


def half(x):
    """Halved by this module's own SCALE."""
    return x * SCALE


def split(x, y):
    """Two results."""
    return min(x, y), max(x, y)


def with_builtins(x, *, scale=1.0):
    """Python's builtins mean the vocabulary's here too."""
    return abs(x) * scale + half(x)
