"""Every knob, declared once: type, bounds, default and help. The command line is derived from it.

Sections are frozen; nothing changes them after `build`. Only `build` validates (msgspec checks
bounds when converting, not in constructors), so every config that crosses a border comes from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from protos.errors import InvalidRequestError

MIB = 1 << 20

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


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
        DType, Meta(description="weights and KV cache; auto is float32 on a CPU, the checkpoint's own on a GPU")
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
    kv_cache_memory: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="MiB for the KV cache; 0 is a third of the memory free at start, on a CPU at most 1024",
        ),
    ] = 0
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
    max_steps_in_flight: Annotated[
        int,
        Meta(
            ge=0, le=8, description="steps issued before the first one's result is back; 0 is 1 on a CPU and 2 on a GPU"
        ),
    ] = 0


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workers."""

    num_threads: Annotated[int, Meta(ge=0, le=4096, description="CPU threads of a worker; 0 is one per core")] = 0
    null_step_ms: Annotated[
        float, Meta(ge=0, le=60_000, description="simulated device time per step of the 'null' model, milliseconds")
    ] = 0.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine needs to know; sent to the core process on start."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    executor: ExecutorOptions = ExecutorOptions()


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The gRPC server."""

    listen: Annotated[str, Meta(description="HOST:PORT, or unix:PATH, to serve gRPC on")] = "127.0.0.1:50051"
    served_model_name: Annotated[
        str, Meta(description="name clients may ask for beside the model's own; empty is derived from the path")
    ] = ""
    metrics_listen: Annotated[str, Meta(description="HOST:PORT of the Prometheus endpoint; empty has none")] = ""
    max_queued_requests: Annotated[
        int, Meta(ge=0, le=1 << 20, description="requests waiting beyond those that run; more get RESOURCE_EXHAUSTED")
    ] = 1024
    max_message_mib: Annotated[int, Meta(ge=1, le=2047, description="largest message accepted, MiB")] = 64
    drain_timeout: Annotated[
        float, Meta(ge=0, le=1e6, description="seconds that running streams get after SIGTERM")
    ] = 30.0
    step_timeout: Annotated[
        float, Meta(gt=0, le=1e6, description="seconds the core may be silent before health turns NOT_SERVING")
    ] = 60.0
    log_format: Annotated[Literal["text", "json"], Meta(description="one line per request, in this form")] = "text"
    log_prompts: Annotated[bool, Meta(description="also log prompts and outputs")] = False


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`tailrace serve`: a server around an engine."""

    server: ServerOptions = ServerOptions()
    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    executor: ExecutorOptions = ExecutorOptions()

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(model=self.model, cache=self.cache, scheduler=self.scheduler, executor=self.executor)


def sections(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The section structs of a config, by the name of their field."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


ConfigT = TypeVar("ConfigT", EngineConfig, ServeConfig)


def build(kind: type[ConfigT], **options: Any) -> ConfigT:
    """Builds and validates a config from flat options (`max_num_seqs=8`), in whatever sections they live.

    Raises InvalidRequestError naming the option that is unknown or out of bounds.
    """
    values: dict[str, dict[str, Any]] = {}
    for name, section in sections(kind).items():
        known = {field.name for field in msgspec.structs.fields(section)}
        values[name] = {key: options.pop(key) for key in known & options.keys()}
    for unknown in options:
        raise InvalidRequestError(unknown, "no such option")
    try:
        config = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise InvalidRequestError(path.strip("`").rpartition(".")[2], problem) from None
    if config.cache.block_size % 8:
        raise InvalidRequestError("block_size", f"must be a multiple of 8, not {config.cache.block_size}")
    return config
