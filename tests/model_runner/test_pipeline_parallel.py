"""Pipelines: two stages, with steps in flight, draw exactly the tokens that one draws, whatever the core does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.stage import check_stages, stage_layers
from protos.architectures import ARCHITECTURES
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.messages import FinishReason
from protos.model_files import read_model_spec
from protos.model_spec import BasicSpec
from protos.place import Place
from tests.fakes import ScriptedMatcher
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.ranks import Ranks
from tests.model_runner.staged import Engine
from tests.model_runner.test_tiny_greedy import FAMILIES, UNTIED
from tests.model_runner.test_tiny_models import TOKENS
from tests.model_runner.tiny import save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_TOKENS = 10
PROMPTS = [TOKENS[:size] for size in (1, 7, 31, 64, 150)] + [TOKENS[:48] + TOKENS[:20]]
"""Some of which begin alike."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("stages"), tensor_size=1, pipeline_size=2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers."""
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "LlamaForCausalLM", vocab_size=256)
    return path


def config(**options: Any) -> EngineConfig:
    usual = {"max_num_seqs": 16, "num_kv_blocks": 128, "num_threads": 1, "max_num_batched_tokens": 64}
    return build(EngineConfig, **usual | options)


def engines(path: Path, ranks: Ranks, **options: Any) -> list[Engine]:
    """Of one stage and of several."""
    return [Engine(path, config(**options)), Engine(path, config(**options), ranks)]


def assert_alike(path: Path, ranks: Ranks) -> Engine:
    """What two engines draw, greedily and not, from prompts longer than a step and behind one another's prefixes."""
    outputs = []
    for engine in engines(path, ranks):
        for _ in range(2):
            handles = [engine.add(prompt, NUM_TOKENS) for prompt in PROMPTS]
            handles += [engine.add(prompt, NUM_TOKENS, temperature=1.0, seed=7) for prompt in PROMPTS]
            engine.run()
            outputs.append([engine.tokens[handle] for handle in handles])
        assert engine.scheduler.stats(0).prefix_hits >= 48
    assert all(output == outputs[0] for output in outputs)
    assert len({token for output in outputs[0] for token in output}) > 5
    assert engine.executor.most_in_flight == 2
    return engine


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((name, FAMILIES[name] | UNTIED) for name in ("LlamaForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM")),
        *((name, FAMILIES[name] | UNTIED) for name in ("GPT2LMHeadModel", "SmolLM3ForCausalLM")),
        ("Gemma3ForCausalLM", FAMILIES["Gemma3ForCausalLM"] | {"num_hidden_layers": 7, "tie_word_embeddings": True}),
        ("OPTForCausalLM", FAMILIES["OPTForCausalLM"] | {"word_embed_proj_dim": 32}),
        ("OPTForCausalLM", FAMILIES["OPTForCausalLM"] | {"do_layer_norm_before": False} | UNTIED),
    ],
    ids=["llama", "mixtral", "olmo2", "gpt2", "smollm3", "gemma3-tied", "opt-projected-tied", "opt-norms-behind"],
)
def test_two_stages_draw_the_tokens_of_one(architecture: str, changes: dict[str, Any], two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, architecture, **changes)
    assert_alike(tmp_path, two)


def test_two_stages_read_their_layers_of_a_gguf_file(two: Ranks, tmp_path: Path):
    model = save_tiny(tmp_path, "LlamaForCausalLM")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, ARCHITECTURES["LlamaForCausalLM"].gguf_name, "Q8_0")
    assert_alike(path, two)


def test_two_stages_make_the_random_weights_of_one(two: Ranks, tiny: Path):
    outputs = []
    for engine in engines(tiny, two, load_format="dummy"):
        engine.add(TOKENS[:40], NUM_TOKENS)
        engine.run()
        outputs.append(engine.tokens[0])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_stage_holds_and_reads_its_own_part(architecture: str, two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED)
    alone, staged = engines(tmp_path, two)
    whole, (first, last) = alone.core.ready, staged.executor.infos
    # Of three layers the first stage has two.
    assert (first.kv_cache_bytes, last.kv_cache_bytes) == (whole.kv_cache_bytes * 2 // 3, whole.kv_cache_bytes // 3)
    assert first.weight_bytes + last.weight_bytes == whole.weight_bytes
    assert (first.num_stages, first.max_steps_in_flight) == (last.num_stages, last.max_steps_in_flight) == (2, 2)


def test_both_ends_hold_embeddings_that_are_the_head_too(two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True, vocab_size=256)
    alone, staged = engines(tmp_path, two)
    first, last = staged.executor.infos
    assert first.weight_bytes + last.weight_bytes == alone.core.ready.weight_bytes + 256 * 64 * 4


def test_a_stage_refuses_what_belongs_to_no_stage_and_skips_what_belongs_to_another(two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, "MixtralForCausalLM", **FAMILIES["MixtralForCausalLM"])
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    engines(tmp_path, two)
    save_file(weights | {"model.layers.3.mlp.up_proj.weight": torch.ones(2, 2)}, path)
    with pytest.raises(AssertionError, match=r"model.layers.3.mlp.up_proj.weight has no place in this architecture"):
        Engine(tmp_path, config(), two)
    del weights["model.layers.2.input_layernorm.weight"]
    save_file(weights, path)
    with pytest.raises(AssertionError, match=r"has no tensor model.layers.2.input_layernorm.weight"):
        Engine(tmp_path, config(), two)


def busy(engine: Engine) -> dict[int, list[int]]:
    """More requests than rows and blocks for them, seeded and with grammars; one in four is given up."""
    for number in range(20):
        prompt = TOKENS[number : number + 5 + 7 * (number % 6)]
        matcher = ScriptedMatcher(number, 30) if number % 5 == 0 else None
        engine.add(prompt, 40, matcher, seed=number, temperature=0.0 if number % 2 else 1.0, top_p=0.95)
    given_up: set[int] = set()
    while engine.core.has_work:
        engine.step()
        for handle in range(2, 20, 4):
            if len(engine.tokens[handle]) > 3 and handle not in given_up:
                given_up.add(handle)
                engine.scheduler.abort(0, [handle])
    engine.scheduler.table.audit()
    assert len(given_up) == 5
    assert engine.scheduler.stats(0).preemptions > 2
    assert {engine.ends[handle] for handle in given_up} == {FinishReason.ABORTED}
    return {handle: tokens for handle, tokens in engine.tokens.items() if handle not in given_up}


def test_preempted_seeded_constrained_and_given_up_requests_are_as_with_one_stage(two: Ranks, tiny: Path):
    options = {"num_kv_blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 128}
    alone, staged = (busy(engine) for engine in engines(tiny, two, **options))
    assert alone == staged
    assert {len(tokens) for tokens in alone.values()} == {30, 40}


def test_log_probabilities_of_prompt_and_output_are_those_of_one_stage(two: Ranks, tiny: Path):
    told = []
    for engine in engines(tiny, two, max_num_batched_tokens=512):
        engine.add(TOKENS[:60], 6, logprobs=3, prompt_logprobs=2)
        engine.run()
        told.append(engine.logprobs)
    assert told[0] == told[1]
    assert sum(len(logprobs) // 4 for logprobs in told[0]) == 59 + 6


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_step_that_fails_in_a_stage_fails_behind_it_and_the_next_goes_on(guilty: int, two: Ranks, tiny: Path):
    alone, staged = engines(tiny, two)
    staged.executor.guilty = {0: guilty, 5: guilty}
    for engine in (alone, staged):
        for number in range(6):
            engine.add(TOKENS[number : number + 20], 12)
        engine.run()
    assert staged.executor.failed[0] == staged.executor.failed[5] == [guilty == 0, True]
    assert sum(any(failed) for failed in staged.executor.failed.values()) == 2
    assert alone.tokens == staged.tokens
    assert set(staged.ends.values()) == {FinishReason.MAX_TOKENS}


def test_hidden_states_that_are_no_numbers_end_their_row_alone_as_in_one_stage(two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", **UNTIED)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][5] = math.nan
    save_file(weights, path)
    ends = []
    for engine in engines(tmp_path, two):
        engine.add([5, 6, 7], 8)
        engine.add([8, 9, 5], 8)
        engine.add([8, 9, 10], 8)
        engine.run()
        ends.append((engine.ends, engine.tokens[2]))
    assert ends[0] == ends[1]
    assert [ends[0][0][handle] for handle in range(3)] == [FinishReason.INVALID] * 2 + [FinishReason.MAX_TOKENS]
    assert not any(any(failed) for failed in engine.executor.failed.values())


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("both"), tensor_size=2, pipeline_size=2)
    yield ranks
    ranks.stop()


def test_two_stages_of_two_workers_each_draw_the_tokens_of_one(four: Ranks, tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", **UNTIED)
    alone, staged = engines(tmp_path, four)
    for engine in (alone, staged):
        for prompt in PROMPTS:
            engine.add(prompt, NUM_TOKENS)
        engine.run()
    assert alone.tokens == staged.tokens


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(4, [4]), (4, [2, 2]), (3, [2, 1]), (8, [2, 2, 2, 2]), (9, [2, 2, 3, 2]), (11, [3, 3, 3, 2]), (4, [1] * 4)],
)
def test_layers_are_cut_evenly_and_the_last_stage_has_none_of_the_rest(num_layers: int, sizes: list[int]):
    places = [Place(rank=rank, pipeline_size=len(sizes)) for rank in range(len(sizes))]
    cut = [stage_layers(num_layers, place) for place in places]
    assert [len(layers) for layers in cut] == sizes
    assert [layer for layers in cut for layer in layers] == list(range(num_layers))


def test_workers_of_a_stage_have_the_same_layers():
    layers = [stage_layers(5, Place(rank=rank, tensor_size=2, pipeline_size=2)) for rank in range(4)]
    assert layers == [range(3), range(3), range(3, 5), range(3, 5)]


def test_more_stages_than_layers_and_models_that_are_not_cut_are_refused(tiny: Path):
    spec = read_model_spec(tiny)
    check_stages(spec, Place(pipeline_size=3))
    with pytest.raises(
        StartupError, match=r"^--pipeline-parallel-size 4 is more than the model has layers; it can be 3 "
    ):
        check_stages(spec, Place(pipeline_size=4))
    generic = BasicSpec(architecture="OtherForCausalLM", vocab_size=9)
    check_stages(generic, Place())
    with pytest.raises(
        StartupError, match=r"^--pipeline-parallel-size 2: architecture OtherForCausalLM is computed by"
    ):
        check_stages(generic, Place(pipeline_size=2))
