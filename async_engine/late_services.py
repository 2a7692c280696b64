"""LateServices: services whose handlers come when the server listens already; until then callers are told so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from protos.errors import LoadingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


async def _loading(requests: Any, context: Any) -> NoReturn:
    raise LoadingError("the model is loading")


_LOADING: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_loading)
"""For methods of every kind: it reads nothing and answers with a status."""


class LateServices(grpc.GenericRpcHandler):
    """Stands for the services of these names in a server; to who adds servicers it looks like one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._handlers: list[grpc.GenericRpcHandler] = []
        self.is_loading = True
        """Until it is turned off, when all servicers have been added."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        for handlers in self._handlers:
            if (handler := handlers.service(handler_call_details)) is not None:
                return handler
        name = handler_call_details.method[1:].partition("/")[0]
        return _LOADING if self.is_loading and name in self._names else None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers += generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """The generic handlers have them, too."""
