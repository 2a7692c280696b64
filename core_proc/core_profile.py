"""CoreProfile: what the core's main loop and its workers do with their time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.python_profile import PythonProfile

if TYPE_CHECKING:
    from gpu_executor.executor import Executor


class CoreProfile:
    """Recorded for one front end at a time, on the main loop's thread."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._client: int | None = None
        self._profile: PythonProfile

    def start(self, client: int) -> bool:
        """False if it is being recorded already."""
        if self._client is not None:
            return False
        self._executor.start_profile()
        self._client, self._profile = client, PythonProfile()
        return True

    def stop(self, client: int) -> dict[str, bytes]:
        """Files by their names; none if nothing is being recorded for this front end. Waits for the workers."""
        if self._client != client:
            return {}
        self._client = None
        return {"core.pstats": self._profile.stop(), **self._executor.stop_profile()}
