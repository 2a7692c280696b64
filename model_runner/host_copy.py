"""HostCopy: tensors on their way from the device to the host, without anybody waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    Arrays = list[npt.NDArray[np.generic]]


class HostCopy(Protocol):
    def wait(self) -> Arrays:
        """The tensors as arrays, once they are here. They may share memory with the tensors."""
        ...


class HostCopier(Protocol):
    def __call__(self, *tensors: torch.Tensor) -> HostCopy:
        """Starts a copy of the tensors as the work issued so far leaves them; they must not be written again."""
        ...


class HereCopy:
    """Of tensors that are the host's already."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Arrays:
        return [tensor.numpy() for tensor in self._tensors]


def copy_here(*tensors: torch.Tensor) -> HostCopy:
    """The copier of a CPU."""
    return HereCopy(tensors)


class CudaCopier:
    """Copies on a stream of its own, so that the next step's work need not come first."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, *tensors: torch.Tensor) -> HostCopy:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            for tensor in tensors:
                # Its memory is not given to others before the copy is done.
                tensor.record_stream(self._stream)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        return CudaCopy(copies, done)


class CudaCopy:
    """In pinned memory, there once the event has passed. Who waits sleeps: the core that he would spin on launches
    the next step."""

    def __init__(self, tensors: Sequence[torch.Tensor], done: torch.cuda.Event) -> None:
        self._tensors, self._done = tensors, done

    def wait(self) -> Arrays:
        self._done.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
