"""Programs: what CpuOps were called for, to be called again as one list, without Python in between.

The memory of what is computed on the way belongs to a pool that all programs share, so one of them runs at a time, and
its result holds until the next runs.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.capture import NotCapturableError
from kernels.cpu_library import Call, Pace
from kernels.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.cpu_library import Calls

LARGEST_BATCH = 64
"""Rows; a step of more takes many times longer than Python does between its kernels."""
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


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
        run, num_threads, pace = self._calls.library.run_list, self._calls.num_threads, Pace()

        def replay(kept: object = (memory, of)) -> None:
            run(calls, num_threads, pace)

        return replay
