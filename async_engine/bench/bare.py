"""The least a grpc.aio server can do for a stream of tokens: what GenerateStream is held against.

    python -m async_engine.bench.bare STAMPS_FILE STEP_MS

Loop, environment, channel options, garbage collection and messages are the server's; grpc's poller is as grpc has it.
Each handler waits for the tick of a step and writes a message that all share; there is no core, no request and no text.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from async_engine.bench.stamps import StampWriter
from async_engine.endpoint import channel_options
from async_engine.own_process import quiet_gc
from protos.child_process import die_with_parent
from protos.server_config import ServerOptions
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc

FIRST_PRINTABLE, NUM_PRINTABLE = 32, 95


class BareServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Sends each stream one token per step from the next one on."""

    def __init__(self, stamps: StampWriter, step_seconds: float) -> None:
        self._stamps = stamps
        self._step_seconds = step_seconds
        self._num_steps = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._messages: list[pb.GenerateStreamResponse] = []
        """By offset: the first stream to get there builds what all send."""

    async def run(self) -> None:
        """Ticks for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due, loop.time()) + self._step_seconds
            await asyncio.sleep(due - loop.time())
            self._num_steps += 1
            self._stamps.stamp()
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> None:
        await context.write(pb.GenerateStreamResponse(started=pb.RequestStarted()))
        loop, begin = asyncio.get_running_loop(), self._num_steps
        for offset in itertools.count():
            while self._num_steps - begin <= offset:
                waiter = loop.create_future()
                self._waiters.append(waiter)
                await waiter
            if offset == len(self._messages):
                self._messages.append(_message(offset))
            await context.write(self._messages[offset])


def _message(offset: int) -> pb.GenerateStreamResponse:
    token_id = FIRST_PRINTABLE + offset % NUM_PRINTABLE
    sequence = pb.SequenceDelta(offset=offset, token_ids=[token_id], text=chr(token_id))
    return pb.GenerateStreamResponse(delta=pb.OutputDelta(sequences=[sequence]))


async def main(stamps_path: str, step_ms: str) -> None:
    servicer = BareServicer(StampWriter(stamps_path), float(step_ms) / 1e3)
    server = grpc.aio.server(options=channel_options(ServerOptions()))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"ready on 127.0.0.1:{port}: bare\n")
    sys.stdout.flush()
    quiet_gc()
    await servicer.run()


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(main(*sys.argv[1:]))
