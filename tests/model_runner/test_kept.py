"""Models that compute with the integers of their file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kernels.ops import make_ops
from model_runner.device import DevicePolicy
from model_runner.gguf_rows import QUANTISED_FORMATS
from model_runner.layers.matrix import Matrix
from model_runner.parallel import Workers
from model_runner.shard import all_of
from model_runner.step_program import StepProgram
from protos.architectures import ARCHITECTURES
from protos.config import EngineConfig, build
from protos.messages import Sampling
from protos.place import Place
from protos.step import GrammarMask
from tests.model_runner.driver import GREEDY, Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.test_tiny_greedy import FAMILIES, IN_GGUF
from tests.model_runner.tiny import as_floats, chunk_logits, kept_weights, load_tiny, make_runner, save_tiny, tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from model_runner.pending_step import PendingStep
    from model_runner.runner import ModelRunner
    from protos.step import SchedulerOutput
    from tests.model_runner.driver import Steps

TOKENS = [(7 * i * i + 3) % 199 for i in range(100)]
ENDS = [1, 7, 40, 41, 99]
IN_VECTORS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 208}
"""Sizes that the CPU kernels take."""
UNTIED = {"tie_word_embeddings": False, "use_sliding_window": False}


def write(tmp_path: Path, architecture: str, kind: str) -> Path:
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, ARCHITECTURES[architecture].gguf_name, kind)
    return path


@pytest.mark.parametrize("architecture", IN_GGUF)
def test_logits_are_those_of_the_same_weights_as_floats(architecture: str, tmp_path: Path):
    """In the same bits however the prompt is cut, as no product depends on the rows beside it; but for experts, which
    are floats."""
    path = write(tmp_path, architecture, "Q4_1" if architecture == "LlamaForCausalLM" else "Q8_0")
    runner = load_tiny(path, dtype="auto", kv_cache_dtype="float32")
    assert len(kept_weights(runner)) >= 8
    ours, exact = chunk_logits(runner, TOKENS, ENDS), chunk_logits(load_tiny(path), TOKENS, ENDS)
    assert (ours - exact).abs().max() < 3e-3 * exact.abs().max()
    if "Moe" not in architecture and "Mixtral" not in architecture:
        assert torch.equal(
            chunk_logits(load_tiny(path, dtype="auto", kv_cache_dtype="float32"), TOKENS, [99])[0], ours[-1]
        )


def test_eight_bits_are_coarser_and_as_exact_in_any_chunk(tmp_path: Path):
    path = write(tmp_path, "LlamaForCausalLM", "Q4_1")
    exact = chunk_logits(load_tiny(path), TOKENS, ENDS)
    ours, coarse = (chunk_logits(load_tiny(path, dtype="auto", activation_bits=b), TOKENS, ENDS) for b in ("16", "8"))
    assert 30 * (ours - exact).abs().max() < (coarse - exact).abs().max() < 0.2 * exact.abs().max()
    whole = chunk_logits(load_tiny(path, dtype="auto", activation_bits="8"), TOKENS, [99])
    assert torch.equal(whole[0], coarse[-1])


def test_only_what_the_device_computes_fastest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, "LlamaForCausalLM", "Q8_0")
    assert kept_weights(load_tiny(path, dtype="auto"))
    assert not kept_weights(load_tiny(path, dtype="float32"))
    assert not kept_weights(load_tiny(path, dtype="bfloat16"))
    assert not kept_weights(load_tiny(path, dtype="auto", load_format="dummy"))
    assert not kept_weights(load_tiny(tmp_path, dtype="auto"))
    monkeypatch.setattr("kernels.cpu.load_library", lambda variant: None)
    assert not kept_weights(load_tiny(path, dtype="auto"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_a_file_of_floats_is_read_as_floats(kind: str, tmp_path: Path):
    path = write(tmp_path, "LlamaForCausalLM", kind)
    runner = load_tiny(path, dtype="auto")
    assert not kept_weights(runner)
    torch.testing.assert_close(
        chunk_logits(runner, TOKENS, ENDS), chunk_logits(load_tiny(path), TOKENS, ENDS), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel"])
def test_workers_keep_their_parts(architecture: str, tmp_path: Path):
    """What is cut between groups; what is cut inside one, or inside a tile of rows, is turned into floats."""
    path = write(tmp_path, architecture, "Q8_0")
    config = build(EngineConfig, num_kv_blocks=8, max_num_seqs=2, num_threads=1)
    whole = tensors(load_tiny(path))
    for rank in range(2):
        runner = make_runner(path, config, Workers(Place(rank=rank, tensor_size=2)))
        runner.load(path, lambda done, total: None)
        kept = kept_weights(runner)
        assert any("mlp" in name for name in kept)
        for name, target in runner.model.weights().items():
            pieces = [*target.kept_pieces(), *target.pieces()]
            theirs = torch.cat([whole[name][place] for place, _ in pieces])
            held = [as_floats(kept.weights) for kept in target.kept] or [view for _, view in target.pieces()]
            ours = torch.cat(held)
            torch.testing.assert_close(ours[: len(theirs)], theirs, atol=0, rtol=0)


def test_parts_that_cannot_be_one_product_are_several():
    """Rows that end inside a tile, and floats among integers."""
    cpu = torch.device("cpu")
    policy = DevicePolicy(cpu, torch.float32, make_ops(cpu, 16, 1), 1, None, 1, keeps_weights=True)
    counts = [16, 8, 32, 24, 40]
    matrix = Matrix(counts, 64, policy)
    target = matrix.target(0, tuple(all_of(count) for count in counts), all_of(64))
    torch.manual_seed(0)
    for kept, count in zip(target.kept, counts, strict=True):
        if count == 24:
            kept.fill(0, torch.randn(24, 64), torch.float32)
        else:
            values = torch.randint(-9, 9, (count, 64)).to(torch.int8)
            kept.integers(QUANTISED_FORMATS[8]).fill(0, values, torch.rand(count, 2).half().float(), None)
    weights = torch.cat([as_floats(kept.weights) for kept in target.kept])
    x, bias = torch.randn(3, 64), torch.randn(120)
    torch.testing.assert_close(matrix.times(x, bias), x @ weights.T + bias, atol=1e-2, rtol=0)


def write_vectors(tmp_path: Path, architecture: str) -> Path:
    """A model of sizes that the CPU kernels take."""
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED | IN_VECTORS)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, ARCHITECTURES[architecture].gguf_name, "Q8_0")
    return path


class OddTokens:
    """A runner, every other of whose draws may only be of an odd token."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_draws = 0

    def execute(self, step: SchedulerOutput) -> None:
        self._num_draws = int(step.samples.sum())
        self._runner.execute(step)

    def sample(self, mask: GrammarMask | None = None) -> PendingStep:
        index = np.arange(0, self._num_draws, 2, dtype=np.int32)
        bits = np.full((len(index), -(-IN_VECTORS["vocab_size"] // 32)), 0xAAAAAAAA, np.uint32).view(np.int32)
        return self._runner.sample(GrammarMask(index, bits) if len(index) else None)


class Remembering:
    """A runner, and all that it drew, with what that was when it was drawn."""

    def __init__(self, runner: ModelRunner) -> None:
        self.execute = runner.execute
        self._runner = runner
        self.drawn: list[tuple[PendingStep, list[int]]] = []

    def sample(self, mask: GrammarMask | None = None) -> PendingStep:
        pending = self._runner.sample(mask)
        self.drawn.append((pending, pending.result().token_ids.tolist()))
        return pending


def outputs(
    path: Path,
    wrap: Callable[[ModelRunner], Steps] = lambda runner: runner,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> tuple[ModelRunner, list[tuple[list[int], list[list[float]]]]]:
    """Tokens, and their log-probabilities where they are told, of rows that end one after the other, so that batches of
    many sizes decode; prompts come in pieces, some of which do not draw, and the first step is one token's."""
    runner = load_tiny(path, dtype="auto", **options)
    driver = Driver(wrap(runner), 64, 8)
    first = driver.add([5], 20, sampling)
    driver.run([first], num_steps=1)
    generations = [first, *(driver.add([row, 9, 8, 7] * (1 + row % 3), 5 + 3 * row, sampling) for row in range(7))]
    driver.run(generations, budget=9)
    told = [[each.logprobs.tolist() for each in generation.logprobs] for generation in generations]
    return runner, [(generation.output, logprobs) for generation, logprobs in zip(generations, told, strict=True)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3ForCausalLM"])
def test_steps_of_all_sizes_are_one_program_and_draw_the_same_tokens(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write_vectors(tmp_path, architecture)
    with caplog.at_level(logging.WARNING):
        runner, recorded = outputs(path)
    assert not caplog.records
    assert isinstance(runner._graphs, StepProgram)
    assert runner._graphs._program is not None
    alone, expected = outputs(path, graphs="off", num_threads=1)
    assert alone._graphs is None
    assert recorded == expected
    masked = outputs(path, OddTokens)[1]
    assert masked != recorded
    assert masked == outputs(path, OddTokens, graphs="off", num_threads=1)[1]


def test_what_a_program_drew_holds_while_others_run(tmp_path: Path):
    path = write_vectors(tmp_path, "LlamaForCausalLM")
    remembering: list[Remembering] = []

    def wrap(runner: ModelRunner) -> Remembering:
        remembering.append(Remembering(runner))
        return remembering[0]

    outputs(path, wrap)
    for pending, drawn in remembering[0].drawn:
        assert pending.result().token_ids.tolist() == drawn


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0, seed=5), Sampling(logprobs=2), Sampling(logit_bias={7: 90.0})],
    ids=["temperature", "log-probabilities", "bias"],
)
def test_rows_that_ask_for_more_than_the_largest_logit_get_it_recorded_and_not(sampling: Sampling, tmp_path: Path):
    path = write_vectors(tmp_path, "LlamaForCausalLM")
    runner, recorded = outputs(path, sampling=sampling)
    assert isinstance(runner._graphs, StepProgram)
    assert runner._graphs._program is not None
    assert recorded == outputs(path, sampling=sampling, graphs="off")[1]
    assert recorded != outputs(path)[1]


def test_a_model_of_which_torch_computes_a_part_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Here the reference bounds the logits, which are no whole vectors."""
    path = write(tmp_path, "Gemma2ForCausalLM", "Q8_0")
    with caplog.at_level(logging.WARNING):
        _, told = outputs(path)
    (record,) = caplog.records
    assert "steps run operation by operation: aten." in record.message
    assert told == outputs(path, graphs="off")[1]
