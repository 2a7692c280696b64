"""Tensor parallelism: several workers draw the tokens that one draws, from every fused model, however steps are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from protos.architectures import ARCHITECTURES
from protos.config import EngineConfig, build
from protos.messages import Sampling
from protos.step import GrammarMask, NewRow, SchedulerOutput
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.greedy import assert_greedy
from tests.model_runner.ranks import Ranks
from tests.model_runner.test_tiny_greedy import FAMILIES, IN_GGUF, UNTIED
from tests.model_runner.test_tiny_models import ENDS, TOKENS, TOLERANCE
from tests.model_runner.tiny import VOCAB, chunk_logits, kept_weights, make_runner, save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_runner.parallel import Workers
    from model_runner.runner import ModelRunner
    from protos.step import ModelRunnerOutput

NUM_TOKENS, NUM_BLOCKS, NUM_ROWS = 12, 128, 16
PROMPTS = [TOKENS[:size] for size in (1, 7, 31, 64)] + [TOKENS[:48] + TOKENS[:20]]
"""Some of which begin alike."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("two"), tensor_size=2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("four"), tensor_size=4)
    yield ranks
    ranks.stop()


def load(path: Path, workers: Workers | None, **options: Any) -> ModelRunner:
    shape = {"max_num_seqs": NUM_ROWS, "num_kv_blocks": NUM_BLOCKS, "num_threads": 1, "dtype": "float32"}
    runner = make_runner(path, build(EngineConfig, **shape | options), workers)
    runner.load(path, lambda done, total: None)
    return runner


@dataclass
class Drawn:
    """By a model, greedily."""

    logits: torch.Tensor
    """After each chunk of one sequence."""
    whole: list[list[int]]
    """The outputs of all prompts as one batch."""
    chunked: list[list[int]]
    """The same in chunks, behind prefix hits."""


def draw(workers: Workers | None, path: Path) -> Drawn:
    runner = load(path, workers)
    logits = chunk_logits(runner, TOKENS, ENDS)
    whole = Driver(runner, NUM_BLOCKS, NUM_ROWS)
    generations = [whole.add(prompt, NUM_TOKENS) for prompt in PROMPTS]
    whole.run(generations)
    chunked = Driver(runner, NUM_BLOCKS, NUM_ROWS)
    first = chunked.add(TOKENS[:80], 1)
    chunked.run([first], budget=40)
    again = [chunked.add(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert {chunked.share_prefix(generation, first) for generation in again} >= {0, 16, 48}
    chunked.run(again, budget=13)
    return Drawn(logits, [one.output for one in generations], [one.output for one in again])


def assert_drawn_alike(ranks: Ranks, path: Path, model: Any) -> None:
    alone = draw(None, path)
    answers = ranks.run(draw, path)
    for drawn in answers:
        torch.testing.assert_close(drawn.logits, alone.logits, atol=TOLERANCE, rtol=0)
        assert torch.equal(drawn.logits, answers[0].logits)
        assert (drawn.whole, drawn.chunked) == (answers[0].whole, answers[0].chunked)
    for ours, theirs in ((drawn.whole, alone.whole), (drawn.chunked, alone.chunked)):
        for prompt, output, expected in zip(PROMPTS, ours, theirs, strict=True):
            if output != expected:  # only where a tie is nearer than float32 decides
                assert_greedy(model, prompt, output)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_two_workers_draw_the_tokens_of_one(architecture: str, two: Ranks, tmp_path: Path):
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED)
    assert_drawn_alike(two, tmp_path, model)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
        ("Olmo2ForCausalLM", {"num_key_value_heads": 2}),
        ("OPTForCausalLM", FAMILIES["OPTForCausalLM"] | {"word_embed_proj_dim": 32}),
    ],
    ids=["biases", "norms over heads held twice", "projected embeddings"],
)
def test_four_workers_with_two_kv_heads_draw_the_tokens_of_one(
    architecture: str, changes: dict[str, Any], four: Ranks, tmp_path: Path
):
    model = save_tiny(tmp_path, architecture, **changes)
    assert_drawn_alike(four, tmp_path, model)


def sums(workers: Workers, tensor: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Over the workers, of what each makes of a tensor: of all rows, and of each by itself."""
    ours = tensor * 1.1 ** (7 * workers.place.tensor_rank)
    return workers.all_reduce(ours.clone()), [workers.all_reduce(row.clone()) for row in ours]


def test_a_sum_does_not_depend_on_batch_mates(four: Ranks):
    tensor = torch.randn(9, 100)
    answers = four.run(sums, tensor)
    for together, alone in answers:
        assert torch.equal(together, torch.stack(alone))
        assert torch.equal(together, answers[0][0])


def logits_in(workers: Workers | None, path: Path, dtype: str) -> torch.Tensor:
    return chunk_logits(load(path, workers, dtype=dtype), TOKENS, ENDS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "MixtralForCausalLM"])
def test_sixteen_bit_logits_are_nearly_as_near_as_those_of_one_worker(
    architecture: str, dtype: str, two: Ranks, tmp_path: Path
):
    """Each worker's part of a sum is rounded, and then the sum: three times instead of once."""
    save_tiny(tmp_path, architecture, **FAMILIES[architecture] | {"initializer_range": 0.05})
    exact, alone = logits_in(None, tmp_path, "float32"), logits_in(None, tmp_path, dtype)
    for logits in two.run(logits_in, tmp_path, dtype):
        assert 0 < (logits - exact).square().mean() < 5 * (alone - exact).square().mean()


def gguf_logits(workers: Workers | None, path: Path, dtype: str) -> tuple[torch.Tensor, set[str]]:
    """And the names of the tensors that are kept as integers."""
    runner = load(path, workers, dtype=dtype)
    kept = set(kept_weights(runner))
    return chunk_logits(runner, TOKENS, ENDS), kept


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("architecture", IN_GGUF)
def test_two_workers_read_a_gguf_file_of_quantised_blocks(architecture: str, dtype: str, two: Ranks, tmp_path: Path):
    """Rows are cut between heads, whose halves lie interleaved in some; columns in the middle of a block in others.

    Weights that stay integers take what they are multiplied with in 16 bits, which sums in another order may round to
    the next: the workers are as near to exact products as one is.
    """
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | {"use_sliding_window": False})
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, ARCHITECTURES[architecture].gguf_name, "Q8_0")
    exact, _ = gguf_logits(None, path, "float32")
    alone, kept_alone = gguf_logits(None, path, dtype)
    error = max(TOLERANCE, 2 * float((alone - exact).abs().max()))
    answers = two.run(gguf_logits, path, dtype)
    for logits, kept in answers:
        torch.testing.assert_close(logits, exact, atol=error, rtol=0)
        assert torch.equal(logits, answers[0][0])
        assert bool(kept) == bool(kept_alone)
        # What is cut inside a group of weights with one scale is turned into floats.
        assert {name.split(".")[-2] for name in kept_alone - kept} <= {"down_proj"}


def sample(workers: Workers | None, path: Path) -> list[ModelRunnerOutput]:
    """Rows that draw at random, one of them behind a grammar, with log-probabilities of outputs and prompts."""
    runner = load(path, workers)
    prompt, rows = np.array(TOKENS[:20], np.int32), np.arange(4, dtype=np.int32)
    samplings = [Sampling(1.0, seed=row, top_p=0.9, logprobs=5, prompt_logprobs=2, min_tokens=3) for row in range(4)]
    new_rows = [NewRow(row, prompt, 20, [3 * row + 1, 3 * row + 2, 3 * row + 3], samplings[row]) for row in range(4)]
    outputs = []
    for number in range(20):
        starts = np.full(4, 19 + number if number else 0, np.int32)
        counts = np.full(4, 1 if number else 20, np.int32)
        bits = np.full((1, -(-VOCAB // 32)), 1 << number, np.int32)
        runner.execute(SchedulerOutput(number, rows, starts, counts, np.ones(4, np.bool_), new_rows))
        outputs.append(runner.sample(GrammarMask(np.array([2], np.int32), bits)).result())
        new_rows = []
    return outputs


def test_seeds_grammars_and_logprobs_are_those_of_one_worker(two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    alone = sample(None, tmp_path)
    answers = two.run(sample, tmp_path)
    drawn = np.array([output.token_ids for output in alone])
    assert len(np.unique(drawn)) > 20
    assert (drawn[:, 2] % 32 == np.arange(20)).all()
    for outputs in answers:
        assert np.array_equal([output.token_ids for output in outputs], drawn)
        for ours, theirs, others in zip(outputs, alone, answers[0], strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert others.logprobs is not None
            assert np.array_equal(ours.logprobs.logprobs, others.logprobs.logprobs)
            np.testing.assert_allclose(ours.logprobs.logprobs, theirs.logprobs.logprobs, atol=TOLERANCE)
            for our_prompt, their_prompt in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
                assert our_prompt.row == their_prompt.row
                np.testing.assert_allclose(our_prompt.logprobs.logprobs, their_prompt.logprobs.logprobs, atol=TOLERANCE)
    assert len(alone[0].prompt_logprobs) == 4


def blocks(workers: Workers, path: Path) -> tuple[int, int]:
    """Of one that is allowed less memory than the others."""
    memory = 3 - workers.place.tensor_rank
    info = make_runner(path, build(EngineConfig, num_threads=1, kv_cache_memory=memory, max_num_seqs=64), workers)
    size = info._size
    return size.num_blocks, size.max_model_len


def test_the_worker_with_the_least_memory_decides_how_many_blocks_there_are(two: Ranks, tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    block_bytes = 2 * 3 * 16 * 1 * 16 * 4
    assert two.run(blocks, tmp_path) == [((2 << 20) // block_bytes, 512)] * 2
