"""Options of adapters: small changes of a model that requests may ask for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protos.errors import InvalidRequestError


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters beside the model."""

    adapters: Annotated[
        str,
        Meta(
            description="NAME=PATH of adapters to load at start, with commas between: directories as PEFT saves them; "
            "operators may load others later; default: none"
        ),
    ] = ""
    max_adapters: Annotated[int, Meta(ge=0, le=1024, description="LoRA adapters loaded at once; 0: none are taken")] = 8
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512, description="largest rank of an adapter that is taken")] = 64


def adapter_paths(adapters: str) -> dict[str, str]:
    """By name, what the option names. Raises InvalidRequestError if that is no list of names and paths."""
    paths: dict[str, str] = {}
    for part in filter(None, map(str.strip, adapters.split(","))):
        name, equals, path = part.partition("=")
        if not (name and equals and path):
            raise InvalidRequestError("adapters", f"must be NAME=PATH,NAME=PATH, which {part!r} is not")
        if name in paths:
            raise InvalidRequestError("adapters", f"{name!r} is there twice")
        paths[name] = path
    return paths
