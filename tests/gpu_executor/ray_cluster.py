"""A Ray cluster of two nodes on this machine, in a process of its own: Ray takes signal handlers for itself.

Reads lines from stdin: `remove` ends the second node without a word, `add` makes another. Answers each with a line; the
first is the cluster's address. Its end, or that of stdin, ends the cluster.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from protos.child_process import ROOT, child_environment, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}


class ClusterProcess:
    """The process, from the outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("cluster: "):
            assert line, "the cluster did not start"
        return line.removeprefix("cluster: ").strip()

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._answer()


@contextlib.contextmanager
def ray_cluster() -> Iterator[ClusterProcess]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gpu_executor.ray_cluster"],
        cwd=ROOT,
        env=child_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield ClusterProcess(process)
        process.communicate(timeout=60)


def main() -> None:
    die_with_parent()
    os.environ.pop("RAY_ADDRESS", None)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        second: Any = cluster.add_node(**NODE)
        print("cluster:", cluster.address, flush=True)  # noqa: T201
        for line in sys.stdin:
            if line.strip() == "remove":
                cluster.remove_node(second, allow_graceful=False)
            else:
                second = cluster.add_node(**NODE)
            print("cluster: done", flush=True)  # noqa: T201
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
