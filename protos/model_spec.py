"""What the files of a model say about it: one struct, whatever the file format."""

from __future__ import annotations

from typing import Any

import msgspec


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. `scaling` is the checkpoint's own table of parameters for `kind`."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn or longrope."""
    scaling: dict[str, Any] = {}
    original_max_position: int = 0
    """Context the model was trained with before scaling; 0 is max_position_embeddings."""
    partial_factor: float = 1.0
    """Fraction of each head that is rotated."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants of a decoder-only transformer, and the defaults it was published with."""

    architecture: str
    """Class name as Hugging Face configs have it, e.g. LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeSpec
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's query and key pass a norm before they are rotated."""
    post_norms: bool = False
    """What attention and MLP compute passes a norm of its own before it is added."""
    attention_scale: float = 0.0
    """Of the products of queries and keys; 0 is head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """Of the embeddings on their way in, rounded to their type."""
    sliding_window: int = 0
    """Keys a query sees at most in a local layer, in tokens; 0 is all before it."""
    global_layers: tuple[int, ...] = ()
    """Layers that see all keys and turn by `rope`; the others are local."""
    local_rope: RopeSpec | None = None
    """Of local layers; None is `rope`."""
    dtype: str = "float32"
    """Of the weights in the file."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0

    def is_local(self, layer: int) -> bool:
        return layer not in self.global_layers

    def window(self, layer: int) -> int:
        """Keys a query of this layer sees at most; 0 is all."""
        return self.sliding_window if self.is_local(layer) else 0
