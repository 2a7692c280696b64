"""A whole model as a GPU runs it, without one: Triton kernels, memory of its own, recorded steps, a sampler that does
not wait. It computes and draws what the reference's operations do."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kernels.reference import FP8, ReferenceOps
from protos.config import EngineConfig, build
from protos.messages import Sampling
from tests.model_runner.apart import apart
from tests.model_runner.driver import Driver, Generation
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.tiny import chunk_logits, make_runner, save_tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from model_runner.device import DevicePolicy
    from model_runner.runner import ModelRunner

    Change = Callable[[DevicePolicy], DevicePolicy]

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="the kernels are Triton's"),
    # The interpreter's numpy warns of what a GPU just does: a sigmoid far below 0 is 1 / infinity.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
NUM_BLOCKS, NUM_ROWS = 24, 4
SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=1, top_k=20, top_p=0.9),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logprobs=3, prompt_logprobs=1),
    Sampling(0.7, seed=2, min_p=0.05, logit_bias={3: 2.0}, logprobs=1),
]
PROMPTS = [[1, 2, 3, 4] * 5, [9, 8, 7] * 4, [11, 12, 13, 11, 12], [5]]
TOKENS = [(7 * position + 3) % 199 for position in range(41)]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 24},
    "Gemma2ForCausalLM": {"head_dim": 32, "sliding_window": 20, "attn_logit_softcapping": 5.0},
}


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_tiny(path, request.param, num_hidden_layers=2, **MODELS[request.param])
    return path


def as_a_gpu(backend: RecordingBackend | None = None) -> Change:
    """Of few multiprocessors: the interpreter takes milliseconds for each split of a row."""
    from tests.kernels.interpreted import Gpu, cuda_ops

    ops = cuda_ops(Gpu(capability=90, num_sms=4))
    return lambda policy: replace(apart(policy), ops=ops, graphs=None if backend is None else lambda: backend)


def as_the_reference(policy: DevicePolicy) -> DevicePolicy:
    return replace(policy, ops=ReferenceOps(), graphs=None)


def load(path: Path, change: Change) -> ModelRunner:
    config = build(
        EngineConfig, model=str(path), dtype="float32", device="cpu", max_num_seqs=NUM_ROWS, num_kv_blocks=NUM_BLOCKS
    )
    runner = make_runner(path, config, change=change)
    runner.load(path, lambda done, total: None)
    return runner


def generate(path: Path, change: Change) -> list[Generation]:
    """Prompts in pieces, then rows that decode together, then fewer."""
    driver = Driver(load(path, change), NUM_BLOCKS, NUM_ROWS)
    generations = [
        driver.add(prompt, 3 + row, sampling)
        for row, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    driver.run(generations, budget=16)
    return generations


def test_logits_of_a_prompt_in_pieces_and_of_a_token_are_the_reference_s(directory: Path) -> None:
    ends = [19, 40, 41]
    ours, truth = (chunk_logits(load(directory, change), TOKENS, ends) for change in (as_a_gpu(), as_the_reference))
    torch.testing.assert_close(ours, truth, atol=2e-3, rtol=1e-3)


def test_a_cache_of_eight_bits_is_the_reference_s(directory: Path) -> None:
    """Not that of floats: keys and values are rounded to 3 bits behind the first."""
    changes: tuple[Change, ...] = (as_a_gpu(), as_the_reference)
    found = []
    for change in changes:
        runner = load(directory, lambda policy, change=change: replace(change(policy), cache_dtype=FP8))
        assert {cache.dtype for caches in runner._kv_caches.values() for cache in caches} == {FP8}
        found.append(chunk_logits(runner, TOKENS, [19, 40]))
    torch.testing.assert_close(*found, atol=2e-2, rtol=1e-2)
    exact = chunk_logits(load(directory, as_the_reference), TOKENS, [19, 40])
    assert (found[0] - exact).abs().max() > 5e-2


def test_a_model_on_a_gpu_draws_what_the_reference_draws(directory: Path) -> None:
    backend = RecordingBackend()
    ours, truth = (generate(directory, change) for change in (as_a_gpu(backend), as_the_reference))
    assert backend.captured[::-1] == [1, 2, 4]
    assert set(backend.replayed) == {1, 2, 4}
    for one, other in zip(ours, truth, strict=True):
        assert one.output == other.output
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.top_ids.tolist() == theirs.top_ids.tolist()
            np.testing.assert_allclose(mine.top_logprobs, theirs.top_logprobs, atol=1e-4)
        for told, known in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            np.testing.assert_allclose(told.logprobs.logprobs, known.logprobs.logprobs, atol=1e-4)
