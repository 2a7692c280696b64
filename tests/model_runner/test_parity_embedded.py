"""The embedded model draws the tokens that transformers draws, however its prompts are computed.

A different token is allowed where transformers' own two logits are closer than 1e-3: there, float32
itself does not decide. Such flips are counted and printed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.uniproc import UniprocExecutor
from gpu_executor.worker import Worker
from protos.config import EngineConfig, build
from protos.messages import EngineCoreRequest, Sampling
from protos.model_files import read_model_spec, resolve_model
from tests.model_runner.driver import Driver
from tests.model_runner.prompts import load_prompts
from tests.model_runner.tiny import tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_runner.runner import ModelRunner
    from protos.step import WorkerInfo
    from tests.model_runner.driver import Generation

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]
NUM_TOKENS = 64
NEAR_TIE = 1e-3
NEAR_TIE_OF_INTEGERS = 0.02
"""Where layers compute with the file's integers, which rounds what goes into them to 16 bits."""


class Engine:
    """A loaded worker, and its model's weights."""

    def __init__(self, dtype: str) -> None:
        self.worker = Worker(build(EngineConfig, kv_cache_memory=512, dtype=dtype), (2,))
        self.info: WorkerInfo = self.worker.load(lambda done, total: None)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        runner: ModelRunner = self.worker._loaded()
        return tensors(runner)

    def driver(self) -> Driver:
        return Driver(self.worker, self.info.num_blocks, 256)


@dataclass
class Tokens:
    """One request's output."""

    output: list[int]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("float32")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return load_prompts(resolve_model(""))


class Reference:
    """What transformers' generate draws for each prompt, and the logits [step, vocabulary] it draws from."""

    def __init__(self, weights: dict[str, torch.Tensor], prompts: list[list[int]]) -> None:
        self._model = transformers_model(weights)
        self.token_ids: dict[int, list[int]] = {}
        self.logits: dict[int, torch.Tensor] = {}
        # Padding costs as much as prompts do: the short ones together, and the long ones.
        short = [index for index, prompt in enumerate(prompts) if len(prompt) <= 40]
        self._generate(short, prompts)
        self._generate([index for index in range(len(prompts)) if index not in short], prompts)

    def _generate(self, group: list[int], prompts: list[list[int]]) -> None:
        from transformers import GenerationConfig

        width = max(len(prompts[index]) for index in group)
        ids = torch.tensor([[0] * (width - len(prompts[index])) + prompts[index] for index in group])
        mask = torch.tensor([[0] * (width - len(prompts[index])) + [1] * len(prompts[index]) for index in group])
        settings = GenerationConfig(
            max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
        )
        with torch.inference_mode():
            result = self._model.generate(ids, attention_mask=mask, generation_config=settings)
        for place, index in enumerate(group):
            self.token_ids[index] = result.sequences[place, width:].tolist()
            self.logits[index] = torch.stack([step[place] for step in result.logits])


def transformers_model(weights: dict[str, torch.Tensor]) -> Any:
    """Their modelling code around our weights, sharing the memory. It never stops at an end-of-sequence token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = read_model_spec(resolve_model(""))
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # Strict: every parameter of theirs has a tensor of ours, of the same shape.
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(scope="module")
def reference(engine: Engine, prompts: list[list[int]]) -> Reference:
    return Reference(engine.weights, prompts)


@pytest.fixture
def check(reference: Reference, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest):
    def check(generations: Mapping[int, Generation | Tokens], near_tie: float = NEAR_TIE) -> int:
        flips = 0
        for index, generation in generations.items():
            theirs, ours = reference.token_ids[index], generation.output
            assert len(ours) == len(theirs) == NUM_TOKENS
            if ours == theirs:
                continue
            place = next(i for i in range(NUM_TOKENS) if ours[i] != theirs[i])
            logits = reference.logits[index][place]
            gap = float(logits.max() - logits[ours[place]])
            assert gap < near_tie, f"prompt {index}, token {place}: {ours[place]}, not {theirs[place]} (gap {gap})"
            flips += 1
        with capsys.disabled():
            print(f"\n{request.node.name}: {flips} of {len(generations)} prompts flip at a near tie")  # noqa: T201
        return flips

    return check


@pytest.mark.parametrize("quarter", range(4))
def test_each_prompt_alone(quarter: int, engine: Engine, prompts: list[list[int]], check):
    driver = engine.driver()
    generations = {index: driver.add(prompts[index], NUM_TOKENS) for index in range(quarter, 32, 4)}
    for generation in generations.values():
        driver.run([generation])
        driver.leave(generation)
    check(generations)


def test_batched_with_31_others(engine: Engine, prompts: list[list[int]], check):
    driver = engine.driver()
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    driver.run(generations)
    check(dict(enumerate(generations)))


def test_chunked_prefill_with_a_budget_of_64(engine: Engine, prompts: list[list[int]], check):
    driver = engine.driver()
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    driver.run(generations, budget=64)
    check(dict(enumerate(generations)))


def test_prefix_hits(engine: Engine, prompts: list[list[int]], check):
    driver = engine.driver()
    first = [driver.add(prompt, 1) for prompt in prompts]
    driver.run(first)
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    hits = [driver.share_prefix(to, of) for to, of in zip(generations, first, strict=True)]
    assert sum(hit > 0 for hit in hits) >= 10
    driver.run(generations)
    check(dict(enumerate(generations)))


def test_forced_preemption(engine: Engine, prompts: list[list[int]], check):
    driver = engine.driver()
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    driver.run(generations, num_steps=20)
    for generation in generations[::2]:
        driver.preempt(generation)
    driver.run(generations, budget=300, num_steps=9)
    for generation in generations[::3]:
        driver.preempt(generation)
    driver.run(generations)
    check(dict(enumerate(generations)))


def test_the_default_draws_the_same_and_whatever_the_batch(prompts: list[list[int]], check):
    """It computes with the file's integers, in an order that no other row changes."""
    engine = Engine("auto")
    assert engine.info.weight_bytes < 110e6
    driver = engine.driver()
    together = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    driver.run(together)
    assert check(dict(enumerate(together)), NEAR_TIE_OF_INTEGERS) <= 0.05 * len(prompts)

    others = engine.driver()
    chunked = [others.add(prompt, NUM_TOKENS) for prompt in prompts]
    others.run(chunked, budget=64)
    for index, generation in enumerate(chunked):
        others.leave(generation)
        if index % 8 == 0:
            alone = others.add(prompts[index], NUM_TOKENS)
            others.run([alone])
            others.leave(alone)
            assert alone.output == generation.output
    assert [generation.output for generation in chunked] == [generation.output for generation in together]


class Small:
    """The loaded worker, as one with little room for keys and values."""

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        self.execute, self.sample = engine.worker.execute, engine.worker.sample
        room = (num_blocks - 1) * 16
        self._info = msgspec.structs.replace(engine.info, num_blocks=num_blocks, max_model_len=room)

    def load(self, report: Any) -> WorkerInfo:
        return self._info


def test_through_the_scheduler_in_chunks_with_prefix_hits_and_preemptions(
    engine: Engine, prompts: list[list[int]], check
):
    config = build(EngineConfig, max_num_seqs=32, max_num_batched_tokens=64)
    core = EngineCore(config, (), executor=UniprocExecutor(config, (), worker=Small(engine, 96)))

    def generate(max_tokens: int) -> dict[int, Tokens]:
        for index, prompt in enumerate(prompts):
            message = EngineCoreRequest(index, np.array(prompt, "<i4").tobytes(), Sampling(), max_tokens)
            core.scheduler.add(make_request(message, 0, 16, core.ready.max_model_len, time.monotonic()))
        outputs = {index: Tokens([]) for index in range(len(prompts))}
        while core.step():
            for events in core.scheduler.events.take().values():
                handles, drawn = np.frombuffer(events.handles, "<i8"), np.frombuffer(events.token_ids, "<i4")
                for handle, token_id in zip(handles.tolist(), drawn.tolist(), strict=True):
                    outputs[handle].output.append(token_id)
            core.scheduler.table.audit()
        return outputs

    generate(1)  # leaves prompts in the cache
    outputs = generate(NUM_TOKENS)
    stats = core.scheduler.stats(0)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    check(outputs)


def test_weights_equal_what_transformers_reads_from_the_file(engine: Engine):
    """Bit for bit: names, dequantisation and the order of rows in q and k are right."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(resolve_model(""))
    config = load_gguf_checkpoint(path)["config"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    ours = engine.weights
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
