"""Columns of rows, on their way to the device in one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy


def to_columns(policy: DevicePolicy, *columns: npt.NDArray[np.generic[Any]]) -> list[torch.Tensor]:
    """Columns of one length as tensors on the device: int64, or float64 where they are floats."""
    packed = np.empty((len(columns), len(columns[0])), np.int64)
    are_floats = [column.dtype.kind == "f" for column in columns]
    for place, (column, is_float) in enumerate(zip(columns, are_floats, strict=True)):
        (packed.view(np.float64) if is_float else packed)[place] = column
    tensor = policy.tensor(packed)
    integers, floats = tensor.unbind(), tensor.view(torch.float64).unbind()
    return [floats[place] if is_float else integers[place] for place, is_float in enumerate(are_floats)]
