"""Front ends: source in, graph out, nothing else."""

from epifuse.frontend.python_function import Parsed, activation_body, parse

__all__ = ["Parsed", "activation_body", "parse"]
