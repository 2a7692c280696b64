"""A model of which there is no more than config.json and a tokenizer, through the whole engine."""

from async_engine.llm import LLM
from protos.params import SamplingParams
from tests.model_runner.hostile import write_directory


def test_a_model_without_weights_generates(tmp_path):
    path = tmp_path / "model"
    write_directory(path)
    for file in path.iterdir():
        if file.name not in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            file.unlink()
    with LLM(str(path), load_format="dummy", num_kv_blocks=16, max_num_seqs=4, progress=False) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        outputs = [output.token_ids for output in llm.generate(["abc", "hello"], params)]
    assert [len(token_ids) for token_ids in outputs] == [8, 8]
    assert outputs[0] != outputs[1]
