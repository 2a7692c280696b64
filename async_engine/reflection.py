"""Server reflection, so that tools can call us without our .proto files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

V1 = "grpc.reflection.v1.ServerReflection"
"""The library has v1alpha alone; v1 has the same messages under another name, and newer tools ask only for that."""


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Offers the descriptors of `services` under both versions of the reflection protocol.

    v1 is not listed: who lists services asks for the descriptor of each, and it has none here.
    """
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (reflection.SERVICE_NAME, V1)
        )
    )
