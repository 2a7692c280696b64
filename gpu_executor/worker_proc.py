"""The process of one worker of several on a node: steps from the ring, results on the socket to the core.

Started with the descriptors of the socket, the ring and the eventfd that wakes it. It lives as long as the core.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import sys

from gpu_executor import wire
from gpu_executor.ring import RingReader
from gpu_executor.step_loop import MakeWorker, serve
from gpu_executor.uniproc import make_worker
from protos import codec
from protos.child_process import die_with_parent


def main(make: MakeWorker = make_worker) -> int:
    die_with_parent()
    # What the terminal or a service manager sends to all of us is for the front end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket_descriptor, ring_descriptor, wake = map(int, sys.argv[1:])
    for descriptor in (ring_descriptor, wake):
        os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=socket_descriptor)
    start = next(codec.read_frames(channel, wire.start))
    logging.basicConfig(format=f"%(asctime)s worker {start.place.rank} %(levelname)s %(message)s")
    ring = RingReader(ring_descriptor, wake, start.place.rank, start.spin_seconds)
    messages = (wire.to_worker.decode(ring.read()) for _ in itertools.count())
    return serve(make, start, messages, lambda message: channel.sendall(codec.frame(message, wire.encoder)))


if __name__ == "__main__":
    sys.exit(main())
