"""PolicyApart: a CPU that pretends to have memory of its own, as a GPU does: tensors see nothing that numpy writes,
and what they become is not here before somebody waits."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from model_runner.device import DevicePolicy
from model_runner.host_copy import HereCopy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from model_runner.host_copy import Arrays


class PolicyApart(DevicePolicy):
    def tensor(self, array: npt.NDArray[np.generic[Any]]) -> torch.Tensor:
        return torch.from_numpy(array).clone()


class LateCopy(HereCopy):
    """The last moment to look at what was copied; the thread that launches steps has no time to."""

    def wait(self) -> Arrays:
        assert not threading.current_thread().name.startswith("worker"), "the next step would wait for this one"
        return super().wait()


def apart(policy: DevicePolicy) -> DevicePolicy:
    """The same, with memory of its own."""
    given = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return PolicyApart(**given | {"shares_memory": False, "to_host": lambda *tensors: LateCopy(tensors)})
