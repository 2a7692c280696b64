"""Tiny Gemma 3: greedy tokens in batches, chunks and behind prefix hits; GGUF files; what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from protos.errors import StartupError
from protos.model_files import read_model_spec
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.greedy import Greedy
from tests.model_runner.test_tiny_models import ENDS, GEMMA, TOKENS
from tests.model_runner.tiny import VOCAB, chunk_logits, load_tiny, reference_logits, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = GEMMA["sliding_window"]
NUM_TOKENS = 32
LENGTHS = [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 64, 150]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    # Tied, a random model repeats its last token, and equal tokens would say little.
    model = save_tiny(directory, "Gemma3ForCausalLM", **GEMMA, tie_word_embeddings=False, eos_token_id=None)
    write_gguf(directory / "tiny.gguf", model, "gemma3")
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some of which begin alike."""
    return [TOKENS[:size] for size in LENGTHS] + [TOKENS[:48] + TOKENS[:20], [*TOKENS[:80], 1, 2, 3]]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> Greedy:
    return Greedy(model, prompts, NUM_TOKENS)


@pytest.mark.parametrize("budget", [4096, 40, 13])
@pytest.mark.parametrize("file", ["", "tiny.gguf"])
def test_greedy_tokens_in_one_batch_equal_transformers(
    file: str, budget: int, directory: Path, prompts: list[list[int]], expected: Greedy
):
    driver = Driver(load_tiny(directory / file, max_num_seqs=16, num_kv_blocks=128), 128, 16)
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    driver.run(generations, budget)
    expected.num_flips([generation.output for generation in generations])


def test_greedy_tokens_behind_prefix_hits_equal_transformers(
    directory: Path, model: Any, prompts: list[list[int]], expected: Greedy
):
    """Hits shorter and longer than the window."""
    driver = Driver(load_tiny(directory, max_num_seqs=32, num_kv_blocks=256), 256, 32)
    first = driver.add(TOKENS, 1)
    driver.run([first])
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    hits = [driver.share_prefix(generation, first) for generation in generations]
    assert {0, 16, 48, 80, 144} <= set(hits)
    driver.run(generations, budget=50)
    expected.num_flips([generation.output for generation in generations])


def test_logits_of_a_gguf_file_equal_transformers(directory: Path, model: Any):
    ours = chunk_logits(load_tiny(directory / "tiny.gguf"), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


@pytest.mark.parametrize("pattern", [3, np.array([1, 0, 1, 1, 0, 1, 1], bool)])
def test_a_gguf_file_may_name_the_layers_with_a_window(pattern: Any, tmp_path: Path):
    kinds = {0: "full_attention", 1: "sliding_attention"}
    local = [(layer + 1) % 3 != 0 for layer in range(7)] if isinstance(pattern, int) else pattern.tolist()
    model = save_tiny(tmp_path, "Gemma3ForCausalLM", **GEMMA, layer_types=[kinds[is_local] for is_local in local])
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "gemma3", attention__sliding_window_pattern=pattern, rope__freq_base_swa=10000.0)
    assert read_model_spec(path).global_layers == tuple(layer for layer in range(7) if not local[layer])
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_logits_are_as_near_as_those_of_transformers(dtype: str, tmp_path: Path):
    model = save_tiny(tmp_path, "Gemma3ForCausalLM", **GEMMA, initializer_range=0.05)
    exact = reference_logits(model, TOKENS, ENDS)
    ours = chunk_logits(load_tiny(tmp_path, dtype=dtype), TOKENS, ENDS)
    theirs = reference_logits(model.to(getattr(torch, dtype)), TOKENS, ENDS)
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_gguf_file_with_capped_logits_is_refused(key: str, model: Any, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", model, "gemma3", **{key: 30.0})
    with pytest.raises(StartupError, match=rf"tiny\.gguf: gemma3\.{key} is not supported"):
        read_model_spec(tmp_path / "tiny.gguf")


def test_the_largest_gemma_scales_queries_by_its_hidden_size(model: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(model.config, "num_hidden_layers", 62)
    write_gguf(tmp_path / "tiny.gguf", model, "gemma3")
    assert read_model_spec(tmp_path / "tiny.gguf").attention_scale == (64 / 4) ** -0.5


def test_tokens_vary(expected: Greedy):
    """Else equal ones would say little."""
    assert len({token for tokens in expected.token_ids for token in tokens}) > VOCAB // 4
