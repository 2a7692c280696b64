"""PolicyApart: a CPU that pretends to have memory of its own, as a GPU does: tensors see nothing that numpy writes."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from model_runner.device import DevicePolicy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class PolicyApart(DevicePolicy):
    def tensor(self, array: npt.NDArray[np.generic[Any]]) -> torch.Tensor:
        return torch.from_numpy(array).clone()


def apart(policy: DevicePolicy) -> DevicePolicy:
    """The same, with memory of its own."""
    given = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return PolicyApart(**given | {"shares_memory": False})
