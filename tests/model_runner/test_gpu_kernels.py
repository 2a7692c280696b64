"""Whole models with the kernels of GPUs, run by Triton's interpreter, recorded and padded as on one."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

from protos.config import EngineConfig, build
from tests.model_runner.apart import apart
from tests.model_runner.driver import Driver
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.tiny import chunk_logits, load_tiny, make_runner, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.device import DevicePolicy
    from model_runner.runner import ModelRunner

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="its kernels are Triton's")
TOKENS = [(7 * position + 3) % 199 for position in range(41)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_hidden_layers": 2}),
    "window and cap": (
        "Gemma2ForCausalLM",
        {"num_hidden_layers": 2, "head_dim": 32, "sliding_window": 20, "attn_logit_softcapping": 5.0},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    architecture, changes = MODELS[request.param]
    save_tiny(path, architecture, **changes)
    return path


def load_on_gpu(path: Path, backend: RecordingBackend | None = None) -> ModelRunner:
    """Of few multiprocessors, for the interpreter takes milliseconds for each split of a row."""
    from tests.kernels.interpreted import Gpu, cuda_ops

    def change(policy: DevicePolicy) -> DevicePolicy:
        ops = cuda_ops(Gpu(capability=90, num_sms=4))
        return replace(apart(policy), ops=ops, graphs=None if backend is None else lambda: backend)

    config = build(EngineConfig, max_num_seqs=4, num_kv_blocks=24, dtype="float32", device="cpu")
    runner = make_runner(path, config, change=change)
    runner.load(path, lambda done, total: None)
    return runner


def test_logits_of_a_prompt_in_pieces_and_of_a_token_are_those_of_a_cpu(directory: Path):
    ends = [19, 40, 41]
    expected = chunk_logits(load_tiny(directory), TOKENS, ends)
    torch.testing.assert_close(chunk_logits(load_on_gpu(directory), TOKENS, ends), expected, atol=2e-3, rtol=1e-3)


def test_padded_batches_draw_what_a_cpu_draws(directory: Path):
    """Some end sooner than others, so that recordings of several sizes run; three rows are padded to four."""
    backend, drawn = RecordingBackend(), []
    for runner in (load_tiny(directory), load_on_gpu(directory, backend)):
        driver = Driver(runner, 24, 4)
        generations = [driver.add(TOKENS[: 9 + 14 * row], 2 + row) for row in range(3)]
        driver.run(generations)
        drawn.append([generation.output for generation in generations])
    assert drawn[0] == drawn[1]
    assert set(backend.replayed) == {1, 2, 4}
