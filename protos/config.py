"""Every knob, declared once: type, bounds, default and help. The command line is derived from it.

Sections are frozen; nothing changes them after `build`. Only `build` validates (msgspec checks
bounds when converting, not in constructors), so every config that crosses a border comes from it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from protos.adapter_config import AdapterOptions
from protos.errors import InvalidRequestError
from protos.parallel_config import ParallelOptions
from protos.scale_config import CoreServerOptions, ScaleOptions
from protos.server_config import AdmissionOptions, ServerOptions, service_names

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1 << 20
USEFUL_CONTEXT = 2048
"""Tokens; what we suggest room for to those who ask for none."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
CacheDType = Literal["auto", "float32", "float16", "fp8"]
Graphs = Literal["auto", "off"]
ActivationBits = Literal["8", "16"]
Quantization = Literal["auto", "none", "int8", "int4"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is held."""

    model: Annotated[
        str,
        Meta(
            description="Hugging Face directory or hub id, a .gguf file, 'null' for scripted tokens without a model; "
            "empty is the embedded SmolLM2-135M-Instruct"
        ),
    ] = ""
    dtype: Annotated[
        DType,
        Meta(
            description="weights and KV cache; auto is the checkpoint's own on a GPU; on a CPU it is float32, and "
            "weights of products stay as the checkpoint has them: integers of GGUF files, 16-bit floats"
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Meta(
            description="weights of products on a CPU: auto is as the checkpoint has them; none is floats, also of a "
            "GGUF file's integers; int8 and int4 make integers of floats at load (with int4 the head and the embedding "
            "have 8 bits), which changes some tokens"
        ),
    ] = "auto"
    activation_bits: Annotated[
        ActivationBits,
        Meta(
            description="what products with integers round the other side to, on a CPU; 8 is faster in "
            "batches and for prompts, and changes some tokens"
        ),
    ] = "16"
    load_format: Annotated[
        LoadFormat,
        Meta(
            description="auto is as the model's files are; dummy makes random weights, to measure speed with no more "
            "than config.json and a tokenizer"
        ),
    ] = "auto"
    device: Annotated[Device, Meta(description="auto takes a GPU where there is one")] = "auto"
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="longest prompt + output, tokens; 0 is the model's limit or what the KV cache can hold",
        ),
    ] = 0


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[int, Meta(ge=8, le=256, description="tokens per KV block, a multiple of 8")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of a GPU's memory that weights, the largest step, graphs and KV cache take together, "
            "with whatever else is on it",
        ),
    ] = 0.9
    kv_cache_memory: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="MiB for the KV cache of each worker; 0 is what --gpu-memory-utilization leaves on a GPU, on a "
            "CPU a third of the memory free at start, at most 1024 for all",
        ),
    ] = 0
    kv_cache_dtype: Annotated[
        CacheDType,
        Meta(
            description="type of the cached keys and values: auto is float16 where a CPU computes with "
            "integers, else the model's; fp8, half of 16 bits, is for GPUs from compute capability 8.9 on"
        ),
    ] = "auto"
    num_kv_blocks: Annotated[
        int, Meta(ge=0, le=1 << 28, description="number of KV blocks; 0 derives it from --kv-cache-memory")
    ] = 0
    prefix_caching: Annotated[bool, Meta(description="share the KV blocks of equal prompt prefixes")] = True


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs in a step."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences running at once")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=1 << 20, description="tokens computed per step, prompts and outputs together")
    ] = 2048
    long_prefill_threshold: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="prompt tokens per request and step while others have work; 0 is a quarter of the budget",
        ),
    ] = 0
    max_inter_token_gap: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds that a step with running outputs aims to stay within: it computes so many tokens of "
            "prompts beside them; 0 is 2.5 times what it takes without",
        ),
    ] = 0.0
    max_steps_in_flight: Annotated[
        int,
        Meta(
            ge=0,
            le=8,
            description="steps issued before the first one's result is back; 0 is 1 on a CPU, 2 on a GPU, and in a "
            "pipeline one for each stage",
        ),
    ] = 0


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workers."""

    num_threads: Annotated[
        int, Meta(ge=0, le=4096, description="CPU threads of a worker; 0: its share of the cores")
    ] = 0
    graphs: Annotated[
        Graphs,
        Meta(
            description="auto records steps and replays them, on a GPU those in which every row decodes, where the "
            "device and the model allow it; off runs them operation by operation"
        ),
    ] = "auto"
    null_step_ms: Annotated[
        float, Meta(ge=0, le=60_000, description="simulated device time per step of the 'null' model, milliseconds")
    ] = 0.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine needs to know; sent to the core process on start."""

    model: ModelOptions = ModelOptions()
    adapters: AdapterOptions = AdapterOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    executor: ExecutorOptions = ExecutorOptions()
    parallel: ParallelOptions = ParallelOptions()

    @property
    def engine(self) -> EngineConfig:
        """Without what is for servers around it."""
        return EngineConfig(**{name: getattr(self, name) for name in sections(EngineConfig)})


class ServeConfig(EngineConfig, frozen=True, kw_only=True):
    """`tailrace serve`: a server around an engine."""

    server: ServerOptions = ServerOptions()
    admission: AdmissionOptions = AdmissionOptions()
    scale: ScaleOptions = ScaleOptions()


class CoreConfig(EngineConfig, frozen=True, kw_only=True):
    """`tailrace core`: the core of an engine, for front ends elsewhere."""

    server: CoreServerOptions = CoreServerOptions()


def sections(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The section structs of a config, by the name of their field."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


ConfigT = TypeVar("ConfigT", EngineConfig, ServeConfig, CoreConfig)


def build(kind: type[ConfigT], **options: Any) -> ConfigT:
    """Builds and validates a config from flat options (`max_num_seqs=8`), in whatever sections they live.

    Raises InvalidRequestError naming the option that is unknown or out of bounds.
    """
    given = dict(options)
    values: dict[str, dict[str, Any]] = {}
    for name, section in sections(kind).items():
        known = {field.name for field in msgspec.structs.fields(section)}
        values[name] = {key: options.pop(key) for key in known & options.keys()}
    for unknown in options:
        raise InvalidRequestError(unknown, "no such option")
    try:
        config = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, given) from None
    if isinstance(config, ServeConfig):
        service_names(config.server.services)
    if config.parallel.executor == "uniproc" and config.parallel.num_workers > 1:
        raise InvalidRequestError("executor", f"uniproc is one worker, not {config.parallel.num_workers}")
    block_size = config.cache.block_size
    if block_size % 8:
        raise InvalidRequestError("block_size", f"must be a multiple of 8, not {block_size}")
    if config.cache.num_kv_blocks == 1:
        context = config.model.max_model_len or USEFUL_CONTEXT
        raise InvalidRequestError(
            "num_kv_blocks",
            f"must be more than 1, which holds no tokens; {1 + -(-context // block_size)} hold a context of {context}",
        )
    return config


_BOUND = re.compile(r"Expected `\w+` (>=|<=|>|<) (\S+)")
_BOUND_WORDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def refusal(error: msgspec.ValidationError, options: Mapping[str, Any]) -> InvalidRequestError:
    """What msgspec has against one of the options, by its name and in our words."""
    problem, _, path = str(error).partition(" - at ")
    name = path.strip("`$").rpartition(".")[2]
    if bound := _BOUND.fullmatch(problem):
        problem = f"must be {_BOUND_WORDS[bound[1]]} {bound[2].removesuffix('.0')}, not {options[name]}"
    return InvalidRequestError(name, problem)
