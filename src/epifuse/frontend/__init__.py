"""Front ends: they turn the source of an epilogue into a graph, and do nothing else."""

from epifuse.frontend.parse_cache import check_importable, parsed, parsed_method, parsed_once
from epifuse.frontend.python_function import FrontEnd, Parsed, activation_body, body_of, parse

__all__ = [
    "FrontEnd",
    "Parsed",
    "activation_body",
    "body_of",
    "check_importable",
    "parse",
    "parsed",
    "parsed_method",
    "parsed_once",
]
