"""The sampler with a GPU's kernels draws what it draws with their twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.interpreted import cuda_ops
from tests.model_runner.rows import EVERY_KIND, VOCAB, Rows, logits_of, mask_of, policy


@pytest.mark.parametrize("masked", [False, True])
def test_53_a_step_of_every_kind_draws_the_same_on_a_gpu(masked: bool):
    logits, size = logits_of(len(EVERY_KIND)), len(EVERY_KIND)
    histories = [([place, 1, 9, 0, 0, place % 2], 3) for place in range(size)]
    mask = mask_of({place: np.arange(VOCAB) % 3 > 0 for place in (0, 4, 7, 8)}) if masked else None
    rows = Rows(EVERY_KIND, histories=histories, on=replace(policy(1 << 26), ops=cuda_ops()))
    token_ids, logprobs = rows.sample(logits, mask=mask)
    expected_ids, expected = Rows(EVERY_KIND, histories=histories).sample(logits, mask=mask)
    assert token_ids == expected_ids
    assert logprobs is not None
    assert expected is not None
    for name in ("index", "ranks", "widths", "top_ids"):
        assert np.array_equal(getattr(logprobs, name), getattr(expected, name)), name
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(logprobs, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
