"""Programs: what CpuOps were called for, to be called again as one list, without Python in between.

The memory of what is computed on the way belongs to a pool that all programs share, so one of them runs at a time, and
its result holds until the next runs.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.capture import NotCapturableError
from kernels.cpu_library import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.cpu_library import Calls

ARENA_BYTES = 1 << 24
"""Taken from the system at a time. What is not written is not resident."""
LARGEST_BATCH = 64
"""Rows; a step of more takes many times longer than Python does between its kernels."""
_ALIGNMENT = 64
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


class Pool:
    """Memory that tensors come from and go back to when the last view of them is gone."""

    def __init__(self) -> None:
        self._arenas: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._free: list[tuple[int, int, int]] = []
        """Arena, first byte and end of each piece, in this order."""
        self._epoch = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        nbytes = max(1, shape.numel()) * dtype.itemsize
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        arena, first = self._take(size)
        memory = self._arenas[arena][first : first + nbytes]
        # The tensor's storage keeps this array, and nothing else does.
        weakref.finalize(memory, self._give_back, self._epoch, (arena, first, first + size)).atexit = False
        return torch.from_numpy(memory).view(dtype)[: shape.numel()].view(shape)

    def reset(self) -> None:
        """All memory is free again, whoever still looks at it."""
        self._epoch += 1
        self._free = [(arena, 0, len(memory)) for arena, memory in enumerate(self._arenas)]

    def _take(self, size: int) -> tuple[int, int]:
        for place, (arena, first, end) in enumerate(self._free):
            if end - first >= size:
                self._free[place : place + 1] = [(arena, first + size, end)] if end - first > size else []
                return arena, first
        memory = np.empty(max(ARENA_BYTES, size) + _ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % _ALIGNMENT
        self._arenas.append(memory[offset : offset + max(ARENA_BYTES, size)])
        self._free.append((len(self._arenas) - 1, 0, len(self._arenas[-1])))
        return self._take(size)

    def _give_back(self, epoch: int, piece: tuple[int, int, int]) -> None:
        if epoch != self._epoch:
            return
        merged: list[tuple[int, int, int]] = []
        for arena, first, end in sorted([*self._free, piece]):
            if merged and merged[-1][0] == arena and merged[-1][2] == first:
                merged[-1] = (arena, merged[-1][1], end)
            else:
                merged.append((arena, first, end))
        self._free = merged


class _OpsOnly(TorchDispatchMode):
    """What torch may do while a program is recorded: look at tensors in other ways, and take memory from the pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, for seconds, to keep it from compiling this."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._pool.empty(result.shape, result.dtype)
        results = result if isinstance(result, (list, tuple)) else [result]
        if any(value.alias_info is None or value.alias_info.is_write for value in func._schema.returns) or any(
            not torch._C._is_alias_of(tensor, args[0]) for tensor in results
        ):
            raise NotCapturableError(f"{func} computes outside of the kernels")
        return result


class Programs:
    """Programs of the kernels that some CpuOps call: what a GraphBackend of the model runner is, for a CPU."""

    captures_ahead = False
    """A recording takes hardly longer than the step it is made of."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._pool = calls, Pool()
        self._is_warm = False

    def sizes(self, max_rows: int) -> Sequence[int]:
        """Of batches that are worth a program, each its own: padding would cost as much as rows do."""
        return range(1, min(max_rows, LARGEST_BATCH) + 1)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Runs `run`; returns its result, and what computes it again from whatever is then in the tensors it read.

        These must stay where they are, and alive as long as `run` is. Raises NotCapturableError if more is computed
        than kernels do.
        """
        assert self._calls.recording is None, "one recording at a time"
        if not self._is_warm:
            run()  # What is made at first use is not part of a program.
            self._is_warm = True
        recording = self._calls.recording = []
        try:
            with _OpsOnly(self._pool):
                result = run()
        finally:
            self._calls.recording = None
            self._pool.reset()
        return result, self._program(recording, run)

    def _program(self, recording: list[ctypes.Structure], of: object) -> Callable[[], None]:
        """The calls and their arguments in two pieces of memory. Keeps what they are of: the tensors it reads."""
        made, arguments = recording[::2], recording[1::2]
        sizes = [-(-ctypes.sizeof(each) // 8) * 8 for each in arguments]
        memory = ctypes.create_string_buffer(sum(sizes) or 1)
        calls = (Call * len(made))()
        at = ctypes.addressof(memory)
        for place, (call, each, size) in enumerate(zip(made, arguments, sizes, strict=True)):
            ctypes.memmove(at, ctypes.addressof(each), ctypes.sizeof(each))
            calls[place] = Call(call.kernel, at)
            at += size
        run, num_threads, count = self._calls.library.run, self._calls.num_threads, len(made)

        def replay(kept: object = (memory, of)) -> None:
            run(calls, count, num_threads)

        return replay
