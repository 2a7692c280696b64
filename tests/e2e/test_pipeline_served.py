"""A model whose stages are processes of their own, through the whole engine."""

import pytest

from async_engine.llm import LLM
from tests.e2e.serving import ServerProcess
from tests.e2e.test_tensor_parallel_served import PARAMS, PROMPTS
from tests.model_runner.hostile import CONFIG, write_directory


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    write_directory(path, CONFIG | {"num_hidden_layers": 3})
    return path


def generate(path, num_stages):
    options = {"load_format": "dummy", "num_kv_blocks": 32, "max_num_seqs": 4, "num_threads": 1}
    with LLM(str(path), progress=False, pipeline_parallel_size=num_stages, **options) as llm:
        return llm.generate(PROMPTS * 2, PARAMS * 2)


def test_two_stages_generate_what_one_does(directory):
    ours, expected = (generate(directory, num_stages) for num_stages in (2, 1))
    assert [output.token_ids for output in ours] == [output.token_ids for output in expected]
    assert len({tuple(output.token_ids) for output in ours}) == len(PROMPTS)
    assert ours[3].text.isdecimal()


def test_more_stages_than_layers_are_one_line(tmp_path):
    write_directory(tmp_path / "model")
    arguments = (
        str(tmp_path / "model"),
        "--load-format",
        "dummy",
        "--pipeline-parallel-size",
        "2",
        "--num-threads",
        "1",
    )
    with ServerProcess(*arguments, "--listen", "127.0.0.1:0") as server:
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    (line,) = errors.strip().splitlines()
    assert "--pipeline-parallel-size 2 is more than the model has layers; it can be 1 at most" in line
