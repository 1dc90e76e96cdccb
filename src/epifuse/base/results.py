"""What a call with several outputs returns."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView
from typing import Any

import torch

from epifuse.base.errors import fail


class Results(tuple):  # type: ignore[type-arg]  # a tuple of tensors
    """Outputs in the order of the return statement, also by name: `r.D`, `r["D"]`, `r.items()`, `"D" in r`.

    A loop runs over the tensors, as over a tuple. An output's name takes precedence over an attribute of a tuple or a
    mapping, such as `r.count` or `r.items`, and over `r.names`, the names in order.
    """

    __named: dict[str, torch.Tensor]

    def __new__(cls, named: Any, *further: Any) -> Any:
        # torch.fx makes a new tuple by this type from a tuple of proxies; hooks of modules do, from single tensors.
        if isinstance(named, torch.Tensor):
            return (named, *further)
        if not isinstance(named, dict):
            return tuple(named)
        made = super().__new__(cls, named.values())
        for name, value in ({"names": tuple(named)} | named).items():
            setattr(made, name, value)  # Dynamo of PyTorch 2.11 does not trace `vars(made).update`
        made.__named = dict(named)
        return made

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.__named:
            raise fail("unknown_result", None, name=key, outputs=", ".join(self.__named))
        return self.__named[key]

    def __contains__(self, key: object) -> bool:
        return key in self.__named if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> KeysView[str]:
        """The names, in order."""
        return self.__named.keys()

    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in order: the tuple itself."""
        return self

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Each name with its tensor, in order."""
        return self.__named.items()

    def __getattr__(self, name: str) -> torch.Tensor:
        known = ", ".join(vars(self).get("_Results__named", ()))
        raise AttributeError(f"no output named {name!r}; there are {known}")  # hasattr and pickle ask by this class

    def __getnewargs__(self) -> tuple[dict[str, torch.Tensor]]:
        return (self.__named,)
