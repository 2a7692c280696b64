"""What a front end sets of its own process once it is ready."""

from __future__ import annotations

import contextlib
import gc
import os
import threading

POLLER = "_poll_wrapper"
"""What grpc.aio's thread runs that waits for what became of calls; Python puts it into the thread's name."""


def settle() -> None:
    """To be called when there is something to serve, and a gRPC server."""
    quiet_gc()
    calm_poller()


def quiet_gc() -> None:
    """Takes what is here now out of the collector's sight, and lets it look less often.

    By default it runs every 700 objects, that is every few dozen tokens, and each full run visits everything
    that was ever imported: an eighth of the CPU of a stream.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def calm_poller() -> None:
    """Lets grpc.aio's poller wait for its turn: where no core is free, it would push the loop off its own, only to say
    that a message is out, once for every token: a quarter of the CPU of a stream. Linux only."""
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in threading.enumerate():
        if POLLER in thread.name and thread.native_id is not None:
            with contextlib.suppress(OSError):  # where it may not, it is as it was
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
