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

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1 << 20
USEFUL_CONTEXT = 2048
"""Tokens; what we suggest room for to those who ask for none."""

SERVICES = ("vllm-engine", "vllm-inference", "kserve")
"""Services of other engines that can be offered beside our own."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
CacheDType = Literal["auto", "fp8"]
Graphs = Literal["auto", "off"]
ActivationBits = Literal["8", "16"]


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
            description="weights and KV cache; auto is float32 on a CPU, where integers of GGUF files stay as they "
            "are, and the checkpoint's own on a GPU"
        ),
    ] = "auto"
    activation_bits: Annotated[
        ActivationBits,
        Meta(
            description="what products with a file's integers round the other side to, on a CPU; 8 is faster in "
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
            description="type of the cached keys and values: auto is the model's, fp8 half of 16 bits, on GPUs from "
            "compute capability 8.9 on"
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
            "prompts beside them; 0 is three times what it takes without",
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
            description="auto records steps in which every row decodes, and replays them, where the device and the "
            "model allow it; off runs them operation by operation"
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


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The gRPC server."""

    listen: Annotated[str, Meta(description="HOST:PORT, :PORT for all interfaces, or unix:PATH, to serve gRPC on")] = (
        "127.0.0.1:50051"
    )
    admin_listen: Annotated[
        str,
        Meta(
            description="HOST:PORT or unix:PATH of the service for operators (tailrace top, pause, drain); who reaches "
            "it may stop the engine; default: none"
        ),
    ] = ""
    served_model_name: Annotated[
        str, Meta(description="name clients may ask for beside the model's own, and the one we tell; default: none")
    ] = ""
    tls_cert: Annotated[
        str,
        Meta(
            description="FILE with the server's certificate chain in PEM, read again when it changes; default: no TLS"
        ),
    ] = ""
    tls_key: Annotated[str, Meta(description="FILE with the certificate's private key in PEM, read again likewise")] = (
        ""
    )
    tls_client_ca: Annotated[
        str, Meta(description="FILE with the authorities in PEM that every client must have a certificate of")
    ] = ""
    auth_tokens: Annotated[
        str,
        Meta(
            description="FILE of lines `principal:token`, read again when it changes; calls then need a bearer token, "
            "all but health; default: anybody may call"
        ),
    ] = ""
    admin_auth_tokens: Annotated[
        str, Meta(description="FILE of the same kind for the operators' service; default: who reaches its address")
    ] = ""
    load_reports: Annotated[
        bool, Meta(description="tell balancers the load with each answer (ORCA, for weighted_round_robin)")
    ] = False
    otlp_endpoint: Annotated[
        str,
        Meta(description="URL of a collector of OpenTelemetry spans, by gRPC; default: as OTEL_ variables say"),
    ] = ""
    channelz: Annotated[bool, Meta(description="serve channelz, the state of all connections, at --admin-listen")] = (
        False
    )
    health_listen: Annotated[
        str,
        Meta(
            description="HOST:PORT or unix:PATH of health alone, without TLS and tokens, for probes that have neither; "
            "default: with the other services only"
        ),
    ] = ""
    services: Annotated[
        str,
        Meta(
            description="services of other engines to offer beside our own, by name, with commas between: vllm-engine "
            "(for smg), vllm-inference (for vllm-router and dynamo), kserve (for tritonclient); default: none"
        ),
    ] = ""
    profile_dir: Annotated[
        str,
        Meta(description="DIR that profiles are written to, when operators ask for one; default: there are none"),
    ] = ""
    kv_events: Annotated[
        bool,
        Meta(
            description="tell clients of vllm-engine what the prefix cache holds, that is the tokens of all callers' "
            "prompts and outputs"
        ),
    ] = False
    metrics_listen: Annotated[str, Meta(description="HOST:PORT of the Prometheus endpoint; default: none")] = ""
    max_message_mib: Annotated[int, Meta(ge=1, le=2047, description="largest message accepted, MiB")] = 16
    keepalive_time: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="seconds of silence after which a connection is asked for a sign of life; 0: never",
        ),
    ] = 30.0
    keepalive_timeout: Annotated[
        float,
        Meta(ge=0.01, le=1e6, description="seconds it has for that; then its requests are aborted"),
    ] = 20.0
    max_connection_age: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="seconds after which a client is asked to connect anew, so that balancers spread it; 0: never",
        ),
    ] = 0.0
    max_connection_age_grace: Annotated[
        float, Meta(ge=0.001, le=1e6, description="seconds that calls of such a connection then have to end")
    ] = 600.0
    drain_timeout: Annotated[
        float, Meta(ge=0, le=1e6, description="seconds that running streams get after SIGTERM")
    ] = 30.0
    step_timeout: Annotated[
        float, Meta(gt=0, le=1e6, description="seconds the core may be silent before health turns NOT_SERVING")
    ] = 60.0
    hang_timeout: Annotated[
        float, Meta(gt=0, le=1e6, description="seconds the core may be silent before it is replaced")
    ] = 120.0
    max_core_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="times in a row that a core which died is replaced; streams go on")
    ] = 5
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="the least that is logged; info has one line per request"),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="form of a line of the log")] = "text"
    log_prompts: Annotated[bool, Meta(description="also log prompts and outputs")] = False


class AdmissionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait at the door. What is over it gets RESOURCE_EXHAUSTED, and when to try again."""

    max_queued_requests: Annotated[
        int, Meta(ge=0, le=1 << 20, description="requests waiting beyond those that run; more get RESOURCE_EXHAUSTED")
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="prompt tokens that wait at most, beside those of one request; more get RESOURCE_EXHAUSTED",
        ),
    ] = 1 << 20
    queue_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="seconds that a request which does not say waits to be admitted, then RESOURCE_EXHAUSTED; "
            "0: no limit",
        ),
    ] = 0.0


def service_names(services: str) -> tuple[str, ...]:
    """Those of SERVICES that the option names. Raises InvalidRequestError for one that there is not."""
    names = tuple(dict.fromkeys(name.strip() for name in services.split(",") if name.strip()))
    for name in names:
        if name not in SERVICES:
            raise InvalidRequestError("services", f"no service {name!r}; there are {', '.join(SERVICES)}")
    return names


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
