"""What the files of a model say about it: one struct, whatever the file format."""

from __future__ import annotations

from typing import Any, Literal

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


class MoESpec(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts: a router picks, for each token, a few of a layer's MLPs."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    norm_weights: bool
    """Whether the weights of the experts picked for a token are scaled to add up to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP for all tokens, of the ModelSpec's intermediate_size."""


class BasicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end needs of any model, and the defaults it was published with."""

    architecture: str
    """Class name as Hugging Face configs have it, e.g. LlamaForCausalLM."""
    vocab_size: int
    dtype: str = "float32"
    """Of the weights in the file."""
    has_integers: bool = False
    """Most of them are small integers with scales, of which `dtype` is what they are computed as."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0


class ModelSpec(BasicSpec, frozen=True, kw_only=True):
    """Shape and constants of a decoder-only transformer that is computed by our own code."""

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
    merged_projections: bool = False
    """In the file, queries, keys and values are one tensor; and so are gates and ups."""
    qk_norm: Literal["", "head", "all"] = ""
    """Queries and keys pass a norm before they are rotated: each head's by itself, or all heads' as one."""
    norm_place: Literal["before", "around", "behind", "sum"] = "before"
    """Norms are of what attention and MLP compute on (before), of what they add (behind), of both (around), or of
    the sums."""
    attention_scale: float = 0.0
    """Of the products of queries and keys; 0 is head_dim ** -0.5."""
    attention_softcap: float = 0.0
    """Bound of those products, c * tanh(x / c); 0 is none."""
    logits_softcap: float = 0.0
    """Bound of the logits, likewise."""
    embedding_size: int = 0
    """Where it is not hidden_size, embeddings are projected on their way in and out; 0 where it is."""
    position_offset: int = 0
    """Where positions are learned: rows of their table before that of position 0."""
    embedding_scale: float = 1.0
    """Of the embeddings on their way in, rounded to their type."""
    sliding_window: int = 0
    """Keys a query sees at most in a local layer, in tokens; 0 is all before it."""
    global_layers: tuple[int, ...] = ()
    """Layers that see all keys and turn by `rope`; the others are local."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers that turn neither queries nor keys."""
    local_rope: RopeSpec | None = None
    """Of local layers; None is `rope`."""
    moe: MoESpec | None = None

    @property
    def stretches(self) -> bool:
        """Whether sequences may be longer than max_position_embeddings."""
        return self.rope.kind == "dynamic"

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that is not needed."""
        return self.tie_word_embeddings and name == "lm_head.weight"

    def is_local(self, layer: int) -> bool:
        return layer not in self.global_layers

    def is_rotated(self, layer: int) -> bool:
        return layer not in self.unrotated_layers

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def window(self, layer: int) -> int:
        """Keys a query of this layer sees at most; 0 is all."""
        return self.sliding_window if self.is_local(layer) else 0
