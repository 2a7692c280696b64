"""Log-probabilities of the embedded model, of prompts and outputs, are transformers', however they are computed."""

from __future__ import annotations

from typing import Any

import pytest

from protos.messages import Sampling
from protos.model_files import resolve_model
from tests.model_runner.prompts import load_prompts
from tests.model_runner.reported import check_generation
from tests.model_runner.test_parity_embedded import Engine, transformers_model

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(300)]
NUM_TOKENS = 8
REPORT = Sampling(logprobs=5, prompt_logprobs=5, logprob_token_ids=(1, 40000))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("float32")


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Any:
    return transformers_model(engine.weights)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """16 of 1 to 300 tokens."""
    return load_prompts(resolve_model(""))[::2]


@pytest.mark.parametrize("budget", [4096, 64])
def test_16_prompts_together_whole_and_in_chunks(budget: int, engine: Engine, reference: Any, prompts: list[list[int]]):
    driver = engine.driver()
    generations = [driver.add(prompt, NUM_TOKENS, REPORT) for prompt in prompts]
    driver.run(generations, budget)
    assert any(len(generation.prompt_logprobs) > 1 for generation in generations) == (budget == 64)
    for generation in generations:
        check_generation(reference, generation)


def test_with_prefix_hits(engine: Engine, reference: Any, prompts: list[list[int]]):
    driver = engine.driver()
    first = [driver.add(prompt, 1) for prompt in prompts]
    driver.run(first)
    generations = [driver.add(prompt, NUM_TOKENS, REPORT) for prompt in prompts]
    hits = [driver.share_prefix(to, of) for to, of in zip(generations, first, strict=True)]
    assert sum(hit > 0 for hit in hits) >= 5
    driver.run(generations, budget=64)
    for generation, hit in zip(generations, hits, strict=True):
        check_generation(reference, generation, first=hit + 1)
