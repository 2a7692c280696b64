"""RayActor: one worker's process, where Ray has placed it."""

from __future__ import annotations

import os
import socket

import ray

from gpu_executor import wire
from gpu_executor.step_loop import MakeWorker, serve
from gpu_executor.uniproc import make_worker
from protos import codec

CONNECT_SECONDS = 30.0
SILENT_SECONDS = 5
"""After which a connection is asked for a sign of life, thrice: the end of a node closes no socket."""


class RayActor:
    """Says where it is, then serves the core, to which it connects, as long as that is there."""

    make: MakeWorker = staticmethod(make_worker)

    def where(self) -> tuple[str, str, list[str]]:
        """(node, its address, its GPUs that are this worker's)."""
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), gpus

    def meeting(self) -> str:
        """A URL on this node for torch.distributed; its port is free now."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as probe:
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def run(self, address: tuple[str, int], secret: bytes, gpus: list[str]) -> int:
        """A worker's life; `gpus` are those of all workers of the node, by local rank."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with socket.create_connection(address, timeout=CONNECT_SECONDS) as channel:
            notice_silence(channel)
            channel.sendall(secret)
            channel.settimeout(None)
            start = next(codec.read_frames(channel, wire.start))
            messages = codec.read_frames(channel, wire.to_worker)
            return serve(
                make_worker, start, messages, lambda message: channel.sendall(codec.frame(message, wire.encoder))
            )


def notice_silence(sock: socket.socket) -> None:
    """Small messages go at once, and a connection whose other side is gone without a word ends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, SILENT_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4 * SILENT_SECONDS * 1000)
