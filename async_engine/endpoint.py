"""Endpoint: a gRPC server on one address; what stands between the network and the services."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from async_engine.auth import AuthInterceptor, Tokens
from async_engine.interceptors import ErrorInterceptor
from async_engine.late_services import LateServices
from async_engine.reflection import add_reflection
from async_engine.tls import server_credentials
from protos.config import MIB
from protos.errors import InvalidRequestError, StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from async_engine.health import HealthServicer
    from protos.server_config import ServerOptions

MAX_PENDING_CALLS = 65_536
NEVER = (1 << 31) - 1
"""What grpc takes for no limit in milliseconds."""
TOKENS = {"listen": "auth_tokens", "admin_listen": "admin_auth_tokens"}
"""Options that name an address, and those that name the tokens for it."""
GRPC_ADDRESSES = (*TOKENS, "health_listen")
"""Options that may also name a unix socket."""
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def channel_options(options: ServerOptions, shares_port: bool = False) -> list[tuple[str, Any]]:
    """grpc ignores keys it does not know without a word; tests hold these against the library's own list."""
    return [
        ("grpc.max_receive_message_length", options.max_message_mib * MIB),
        ("grpc.max_send_message_length", options.max_message_mib * MIB),
        # Kernels answer for a process that is stopped, and nobody for one whose cable is out: we ask ourselves. A
        # client that just does not read answers all the same.
        ("grpc.keepalive_time_ms", int(options.keepalive_time * 1000) or NEVER),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout * 1000)),
        # The sign of life is a ping, whose own limit, a minute, would count otherwise.
        ("grpc.http2.ping_timeout_ms", int(options.keepalive_timeout * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients that ping every 10 s, also while nothing streams, are well-behaved: no GOAWAY for them.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # grpc varies the age by a tenth, so that clients do not all come back at once.
        ("grpc.max_connection_age_ms", int(options.max_connection_age * 1000) or NEVER),
        ("grpc.max_connection_age_grace_ms", int(options.max_connection_age_grace * 1000)),
        # A window that grows lets a reader that does not read pile up messages here instead of merging them.
        ("grpc.http2.bdp_probe", 0),
        # Beyond 1,000 calls that wait for their handler grpc resets some at random; admission is ours to decide.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        ("grpc.enable_channelz", int(options.channelz)),
        # Two servers on one port by mistake is an error, not load balancing; front ends of one server balance by it.
        ("grpc.so_reuseport", int(shares_port)),
    ]


def split_address(option: str, address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; no host is all interfaces. Raises InvalidRequestError for what is neither."""
    host, colon, port = address.rpartition(":")
    is_number = port.removeprefix("-").isdecimal()
    if not colon or not is_number or "/" in host or (":" in host and not host.startswith("[")):
        raise InvalidRequestError(
            option, f"must be HOST:PORT{' or unix:PATH' * (option in GRPC_ADDRESSES)}, not {address!r}"
        )
    if not 0 <= int(port) <= 65535:
        raise InvalidRequestError(option, "port must be 0-65535")
    return host.strip("[]") or "0.0.0.0", int(port)


def check_address(option: str, address: str) -> None:
    """Tries whether the option's address can be had. Raises StartupError with the reason, or InvalidRequestError."""
    path = Path(address.removeprefix("unix:"))
    try:
        if option in GRPC_ADDRESSES and address.startswith("unix:"):
            if not path.is_socket():  # one that is there is replaced
                _bind(socket.AF_UNIX, str(path))
                path.unlink()
        else:
            host, port = split_address(option, address)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, target in found[:-1]:
                with contextlib.suppress(OSError):
                    return _bind(family, target)
            _bind(found[-1][0], found[-1][4])
    except UnicodeError:
        raise InvalidRequestError(option, f"no host can have the name of {address!r}") from None
    except OSError as error:
        reason = "; is it in use?" if error.errno == errno.EADDRINUSE else f": {error.strerror or error};"
        raise StartupError(f"cannot listen on {address}{reason} choose another --{option.replace('_', '-')}") from None


def check_files(options: ServerOptions) -> None:
    """Raises StartupError, or InvalidRequestError, if a file that stands before the services is of no use."""
    if options.channelz and not options.admin_listen:
        raise InvalidRequestError("channelz", "needs --admin-listen")
    if (path := options.profile_dir) and not (Path(path).is_dir() and os.access(path, os.W_OK)):
        raise InvalidRequestError("profile_dir", f"{path} is no directory that can be written to")
    server_credentials(options)
    for option in TOKENS.values():
        if path := getattr(options, option):
            Tokens(Path(path))


def _bind(family: int, address: Any) -> None:
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


class Endpoint:
    """A gRPC server on the address that an option names; health and reflection are on each, and the other `services`
    are added to `late` when there is something to serve."""

    def __init__(
        self,
        option: str,
        options: ServerOptions,
        health: HealthServicer,
        services: Iterable[str],
        observers: Iterable[grpc.aio.ServerInterceptor] = (),
        shares_port: bool = False,
    ) -> None:
        """`observers` see the calls that are let in, and their errors before those become statuses. Other front ends of
        the server listen there, too, if it `shares_port`.

        Raises StartupError, or InvalidRequestError, if a file for TLS or with tokens is of no use.
        """
        self._option = option
        self.address: str = getattr(options, option)
        """What it listens on; once bound, with the port resolved."""
        # Probes have neither certificates nor tokens: nothing but health is to be had where they ask.
        guarded = option in TOKENS
        self._credentials = server_credentials(options) if guarded else None
        tokens = getattr(options, TOKENS[option]) if guarded else ""
        interceptors: list[grpc.aio.ServerInterceptor] = [AuthInterceptor(Tokens(Path(tokens)))] if tokens else []
        # The first is the outermost.
        interceptors += [ErrorInterceptor(), *observers]
        self.grpc = grpc.aio.server(interceptors=interceptors, options=channel_options(options, shares_port))
        health_pb2_grpc.add_HealthServicer_to_server(health, self.grpc)
        add_reflection(self.grpc, (*services, HEALTH))
        self.late = LateServices(services)
        self.grpc.add_generic_rpc_handlers((self.late,))

    def bind(self) -> None:
        """Raises StartupError or InvalidRequestError if the address is no good."""
        listen = self.address
        is_path = listen.startswith("unix:")
        if not is_path:
            host, port = split_address(self._option, listen)
            listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                port = self.grpc.add_insecure_port(listen)
            else:
                port = self.grpc.add_secure_port(listen, self._credentials)
        except RuntimeError:
            check_address(self._option, self.address)
            flag = self._option.replace("_", "-")
            raise StartupError(f"cannot listen on {listen}; choose another --{flag}") from None
        self.address = listen if is_path else f"{listen.rpartition(':')[0]}:{port}"
