"""Options of adapters: small changes of a model that requests may ask for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters beside the model."""

    max_adapters: Annotated[int, Meta(ge=0, le=1024, description="LoRA adapters loaded at once; 0: none are taken")] = 8
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512, description="largest rank of an adapter that is taken")] = 64
