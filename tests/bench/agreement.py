"""What faster arithmetic changes: an engine's greedy text and perplexity beside those of float32 on the same weights.

    python -m tests.bench.agreement [--tokens 64] [engine flags, such as --dtype bfloat16]

Runs the engine twice, as the flags say and with --dtype float32 and its KV cache in their place, on the prompts of
`agreement_prompts.txt` (chats of one message, past the model's own end) and on `agreement_text.txt`. Prints a table,
and last a line of JSON. The gap where outputs part is float32's: between the log-probabilities of its two likeliest
tokens there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_engine.bench.table import format_table
from async_engine.flags import add_flags, values
from async_engine.llm import LLM
from protos.config import CacheOptions, ExecutorOptions, ModelOptions, SchedulerOptions
from protos.params import SamplingParams

SECTIONS = (ModelOptions, CacheOptions, SchedulerOptions, ExecutorOptions)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sample:
    """What one engine says."""

    texts: list[list[int]]
    """Token ids of each prompt's output."""
    gaps: list[list[float]]
    """Of each of those tokens: how much likelier the likeliest was than the second, in log-probability."""
    logprobs: list[float]
    """Of the fixed text's tokens."""
    perplexity: float


@dataclass(frozen=True)
class Divergence:
    """Where two outputs first differ."""

    prompt: int
    token: int
    gap: float


@dataclass(frozen=True)
class Agreement:
    """How well an engine agrees with float32; the bars are those of a default."""

    prompts: int
    same_texts: float
    """Share of the outputs that are equal to the last token."""
    same_tokens: float
    """Share of the tokens that come before the first difference of their output."""
    widest_gap: float
    """At a first difference."""
    perplexity: float
    float32_perplexity: float
    mean_logprob_error: float
    worst_logprob_error: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.float32_perplexity - 1

    @property
    def is_enough(self) -> bool:
        return self.same_texts >= 0.95 and self.widest_gap < 0.02 and abs(self.perplexity_change) <= 0.001


def sample(options: dict[str, Any], num_prompts: int, num_tokens: int) -> Sample:
    prompts = (HERE / "agreement_prompts.txt").read_text().splitlines()[:num_prompts]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    with LLM(**options, progress=False) as llm:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        (score,) = llm.score((HERE / "agreement_text.txt").read_text())
    gaps = []
    for output in outputs:
        logprobs = output.sequences[0].logprobs
        assert logprobs is not None
        gaps.append([a - b for a, b in zip(logprobs.top_logprobs[::2], logprobs.top_logprobs[1::2], strict=True)])
    return Sample([output.token_ids for output in outputs], gaps, score.logprobs, score.perplexity)


def divergences(ours: Sample, exact: Sample) -> list[Divergence]:
    found = []
    for prompt, (a, b) in enumerate(zip(ours.texts, exact.texts, strict=True)):
        token = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        if token < len(b):
            found.append(Divergence(prompt, token, exact.gaps[prompt][token]))
    return found


def compare(ours: Sample, exact: Sample) -> Agreement:
    differences = divergences(ours, exact)
    num_tokens = sum(map(len, exact.texts))
    num_behind = sum(len(exact.texts[difference.prompt]) - difference.token for difference in differences)
    errors = [abs(a - b) for a, b in zip(ours.logprobs, exact.logprobs, strict=True)]
    return Agreement(
        prompts=len(exact.texts),
        same_texts=1 - len(differences) / len(exact.texts),
        same_tokens=1 - num_behind / num_tokens,
        widest_gap=max((difference.gap for difference in differences), default=0.0),
        perplexity=ours.perplexity,
        float32_perplexity=exact.perplexity,
        mean_logprob_error=statistics.fmean(errors),
        worst_logprob_error=max(errors),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="how many of them")
    parser.add_argument("--tokens", type=int, default=64, help="of each output")
    for section in SECTIONS:
        add_flags(parser, section)
    arguments = parser.parse_args()
    options = values(arguments, *SECTIONS)
    ours = sample(options, arguments.prompts, arguments.tokens)
    exact = sample(options | {"dtype": "float32", "kv_cache_dtype": "auto"}, arguments.prompts, arguments.tokens)
    agreement = compare(ours, exact)
    rows: list[list[object]] = [
        [f"prompt {one.prompt}", one.token, f"{one.gap:.4f}"] for one in divergences(ours, exact)
    ]
    sys.stdout.write(format_table(["differs from float32", "from token", "gap there"], rows) + "\n")
    found = {**asdict(agreement), "perplexity_change": agreement.perplexity_change, "is_enough": agreement.is_enough}
    rows = [[name, f"{value:.5g}" if isinstance(value, float) else value] for name, value in found.items()]
    sys.stdout.write(format_table(["", arguments.dtype], rows) + "\n" + json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
