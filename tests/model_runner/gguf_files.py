"""GGUF files of tiny models, written by the gguf package from a transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

GEMMA_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, family: str) -> str:
    name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
    name = name.replace("lm_head", "output").replace("model.layers.", "blk.")
    for theirs, ours in (GEMMA_NAMES if family == "gemma3" else NAMES).items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(path: Path, model: Any, family: str, kind: str = "F32", **metadata: Any) -> None:
    """The model as llama.cpp's converter lays it out: q and k of Llama with their rows in pair order, norms
    of Gemma with the 1 that its modelling code adds."""
    config = model.config
    writer = GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
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
    quantised = GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if family == "llama" and heads:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if family == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        array = np.ascontiguousarray(array)
        if array.ndim == 2 and kind != "F32":
            writer.add_tensor(gguf_name(name, family), quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name, family), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
