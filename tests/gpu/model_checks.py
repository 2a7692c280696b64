"""A whole model on a device against transformers on the same device, with the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.gpu.device_engine import BLOCK_SIZE, DeviceEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.gpu.device_report import DeviceReport
    from tests.gpu.device_sizes import DeviceSizes

GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""How far below the best a drawn token may be: logits closer than this are rounding's to decide."""
NUM_JUDGED = 8
"""Sequences of a batch that transformers looks at."""


def make_judge(sizes: DeviceSizes) -> Any:
    """The model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(sizes.device):
            return LlamaForCausalLM(LlamaConfig(**sizes.model)).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def make_prompts(sizes: DeviceSizes, count: int, seed: int = 0) -> list[list[int]]:
    """Of different lengths, with nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(1, sizes.prompt_tokens - 7 * (index % 9)) for index in range(count)]
    return [torch.randint(sizes.model["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def check_model(report: DeviceReport, sizes: DeviceSizes, judge: Any) -> None:
    weights = judge.state_dict()
    engine = DeviceEngine(sizes, weights)
    texts: dict[int, list[list[int]]] = {}
    for batch in sizes.batches:
        prompts = make_prompts(sizes, batch, seed=batch)
        texts[batch] = engine.generate(prompts, sizes.output_tokens)
        name = f"{sizes.output_tokens} greedy tokens of {batch} at once: furthest below transformers' best"
        report.near(name, _furthest(judge, prompts, texts[batch]), GAPS[sizes.dtype])
    _check_logprobs(report, sizes, engine, judge)
    _check_prefix_hit(report, sizes, engine)
    engine.close()
    eager = DeviceEngine(sizes, weights, graphs="off")
    for batch in sizes.batches:
        again = eager.generate(make_prompts(sizes, batch, seed=batch), sizes.output_tokens)
        equal = sum(ours == theirs for ours, theirs in zip(again, texts[batch], strict=True))
        report.check(f"with graphs as without, {batch} at once", equal == batch, f"{equal} of {batch} texts equal")
    eager.close()
    _check_preemption(report, sizes, judge, weights)


def _check_logprobs(report: DeviceReport, sizes: DeviceSizes, engine: DeviceEngine, judge: Any) -> None:
    """Those of a prompt and of what was drawn."""
    (prompt,) = make_prompts(sizes, 1, seed=3)
    engine.logprobs.clear()
    (text,) = engine.generate([prompt], sizes.output_tokens, logprobs=5, prompt_logprobs=0)
    told = [np.frombuffer(part, "<f4").tolist() for part in engine.logprobs]
    # A prompt's come in one step, together, and those of an output one by one.
    of_prompt = max(told, key=len)
    told.remove(of_prompt)
    ids = torch.tensor([prompt + text], device=judge.device)
    with torch.inference_mode():
        theirs = judge(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
    ours = torch.tensor([*of_prompt, *(logprob for (logprob,) in told)])
    report.near("log-probabilities of a prompt and an output", float((ours - theirs).abs().max()), GAPS[sizes.dtype])


def _check_prefix_hit(report: DeviceReport, sizes: DeviceSizes, engine: DeviceEngine) -> None:
    prompt = make_prompts(sizes, 1, seed=-1)[0]
    first, hits = engine.generate([prompt], sizes.output_tokens), engine.core.scheduler.stats(0).prefix_hits
    again = engine.generate([prompt], sizes.output_tokens)
    num_hit = engine.core.scheduler.stats(0).prefix_hits - hits
    expected = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    report.check("prefix found in the cache", num_hit == expected, f"{num_hit} of {expected} tokens")
    report.check("the same text behind a prefix hit", first == again)


def _check_preemption(report: DeviceReport, sizes: DeviceSizes, judge: Any, weights: dict[str, torch.Tensor]) -> None:
    batch = sizes.batches[1]
    prompts = make_prompts(sizes, batch, seed=7)
    blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts)
    longest = sizes.prompt_tokens + sizes.output_tokens
    engine = DeviceEngine(sizes, weights, num_kv_blocks=1 + blocks, max_model_len=longest, prefix_caching=False)
    texts = engine.generate(prompts, sizes.output_tokens)
    report.check("preempted", (count := engine.core.scheduler.stats(0).preemptions) > 0, f"{count} times")
    report.near("furthest below the best after preemption", _furthest(judge, prompts, texts), GAPS[sizes.dtype])
    engine.close()


@torch.inference_mode()
def _furthest(judge: Any, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> float:
    """How far below transformers' best logit a drawn token is, at most."""
    found = []
    for prompt, text in list(zip(prompts, texts, strict=True))[:NUM_JUDGED]:
        ids = torch.tensor([prompt + text], device=judge.device)
        logits = judge(ids).logits[0, len(prompt) - 1 : -1].float()
        drawn = logits.gather(-1, torch.tensor(text, device=judge.device)[:, None])[:, 0]
        found.append(float((logits.max(-1).values - drawn).max()))
    return float(torch.tensor(found).max())
