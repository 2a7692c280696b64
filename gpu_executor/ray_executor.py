"""RayWorkers: an actor for each worker, over the nodes of a Ray cluster, and a connection to each, which steps take.

Ray places workers, starts them and tells how they ended. Steps do not pass through it: a call of an actor costs some
ten times what a message on a connection does. A stage is a bundle of the placement group, so its workers, which
exchange most, share a node; stages are packed onto as few nodes as hold them.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpu_executor import wire
from gpu_executor.channel import Channel
from gpu_executor.ray_actor import RayActor, notice_silence
from protos import codec
from protos.errors import StartupError
from protos.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protos.config import EngineConfig

CONNECT_SECONDS = 5.0
PLACEMENT_SECONDS = 60.0
"""That others get to make room, the workers of an engine that died among them."""
SECRET_BYTES = 32
SECRET_SECONDS = 2.0
"""That a connection gets to tell whose it is."""


class RayWorker(Channel):
    """The core's end of one worker."""

    def __init__(self, sock: socket.socket, start: wire.Start, actor: Any, run: Any, address: str) -> None:
        super().__init__(sock, start)
        self._actor = actor
        self._run = run
        self._address = address

    def __str__(self) -> str:
        return f"worker {self.rank} (on {self._address})"

    def how_it_ended(self) -> str:
        return _how_it_ended(self._run)

    @property
    def was_killed(self) -> bool:
        """Ray does not tell a crash from the end of a node."""
        return True

    def state(self) -> str:
        return "connected"

    def kill(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor)

    def disconnect(self) -> None:
        """Whoever waits on the socket sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class RayWorkers:
    """The way to workers of a Ray cluster."""

    def __init__(
        self, config: EngineConfig, eos_token_ids: tuple[int, ...], actor_class: type[RayActor] = RayActor
    ) -> None:
        self._config = config
        self._actor_class = actor_class
        self._eos_token_ids = eos_token_ids
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._workers: list[RayWorker] = []
        self._num_sent = 0

    def start(self) -> Sequence[RayWorker]:
        _connect()
        try:
            return self._start()
        except RayError as error:
            raise StartupError(f"--executor ray: {wire.one_line(error)}") from None

    def _start(self) -> Sequence[RayWorker]:
        resource, amount = self._resource()
        self._place_actors(resource, amount)
        found = ray.get([actor.where.remote() for actor in self._actors])
        meeting = ray.get(self._actors[0].meeting.remote()) if len(self._actors) > 1 else ""
        nodes = [node for node, _, _ in found]
        with socket.create_server((ray.util.get_node_ip_address(), 0), backlog=len(nodes)) as listener:
            keys = [secrets.token_bytes(SECRET_BYTES) for _ in nodes]
            for actor, key, node in zip(self._actors, keys, nodes, strict=True):
                gpus = [gpu for other, _, own in found if other == node for gpu in own]
                self._runs.append(actor.run.remote(listener.getsockname()[:2], key, gpus))
            sockets = self._accept(listener, keys)
        for rank, sock in enumerate(sockets):
            place = Place(
                rank=rank,
                tensor_size=self._config.parallel.tensor_parallel_size,
                pipeline_size=self._config.parallel.pipeline_parallel_size,
                local_rank=nodes[:rank].count(nodes[rank]),
                local_size=nodes.count(nodes[rank]),
                rendezvous=meeting,
            )
            start = wire.Start(self._config, self._eos_token_ids, place, spin_seconds=0.0)
            self._workers.append(RayWorker(sock, start, self._actors[rank], self._runs[rank], found[rank][1]))
        return self._workers

    def _resource(self) -> tuple[str, int]:
        """What a worker takes of its node."""
        model, cluster = self._config.model, ray.cluster_resources()
        if model.device == "cuda" or (model.device == "auto" and model.model != "null" and cluster.get("GPU", 0)):
            return "GPU", 1
        return "CPU", max(1, self._config.executor.num_threads)

    def _place_actors(self, resource: str, amount: int) -> None:
        """Raises StartupError where the cluster is too small, or has no room for too long."""
        parallel = self._config.parallel
        bundle = amount * parallel.tensor_parallel_size
        nodes = [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]
        room = sum(int(size // bundle) for size in nodes)
        if room < parallel.pipeline_parallel_size:
            raise StartupError(
                f"the Ray cluster is too small: each of {parallel.pipeline_parallel_size} stages needs {bundle} "
                f"{resource}s on one node; its nodes have {', '.join(f'{size:g}' for size in nodes)}"
            )
        self._group = placement_group([{resource: bundle}] * parallel.pipeline_parallel_size, strategy="PACK")
        if not self._group.wait(PLACEMENT_SECONDS):
            raise StartupError(f"the Ray cluster had no room for {PLACEMENT_SECONDS:g} s: others use its {resource}s")
        for rank in range(parallel.num_workers):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // parallel.tensor_parallel_size
            )
            options = {"num_gpus": amount, "num_cpus": 0} if resource == "GPU" else {"num_cpus": amount}
            self._actors.append(ray.remote(self._actor_class).options(scheduling_strategy=strategy, **options).remote())

    def _accept(self, listener: socket.socket, keys: list[bytes]) -> list[socket.socket]:
        """A connection of each worker, known by its secret. Raises StartupError if one ends before."""
        found: dict[int, socket.socket] = {}
        listener.settimeout(1.0)
        while len(found) < len(keys):
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
            if ended:
                raise StartupError(f"worker {self._runs.index(ended[0])} {_how_it_ended(ended[0])} before it connected")
            with contextlib.suppress(TimeoutError):
                sock, _ = listener.accept()
                sock.settimeout(SECRET_SECONDS)
                told = b""
                with contextlib.suppress(OSError):
                    told = sock.recv(SECRET_BYTES, socket.MSG_WAITALL)
                rank = next((rank for rank, key in enumerate(keys) if hmac.compare_digest(key, told)), None)
                if rank is None:
                    sock.close()
                    continue
                notice_silence(sock)
                sock.settimeout(None)
                found[rank] = sock
        return [found[rank] for rank in range(len(keys))]

    def send(self, message: bytes, wait: Callable[[], None]) -> int:
        data = codec.prefixed(message)
        for worker in self._workers:
            worker.send(data, wait)
        self._num_sent += 1
        return self._num_sent

    def num_taken(self, rank: int) -> int | None:
        return None

    def close(self, grace: float) -> None:
        if not ray.is_initialized():
            return
        if self._runs and grace:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=grace)
        for actor in self._actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        for worker in self._workers:
            worker.disconnect()
        ray.shutdown()


def _how_it_ended(run: Any) -> str:
    try:
        ray.get(run, timeout=1.0)
    except GetTimeoutError:
        return "lost its connection"
    except RayError as error:
        return f"ended ({wire.one_line(error)})"
    return "left"


def _connect() -> None:
    """To the cluster that is there. Raises StartupError if there is none."""
    given = os.environ.get("RAY_ADDRESS", "")
    host, _, port = given.rpartition(":")
    if port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise StartupError(f"--executor ray: no Ray cluster at RAY_ADDRESS={given}: {error}") from None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        raise StartupError(
            "--executor ray: no Ray cluster; start one with `ray start --head`, or set RAY_ADDRESS"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"--executor ray: {wire.one_line(error)}") from None
    finally:
        # Ray takes SIGTERM for itself; what it is to us has been decided.
        for number, handler in handlers.items():
            signal.signal(number, handler)
