"""Tiny Gemma 2 and 3: what their GGUF files say and do not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from protos.errors import StartupError
from protos.model_files import read_model_spec
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.test_tiny_models import ENDS, GEMMA, GEMMA2, TOKENS
from tests.model_runner.tiny import chunk_logits, load_tiny, reference_logits, save_tiny

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_gguf_file_with_capped_scores_is_refused(tmp_path: Path):
    """The architecture has none: readers pass over the key, and none says what it means."""
    model = save_tiny(tmp_path, "Gemma3ForCausalLM", **GEMMA)
    write_gguf(tmp_path / "tiny.gguf", model, "gemma3", attn_logit_softcapping=30.0)
    with pytest.raises(StartupError, match=r"tiny\.gguf: gemma3\.attn_logit_softcapping is not supported"):
        read_model_spec(tmp_path / "tiny.gguf")


def test_a_gemma2_file_without_caps_has_those_of_the_architecture(tmp_path: Path):
    model = save_tiny(tmp_path, "Gemma2ForCausalLM", **GEMMA2)
    model.config.attn_logit_softcapping = model.config.final_logit_softcapping = None
    write_gguf(tmp_path / "tiny.gguf", model, "gemma2")
    spec = read_model_spec(tmp_path / "tiny.gguf")
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)


def test_a_file_that_does_not_say_the_window_is_refused(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, save_tiny(tmp_path, "Gemma2ForCausalLM", **GEMMA2), "gemma2")
    path.write_bytes(path.read_bytes().replace(b"gemma2.attention.sliding_window", b"gemma2.attention.sliding_windov"))
    with pytest.raises(StartupError, match=r"tiny\.gguf: has no gemma2\.attention\.sliding_window"):
        read_model_spec(path)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_by_its_hidden_size(family: str, layers: int, tmp_path: Path):
    architecture = f"{family.capitalize()}ForCausalLM"
    model = save_tiny(tmp_path, architecture, **{"gemma2": GEMMA2, "gemma3": GEMMA}[family])
    model.config.num_hidden_layers = layers
    write_gguf(tmp_path / "tiny.gguf", model, family)
    assert read_model_spec(tmp_path / "tiny.gguf").attention_scale == (64 / 4) ** -0.5
