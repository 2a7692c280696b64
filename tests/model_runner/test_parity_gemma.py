"""Gemma 3 270M has the weights that transformers reads from its file, and draws the tokens that it draws.

All of theirs is their own: reader, dequantisation, modelling code. Only the vocabulary is left out of the
copy they read, because their reader takes a minute and a gigabyte for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from async_engine.tokenizer import load_tokenizer
from protos.config import EngineConfig, build
from protos.gguf import read_gguf
from protos.model_files import read_model_spec
from tests.gemma import gemma_gguf
from tests.model_runner.driver import Driver
from tests.model_runner.greedy import Greedy
from tests.model_runner.tiny import make_runner, tensors

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.runner import ModelRunner

pytestmark = [pytest.mark.gemma, pytest.mark.timeout(300)]
NUM_TOKENS = 32
NUM_BLOCKS = 256
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "<start_of_turn>user\nWhat is gravity?<end_of_turn>\n<start_of_turn>model\n",
    "日本の首都は",
    "1, 1, 2, 3, 5, 8,",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of",
    "A long report begins with a summary of what was found, why it matters and what to do next. " * 28,
]
"""The last is longer than the window of 512 tokens."""


@pytest.fixture(scope="module")
def file() -> Path:
    return gemma_gguf()


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(file)
    return [tokenizer.encode(text, True) for text in TEXTS]


@pytest.fixture(scope="module")
def theirs(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model that transformers makes of the file."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    bare = tmp_path_factory.mktemp("gemma") / "bare.gguf"
    write_without_vocabulary(file, bare)
    config = Gemma3TextConfig(**load_gguf_checkpoint(bare)["config"], vocab_size=read_model_spec(file).vocab_size)
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    tensors = load_gguf_checkpoint(bare, return_tensors=True, model_to_load=model)["tensors"]
    bare.unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    # What is no weight was made without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    scale = model.model.embed_tokens.scalar_embed_scale
    model.model.embed_tokens.embed_scale = torch.tensor(scale)
    return model.eval()


def write_without_vocabulary(source: Path, target: Path) -> None:
    """Arrays of metadata are the vocabulary's; tensors keep their blocks."""
    file = read_gguf(source)
    writer = GGUFWriter(target, file.metadata["general.architecture"])
    for key, value in file.metadata.items():
        if type(value) in (int, float) and not key.startswith("general."):
            (writer.add_uint32 if type(value) is int else writer.add_float32)(key, value)
    data = np.memmap(source, np.uint8, "r")
    for tensor in file.tensors.values():
        blocks = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(tensor.name, blocks, raw_dtype=GGMLQuantizationType(tensor.type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def expected(theirs: Any, prompts: list[list[int]]) -> Greedy:
    return Greedy(theirs, prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def runner(theirs: Any, file: Path) -> ModelRunner:
    """Made behind theirs, so that what they need for loading is free again."""
    runner = make_runner(file, build(EngineConfig, max_num_seqs=8, num_kv_blocks=NUM_BLOCKS, dtype="float32"))
    runner.load(file, lambda done, total: None)
    return runner


def test_weights_equal_what_transformers_reads_from_the_file(runner: ModelRunner, theirs: Any):
    """Bit for bit, but for the 1 that they take from norms and give back."""
    ours, table = tensors(runner), theirs.state_dict()
    assert ours.keys() == table.keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        if name.endswith("norm.weight"):
            torch.testing.assert_close(tensor, 1 + table[name], atol=0, rtol=2e-7 * 64)
        else:
            assert torch.equal(tensor, table[name]), name


def test_greedy_text_in_one_batch_with_chunked_prefill_equals_transformers(
    runner: ModelRunner,
    prompts: list[list[int]],
    expected: Greedy,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
):
    assert len(prompts[-1]) > 512
    driver = Driver(runner, NUM_BLOCKS, 8)
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    driver.run(generations, budget=100)
    flips = expected.num_flips([generation.output for generation in generations])
    with capsys.disabled():
        print(f"\n{request.node.name}: {flips} of {len(generations)} prompts flip at a near tie")  # noqa: T201
