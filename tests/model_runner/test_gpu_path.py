"""A whole model as a GPU runs it, without one: Triton kernels, memory of its own, recorded steps, samplers that do not
wait. It draws what the reference's operations draw."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernels.reference import ReferenceOps
from protos.config import EngineConfig, build
from protos.messages import Sampling
from tests.model_runner.apart import apart
from tests.model_runner.driver import Driver, Generation
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.tiny import make_runner, save_tiny

pytest.importorskip("triton")

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.device import DevicePolicy

NUM_BLOCKS, NUM_ROWS = 24, 4
SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=1, top_k=20, top_p=0.9),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logprobs=3, prompt_logprobs=1),
    Sampling(0.7, seed=2, min_p=0.05, logit_bias={3: 2.0}, logprobs=1),
]
PROMPTS = [[1, 2, 3, 4] * 5, [9, 8, 7] * 4, [11, 12, 13, 11, 12], [5]]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 24},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
}


def generate(path: Path, change: Any) -> list[Generation]:
    """Prompts in chunks, then rows that decode together, then fewer."""
    config = build(
        EngineConfig, model=str(path), dtype="float32", device="cpu", max_num_seqs=NUM_ROWS, num_kv_blocks=NUM_BLOCKS
    )
    runner = make_runner(path, config, change=change)
    runner.load(path, lambda done, total: None)
    driver = Driver(runner, NUM_BLOCKS, NUM_ROWS)
    generations = [
        driver.add(prompt, 3 + row, sampling)
        for row, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    driver.run(generations, budget=16)
    return generations


# The interpreter's numpy warns of what a GPU just does: a sigmoid far below 0 is 1 / infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_on_a_gpu_draws_what_the_reference_draws(tmp_path: Path, architecture: str) -> None:
    from tests.kernels.interpreted import cuda_ops

    save_tiny(tmp_path, architecture, num_hidden_layers=2, **MODELS[architecture])
    backend = RecordingBackend()

    def as_a_gpu(policy: DevicePolicy) -> DevicePolicy:
        return replace(apart(policy), ops=cuda_ops(), graphs=lambda: backend)

    ours = generate(tmp_path, as_a_gpu)
    truth = generate(tmp_path, lambda policy: replace(policy, ops=ReferenceOps(), graphs=None))
    assert backend.captured[::-1] == [1, 2, 4]
    assert set(backend.replayed) == {1, 2, 4}
    for one, other in zip(ours, truth, strict=True):
        assert one.output == other.output
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.top_ids.tolist() == theirs.top_ids.tolist()
            np.testing.assert_allclose(mine.top_logprobs, theirs.top_logprobs, atol=1e-4)
        for mine, theirs in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            np.testing.assert_allclose(mine.logprobs.logprobs, theirs.logprobs.logprobs, atol=1e-4)
