"""Adapter: a LoRA adapter's files as PEFT saves them, and whether they fit a model; all but the numbers in them."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from protos.adapter import Adapter
from protos.architectures import ARCHITECTURES
from protos.errors import AdapterError, StartupError
from protos.json_files import read_json_object
from protos.model_spec import BasicSpec, ModelSpec
from protos.tensor_names import bare_name, renamed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Tensor types that are taken, with their size in bytes."""
_MAX_ALPHA = 1e6
_CHANGES = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "modules_to_save", "trainable_token_indices"),
    *("layer_replication", "target_parameters", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)
"""Keys of the config that make of the adapter more than sums of products, unless they are empty."""
_KEEPING_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`, those after which the adapter is for the model's own weights."""
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")
_PLAIN = re.compile(r"\^?(?:\w|\\?[.])+")
"""Patterns of module names that are taken: names, whose dots may be escaped, and with ^ whole ones. So none takes
long to look for."""


class AdapterModule(NamedTuple):
    """What an adapter adds to a module of the model: x to scale * B A x, A [rank, inputs], B [outputs, rank]."""

    name: str
    """As our models name it, from the layers on; where transformers' own code computes, as it does."""
    rank: int
    scale: float
    a: str
    b: str
    """The tensors' names in the file."""


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    num_bytes: int


def read_adapter(name: str, path: Path, spec: BasicSpec, max_rank: int) -> Adapter:
    """Raises AdapterError with the file and what is wrong with it.

    Of a model that is not computed by our own code nothing is known here: then the files have to fit each other.
    """
    path = path.absolute()
    modules, num_bytes, digest = _read(path, spec, max_rank)
    return Adapter(name, str(path), digest, max(module.rank for module in modules), num_bytes)


def adapter_modules(adapter: Adapter, spec: BasicSpec, max_rank: int) -> list[AdapterModule]:
    """Of an adapter that was read before. Raises AdapterError, also where its files are not those any more."""
    path = Path(adapter.path)
    modules, _, digest = _read(path, spec, max_rank)
    if digest != adapter.digest:
        raise AdapterError(f"{path}: the files have changed since adapter {adapter.name} was read from them")
    return modules


def module_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the modules of a layer that an adapter may be for: all but experts and what picks them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"self_attn.o_proj": (hidden, queries)}
    if spec.merged_projections:
        shapes["self_attn.qkv_proj"] = queries + 2 * keys, hidden
    else:
        shapes |= {"self_attn.q_proj": (queries, hidden)}
        shapes |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    if spec.is_sparse(layer):
        return shapes
    shapes["mlp.down_proj"] = hidden, inner
    gated = ARCHITECTURES[spec.architecture].gated
    if gated and spec.merged_projections:
        shapes["mlp.gate_up_proj"] = 2 * inner, hidden
    else:
        shapes |= {f"mlp.{name}_proj": (inner, hidden) for name in (("gate", "up") if gated else ("up",))}
    return shapes


def _read(path: Path, spec: BasicSpec, max_rank: int) -> tuple[list[AdapterModule], int, str]:
    """The modules, the bytes of their tensors and the digest of the files."""
    try:
        modules, num_bytes = _read_modules(path, spec, max_rank)
        return modules, num_bytes, _digest(path)
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from None


def _read_modules(path: Path, spec: BasicSpec, max_rank: int) -> tuple[list[AdapterModule], int]:
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise AdapterError(f"{path / name}: no such file; an adapter is a directory of {CONFIG} and {WEIGHTS}")
    try:
        config = read_json_object(path / CONFIG)
    except StartupError as error:
        raise AdapterError(str(error)) from None
    scales = _Scales(path / CONFIG, config, max_rank)
    file = path / WEIGHTS
    tensors = _tensors(file)
    pairs: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"{file}: tensor {name} is no lora_A or lora_B of a linear module")
        pairs.setdefault(match[1], {})[match[2]] = name
    if not pairs:
        raise AdapterError(f"{file}: holds no tensors")
    modules = []
    for name, pair in sorted(pairs.items()):
        if len(pair) < 2:
            raise AdapterError(f"{file}: tensor {next(iter(pair.values()))} is there without the other of its pair")
        rank, scale = scales.of(name)
        module = AdapterModule(_our_name(file, name, spec), rank, scale, pair["A"], pair["B"])
        _check_shapes(file, module, tensors, spec)
        modules.append(module)
    names = [module.name for module in modules]
    if len(set(names)) < len(names):
        raise AdapterError(f"{file}: has two adapters for one module, under other names")
    return modules, sum(tensor.num_bytes for tensor in tensors.values())


class _Scales:
    """Rank and scale of each module, as the config says."""

    def __init__(self, file: Path, config: dict[str, Any], max_rank: int) -> None:
        self._file, self._max_rank = file, max_rank
        if config.get("peft_type") != "LORA":
            raise AdapterError(f"{file}: peft_type is {config.get('peft_type')!r}, not LORA")
        if config.get("bias", "none") != "none":
            raise AdapterError(f"{file}: bias is {config['bias']!r}; only none is supported")
        for key in _CHANGES:
            if config.get(key):
                raise AdapterError(f"{file}: {key} is not supported")
        if config.get("init_lora_weights") not in _KEEPING_STARTS:
            raise AdapterError(
                f"{file}: init_lora_weights is {config['init_lora_weights']!r}, which changes the model's own weights; "
                "save it as a plain LoRA adapter"
            )
        self._by_root = config.get("use_rslora", False)
        if not isinstance(self._by_root, bool):
            raise AdapterError(f"{file}: use_rslora is no boolean")
        self._rank, self._alpha = self._is_rank("r", config.get("r")), self._is_alpha(config.get("lora_alpha"))
        self._ranks = self._patterns("rank_pattern", config)
        self._alphas = self._patterns("alpha_pattern", config)

    def of(self, module: str) -> tuple[int, float]:
        """By the name in the adapter's own files."""
        rank, alpha = _matched(self._ranks, module), _matched(self._alphas, module)
        rank = self._rank if rank is None else self._is_rank("rank_pattern", rank)
        alpha = self._alpha if alpha is None else self._is_alpha(alpha)
        return rank, alpha / (math.sqrt(rank) if self._by_root else rank)

    def _is_rank(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AdapterError(f"{self._file}: {key}: {value!r} is no rank")
        if value > self._max_rank:
            raise AdapterError(
                f"{self._file}: {key}: rank {value} is more than the largest that is taken, {self._max_rank} "
                "(--max-adapter-rank)"
            )
        return value

    def _is_alpha(self, value: Any) -> float:
        # NaN fails the comparison.
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MAX_ALPHA:
            raise AdapterError(f"{self._file}: lora_alpha or alpha_pattern: {value!r} is no scale")
        return float(value)

    def _patterns(self, key: str, config: dict[str, Any]) -> dict[str, Any]:
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{self._file}: {key} is no object")
        for pattern in patterns:
            if not _PLAIN.fullmatch(pattern):
                raise AdapterError(f"{self._file}: {key}: {pattern!r} is no plain name; only those are supported")
        return patterns


def _matched(patterns: dict[str, Any], module: str) -> Any:
    """What the first pattern says that the module's name, or the end of it from a dot on, is of."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?{pattern}", module):
            return value
    return None


def _tensors(file: Path) -> dict[str, _Tensor]:
    """What the file holds, by its header."""
    found = {}
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                entry = opened.get_slice(name)
                shape, kind = tuple(entry.get_shape()), entry.get_dtype()
                if kind not in _FLOATS:
                    raise AdapterError(f"{file}: tensor {name} has type {kind}; supported are {', '.join(_FLOATS)}")
                found[name] = _Tensor(shape, math.prod(shape) * _FLOATS[kind])
    except SafetensorError as error:
        raise AdapterError(f"{file}: is cut short or no safetensors file ({error})") from None
    return found


def _our_name(file: Path, name: str, spec: BasicSpec) -> str:
    """Of a module of the model. Raises AdapterError where the model has none that an adapter may be for."""
    if not isinstance(spec, ModelSpec):
        return name
    # Parts of names are between dots: the one that follows those of a module is taken away again.
    ours = bare_name(renamed(f"{name}.weight", ARCHITECTURES[spec.architecture].renamed)).removesuffix(".weight")
    match = _LAYER.fullmatch(ours)
    if match is None:
        raise AdapterError(f"{file}: module {name}: adapters are for the linear modules of layers alone")
    layer, module = int(match[1]), match[2]
    if layer >= spec.num_layers:
        raise AdapterError(f"{file}: module {name}: the model has {spec.num_layers} layers")
    if module not in (known := module_shapes(spec, layer)):
        raise AdapterError(
            f"{file}: module {name}: the model has no such module, or none that adapters may be for; these are "
            f"{', '.join(sorted(known))}"
        )
    return f"layers.{layer}.{module}"


def _check_shapes(file: Path, module: AdapterModule, tensors: dict[str, _Tensor], spec: BasicSpec) -> None:
    a, b = tensors[module.a].shape, tensors[module.b].shape
    if isinstance(spec, ModelSpec):
        layer, _, name = module.name.removeprefix("layers.").partition(".")
        outs, ins = module_shapes(spec, int(layer))[name]
    else:
        outs, ins = b[0] if b else 0, a[-1] if a else 0
    for tensor, shape, wanted in ((module.a, a, (module.rank, ins)), (module.b, b, (outs, module.rank))):
        if shape != wanted:
            raise AdapterError(
                f"{file}: tensor {tensor} has shape {list(shape)}; by the model and {CONFIG} it is {list(wanted)}"
            )


def _digest(path: Path) -> str:
    """Of both files' content, each by itself: so that no byte can move from one to the other."""
    whole = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        with (path / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()
