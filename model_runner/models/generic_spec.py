"""GenericSpec: what is to be known of a model without a fused one before memory is taken for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from model_runner.models.hf_module import Refused, build_module, weight_table
from model_runner.models.probe import ATTENTION, one_line, run_probe, window
from protos.config_spec import MAX_LAYERS, MAX_POSITIONS
from protos.errors import StartupError
from protos.model_spec import BasicSpec

if TYPE_CHECKING:
    from pathlib import Path


class GenericSpec(BasicSpec, frozen=True, kw_only=True):
    """Shapes of the KV cache, and what builds the module."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    """Of keys. Values may be smaller and are kept with zeros behind."""
    max_position_embeddings: int
    windows: tuple[int, ...]
    """Of each layer: keys a query sees at most; 0 is all before it."""
    config: Any
    """PreTrainedConfig."""
    model_class: Any
    unneeded: tuple[str, ...]
    """Expressions for the names of tensors that a checkpoint may hold for nothing."""
    stretches: ClassVar[bool] = False

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that is not needed."""
        return any(re.search(expression, name) for expression in self.unneeded)


def generic_spec(directory: Path, basic: BasicSpec) -> GenericSpec:
    """Finds transformers' class for a model and whether it can be served. Raises StartupError with the reason."""
    path = directory / "config.json"
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # Of each model's own checks, which raise anything.
        raise StartupError(f"{path}: transformers cannot read it: {one_line(error)}") from None
    try:
        return _probed(basic, config)
    except Refused as reason:
        raise StartupError(f"{path}: architecture {basic.architecture} is not supported: {reason}") from None


def _probed(basic: BasicSpec, config: PreTrainedConfig) -> GenericSpec:
    model_class = _model_class(basic.architecture, config)
    num_layers, limit = config.num_hidden_layers, getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or not 1 <= limit <= MAX_POSITIONS:
        raise Refused(f"its max_position_embeddings is {limit}")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise Refused(f"it has {num_layers} layers")
    try:
        module = build_module(
            model_class,
            config,
            limit,
            torch.float32,
            torch.device("meta"),
            attn_implementation=ATTENTION,
            experts_implementation="batched_mm",  # the one that looks at no values
        )
    except Exception as error:
        raise Refused(f"transformers cannot build it ({one_line(error)})") from None
    tied = weight_table(module, with_tied=True).keys() - weight_table(module).keys()
    unneeded = [*(module._keys_to_ignore_on_load_unexpected or ()), *(f"^{re.escape(name)}$" for name in tied)]
    found = run_probe(module, num_layers, basic.vocab_size)
    ((num_kv_heads, head_dim),) = found.heads
    sizes = {mask: window(mask, limit) for mask in set(found.masks)}
    return GenericSpec(
        **msgspec.structs.asdict(basic),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=limit,
        windows=tuple(sizes[mask] for mask in found.masks),
        config=config,
        model_class=model_class,
        unneeded=tuple(unneeded),
    )


def _model_class(name: str, config: PreTrainedConfig) -> Any:
    """Raises Refused for what its class and config alone rule out."""
    if config.is_encoder_decoder:
        raise Refused("it is an encoder-decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Refused(f"transformers has no causal language model of type {config.model_type}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if name != model_class.__name__:
        raise Refused(f"transformers' causal language model of this type is {model_class.__name__}")
    if config.get_text_config() is not config:
        raise Refused("it is multimodal")
    if model_class._is_stateful:
        raise Refused("it keeps a state between tokens, not only keys and values")
    if not model_class._supports_attention_backend:
        raise Refused("its attention does not go through transformers' attention interface")
    return model_class
