"""Options of a gRPC server, and of what may wait at its door."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protos.errors import InvalidRequestError

SERVICES = ("vllm-engine", "vllm-inference", "kserve")
"""Services of other engines that can be offered beside our own."""


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
