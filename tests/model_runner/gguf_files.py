"""GGUF files of tiny models, written by the gguf package from a transformers model."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TensorNameMap, get_tensor_name_map
from gguf.quants import quantize

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

PERMUTED = ("llama", "smollm3")
GEMMAS = ("gemma2", "gemma3")
CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


@cache
def _names(family: str) -> TensorNameMap:
    (architecture,) = (architecture for architecture, name in MODEL_ARCH_NAMES.items() if name == family)
    return get_tensor_name_map(architecture, 99)


def gguf_name(name: str, family: str) -> str:
    """By the package's own tables."""
    name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    return _names(family).get_name(name, (".weight", ".bias")) or name


def _split_gates(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """With the gates of all experts and their ups as two tensors instead of one."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            yield name.replace("gate_up", "gate"), gate
            yield name.replace("gate_up", "up"), up
        else:
            yield name, tensor


def write_gguf(
    path: Path, model: Any, family: str, kind: str = "F32", split_max_size: int = 0, **metadata: Any
) -> None:
    """The model as llama.cpp's converter lays it out: q and k of some with their rows in pair order, norms of
    Gemma with the 1 that its modelling code adds, GPT-2 with its matrices turned, tables of Phi-3 as tensors."""
    config = model.config
    writer = GGUFWriter(path, family, split_max_size=split_max_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", {})
    if family == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family in (*GEMMAS, "phi3") or config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    for key, value in metadata.items():
        key = f"{family}." + key.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
            continue
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    if "long_factor" in rope:
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
        )
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    quantised = GGMLQuantizationType[kind]
    for name, tensor in _split_gates(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        module = name.split(".")[-2]
        if family in PERMUTED and module in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if module == "q_proj" else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if family in GEMMAS and name.endswith("norm.weight"):
            array = array + 1
        if family == "gpt2" and name.endswith(CONV1D):
            array = array.T
        array = np.ascontiguousarray(array)
        if array.ndim >= 2:
            writer.add_tensor(gguf_name(name, family), quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name, family), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
