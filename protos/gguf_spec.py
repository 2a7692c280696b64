"""ModelSpec from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from protos.architectures import ARCHITECTURES
from protos.config_spec import MALFORMED, canonical_activation, every_nth_layer, softcaps, to_spec
from protos.errors import StartupError
from protos.gguf import BLOCK_FORMATS

if TYPE_CHECKING:
    from protos.architecture import Architecture
    from protos.gguf import GGUFFile
    from protos.model_spec import ModelSpec

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED_DTYPE = "bfloat16"
"""Of what is computed from quantised blocks: float16 has the digits, but some models overflow it."""


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Raises StartupError naming the file and the key or tensor that is missing or not supported."""
    family = str(file.metadata.get("general.architecture"))
    experts = bool(file.metadata.get(f"{family}.expert_count"))
    has_window = bool(file.metadata.get(f"{family}.attention.sliding_window"))
    names = [name for name, row in ARCHITECTURES.items() if (row.gguf_name, row.experts) == (family, experts)]
    if not names:
        raise StartupError(
            f"{file.path}: GGUF files of architecture {family!r}{', a mixture of experts,' * experts} are not "
            "supported; if `tailrace models` lists it, use its safetensors"
        )
    name = names[-1] if has_window else names[0]
    try:
        values = _values(file, family, ARCHITECTURES[name])
    except MALFORMED as error:
        raise StartupError(f"{file.path}: malformed metadata: {error}") from None
    return to_spec(file.path, values | {"architecture": name})


def _values(file: GGUFFile, family: str, architecture: Architecture) -> dict[str, Any]:
    metadata = file.metadata

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if value is None:
            raise StartupError(f"{file.path}: has no {family}.{key}")
        if isinstance(value, np.ndarray | list):
            raise StartupError(f"{file.path}: {family}.{key} differs by layer, which is not supported")
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.path}: has no tensor token_embd.weight")
    heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // max(heads, 1))
    rope = _rope(file, family, head_dim)
    format_name = BLOCK_FORMATS[_main_type(file)][0]
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_layers": get("block_count"),
        "num_heads": heads,
        "num_kv_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rope": rope,
        "local_rope": _local_rope(metadata, family, architecture, rope),
        "norm_eps": get("attention.layer_norm_rms_epsilon", metadata.get(f"{family}.attention.layer_norm_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(file.tensors),
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "hidden_act": canonical_activation(architecture.defaults.get("hidden_act", "silu")),
        "merged_projections": architecture.merged_projections,
        "qk_norm": architecture.qk_norm,
        "norm_place": architecture.norm_place,
        "attention_scale": _attention_scale(metadata, family, architecture),
        **softcaps(file.path, metadata, architecture, f"{family}."),
        "position_offset": architecture.position_offset,
        "embedding_scale": get("embedding_length") ** 0.5 if architecture.scaled_embeddings else 1.0,
        "sliding_window": get("attention.sliding_window", None if architecture.global_every else 0),
        "unrotated_layers": every_nth_layer(get("block_count"), architecture.unrotated_every),
        "global_layers": _global_layers(metadata, family, architecture),
        "moe": _moe(file, family) if architecture.experts else None,
        "dtype": _DTYPES.get(format_name, _QUANTISED_DTYPE),
        "has_integers": format_name not in _DTYPES,
        "eos_token_ids": _eos_token_ids(metadata),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "default_temperature": metadata.get("general.sampling.temp", 1.0),
        "default_top_p": metadata.get("general.sampling.top_p", 1.0),
        "default_top_k": metadata.get("general.sampling.top_k", 0),
    }


def _main_type(file: GGUFFile) -> int:
    """The block format that holds the most weights; norms are float32 in every file."""
    weights: dict[int, int] = {}
    for tensor in file.tensors.values():
        weights[tensor.type] = weights.get(tensor.type, 0) + int(np.prod(tensor.shape))
    return max(weights, key=weights.__getitem__)


def _rope(file: GGUFFile, family: str, head_dim: int) -> dict[str, Any]:
    prefix = f"{family}.rope."
    get = file.metadata.get
    rotated = get(prefix + "dimension_count", head_dim)
    rope: dict[str, Any] = {
        "theta": get(prefix + "freq_base", 10000.0),
        "partial_factor": rotated / head_dim,
        "original_max_position": get(prefix + "scaling.original_context_length", 0),
    }
    kind = get(prefix + "scaling.type", "none")
    if divisors := _divisors(file, "rope_freqs.weight", head_dim):
        # Llama 3 files carry the divisor of each frequency as a tensor instead of the rule behind it; that is
        # what longrope's tables are, the same for long and short, without its attention factor.
        rope["kind"] = "longrope"
        rope["scaling"] = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    elif divisors := _divisors(file, "rope_factors_long.weight", head_dim):
        short = _divisors(file, "rope_factors_short.weight", head_dim)
        factor = get(prefix + "scaling.attn_factor", 1.0)
        rope["kind"] = "longrope"
        rope["scaling"] = {"short_factor": short, "long_factor": divisors, "attention_factor": factor}
    elif kind != "none":
        rope["kind"] = kind
        rope["scaling"] = {"factor": get(prefix + "scaling.factor", 1.0)}
    return rope


def _divisors(file: GGUFFile, name: str, head_dim: int) -> list[float]:
    """A tensor of the file that is no weight; empty where it has none."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return []
    if len(tensor.shape) != 1 or BLOCK_FORMATS[tensor.type][0] != "F32" or tensor.shape[0] > head_dim:
        raise StartupError(f"{file.path}: tensor {name} is no list of float32 for {head_dim} dimensions")
    divisors: list[float] = np.fromfile(tensor.path, np.float32, tensor.shape[0], offset=tensor.offset).tolist()
    return divisors


def _local_rope(
    metadata: dict[str, Any], family: str, architecture: Architecture, rope: dict[str, Any]
) -> dict[str, Any] | None:
    """Never scaled: files that scale at all mean the global layers."""
    if architecture.local_rope_theta is None:
        return None
    theta = metadata.get(f"{family}.rope.freq_base_swa", architecture.local_rope_theta)
    return {"theta": theta, "partial_factor": rope["partial_factor"]}


def _global_layers(metadata: dict[str, Any], family: str, architecture: Architecture) -> list[int]:
    """The pattern is a number, or whether each layer has the window."""
    pattern = metadata.get(f"{family}.attention.sliding_window_pattern", architecture.global_every)
    if isinstance(pattern, np.ndarray):
        return [int(layer) for layer in np.flatnonzero(~pattern.astype(bool))]
    return every_nth_layer(metadata[f"{family}.block_count"], pattern)


def _moe(file: GGUFFile, family: str) -> dict[str, Any]:
    """Of both families whose files say nothing about the experts' weights, these are normed."""
    metadata = file.metadata
    return {
        "num_experts": metadata[f"{family}.expert_count"],
        "num_experts_per_token": metadata[f"{family}.expert_used_count"],
        "intermediate_size": metadata.get(
            f"{family}.expert_feed_forward_length", metadata[f"{family}.feed_forward_length"]
        ),
        "norm_weights": metadata.get(f"{family}.expert_weights_norm", True),
        "dense_layers": [
            layer
            for layer in every_nth_layer(metadata[f"{family}.block_count"], 1)
            if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors
        ],
    }


def _attention_scale(metadata: dict[str, Any], family: str, architecture: Architecture) -> float:
    """0, for head_dim ** -0.5, is what every known family has but for one size of some."""
    if metadata[f"{family}.block_count"] == architecture.gguf_wide_layers:
        size = metadata[f"{family}.embedding_length"] / metadata[f"{family}.attention.head_count"]
        return float(size**-0.5)
    return float(metadata.get(f"{family}.attention.scale", 0.0))


def _eos_token_ids(metadata: dict[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return sorted({token_id for token_id in ids if token_id is not None})
