"""Workers: those that hold one copy of the model together, and what one tells the others during a step."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from typing import TYPE_CHECKING

import torch

from protos.errors import StartupError
from protos.place import ONLY

if TYPE_CHECKING:
    from protos.place import Place


class Workers:
    """One worker that has the whole model to itself: it tells nobody anything, and that costs nothing."""

    def __init__(self, place: Place = ONLY) -> None:
        self.place = place

    def meet(self) -> None:
        """Waits until all are there; comes before what follows. Raises StartupError."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the workers of the stage, the same bits on each; the tensor may be overwritten."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, size] of each worker of the stage side by side: [rows, tensor_size * size]."""
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """To the worker of the next stage that has this one's tensor rank. Does not wait until it takes it: the tensor
        must not change before as many more have been sent as there are stages."""
        raise AssertionError("there is one stage")

    def receive(self, tensor: torch.Tensor) -> None:
        """Fills the tensor with what that of the previous stage has sent."""
        raise AssertionError("there is one stage")

    def least(self, number: int) -> int:
        """The least of what all workers, of all stages, say."""
        return number

    def leave(self) -> None:
        """Ends the connections; idempotent, and done by itself when the interpreter ends."""


class ConnectedWorkers(Workers):
    """Several, over torch.distributed. Each calls the same methods in the same order."""

    _backend = "nccl"

    def __init__(self, place: Place, device: torch.device) -> None:
        super().__init__(place)
        self._device = device
        self._tensor_group: torch.distributed.ProcessGroup | None = None
        self._sent: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()
        """What may not have been taken yet."""

    def meet(self) -> None:
        import torch.distributed as dist

        place = self.place
        size = place.tensor_size * place.pipeline_size
        if place.local_size == size and sys.platform == "linux":
            # Those of one node need no other: nobody outside can reach gloo's ports, which know no secret.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            dist.init_process_group(self._backend, init_method=place.rendezvous, rank=place.rank, world_size=size)
            # Every worker makes the groups of every stage: torch.distributed wants it so.
            stages = range(0, size, place.tensor_size)
            groups = [dist.new_group(list(range(first, first + place.tensor_size))) for first in stages]
        except (RuntimeError, ValueError) as error:
            cause = str(error).partition("\n")[0]
            raise StartupError(f"worker {place.rank} of {size} cannot meet the others: {cause}") from None
        self._tensor_group = groups[place.stage]
        # An interpreter that ends with gloo's threads running ends with SIGABRT.
        atexit.register(self.leave)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.place.tensor_size > 1:
            torch.distributed.all_reduce(tensor, group=self._tensor_group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.place.tensor_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.place.tensor_size)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=self._tensor_group)
        return torch.cat(parts, -1)

    def send(self, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        to = self.place.rank + self.place.tensor_size
        self._sent.append((torch.distributed.isend(tensor, to), tensor))
        # The step of the oldest is most likely back.
        if len(self._sent) > self.place.pipeline_size:
            work, _ = self._sent.popleft()
            work.wait()

    def receive(self, tensor: torch.Tensor) -> None:
        torch.distributed.recv(tensor, self.place.rank - self.place.tensor_size)

    def least(self, number: int) -> int:
        least = torch.tensor(number, device=self._device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)

    def leave(self) -> None:
        if self._tensor_group is not None:
            self._tensor_group = None
            torch.distributed.destroy_process_group()


class HostWorkers(ConnectedWorkers):
    """On CPUs, over gloo, of which only sending and receiving is used: they run in the calling thread.

    Its collectives wake a thread of their own for every round, which takes longer than what a step has to add up; and
    they add in an order that depends on where in the tensor a number lies. Here each sends to each, and adds in the
    order of ranks: so a token's numbers do not depend on its batch-mates.
    """

    _backend = "gloo"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.place.tensor_size == 1:
            return tensor
        first, *others = self._exchange(tensor)
        total = first.float()  # so that 16 bits are rounded to once, however many they are
        for other in others:
            total += other
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.place.tensor_size == 1 else torch.cat(self._exchange(tensor), -1)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each worker's tensor, by tensor rank."""
        tensor, own = tensor.contiguous(), self.place.tensor_rank
        parts = [tensor if rank == own else torch.empty_like(tensor) for rank in range(self.place.tensor_size)]
        first = self.place.rank - own
        peers = [(first + rank, part) for rank, part in enumerate(parts) if rank != own]
        group = self._tensor_group
        works = [torch.distributed.isend(tensor, peer, group) for peer, _ in peers]
        works += [torch.distributed.irecv(part, peer, group) for peer, part in peers]
        for work in works:
            work.wait()
        return parts


_KINDS: dict[str, type[ConnectedWorkers]] = {"cpu": HostWorkers, "cuda": ConnectedWorkers}
"""By the kind of device they are on."""


def make_workers(place: Place, device: torch.device) -> Workers:
    """Those of a place, not met yet."""
    if place.tensor_size * place.pipeline_size == 1:
        return Workers(place)
    return _KINDS[device.type](place, device)
