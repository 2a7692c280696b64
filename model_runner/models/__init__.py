"""The registry: from the architecture a checkpoint names to the class that computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from protos.model_spec import ModelSpec


class Model(Protocol):
    """What the runner asks of a model."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Where each tensor of the checkpoint belongs, by its Hugging Face name; all of them are needed."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [S, hidden] of the tokens whose next one is drawn; writes the KV cache of all."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, vocabulary] in float32."""
        ...


def _decoder(spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> Model:
    from model_runner.models.decoder import Decoder

    return Decoder(spec, max_model_len, policy)


MODELS: dict[str, Callable[[ModelSpec, int, DevicePolicy], Model]] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _decoder,
    "Qwen2ForCausalLM": _decoder,
    "Gemma3ForCausalLM": _decoder,
}
"""Every architecture of protos.architectures has its entry; what sets them apart is in the ModelSpec."""


def make_model(spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> Model:
    """The model, with its weights allocated but not filled."""
    return MODELS[spec.architecture](spec, max_model_len, policy)
