"""Names of tensors in checkpoints, and what those of one tensor in different checkpoints have in common."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(r"\A(?:(?:_orig_mod|module|model|language_model|transformer|decoder)\.)+")
"""What stands before the names of the tensors: modules around the layers, which checkpoints have or have not."""


def bare_name(name: str) -> str:
    """The name without the modules around: what the names of a tensor in different checkpoints have in common."""
    return _WRAPPERS.sub("", name)


def renamed(name: str, parts: dict[str, str]) -> str:
    """The name with some of its parts, one or several between dots, in other words."""
    name = f".{name}"
    for old, new in parts.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:]
