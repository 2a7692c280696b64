"""GraphBackend: how a device records what is run on it, and runs it again without Python in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kernels.capture import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Recorded = tuple[torch.Tensor, Callable[[], None]]

LARGEST_SIZE = 512
"""Rows; steps of more take the device longer than they take to launch."""


class GraphBackend(Protocol):
    """What one backend records lies in one pool of memory, and one recording runs at a time."""

    def sizes(self, max_rows: int) -> Sequence[int]:
        """Of the batches that are recorded, ascending, up to `max_rows`; a step is padded to the next one."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> Recorded:
        """Runs `run` while recording; returns its result, and what runs it again: on the same memory, which whoever
        calls fills before, and into the same result.

        May run it more than once. Results of several recordings may share their memory. Raises NotCapturableError.
        """
        ...


def padded_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256 and every 16 above, as far as rows go; the last is for all of them."""
    largest = min(max_rows, LARGEST_SIZE)
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_SIZE + 1, 16)) if size < largest]
    return [*sizes, largest]


class CudaGraphs:
    """CUDA graphs. What they allocate while they run is shared by all of them, and so is the result."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._result = torch.empty(0, 0, device=device)

    def sizes(self, max_rows: int) -> Sequence[int]:
        return padded_sizes(max_rows)

    def capture(self, run: Callable[[], torch.Tensor]) -> Recorded:
        outside = torch.cuda.current_stream(self._stream.device)
        # Once without recording: kernels are compiled, and libraries allocate for the stream what they keep.
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            warm = run()
        outside.wait_stream(self._stream)
        if len(warm) > len(self._result):
            self._result = torch.empty_like(warm)
        result = self._result[: len(warm)]
        del warm
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may talk to the device meanwhile: those that watch over collectives do.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result.copy_(run())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(outside)  # torch may not get to it when the end of a recording fails
            raise NotCapturableError(str(error).partition("\n")[0]) from None
        graph.replay()
        return result, graph.replay
