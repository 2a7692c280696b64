"""Small models whose files are written byte by byte, and the ways to damage them."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from async_engine.detokenizer import byte_alphabet

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, VOCAB, LENGTH = 32, 260, 64
NORMAL, CONTROL = 1, 3
U32, F32, STRING, ARRAY = 4, 6, 8, 9
SIZES = (0, 1, 3, 31, 64, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 31, (1 << 32) - 1)
HUGE = (0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

_LAYER = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HIDDEN, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HIDDEN, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (HIDDEN, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (HIDDEN, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, HIDDEN)),
}
TENSORS: list[tuple[str, str, tuple[int, ...]]] = [
    ("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN)),
    ("output_norm.weight", "model.norm.weight", (HIDDEN,)),
    *((f"blk.0.{ours}.weight", f"model.layers.0.{theirs}.weight", shape) for ours, (theirs, shape) in _LAYER.items()),
]
"""GGUF's name, Hugging Face's, and the shape."""
TOKENS = [*byte_alphabet(), "ab", "<bos>", "<eos>", "<pad>"]


# GGUF ------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_fields() -> list[tuple[str, int, bytes]]:
    """Key, type and bytes of each value."""
    numbers = {
        "block_count": 1,
        "context_length": LENGTH,
        "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
    }
    tokens = b"".join(map(text, TOKENS))
    kinds = [NORMAL] * 257 + [CONTROL] * 3
    return [
        ("general.architecture", STRING, text("llama")),
        *((f"llama.{key}", U32, struct.pack("<I", value)) for key, value in numbers.items()),
        ("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        ("tokenizer.ggml.model", STRING, text("gpt2")),
        ("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, len(TOKENS)) + tokens),
        ("tokenizer.ggml.token_type", ARRAY, struct.pack(f"<IQ{len(kinds)}i", 5, len(kinds), *kinds)),
        ("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 1) + text("a b")),
        ("tokenizer.ggml.bos_token_id", U32, struct.pack("<I", 257)),
        ("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 258)),
        ("tokenizer.chat_template", STRING, text("{{ messages[0].content }}")),
    ]


class GGUFImage:
    """The bytes of a file, and where in it the numbers are that a reader trusts."""

    def __init__(self, fields: list[tuple[str, int, bytes]], tensors: list[tuple[str, tuple[int, ...], int]]) -> None:
        self.counts = [8, 16]
        """Offsets of 64-bit counts, lengths and offsets."""
        self.numbers: list[int] = []
        """Offsets of 32-bit values."""
        self.types: list[int] = []
        """Offsets of 32-bit types."""
        parts = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for key, kind, value in fields:
            self.counts.append(len(parts))
            parts += text(key)
            self.types.append(len(parts))
            parts += struct.pack("<I", kind)
            if kind == ARRAY:
                self.types.append(len(parts))
                self.counts.append(len(parts) + 4)
            elif kind == STRING:
                self.counts.append(len(parts))
            elif kind == U32:
                self.numbers.append(len(parts))
            parts += value
        at, data = 0, []
        for name, shape, type_id in tensors:
            self.counts.append(len(parts))
            parts += text(name) + struct.pack("<I", len(shape))
            self.types.append(len(parts) - 4)
            self.counts += [len(parts) + 8 * axis for axis in range(len(shape))]
            parts += struct.pack(f"<{len(shape)}Q", *shape[::-1])
            self.types.append(len(parts))
            self.counts.append(len(parts) + 4)
            parts += struct.pack("<IQ", type_id, at)
            weights = np.full(shape, 0.5, np.float32).tobytes()
            data.append(weights)
            at += len(weights)
        parts += bytes(-len(parts) % 32)
        self.header = len(parts)
        self.content = bytes(parts) + b"".join(data)


def gguf_image(repeated_key: int = -1, repeated_tensor: int = -1) -> GGUFImage:
    fields = gguf_fields()
    tensors = [(name, shape, 0) for name, _, shape in TENSORS]
    if repeated_key >= 0:
        fields.append(fields[repeated_key])
    if repeated_tensor >= 0:
        tensors.append(tensors[repeated_tensor])
    return GGUFImage(fields, tensors)


def damaged_gguf(seed: int) -> bytes:
    """One of the ways to damage a GGUF file; the same for the same seed."""
    rng = random.Random(seed)
    image = gguf_image()
    content = bytearray(image.content)
    match seed % 6:
        case 0:
            for _ in range(rng.randrange(1, 5)):
                content[rng.randrange(image.header)] ^= 1 << rng.randrange(8)
        case 1:
            del content[rng.randrange(len(content)) :]
        case 2 if rng.random() < 0.5:
            struct.pack_into("<I", content, rng.choice(image.numbers), rng.choice(SIZES))
        case 2 | 3:
            struct.pack_into("<Q", content, rng.choice(image.counts), rng.choice(HUGE))
        case 4:
            struct.pack_into("<I", content, rng.choice(image.types), rng.choice([*range(14), 99, 1 << 31]))
        case 5:
            if rng.random() < 0.5:
                return gguf_image(repeated_key=rng.randrange(len(gguf_fields()))).content
            return gguf_image(repeated_tensor=rng.randrange(len(TENSORS))).content
    return bytes(content)


# A directory -----------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "eos_token_id": 258,
    "bos_token_id": 257,
}
GENERIC_CONFIG = CONFIG | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "head_dim": HIDDEN // 2,
}
"""Of a model with the same tensors, that transformers' code computes."""
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 257 + index, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, token in enumerate(TOKENS[257:])
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(TOKENS)}, "merges": [["a", "b"]]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": [258], "temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "add_bos_token": True}
    | {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]},
    "model.safetensors.index.json": {"weight_map": {name: "model.safetensors" for _, name, _ in TENSORS}},
}


def safetensors_entries() -> tuple[dict[str, Any], bytes]:
    header, data = {}, b""
    for _, name, shape in TENSORS:
        weights = np.full(shape, 0.5, np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(weights)]}
        data += weights
    return header, data


def safetensors_bytes(header: bytes, data: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def write_directory(path: Path, config: dict[str, Any] = CONFIG) -> None:
    path.mkdir()
    header, data = safetensors_entries()
    (path / "model.safetensors").write_bytes(safetensors_bytes(json.dumps(header).encode(), data))
    for name, content in {"config.json": config, "tokenizer.json": TOKENIZER, **OTHERS}.items():
        (path / name).write_text(json.dumps(content))


WEIRD: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 1 << 31, 1 << 40, 1 << 63, 1 << 70, 10**400, 0.5, -0.5, 1e-320, 1e308),
    *(float("nan"), float("inf"), "", "x\ny", "\x1b[31m", "\u00e9" * 5000, "../../etc/passwd", "<eos>", "F16", "I8"),
    *([], {}, [[]], [None], ["a"] * 3, {"a": {"b": []}}, [1 << 62, 1 << 63], [-1, -1], [5, 3], list(range(5000))),
]
DEEP = "@deep@"


def damaged_json(content: Any, rng: random.Random) -> bytes:
    """The JSON with some value in it replaced, or a key gone or there twice; or its bytes damaged."""
    encoded = json.dumps(content).encode()
    way = rng.random()
    if way < 0.12:
        return encoded[: rng.randrange(len(encoded))]
    if way < 0.3:
        flipped = bytearray(encoded)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    copy = json.loads(encoded)
    holder = copy
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = rng.choice(keys) if rng.random() < 0.7 or len(keys) < 50 else keys[0]
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
            break
        holder = inner
    if way < 0.4:
        del holder[key]
        return json.dumps(copy).encode()
    if way < 0.5:
        holder[key] = DEEP
        return json.dumps(copy).encode().replace(f'"{DEEP}"'.encode(), b"[" * 100_000 + b"]" * 100_000)
    if way < 0.6 and isinstance(holder, dict):
        twice = f"{json.dumps(key)}: {json.dumps(holder[key])}".encode()
        return json.dumps(copy).encode().replace(twice, twice + b", " + twice, 1)
    holder[key] = rng.choice(WEIRD)
    return json.dumps(copy).encode()


def damage_config(path: Path, seed: int, config: dict[str, Any]) -> None:
    """One of the ways to damage this config."""
    rng = random.Random(seed)
    if seed % 2:
        sizes = [key for key, value in config.items() if isinstance(value, int)]
        (path / "config.json").write_text(json.dumps(config | {rng.choice(sizes): rng.choice(SIZES)}))
    else:
        (path / "config.json").write_bytes(damaged_json(config, rng))


def damage_directory(path: Path, seed: int) -> None:
    """One of the ways to damage a directory; the same for the same seed."""
    rng = random.Random(seed)
    weights = path / "model.safetensors"
    header, data = safetensors_entries()
    match seed % 8:
        case 0 | 1:
            weights.write_bytes(safetensors_bytes(damaged_json(header, rng), data))
        case 2:
            content = bytearray(weights.read_bytes())
            if rng.random() < 0.5:
                del content[rng.randrange(len(content)) :]
            else:
                struct.pack_into("<Q", content, 0, rng.choice(HUGE))
            weights.write_bytes(content)
        case 3 | 4:
            damage_config(path, seed, CONFIG)
        case 5 | 6:
            (path / "tokenizer.json").write_bytes(damaged_json(TOKENIZER, rng))
        case 7:
            name = rng.choice(sorted(OTHERS))
            (path / name).write_bytes(damaged_json(OTHERS[name], rng))
