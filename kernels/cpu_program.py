"""Program: the kernels that are called for work of any size, as one list, without Python in between.

The work has a few sizes: of a step, its tokens, its rows and those that draw. Kernels are recorded for some sizes, not
carried out. What is computed on the way lies in the same places for all of them, those it has in the largest work; so
of the kernels' arguments only numbers differ, which grow evenly with each size, and are known for all sizes then.
"""

from __future__ import annotations

import ctypes
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.capture import NotCapturableError
from kernels.cpu_library import Call, Pace
from kernels.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kernels.cpu_library import Calls

    Record = Callable[["Sizes"], torch.Tensor]
    Then = Callable[[torch.Tensor], torch.Tensor]
    Recording = list[tuple[int, ctypes.Structure]]
    Numbers = npt.NDArray[np.signedinteger[Any]]

Sizes = tuple[int, ...]
"""Of work, each named by its place."""
FEW = 2
"""Of each size in the smallest work that is recorded."""
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


class Program:
    """What `record` calls for, and `then`. One thread runs it, and results hold until it runs again."""

    def __init__(self, calls: Calls, record: Record, most: Sizes, then: Then | None = None) -> None:
        """`record` is called for several sizes up to `most`, each at least 3, and tells the result: one row for each of
        the last size; `then` makes another of that. The tensors they read must stay where they are.

        Raises NotCapturableError if more is computed than kernels do, or arguments do not grow evenly.
        """
        self._library, self._num_threads = calls.library, calls.num_threads
        self._record, self._then = record, then  # they keep what the kernels read
        self._places = _Places()
        largest, self._num_first, self._result, self._other = self._recorded(calls, most)
        # Not of 1: how far rows lie apart where there is one is not said.
        few = [tuple(FEW + (size < grown) for size in range(len(most))) for grown in range(len(most) + 1)]
        recordings = [self._recorded(calls, sizes)[0] for sizes in few]
        if any(_kernels(each) != _kernels(largest) for each in recordings):
            raise NotCapturableError("other kernels are called when there is more to do")
        images = [_image(each) for each in recordings]
        self._memory = _image(largest)
        self._calls = (Call * len(largest))()
        for place, ((kernel, _), start) in enumerate(zip(largest, _starts(largest), strict=True)):
            self._calls[place] = Call(kernel, self._memory.ctypes.data + start)
        self._sizes, self._of_sizes = most, self._results(most)
        self._numbers = [
            _Growth(kind, self._memory, images, _offsets(largest, kind), most)
            for kind in (ctypes.c_int64, ctypes.c_int32)
        ]
        differing = self._memory != np.stack(images)
        for numbers in self._numbers:
            differing[:, numbers.bytes] = False
        if differing.any():
            raise NotCapturableError("kernels are called with other tensors when there is more to do")
        self._paces = [Pace() for _ in range(64)]
        """By the number of bits of the first size: how long it takes is alike for those."""

    def run(self, sizes: Sizes, wants_other: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the result from what is in the tensors now, and the other one if it is wanted."""
        if sizes != self._sizes:
            self._sizes = sizes
            for numbers in self._numbers:
                numbers.fit(sizes)
            self._of_sizes = self._results(sizes)
        count = len(self._calls) if wants_other else self._num_first
        self._library.run_list(self._calls, count, self._num_threads, self._paces[sizes[0].bit_length()])
        result, other = self._of_sizes
        return result, other if wants_other else None

    def _results(self, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The parts of them that work of these sizes makes."""
        return self._result[: sizes[-1]], None if self._other is None else self._other[: sizes[-1]]

    def _recorded(self, calls: Calls, sizes: Sizes) -> tuple[Recording, int, torch.Tensor, torch.Tensor | None]:
        """Also how many calls the result takes without the other one."""
        assert calls.recording is None, "one recording at a time"
        recording = calls.recording = []
        try:
            with self._places:
                result = self._record(sizes)
                num_first = len(recording)
                other = None if self._then is None else self._then(result)
        finally:
            calls.recording = None
        return recording, num_first, result, other


class _Places(TorchDispatchMode):
    """What torch may do while kernels are recorded: look at tensors in other ways, and take memory, of which the n-th
    piece is where the first recording, the largest, has its own."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = Pool()
        self._pieces: list[tuple[int, int]] = []
        """Address and bytes of each."""
        self._num_taken = -1
        """In this recording; below 0 in the first."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, for seconds, to keep it from compiling this."""
        return False

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._num_taken = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._take(result.shape, result.dtype)
        results = result if isinstance(result, (list, tuple)) else [result]
        if any(value.alias_info is None or value.alias_info.is_write for value in func._schema.returns) or any(
            not torch._C._is_alias_of(tensor, args[0]) for tensor in results
        ):
            raise NotCapturableError(f"{func} computes outside of the kernels")
        return result

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if self._num_taken < 0:
            tensor = self._pool.empty(shape, dtype)
            self._pieces.append((tensor.data_ptr(), nbytes))
            return tensor
        address, most = self._pieces[self._num_taken] if self._num_taken < len(self._pieces) else (0, 0)
        self._num_taken += 1
        if not 0 < nbytes <= most:
            raise NotCapturableError("more memory is taken when there is less to do")
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class _Growth:
    """The numbers of one kind among the arguments, in the memory that the kernels read."""

    def __init__(
        self,
        kind: type[ctypes._SimpleCData[int]],
        memory: npt.NDArray[np.uint8],
        few: list[npt.NDArray[np.uint8]],
        offsets: list[int],
        most: Sizes,
    ) -> None:
        """`few`: images of the same for sizes of FEW, and with one more of them larger by one in each."""
        dtype = np.dtype(kind)
        at = np.array(offsets, np.intp) // dtype.itemsize
        values = np.stack([image.view(dtype)[at] for image in few])
        slopes = np.diff(values, axis=0)
        constants = values[0] - FEW * slopes.sum(axis=0, dtype=dtype)
        if (constants + most @ slopes != memory.view(dtype)[at]).any():
            raise NotCapturableError("arguments of kernels do not grow evenly with what there is to do")
        grows = slopes.any(axis=0)
        self.bytes = (at[grows, None] * dtype.itemsize + np.arange(dtype.itemsize)).ravel()
        """Of the memory, those that change."""
        self._memory: Numbers = memory.view(dtype)
        self._at, self._constants, self._slopes = at[grows], constants[grows], slopes[:, grows]

    def fit(self, sizes: Sizes) -> None:
        self._memory[self._at] = self._constants + sizes @ self._slopes


def _kernels(recording: Recording) -> list[int]:
    return [kernel for kernel, _ in recording]


def _width(arguments: ctypes.Structure) -> int:
    """Bytes that a kernel's arguments take in the memory."""
    return -(-ctypes.sizeof(arguments) // 8) * 8


def _image(recording: Recording) -> npt.NDArray[np.uint8]:
    """The arguments of all calls, one after the other."""
    return np.frombuffer(b"".join(bytes(each).ljust(_width(each), b"\0") for _, each in recording), np.uint8).copy()


def _starts(recording: Recording) -> list[int]:
    """Where in the image each call's arguments are."""
    *starts, _ = accumulate((_width(arguments) for _, arguments in recording), initial=0)
    return starts


def _offsets(recording: Recording, kind: type[Any]) -> list[int]:
    """Where in the image the fields of a kind are."""
    return [
        start + getattr(type(arguments), name).offset
        for (_, arguments), start in zip(recording, _starts(recording), strict=True)
        for name, type_ in arguments._fields_
        if type_ is kind
    ]
