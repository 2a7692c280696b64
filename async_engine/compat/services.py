"""The compatible services by their names in `--services`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_engine.compat import kserve, vllm_engine, vllm_inference

if TYPE_CHECKING:
    from async_engine.compat.adapter import Adapter

ADAPTERS: dict[str, Adapter] = {
    "vllm-engine": vllm_engine.ADAPTER,
    "vllm-inference": vllm_inference.ADAPTER,
    "kserve": kserve.ADAPTER,
}
