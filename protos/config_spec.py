"""ModelSpec from config.json: both the keys of transformers 4 (rope_theta, rope_scaling, torch_dtype)
and of transformers 5 (rope_parameters, dtype)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from protos.architectures import ARCHITECTURES, Architecture, require
from protos.errors import InvalidRequestError, StartupError
from protos.json_files import read_json_object
from protos.model_spec import ModelSpec, RopeSpec
from protos.params import SamplingParams

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
MAX_VOCAB_SIZE = 1 << 24
MAX_LAYERS = 4096
MAX_CONSTANT = 1e12
_LARGEST: dict[str, int] = {
    "vocab_size": MAX_VOCAB_SIZE,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": MAX_LAYERS,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 24,
}
"""What a file may say at most. Ten times what any model has: more is damage, or meant to take our memory."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
_DTYPES = ("float32", "bfloat16", "float16")
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Keys that change what is computed, unless they are absent, null or false."""


MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading values of the wrong kind or size ends in."""


def spec_from_config(directory: Path) -> ModelSpec:
    """Reads config.json and generation_config.json. Raises StartupError naming the file and the key."""
    path = directory / "config.json"
    config = _read_json(path, required=True)
    generation = _read_json(directory / "generation_config.json", required=False)
    name = _architecture_name(path, config)
    architecture = require(path, name)
    # null means absent, except that a window of null is the model's way to say it has none.
    present = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    try:
        values = _values(path, _COMMON_DEFAULTS | architecture.defaults | present, architecture)
    except MALFORMED as error:
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
    for key in _UNSUPPORTED:
        if config.get(key):
            raise StartupError(f"{path}: {key} is not supported")
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
        "rope": _global_rope(path, config, architecture),
        "norm_eps": config["rms_norm_eps"],
        "hidden_act": config.get("hidden_activation", config["hidden_act"]),
        "tie_word_embeddings": config["tie_word_embeddings"],
        "attention_bias": bias if architecture.qkv_bias is None else architecture.qkv_bias,
        "attention_out_bias": bias if architecture.out_bias is None else architecture.out_bias,
        "mlp_bias": config["mlp_bias"],
        "qk_norm": architecture.qk_norm,
        "post_norms": architecture.post_norms,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5 if "query_pre_attn_scalar" in config else 0.0,
        "embedding_scale": need("hidden_size") ** 0.5 if architecture.scaled_embeddings else 1.0,
        **_locality(path, config, architecture),
        "local_rope": _local_rope(config, architecture),
        "dtype": _dtype(config),
        "bos_token_id": config.get("bos_token_id"),
    }


def to_spec(path: object, values: dict[str, Any]) -> ModelSpec:
    """Checks types and bounds. Raises StartupError naming the file and the field."""
    try:
        spec = msgspec.convert(values, ModelSpec)
    except (msgspec.ValidationError, OverflowError) as error:
        raise StartupError(f"{path}: {error}") from None
    for name, largest in _LARGEST.items():
        if not 1 <= (value := getattr(spec, name)) <= largest:
            raise StartupError(f"{path}: {name} is {_shown(value)}")
    for name in ("norm_eps", "attention_scale", "embedding_scale", "sliding_window"):
        if not 0 <= (value := getattr(spec, name)) < MAX_CONSTANT:
            raise StartupError(f"{path}: {name} is {_shown(value)}")
    if spec.num_heads % spec.num_kv_heads:
        raise StartupError(f"{path}: {spec.num_heads} attention heads do not share {spec.num_kv_heads} KV heads evenly")
    if spec.hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise StartupError(f"{path}: activation {spec.hidden_act} is not supported; supported are {known}")
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            _check_rope(path, spec.head_dim, rope)
    _check_defaults(path, spec)
    # An id that is none can never be drawn; as an index it would mean another one.
    ends = tuple(token_id for token_id in spec.eos_token_ids if 0 <= token_id < spec.vocab_size)
    return msgspec.structs.replace(spec, eos_token_ids=ends)


def _check_defaults(path: object, spec: ModelSpec) -> None:
    try:
        SamplingParams(temperature=spec.default_temperature, top_p=spec.default_top_p, top_k=spec.default_top_k).verify(
            spec.vocab_size
        )
    except InvalidRequestError as error:
        raise StartupError(f"{path}: its default {error}") from None


def _shown(value: float) -> str:
    """Of an integer too long to spell, its size."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _check_rope(path: object, head_dim: int, rope: RopeSpec) -> None:
    if rope.kind not in ROPE_KINDS:
        raise StartupError(f"{path}: rope type {rope.kind} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if not 0 < rope.theta < MAX_CONSTANT or not 0 <= rope.original_max_position <= MAX_CONSTANT:
        raise StartupError(f"{path}: rope theta or original length is out of bounds")
    rotated = int(head_dim * rope.partial_factor) if 0 < rope.partial_factor <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise StartupError(f"{path}: rope turns no even number of the {head_dim} dimensions of a head")
    pairs = rotated // 2
    for key in ROPE_KINDS[rope.kind]:
        value = rope.scaling.get(key)
        if not isinstance(value, list if key in ("short_factor", "long_factor") else int | float):
            raise StartupError(f"{path}: rope type {rope.kind} needs {key}, not {value!r}")
        if isinstance(value, list) and len(value) != pairs:
            raise StartupError(f"{path}: rope {key} has {len(value)} entries for {pairs} pairs of dimensions")
    for key, value in rope.scaling.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(value, list) and not isinstance(number, int | float):
                raise StartupError(f"{path}: rope {key} has an entry that is no number")
            if isinstance(number, int | float) and not 0 <= number < MAX_CONSTANT:
                raise StartupError(f"{path}: rope {key} is out of bounds: {_shown(number)}")


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        if not required:
            return {}
        raise StartupError(f"{path}: no such file; a model directory needs config.json") from None


def _architecture_name(path: Path, config: dict[str, Any]) -> str:
    if names := config.get("architectures"):
        return str(names[0] if isinstance(names, list) else names)
    model_type = config.get("model_type")
    for name, row in ARCHITECTURES.items():
        if row.model_type == model_type:
            return name
    raise StartupError(f"{path}: has no architectures")


def _global_rope(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        return _rope(config)
    if architecture.local_rope_theta is None:
        raise StartupError(f"{path}: rope parameters that differ by layer are not supported")
    return _rope(config | {"rope_parameters": parameters.get("full_attention")})


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
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


def _local_rope(config: dict[str, Any], architecture: Architecture) -> dict[str, Any] | None:
    """The keys of transformers 4 other than its own are those of global layers."""
    if architecture.local_rope_theta is None:
        return None
    parameters = (config.get("rope_parameters") or {}).get("sliding_attention")
    theta = config.get("rope_local_base_freq", architecture.local_rope_theta)
    return _rope({"rope_parameters": parameters, "rope_theta": theta})


def _locality(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The window, and the layers without it."""
    if not architecture.sliding_window:
        return {}
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("sliding_window_pattern", architecture.global_every)
        full = global_layers(layers, every, config.get("max_window_layers", 0))
    elif len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise StartupError(f"{path}: layer_types must name full_attention or sliding_attention for each layer")
    else:
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    windowless = not window or not config.get("use_sliding_window", True) or len(full) == layers
    return {"sliding_window": 0 if windowless else window, "global_layers": full}


def global_layers(layers: int, every: int, first: int = 0) -> list[int]:
    """The first ones, and of all every n-th; 0 is none. Raises ValueError for more layers than any model has."""
    if layers > MAX_LAYERS:
        raise ValueError(f"{layers} layers")
    return [layer for layer in range(layers) if layer < first or (every and (layer + 1) % every == 0)]


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in _DTYPES else "float32"
