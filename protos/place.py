"""Place: which part of the model a worker holds, and how it meets the others."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place among those that hold one copy of the model.

    Ranks count stage by stage: the workers of a stage, which exchange most, are neighbours.
    """

    rank: int = 0
    tensor_size: int = 1
    """Workers that each hold a slice of every layer of their stage."""
    pipeline_size: int = 1
    """Stages, each of some of the layers."""
    local_rank: int = 0
    """Among the workers of its node: which of its devices to take."""
    local_size: int = 1
    """Workers on its node, which share its memory and its cores."""
    rendezvous: str = ""
    """URL at which torch.distributed lets the workers meet; empty for a single one."""

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_size - 1

    @property
    def tells_output(self) -> bool:
        """Whether this is the one worker whose tokens are taken: the first of the last stage."""
        return self.is_last_stage and self.tensor_rank == 0


ONLY = Place()
"""That of the one worker there is."""
