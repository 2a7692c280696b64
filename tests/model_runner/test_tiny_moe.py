"""Tiny mixtures of experts: greedy tokens in batches, chunks and behind prefix hits; all that their files are like."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.layers.moe import combine
from protos.errors import StartupError
from protos.model_files import read_model_spec
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.greedy import Greedy
from tests.model_runner.hostile import safetensors_bytes
from tests.model_runner.test_tiny_models import ENDS, QWEN3_MOE, TOKENS
from tests.model_runner.tiny import VOCAB, chunk_logits, load_tiny, reference_logits, save_tiny, tensors

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 32
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "eos_token_id": None}, "llama"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN3_MOE | {"norm_topk_prob": True}, "qwen3moe"),
}
"""Architecture, changes of its config, and what GGUF calls it."""


@pytest.fixture(scope="module", params=MODELS)
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def model(kind: str, directory: Path) -> Any:
    architecture, changes, family = MODELS[kind]
    model = save_tiny(directory, architecture, **changes)
    write_gguf(directory / "tiny.gguf", model, family)
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some of which begin alike."""
    return [TOKENS[:size] for size in (1, 7, 40, 64, 150)] + [TOKENS[:48] + TOKENS[:20], [*TOKENS[:80], 1, 2, 3]]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> Greedy:
    return Greedy(model, prompts, NUM_TOKENS)


@pytest.mark.parametrize("budget", [4096, 13])
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
    driver = Driver(load_tiny(directory, max_num_seqs=32, num_kv_blocks=256), 256, 32)
    first = driver.add(TOKENS, 1)
    driver.run([first])
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    assert {0, 32, 48, 80, 144} <= {driver.share_prefix(generation, first) for generation in generations}
    driver.run(generations, budget=50)
    expected.num_flips([generation.output for generation in generations])


def test_tokens_vary(expected: Greedy):
    """Else equal ones would say little."""
    assert len({token for tokens in expected.token_ids for token in tokens}) > VOCAB // 4


# Files -----------------------------------------------------------------------------------------


def assert_equal(path: Path, model: Any) -> None:
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_experts_in_one_tensor_as_transformers_itself_holds_them(model: Any, tmp_path: Path):
    model.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors
    assert_equal(tmp_path, model)
    tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.layers.0.mlp.experts.down_proj"][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    last = model.config.num_experts - 1
    with pytest.raises(StartupError, match=rf"has no tensor model\.layers\.0\.mlp\.experts\.{last}\.down_proj"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("shape", [[1 << 40, 0, 0], [1 << 13, 64, 64], [8, 63, 64], [8, 64]])
def test_what_cannot_be_stacked_experts_has_no_place(shape: list[int], tmp_path: Path):
    save_tiny(tmp_path, "Qwen3MoeForCausalLM", **QWEN3_MOE, num_hidden_layers=1)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    data = bytes(4 * math.prod(shape))
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(json.dumps(header).encode(), data))
    with pytest.raises(StartupError, match=f"tensor {name} has no place in this architecture"):
        load_tiny(tmp_path)


def test_number_of_experts_by_either_name(directory: Path, model: Any, tmp_path: Path):
    config = json.loads((directory / "config.json").read_bytes())
    spec = read_model_spec(directory)
    for name in ("num_experts", "num_local_experts"):
        others = {key: value for key, value in config.items() if key not in ("num_experts", "num_local_experts")}
        (tmp_path / "config.json").write_text(json.dumps(others | {name: 3}))
        moe = read_model_spec(tmp_path).moe
        assert moe is not None
        assert moe.num_experts == 3
    assert read_model_spec(directory / "tiny.gguf").moe == spec.moe


def test_a_gguf_file_of_blocks(kind: str, model: Any, tmp_path: Path):
    """Experts are cut out of quantised tensors where their blocks begin."""
    write_gguf(tmp_path / "tiny.gguf", model, MODELS[kind][2], "Q8_0")
    weights, exact = tensors(load_tiny(tmp_path / "tiny.gguf")), model.state_dict()
    for expert in range(model.config.num_experts):
        gate_up = exact["model.layers.1.mlp.experts.gate_up_proj"][expert]
        down = exact["model.layers.1.mlp.experts.down_proj"][expert]
        for name, theirs in zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True):
            ours = weights[f"model.layers.1.mlp.experts.{expert}.{name}.weight"]
            torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0)


def test_a_gguf_file_with_a_tensor_for_each_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As converters wrote Mixtral before they stacked experts."""
    model = save_tiny(tmp_path, "MixtralForCausalLM", num_local_experts=4)
    state = {}
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".experts.")
        if not prefix:
            state[name] = tensor
            continue
        prefix = prefix.replace("model.layers", "blk").replace("mlp", "ffn_")
        for expert, part in enumerate(tensor):
            parts = dict(zip(("gate", "up"), part.chunk(2), strict=True)) if last == "gate_up_proj" else {"down": part}
            state |= {f"{prefix}{kind}.{expert}.weight": rows for kind, rows in parts.items()}
    monkeypatch.setattr(model, "state_dict", lambda: state)
    write_gguf(tmp_path / "tiny.gguf", model, "llama")
    assert_equal(tmp_path / "tiny.gguf", model)


def test_a_gguf_file_with_experts_of_another_family_is_refused(tmp_path: Path, model: Any):
    write_gguf(tmp_path / "tiny.gguf", model, "qwen2")
    with pytest.raises(StartupError, match="GGUF files of architecture 'qwen2', a mixture of experts, are not"):
        read_model_spec(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_token of the mixture of experts is 9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_token of the mixture of experts is 0"),
        ({"num_local_experts": 1 << 20}, "num_experts of the mixture of experts is 1048576"),
        ({"moe_intermediate_size": -1}, "intermediate_size of the mixture of experts is -1"),
        ({"decoder_sparse_step": "2"}, "malformed: "),
        ({"mlp_only_layers": 7}, "malformed: "),
    ],
)
def test_a_config_that_makes_no_sense(changes: dict[str, Any], problem: str, tmp_path: Path):
    save_tiny(tmp_path, "Qwen3MoeForCausalLM", **QWEN3_MOE, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(StartupError) as caught:
        read_model_spec(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {problem}")


def test_a_model_without_experts_is_dense_throughout(tmp_path: Path):
    save_tiny(tmp_path, "Qwen3MoeForCausalLM", **QWEN3_MOE, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 0}))
    assert read_model_spec(tmp_path).moe is None


# The sum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_sum_has_the_same_bits_whatever_is_beside_it(size: int, dtype: torch.dtype):
    torch.manual_seed(1)
    rows, weights = torch.randn(300 * 8, size).to(dtype), torch.rand(300, 8)
    whole = combine(rows, weights)
    for first, end in [(0, 1), (7, 8), (299, 300), (3, 20), (100, 300)]:
        assert torch.equal(combine(rows[8 * first : 8 * end], weights[first:end]), whole[first:end])
    exact = (rows.double().view(300, 8, size) * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(whole.double(), exact, atol=0.02 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)
