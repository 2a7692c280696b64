"""RecordingBackend: graphs on a CPU that run what they recorded again, and watch how they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.capture import NotCapturableError
from model_runner.graph_backend import padded_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from model_runner.graph_backend import Recorded


class RecordingBackend:
    """As CudaGraphs: padded sizes, of which at most `num_sizes` and the largest, and one result for all.
    `num_capturable` recordings can be made."""

    def __init__(self, num_capturable: int = 1 << 30, num_sizes: int = 1 << 30) -> None:
        self.captured: list[int] = []
        """Rows of each recording, in order."""
        self.replayed: list[int] = []
        self._num_capturable, self._num_sizes = num_capturable, num_sizes
        self._result: torch.Tensor | None = None

    def sizes(self, max_rows: int) -> Sequence[int]:
        sizes = padded_sizes(max_rows)
        return [*sizes[: self._num_sizes], *sizes[self._num_sizes :][-1:]]

    def capture(self, run: Callable[[], torch.Tensor]) -> Recorded:
        if len(self.captured) == self._num_capturable:
            raise NotCapturableError("the test said so")
        first = run()
        if self._result is None or len(self._result) < len(first):
            self._result = first.new_empty(first.shape)
        result = self._result[: len(first)]
        result.copy_(first)
        self.captured.append(len(first))

        def replay() -> None:
            self.replayed.append(len(result))
            result.copy_(run())

        return result, replay
