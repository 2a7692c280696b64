"""A model of the generic backend, served: from files to a stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.serving import run, serving, stream_request
from tests.model_runner.hostile import OTHERS, TOKENIZER, VOCAB
from tests.model_runner.tiny import save_tiny

ROOT = Path(__file__).parents[2]
PROMPT = "The tail race"
NUM_TOKENS = 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny GPT-NeoX with a tokenizer of bytes, without special tokens around prompts."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    config = OTHERS["tokenizer_config.json"] | {"add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_stream_has_the_tokens_that_transformers_draws(directory: Path):
    ends = {"bos_token_id": VOCAB - 3, "eos_token_id": VOCAB - 2, "pad_token_id": VOCAB - 1}
    model = save_tiny(directory, "GPTNeoXForCausalLM", vocab_size=VOCAB, **ends)

    async def main():
        async with serving(model=str(directory), device="cpu", num_kv_blocks=16, num_threads=1) as (_, stub, _):
            request = stream_request(PROMPT, NUM_TOKENS)
            request.spec.sampling.temperature = 0
            return [message async for message in stub.GenerateStream(request)]

    messages = run(main)
    drawn = [token for message in messages[1:-1] for token in message.delta.sequences[0].token_ids]
    prompt = [TOKENIZER["model"]["vocab"][character] for character in PROMPT.replace(" ", "\u0120")]
    assert messages[0].started.prompt_tokens == len(prompt)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    np.testing.assert_array_equal(drawn, expected[0, len(prompt) :])
    text = "".join(message.delta.sequences[0].text for message in messages[1:-1])
    assert text


def test_the_front_end_reads_it_without_torch_and_transformers(directory: Path):
    (directory / "config.json").write_text(json.dumps({"architectures": ["GPTNeoXForCausalLM"], "vocab_size": VOCAB}))
    code = (
        "import pathlib, sys; from protos.model_files import read_model_spec;"
        "from async_engine.tokenizer import load_tokenizer; path = pathlib.Path(sys.argv[1]);"
        "read_model_spec(path); load_tokenizer(path).close();"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, check=True)


def test_the_worker_imports_transformers_for_no_other_model():
    code = (
        "import sys, gpu_executor.worker; from model_runner.models import MODELS; import model_runner.models.decoder;"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
