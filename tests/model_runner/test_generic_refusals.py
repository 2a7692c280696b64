"""What the generic backend does not serve is refused before its weights are read, with the reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gpu_executor.worker import Worker
from model_runner.models import full_spec
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.model_files import read_model_spec
from tests.model_runner.test_generic import EXPERTS, HEADS, MLA, ROUTED
from tests.model_runner.tiny import SHAPE

if TYPE_CHECKING:
    from pathlib import Path

INTERFACE = "its attention does not go through transformers' attention interface"
STATE = "it keeps a state between tokens, not only keys and values"
MASK = "it makes attention masks of its own"
NOT_CAUSAL = "its attention is not causal, with a window at most"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 50,
}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ALiBi": ("BloomForCausalLM", {}, INTERFACE),
    "attention of its own": ("FalconForCausalLM", {"alibi": False}, INTERFACE),
    "state space": ("MambaForCausalLM", {}, STATE),
    "hybrid": ("JambaForCausalLM", {}, STATE),
    "recurrent": ("RwkvForCausalLM", {}, STATE),
    "linear attention": (
        "MiniMaxForCausalLM",
        HEADS | {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "its layer 1 has no attention",
    ),
    "convolutions": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
        "it mixes tokens by convolutions",
    ),
    "last layer without": (
        "MiniMaxForCausalLM",
        HEADS | {"layer_types": ["full_attention", "full_attention", "linear_attention"]},
        "only 2 of its 3 layers are attention",
    ),
    "encoder-decoder": ("T5ForConditionalGeneration", {"d_model": 64}, "it is an encoder-decoder"),
    "sinks": ("GptOssForCausalLM", {"num_local_experts": 2}, "it needs attention sinks"),
    "both ways": ("BertLMHeadModel", {}, NOT_CAUSAL),
    "chunks": ("Llama4ForCausalLM", HEADS | {"attention_chunk_size": 32, "num_local_experts": 2}, NOT_CAUSAL),
    "two attentions a layer": ("DiffLlamaForCausalLM", {}, "its layers do not call attention once each"),
    "dynamic masks": ("DogeForCausalLM", {}, MASK),
    "sparse attention": (
        "DeepseekV32ForCausalLM",
        ROUTED | MLA | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
        MASK,
    ),
    "heads of several sizes": (
        "Gemma4ForCausalLM",
        HEADS | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199},
        "its layers have KV heads of different sizes or numbers",
    ),
    "rope that follows the batch": (
        "PhimoeForCausalLM",
        {"num_local_experts": 4, "rope_parameters": LONGROPE},
        "its code does not run on shapes alone (",
    ),
    "data-dependent routing": ("JetMoeForCausalLM", EXPERTS, "its code does not run on shapes alone ("),
    "no causal model of the type": ("ViTForImageClassification", {}, "transformers has no causal language model of"),
    "another class of the type": (
        "Starcoder2ForSequenceClassification",
        {},
        "transformers' causal language model of this type is Starcoder2ForCausalLM",
    ),
    "no length": ("ArceeForCausalLM", {"max_position_embeddings": 0}, "its max_position_embeddings is 0"),
    "too many layers": ("ArceeForCausalLM", {"num_hidden_layers": 1 << 20}, "it has 1048576 layers"),
    "sizes that do not fit": (
        "ArceeForCausalLM",
        {"num_key_value_heads": 3},
        "its 4 attention heads do not share 3 KV",
    ),
}


def refused(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError) as caught:
        full_spec(directory, read_model_spec(directory))
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"{directory}/config.json: ")


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_served_is_refused_with_the_reason(case: str, tmp_path: Path):
    import transformers

    name, changes, reason = CASES[case]
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    model_type = getattr(transformers, name).config_class.model_type
    config = SHAPE | ids | {"architectures": [name], "model_type": model_type} | changes
    assert refused(tmp_path, config).startswith(f"architecture {name} is not supported: {reason}")


def test_a_type_that_transformers_does_not_know(tmp_path: Path):
    config = SHAPE | {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    assert refused(tmp_path, config).startswith("transformers cannot read it: ")


def test_what_transformers_says_of_a_config_is_shown_in_one_line(tmp_path: Path):
    config = SHAPE | {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "num_hidden_layers": "3"}
    text = refused(tmp_path, config)
    assert text.startswith("transformers cannot read it: Validation error for field 'num_hidden_layers': TypeError: ")
    long = refused(tmp_path, config | {"model_type": "x" * 1000})
    assert long.endswith("...")


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path):
    (tmp_path / "own.py").write_text("raise SystemExit('was run')")
    config = SHAPE | {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    assert refused(tmp_path, config).startswith("transformers cannot read it: ")


def test_a_vocabulary_of_another_size_than_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import ArceeForCausalLM

    original = ArceeForCausalLM.__init__

    def wider(self: Any, config: Any) -> None:
        original(self, config)
        self.lm_head = torch.nn.Linear(64, 200)

    monkeypatch.setattr(ArceeForCausalLM, "__init__", wider)
    config = SHAPE | {"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}
    assert refused(tmp_path, config).endswith("it has logits of 200 tokens, the config says 199")


def test_a_layer_without_a_mask_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.models.arcee.modeling_arcee.create_causal_mask", lambda **_: None)
    config = SHAPE | {"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}
    assert refused(tmp_path, config).endswith(MASK)


def test_the_worker_tells_the_reason(tmp_path: Path):
    config = SHAPE | {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=INTERFACE):
        Worker(build(EngineConfig, model=str(tmp_path), device="cpu"), ()).load(lambda done, total: None)
