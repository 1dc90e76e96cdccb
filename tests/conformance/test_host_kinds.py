"""Every function of `math` that an epilogue may call on numbers has the kind of result that planning assumes."""

import itertools
from typing import Any

import pytest

from epifuse.fusion.vocabulary import MATH_FUNCTIONS
from epifuse.passes.kinds import const_kind, host_kind

ARGUMENTS = [given for count in (1, 2, 3) for given in itertools.product((0.5, 3, 2), repeat=count)]


def results(function: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The arguments that the function accepts, each with its result."""
    found = []
    for given in ARGUMENTS:
        try:
            found.append((given, function(*given)))
        except (TypeError, ValueError):
            continue
    return found


@pytest.mark.parametrize("function", sorted(MATH_FUNCTIONS, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_host_kind(function: Any) -> None:
    taken = results(function)
    assert taken
    for given, result in taken:
        kind = host_kind("host", function.__name__, [const_kind(number) for number in given])
        whole = type(result) is int  # an int computed on the host takes the kind of the other operand
        assert kind == ("int" if whole else const_kind(result)), given
