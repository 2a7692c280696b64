"""HealthServicer: grpc.health.v1, with a Watch that stays open.

Why not the library's: there one watcher that leaves cuts off the others of the same service, and one
that does not read blocks every later change of status.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """One status for all `services` (and for "", the server as a whole); NOT_SERVING until `set`."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset({"", *services})
        self._status: int = _Status.NOT_SERVING
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def is_serving(self) -> bool:
        return self._status == _Status.SERVING

    def set(self, serving: bool) -> None:
        """Changes the status and tells the watchers."""
        self._status = _Status.SERVING if serving else _Status.NOT_SERVING
        self._notify()

    def close(self) -> None:
        """Ends the watches, so that the server need not wait for their clients to go."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Sends the status now and at each change. A slow reader misses changes that did not last."""
        sent = None
        while not self._closed:
            changed = self._changed
            known = request.service in self._services
            status = self._status if known else _Status.SERVICE_UNKNOWN
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()
