"""Frequencies of every kind of RoPE equal those transformers initialises."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.reference import ReferenceOps
from model_runner.layers.rotary import Rotary, rope_frequencies
from protos.config_spec import ROPE_KINDS
from protos.errors import StartupError
from protos.model_files import read_model_spec
from protos.model_spec import ModelSpec, RopeSpec

if TYPE_CHECKING:
    from pathlib import Path

HEAD_DIM, MAX_POSITION = 64, 4096
FACTORS = {
    "short_factor": [1.0 + i / 50 for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + i / 3 for i in range(HEAD_DIM // 2)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Kind, its parameters, the trained length if given, and the longest sequence served.
CASES: list[tuple[str, dict[str, Any], int, int]] = [
    ("linear", {"factor": 3.0}, 0, 4096),
    ("dynamic", {"factor": 2.0}, 0, 4096),
    ("dynamic", {"factor": 2.0}, 0, 10000),
    ("llama3", LLAMA3, 1024, 4096),
    ("llama3", {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}, 2048, 4096),
    ("yarn", {"factor": 4.0}, 1024, 4096),
    ("yarn", {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.9}, 1024, 4096),
    ("yarn", {"factor": 40.0, "mscale": 0.8, "mscale_all_dim": 1.2, "truncate": False}, 512, 4096),
    ("yarn", {"factor": 1.0}, 0, 4096),
    ("longrope", {"factor": 4.0, **FACTORS}, 1024, 1024),
    ("longrope", {"factor": 4.0, **FACTORS}, 1024, 1025),
    ("longrope", {"attention_factor": 1.3, **FACTORS}, 1024, 4096),
    ("longrope", FACTORS, 1024, 4096),
]


def spec_of(kind: str, scaling: dict[str, Any], trained: int = 0, **more: Any) -> ModelSpec:
    rope = RopeSpec(theta=20000.0, kind=kind, scaling=scaling, original_max_position=trained, **more)
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope=rope,
    )


@pytest.mark.parametrize(("kind", "scaling", "trained", "max_model_len"), CASES)
def test_frequencies_equal_transformers(kind: str, scaling: dict[str, Any], trained: int, max_model_len: int):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 20000.0, **scaling}
    if trained:
        parameters["original_max_position_embeddings"] = trained
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=parameters,
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    frequencies, factor = rope_frequencies(spec_of(kind, scaling, trained), max_model_len)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_default_frequencies_equal_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    frequencies, factor = rope_frequencies(spec_of("default", {}), MAX_POSITION)
    assert torch.equal(frequencies, expected)
    assert factor == 1.0


GOOD: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "yarn": {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 1024},
    "longrope": FACTORS | {"factor": 4.0, "original_max_position_embeddings": 1024},
}
WEIRD: list[Any] = [0, -1, 1e-320, 1e308, 10**400, float("nan"), float("inf"), "2", True, {"a": 1}]
WEIRD += [[], [1.0] * 32, [0.0] * 32, [1e-320] * 32, ["a"] * 32, [True] * 32]


@pytest.mark.parametrize("kind", GOOD)
def test_bad_parameters_end_in_one_line_before_the_model_is_made(kind: str, tmp_path: Path):
    """What passes the check has frequencies for every length."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITION}
    refused = []
    for key in [*GOOD[kind], "rope_theta", "partial_rotary_factor"]:
        for value in WEIRD:
            parameters = {"rope_type": kind, "rope_theta": 20000.0, **GOOD[kind], key: value}
            (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": parameters}))
            try:
                rope_frequencies(spec := read_model_spec(tmp_path), 1)
            except (StartupError, ValueError) as error:
                refused.append(str(error))
                continue
            for length in (1024, 1025, 3 * MAX_POSITION):
                rope_frequencies(spec, length)
    assert len(refused) >= 2 * len(WEIRD)
    assert not any("\n" in message for message in refused)


def test_every_kind_is_covered():
    assert {kind for kind, *_ in CASES} | {"default"} == ROPE_KINDS.keys()


def test_part_of_a_head():
    frequencies, _ = rope_frequencies(spec_of("default", {}, partial_factor=0.5), MAX_POSITION)
    expected = 20000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    torch.testing.assert_close(frequencies.double(), expected, rtol=1e-6, atol=0)


def test_far_positions_keep_their_angle():
    rotary = Rotary(spec_of("default", {}), 131072, torch.device("cpu"), ReferenceOps())
    cosines, sines = rotary(torch.tensor([131071]))
    assert cosines[0, 0] == pytest.approx(torch.tensor(131071.0).double().cos().item(), abs=1e-6)
    assert sines[0, 0] == pytest.approx(torch.tensor(131071.0).double().sin().item(), abs=1e-6)


def test_magnitude_is_on_cosines_and_sines():
    rotary = Rotary(
        spec_of("yarn", {"factor": 4.0, "attention_factor": 0.5}, 1024),
        MAX_POSITION,
        torch.device("cpu"),
        ReferenceOps(),
    )
    cosines, sines = rotary(torch.arange(9))
    torch.testing.assert_close(cosines**2 + sines**2, torch.full_like(cosines, 0.25))
