"""The sampler waits for nothing that the device computes, until its result is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from kernels.reference import ReferenceOps
from protos.messages import Sampling
from tests.model_runner.apart import PolicyApart
from tests.model_runner.rows import EVERY_KIND, VOCAB, Rows, logits_of, mask_of

if TYPE_CHECKING:
    from model_runner.host_copy import Arrays

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""What needs numbers of the device to go on: on a GPU the host would wait for them."""


class NoWaiting(TorchDispatchMode):
    """Refuses operations that wait; except inside kernels, of which only the call is looked at."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if function in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) else ()
        is_mask = any(index is not None and index.dtype is torch.bool for index in indices)
        assert function not in WAITING, function
        assert not is_mask, function
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _methods_that_wait_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no operations on a CPU's tensor."""
    for name in ("tolist", "numpy", "cpu"):
        method = getattr(torch.Tensor, name)

        def refuse(tensor: torch.Tensor, method: Any = method) -> Any:
            assert not _get_current_dispatch_mode_stack(), method
            return method(tensor)

        monkeypatch.setattr(torch.Tensor, name, refuse)


class LaunchedOps(ReferenceOps):
    """Kernels as a GPU has them: what they do is their own."""

    def __getattribute__(self, name: str) -> Any:
        kernel = super().__getattribute__(name)
        if name.startswith("_"):
            return kernel

        def launch(*args: Any) -> Any:
            with _disable_current_modes():
                return kernel(*args)

        return launch


class LaterCopy:
    """Has the numbers only once it is told that the device has them."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], device: Device) -> None:
        self._tensors, self._device = tensors, device

    def wait(self) -> Arrays:
        assert self._device.is_done, "waited"
        return [tensor.numpy() for tensor in self._tensors]


class Device:
    def __init__(self) -> None:
        self.is_done = False

    def to_host(self, *tensors: torch.Tensor) -> LaterCopy:
        return LaterCopy(tensors, self)

    def policy(self) -> PolicyApart:
        return PolicyApart(
            torch.device("cpu"),
            torch.float32,
            LaunchedOps(),
            2,
            None,
            1 << 26,
            shares_memory=False,
            to_host=self.to_host,
        )


@pytest.mark.parametrize("masked", [False, True])
def test_a_step_of_every_kind_is_launched_without_waiting_and_draws_the_same(masked: bool):
    logits, device = logits_of(len(EVERY_KIND)), Device()
    mask = mask_of({place: np.arange(VOCAB) % 3 > 0 for place in (0, 4, 7, 8)}) if masked else None
    rows = Rows(EVERY_KIND, on=device.policy())
    with NoWaiting():
        drawn = rows.start(logits, mask=mask)
    device.is_done = True
    token_ids, logprobs = drawn.result()
    expected_ids, expected = Rows(EVERY_KIND).sample(logits, mask=mask)
    assert token_ids.tolist() == expected_ids
    assert logprobs is not None
    assert expected is not None
    for name in ("index", "ranks", "widths", "top_ids", "logprobs", "top_logprobs"):
        assert np.array_equal(getattr(logprobs, name), getattr(expected, name)), name


WAITS = {
    "item": lambda numbers: numbers.max().item(),
    "bool": lambda numbers: bool(numbers.any()),
    "tolist": lambda numbers: numbers.tolist(),
    "numpy": lambda numbers: numbers.numpy(),
    "cpu": lambda numbers: numbers.cpu(),
    "nonzero": lambda numbers: numbers.nonzero(),
    "mask": lambda numbers: numbers[numbers > 1],
}


@pytest.mark.parametrize("wait", WAITS)
def test_waiting_would_be_noticed(wait: str):
    with NoWaiting(), pytest.raises(AssertionError):
        WAITS[wait](torch.arange(3))


def test_tokens_that_only_the_device_has_seen_are_penalised_and_complete_bad_words():
    sampling = Sampling(frequency_penalty=50.0, bad_words=((9, 11, 12),))
    rows = Rows([sampling] * 2, histories=[([1, 2, 3], 3)] * 2, on=Device().policy())
    for position, token_ids in ((3, [9, 10]), (4, [11, 11])):
        rows.batch.record(rows.rows, np.full(2, position, np.int32), torch.tensor(token_ids, dtype=torch.int32))
    assert not rows.batch.token_ids[:, 3:].any()
    logits = torch.zeros(2, VOCAB)
    logits[:, [9, 10, 11, 12, 13]] = torch.tensor([40.0, 40.0, 30.0, 20.0, 10.0])
    drawn = rows.start(logits, 5)
    assert drawn.token_ids.tolist() == [10, 9]
    logits[:, 9:11] = 0
    assert rows.start(logits, 5).token_ids.tolist() == [13, 12]
