"""Architecture: the row of a model class in the registry."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ArchitectureRow(msgspec.Struct, frozen=True, kw_only=True):
    """What users are told of one model class."""

    backend: ClassVar[str]
    """What computes it."""
    model_type: str
    """In config.json."""
    about: str
    """What sets it apart."""
    limits: str = ""
    """What its checkpoints are refused for."""


class Architecture(ArchitectureRow, frozen=True, kw_only=True):
    """A row of models/decoder.py or models/gpt.py. Bias fields: None is as the config's own `attention_bias` says."""

    backend = "fused"
    gguf_name: str | None
    """`general.architecture` of its GGUF files; None where another row's stands for it. Of two rows with the same,
    the one with a window is for files that name one."""
    keys: dict[str, str] = {}
    """Keys of config.json that other architectures name otherwise, with the name they go by there."""
    defaults: dict[str, Any]
    """Keys of config.json that may be absent, with the value absence means."""
    only: dict[str, Any] = {}
    """Keys of config.json whose other values change what is computed, in a way that is not supported."""
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    sliding_window: bool = False
    """Whether the config's sliding window counts; others carry the key without meaning it."""
    global_every: int = 0
    """Where a file names no layers: every n-th is global, the others have the window. 0: all have it."""
    local_rope_theta: float | None = None
    """Base of the rotary embedding of local layers, where the file does not say; None: as in the others."""
    unrotated_every: int = 0
    """Where a file names no layers: every n-th turns neither queries nor keys."""
    rope_kinds: dict[str, str] = {}
    """Kinds of rotary embedding by names that only files of this one mean them by."""
    merged_projections: bool = False
    gated: bool = True
    """Its MLPs have a gate."""
    qk_norm: str = ""
    norm_place: str = "before"
    activations: tuple[str, ...] = ("silu", "gelu_pytorch_tanh")
    """Of the MLP, those supported."""
    mlp_ratio: int = 0
    """Size of the MLP over hidden size, where the file does not say."""
    position_offset: int = 0
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of their size."""
    norm_offset: float = 0.0
    """What safetensors leave out of the weights of norms; GGUF has them whole."""
    experts: bool = False
    """A mixture of experts. Its GGUF files may go by the name of the family without."""
    transposed: bool = False
    """Safetensors have the matrices of layers with rows and columns exchanged; GGUF has not."""
    renamed: dict[str, str] = {}
    """Parts of the names of tensors in safetensors, with what they are for Llama; applied one after the other."""
    gguf_names: dict[str, str] = {}
    """GGUF's names of modules, where they are not what they are for Llama, with their Hugging Face names."""
    gguf_permuted: bool = False
    """GGUF stores the rows of q and k in pair order: each head's halves interleaved."""
    gguf_wide_layers: int = 0
    """Layers of the one size whose queries are scaled by the hidden size per head; files say it by nothing else."""


class GenericArchitecture(ArchitectureRow, frozen=True, kw_only=True):
    """A row of models/generic.py, which has been compared with transformers."""

    backend = "generic"
