"""The registry: from the architecture a checkpoint names to the class that computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protos.model_spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from model_runner.models.generic_spec import GenericSpec
    from model_runner.target import Target
    from protos.model_spec import BasicSpec


class Model(Protocol):
    """What the runner asks of a model."""

    def weights(self) -> dict[str, Target]:
        """Where each tensor of the checkpoint belongs, by its Hugging Face name; all of them are needed."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [S, hidden] of the tokens whose next one is drawn; before the last stage, [T, hidden] of all.
        Writes the KV cache of all; may overwrite what the batch has from the stage before."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, vocabulary] in float32; of the last stage."""
        ...


def _decoder(spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> Model:
    from model_runner.models.decoder import Decoder

    return Decoder(spec, max_model_len, policy)


def _gpt(spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> Model:
    from model_runner.models.gpt import GPT

    return GPT(spec, policy)


MODELS: dict[str, Callable[[ModelSpec, int, DevicePolicy], Model]] = {
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _decoder,
    "MixtralForCausalLM": _decoder,
    "Qwen2ForCausalLM": _decoder,
    "Qwen3ForCausalLM": _decoder,
    "Qwen3MoeForCausalLM": _decoder,
    "SmolLM3ForCausalLM": _decoder,
    "Phi3ForCausalLM": _decoder,
    "Gemma2ForCausalLM": _decoder,
    "Gemma3ForCausalLM": _decoder,
    "Olmo2ForCausalLM": _decoder,
    "Olmo3ForCausalLM": _decoder,
    "GPT2LMHeadModel": _gpt,
    "OPTForCausalLM": _gpt,
}
"""Every architecture of protos.architectures has its entry; what sets them apart is in the ModelSpec."""


def full_spec(path: Path, spec: BasicSpec) -> ModelSpec | GenericSpec:
    """What a runner needs to know of a model: the spec itself, or where it has no fused one, what transformers says.

    Raises StartupError with the reason why it cannot be served.
    """
    if isinstance(spec, ModelSpec):
        return spec
    from model_runner.models.generic_spec import generic_spec

    return generic_spec(path, spec)


def make_model(spec: ModelSpec | GenericSpec, max_model_len: int, policy: DevicePolicy) -> Model:
    """The model, with its weights allocated but not filled."""
    if isinstance(spec, ModelSpec):
        return MODELS[spec.architecture](spec, max_model_len, policy)
    from model_runner.models.generic import GenericModel

    return GenericModel(spec, max_model_len, policy)
