"""ModelSpec from config.json: both the keys of transformers 4 (rope_theta, rope_scaling, torch_dtype)
and of transformers 5 (rope_parameters, dtype)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from protos.architectures import ARCHITECTURES, REGISTRY
from protos.errors import InvalidRequestError, StartupError
from protos.json_files import read_json_object
from protos.model_spec import BasicSpec, ModelSpec, MoESpec, RopeSpec
from protos.params import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from protos.architecture import Architecture

Spec = TypeVar("Spec", bound=BasicSpec)

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
MAX_EXPERTS = 4096
MAX_POSITIONS = 1 << 24
MAX_CONSTANT = 1e12
_LARGEST: dict[str, int] = {
    "vocab_size": MAX_VOCAB_SIZE,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": MAX_LAYERS,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": MAX_POSITIONS,
}
"""What a file may say at most. Ten times what any model has: more is damage, or meant to take our memory."""
_BOUNDS: dict[str, float] = {
    "norm_eps": MAX_CONSTANT,
    "attention_scale": MAX_CONSTANT,
    "attention_softcap": MAX_CONSTANT,
    "logits_softcap": MAX_CONSTANT,
    "embedding_scale": MAX_CONSTANT,
    "sliding_window": MAX_CONSTANT,
    "embedding_size": _LARGEST["hidden_size"],
}
"""Likewise of what may be 0, and need be no integer."""
_SOFTCAPS = {"attention_softcap": "attn_logit_softcapping", "logits_softcap": "final_logit_softcapping"}
_NULL_MEANS_NONE = ("sliding_window", *_SOFTCAPS.values())
"""Keys whose null is the model's way to say that it has none; elsewhere, null means absent."""
_COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
_DTYPES = ("float32", "bfloat16", "float16")

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading values of the wrong kind or size ends in."""


def spec_from_config(directory: Path) -> BasicSpec:
    """Reads config.json and generation_config.json: a ModelSpec where there is a fused model for the architecture.

    Raises StartupError naming the file and the key.
    """
    path = directory / "config.json"
    config = _read_json(path, required=True)
    generation = _read_json(directory / "generation_config.json", required=False)
    name = _architecture_name(path, config)
    architecture = ARCHITECTURES.get(name)
    present = {key: value for key, value in config.items() if value is not None or key in _NULL_MEANS_NONE}
    if architecture is not None:
        present = _usual(path, present, architecture)
    generation = {key: value for key, value in generation.items() if value is not None}
    eos = generation.get("eos_token_id", present.get("eos_token_id", []))
    published = {
        "architecture": name,
        "dtype": _dtype(config),
        "bos_token_id": present.get("bos_token_id"),
        "eos_token_ids": eos if isinstance(eos, list) else [eos],
        "default_temperature": generation.get("temperature", 1.0),
        "default_top_p": generation.get("top_p", 1.0),
        "default_top_k": generation.get("top_k", 0),
    }
    try:
        _check_supported(path, present)
        published["vocab_size"] = _need(path, present, "vocab_size")
        if architecture is None:
            return _settled(path, _converted(path, published, BasicSpec))
        values = _values(path, present, architecture)
    except MALFORMED as error:
        raise StartupError(f"{path}: malformed: {error}") from None
    return to_spec(path, published | values)


def _usual(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The config under the keys that most architectures use, with what the absent ones mean.

    Raises StartupError for a value that is not supported.
    """
    for key, supported in architecture.only.items():
        if config.get(key, supported) != supported:
            raise StartupError(f"{path}: {key} {config[key]!r} is not supported")
    renamed = {usual: config[key] for key, usual in architecture.keys.items() if key in config}
    return _COMMON_DEFAULTS | architecture.defaults | config | renamed


def _need(path: Path, config: dict[str, Any], key: str) -> Any:
    if key not in config:
        raise StartupError(f"{path}: has no {key}")
    return config[key]


def _check_supported(path: Path, config: dict[str, Any]) -> None:
    """Raises StartupError for what no model is read with."""
    if "text_config" in config:
        raise StartupError(f"{path}: multimodal models are not supported")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise StartupError(f"{path}: weights quantised by {method} are not supported; use a plain or GGUF checkpoint")


def _values(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    def need(key: str) -> Any:
        return _need(path, config, key)

    if architecture.mlp_ratio:
        config = {"intermediate_size": architecture.mlp_ratio * need("hidden_size")} | config
    heads = need("num_attention_heads")
    bias = config["attention_bias"]
    return {
        "hidden_size": need("hidden_size"),
        "intermediate_size": need("intermediate_size"),
        "num_layers": need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or need("hidden_size") // max(heads, 1),
        "max_position_embeddings": config["max_position_embeddings"],
        "rope": _global_rope(path, config, architecture),
        "norm_eps": config["rms_norm_eps"],
        "hidden_act": canonical_activation(config["hidden_act"]),
        "tie_word_embeddings": config["tie_word_embeddings"],
        "attention_bias": bias if architecture.qkv_bias is None else architecture.qkv_bias,
        "attention_out_bias": bias if architecture.out_bias is None else architecture.out_bias,
        "mlp_bias": config["mlp_bias"],
        "merged_projections": architecture.merged_projections,
        "qk_norm": architecture.qk_norm,
        "norm_place": architecture.norm_place if config.get("do_layer_norm_before", True) else "sum",
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5 if "query_pre_attn_scalar" in config else 0.0,
        **softcaps(path, config, architecture),
        "embedding_size": config.get("embedding_size", 0),
        "position_offset": architecture.position_offset,
        "embedding_scale": need("hidden_size") ** 0.5 if architecture.scaled_embeddings else 1.0,
        **_locality(path, config, architecture),
        "local_rope": _local_rope(config, architecture),
        "unrotated_layers": _unrotated_layers(path, config, architecture),
        "moe": _moe(config, architecture),
    }


def to_spec(path: object, values: dict[str, Any]) -> ModelSpec:
    """Checks types and bounds. Raises StartupError naming the file and the field."""
    spec = _converted(path, values, ModelSpec)
    for name, bound in _BOUNDS.items():
        if not 0 <= (value := getattr(spec, name)) < bound:
            raise StartupError(f"{path}: {name} is {_shown(value)}")
    if spec.moe is not None:
        _check_moe(path, spec.moe)
    if spec.num_heads % spec.num_kv_heads:
        raise StartupError(f"{path}: {spec.num_heads} attention heads do not share {spec.num_kv_heads} KV heads evenly")
    if spec.hidden_act not in (known := ARCHITECTURES[spec.architecture].activations):
        raise StartupError(f"{path}: activation {spec.hidden_act} is not supported; supported are {', '.join(known)}")
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            _check_rope(path, spec.head_dim, rope)
    return _settled(path, spec)


def _converted(path: object, values: dict[str, Any], kind: type[Spec]) -> Spec:
    """Of the right types, and in bounds."""
    try:
        spec = msgspec.convert(values, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise StartupError(f"{path}: {error}") from None
    for name, largest in _LARGEST.items():
        if not 1 <= (value := getattr(spec, name, 1)) <= largest:
            raise StartupError(f"{path}: {name} is {_shown(value)}")
    return spec


def _settled(path: object, spec: Spec) -> Spec:
    """With defaults that make sense."""
    _check_defaults(path, spec)
    # An id that is none can never be drawn; as an index it would mean another one.
    ends = tuple(token_id for token_id in spec.eos_token_ids if 0 <= token_id < spec.vocab_size)
    return msgspec.structs.replace(spec, eos_token_ids=ends)


def _check_moe(path: object, moe: MoESpec) -> None:
    for name, largest in (
        ("num_experts", MAX_EXPERTS),
        ("num_experts_per_token", moe.num_experts),
        ("intermediate_size", _LARGEST["intermediate_size"]),
    ):
        if not 1 <= (value := getattr(moe, name)) <= largest:
            raise StartupError(f"{path}: {name} of the mixture of experts is {_shown(value)}")


def _check_defaults(path: object, spec: BasicSpec) -> None:
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
        is_table = key in ("short_factor", "long_factor")
        if isinstance(value, bool) or not isinstance(value, list if is_table else int | float):
            raise StartupError(f"{path}: rope type {rope.kind} needs {key}, not {value!r}")
        if isinstance(value, list) and len(value) != pairs:
            raise StartupError(f"{path}: rope {key} has {len(value)} entries for {pairs} pairs of dimensions")
    for key, value in rope.scaling.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(value, list) and not isinstance(number, int | float):
                raise StartupError(f"{path}: rope {key} has an entry that is no number")
            # The numbers of lists are divisors.
            smallest = 1 / MAX_CONSTANT if isinstance(value, list) else 0
            if isinstance(number, int | float) and not smallest <= number < MAX_CONSTANT:
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
    for name, row in REGISTRY.items():
        if row.model_type == model_type:
            return name
    raise StartupError(f"{path}: has no architectures")


def _global_rope(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        return _rope(config, architecture)
    if architecture.local_rope_theta is None:
        raise StartupError(f"{path}: rope parameters that differ by layer are not supported")
    return _rope(config | {"rope_parameters": parameters.get("full_attention")}, architecture)


def _rope(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own_keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    # Phi-3 style configs keep the trained length beside the rope table, and mean that one.
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return {
        "theta": parameters.get("rope_theta") or config["rope_theta"],
        "kind": architecture.rope_kinds.get(kind, kind),
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
    return _rope({"rope_parameters": parameters, "rope_theta": theta}, architecture)


def _locality(path: Path, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The window, and the layers without it."""
    if not architecture.sliding_window:
        return {}
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("sliding_window_pattern", architecture.global_every)
        full = every_nth_layer(layers, every, config.get("max_window_layers", 0))
    elif len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise StartupError(f"{path}: layer_types must name full_attention or sliding_attention for each layer")
    else:
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    windowless = not window or not config.get("use_sliding_window", True) or len(full) == layers
    return {"sliding_window": 0 if windowless else window, "global_layers": full}


def _unrotated_layers(path: Path, config: dict[str, Any], architecture: Architecture) -> list[int]:
    """Of those architectures that have such layers."""
    if not architecture.unrotated_every:
        return []
    layers, rotated = config["num_hidden_layers"], config.get("no_rope_layers")
    if rotated is None:
        return every_nth_layer(layers, config.get("no_rope_layer_interval", architecture.unrotated_every))
    if len(rotated) < layers:
        raise StartupError(f"{path}: no_rope_layers has {len(rotated)} entries for {layers} layers")
    return [layer for layer, is_rotated in enumerate(rotated[:layers]) if not is_rotated]


def every_nth_layer(layers: int, every: int, first: int = 0) -> list[int]:
    """The first ones, and of all every n-th; 0 is none. Raises ValueError for more layers than any model has."""
    if layers > MAX_LAYERS:
        raise ValueError(f"{layers} layers")
    return [layer for layer in range(layers) if layer < first or (every and (layer + 1) % every == 0)]


def softcaps(path: object, values: dict[str, Any], architecture: Architecture, prefix: str = "") -> dict[str, Any]:
    """Raises StartupError where the file has a cap that the architecture has not."""
    found = {}
    for field, key in _SOFTCAPS.items():
        found[field] = values.get(prefix + key, architecture.defaults.get(key)) or 0.0
        if found[field] and key not in architecture.defaults:
            raise StartupError(f"{path}: {prefix}{key} is not supported")
    return found


def canonical_activation(name: str) -> str:
    """One name for those that have several."""
    return "gelu_pytorch_tanh" if name == "gelu_new" else name


def _moe(config: dict[str, Any], architecture: Architecture) -> dict[str, Any] | None:
    """transformers 5 writes num_local_experts for what the files of other versions call num_experts."""
    if not architecture.experts or not (num_experts := config.get("num_local_experts", config["num_experts"])):
        return None
    layers = config["num_hidden_layers"]
    sparse = set(every_nth_layer(layers, config.get("decoder_sparse_step", 1))) - {*config.get("mlp_only_layers", ())}
    return {
        "num_experts": num_experts,
        "num_experts_per_token": config["num_experts_per_tok"],
        "intermediate_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "norm_weights": config.get("norm_topk_prob", False),
        "dense_layers": [layer for layer in range(layers) if layer not in sparse],
    }


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in _DTYPES else "float32"
