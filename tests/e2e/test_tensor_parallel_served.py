"""A model that two processes hold together, through the whole engine."""

import pytest

from async_engine.llm import LLM
from protos.messages import GrammarSpec
from protos.params import SamplingParams
from tests.model_runner.hostile import write_directory

PROMPTS = ["abc", "hello", "hello you " * 6, "hello you " * 6]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(max_tokens=8, temperature=1.0, seed=6, grammar=GrammarSpec("regex", "[0-9]{4}")),
]


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    write_directory(path)
    return path


def generate(path, size, steps_in_flight):
    options = {"load_format": "dummy", "num_kv_blocks": 32, "max_num_seqs": 4, "num_threads": 1}
    options |= {"tensor_parallel_size": size, "max_steps_in_flight": steps_in_flight}
    with LLM(str(path), progress=False, **options) as llm:
        return llm.generate(PROMPTS, PARAMS)


def test_two_processes_generate_what_one_does(directory):
    """Also while they are a step ahead of what is known."""
    ours, expected = generate(directory, 2, 2), generate(directory, 1, 1)
    assert [output.token_ids for output in ours] == [output.token_ids for output in expected]
    assert len({tuple(output.token_ids) for output in ours}) == len(PROMPTS)
    assert ours[3].text.isdecimal()
