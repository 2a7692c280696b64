"""ModelSpec from config.json: both the keys of transformers 4 (rope_theta, rope_scaling, torch_dtype)
and of transformers 5 (rope_parameters, dtype)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from protos.architectures import ARCHITECTURES, Architecture, require
from protos.errors import StartupError
from protos.model_spec import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
"""Kinds of rotary embedding, with the parameters that a checkpoint must give."""
ACTIVATIONS = ("silu",)
_COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
_DTYPES = ("float32", "bfloat16", "float16")


def spec_from_config(directory: Path) -> ModelSpec:
    """Reads config.json and generation_config.json. Raises StartupError naming the file and the key."""
    path = directory / "config.json"
    config = _read_json(path)
    generation = _read_json(directory / "generation_config.json", required=False)
    name = _architecture_name(path, config)
    architecture = require(path, name)
    # null means absent, except that a window of null is the model's way to say it has none.
    present = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    try:
        values = _values(path, _COMMON_DEFAULTS | architecture.defaults | present, architecture)
    except (AttributeError, TypeError, ValueError) as error:
        raise StartupError(f"{path}: malformed: {error}") from None
    generation = {key: value for key, value in generation.items() if value is not None}
    eos = generation.get("eos_token_id", present.get("eos_token_id", []))
    values |= {
        "architecture": name,
        "eos_token_ids": eos if isinstance(eos, list) else [eos],
        "default_temperature": generation.get("temperature", 1.0),
        "default_top_p": generation.get("top_p", 1.0),
        "default_top_k": generation.get("top_k", 0),
    }
    return to_spec(path, values)


def _values(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    def need(key: str) -> Any:
        if key not in config:
            raise StartupError(f"{path}: has no {key}")
        return config[key]

    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise StartupError(f"{path}: weights quantised by {method} are not supported; use a plain or GGUF checkpoint")
    heads = need("num_attention_heads")
    bias = config["attention_bias"]
    return {
        "vocab_size": need("vocab_size"),
        "hidden_size": need("hidden_size"),
        "intermediate_size": need("intermediate_size"),
        "num_layers": need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or need("hidden_size") // max(heads, 1),
        "max_position_embeddings": config["max_position_embeddings"],
        "rope": _rope(path, config),
        "norm_eps": config["rms_norm_eps"],
        "hidden_act": config["hidden_act"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "attention_bias": bias if architecture.qkv_bias is None else architecture.qkv_bias,
        "attention_out_bias": bias if architecture.out_bias is None else architecture.out_bias,
        "mlp_bias": config["mlp_bias"],
        "sliding_window": _sliding_window(path, config, architecture),
        "dtype": _dtype(config),
        "bos_token_id": config.get("bos_token_id"),
    }


def to_spec(path: object, values: dict[str, Any]) -> ModelSpec:
    """Checks types and bounds. Raises StartupError naming the file and the field."""
    try:
        spec = msgspec.convert(values, ModelSpec)
    except msgspec.ValidationError as error:
        raise StartupError(f"{path}: {error}") from None
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    ):
        if getattr(spec, name) < 1:
            raise StartupError(f"{path}: {name} is {getattr(spec, name)}")
    if spec.num_heads % spec.num_kv_heads:
        raise StartupError(f"{path}: {spec.num_heads} attention heads do not share {spec.num_kv_heads} KV heads evenly")
    if spec.hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise StartupError(f"{path}: activation {spec.hidden_act} is not supported; supported are {known}")
    _check_rope(path, spec)
    return spec


def _check_rope(path: object, spec: ModelSpec) -> None:
    rope = spec.rope
    if rope.kind not in ROPE_KINDS:
        raise StartupError(f"{path}: rope type {rope.kind} is not supported; supported are {', '.join(ROPE_KINDS)}")
    pairs = int(spec.head_dim * rope.partial_factor) // 2
    for key in ROPE_KINDS[rope.kind]:
        value = rope.scaling.get(key)
        if not isinstance(value, list if key in ("short_factor", "long_factor") else int | float):
            raise StartupError(f"{path}: rope type {rope.kind} needs {key}, not {value!r}")
        if isinstance(value, list) and len(value) != pairs:
            raise StartupError(f"{path}: rope {key} has {len(value)} entries for {pairs} pairs of dimensions")


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise StartupError(f"{path}: no such file; a model directory needs config.json") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path}: is not a JSON object")
    return content


def _architecture_name(path: Path, config: dict[str, Any]) -> str:
    if names := config.get("architectures"):
        return str(names[0])
    model_type = config.get("model_type")
    for name, row in ARCHITECTURES.items():
        if row.model_type == model_type:
            return name
    raise StartupError(f"{path}: has no architectures")


def _rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise StartupError(f"{path}: rope parameters that differ by layer are not supported")
    own_keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    # Phi-3 style configs keep the trained length beside the rope table, and mean that one.
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return {
        "theta": parameters.get("rope_theta") or config["rope_theta"],
        "kind": parameters.get("rope_type") or parameters.get("type") or "default",
        "scaling": {k: v for k, v in parameters.items() if k not in own_keys and v is not None},
        "original_max_position": original or 0,
        "partial_factor": parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1.0),
    }


def _sliding_window(path: Path, config: dict[str, Any], architecture: Architecture) -> int:
    window = config.get("sliding_window")
    if not architecture.sliding_window or not window or not config.get("use_sliding_window", True):
        return 0
    layers = config["num_hidden_layers"]
    full = min(config.get("max_window_layers", 0), layers)
    kinds = config.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if len(set(kinds)) > 1:
        raise StartupError(f"{path}: a sliding window in some layers only is not supported")
    return int(window) if kinds[0] == "sliding_attention" else 0


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in _DTYPES else "float32"
