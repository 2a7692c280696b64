"""An actor whose worker computes nothing."""

from __future__ import annotations

from gpu_executor.ray_actor import RayActor
from tests.bench.idle_worker import IdleWorker


class IdleActor(RayActor):
    make = IdleWorker
