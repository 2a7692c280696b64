"""LoRA adapters: a row with one draws what the model with merged weights draws, whatever rows are beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kernels.low_rank import LowRank
from model_runner.weights import whole_table
from protos.adapter_files import module_shapes, read_adapter
from protos.config import EngineConfig, build
from protos.errors import AdapterError
from protos.messages import Sampling
from protos.model_files import read_model_spec
from protos.tensor_names import bare_name
from tests.adapter_files import save_adapter, write_adapter
from tests.model_runner.adapted import linear_shapes, merged, save_adapted
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.greedy import assert_greedy
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.test_tiny_greedy import FAMILIES, UNTIED
from tests.model_runner.test_tiny_models import TOKENS
from tests.model_runner.tiny import load_tiny, make_runner, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.runner import ModelRunner
    from tests.model_runner.driver import Generation

NUM_TOKENS = 12
PROMPTS = [TOKENS[:size] for size in (1, 7, 40, 64)] + [TOKENS[:48] + TOKENS[:20]]


def load_adapters(runner: ModelRunner, path: Path, names: dict[int, str], max_rank: int = 64) -> None:
    """Into the slots, from directories below that of the model's own."""
    directory = path if path.is_dir() else path.parent
    for slot, name in names.items():
        runner.load_adapter(slot, read_adapter(name, directory / name, read_model_spec(path), max_rank))


def run(
    runner: ModelRunner, adapters: list[int], budget: int = 4096, num_tokens: int = NUM_TOKENS, **sampling: Any
) -> list[Generation]:
    """Every prompt with every adapter, all in one batch."""
    driver = Driver(runner, 128, 16)
    generations = [
        driver.add(prompt, num_tokens, Sampling(**sampling), slot) for prompt in PROMPTS for slot in adapters
    ]
    driver.run(generations, budget)
    return generations


def outputs(generations: list[Generation]) -> list[list[int]]:
    return [generation.output for generation in generations]


def assert_each_draws(generations: list[Generation], models: dict[int, Any]) -> None:
    """What the model of its slot would."""
    for one in generations:
        assert_greedy(models[one.adapter], one.token_ids[: one.num_prompt_tokens], one.output)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def models(directory: Path) -> dict[int, Any]:
    """A Llama without an adapter, with the first and with the second."""
    model = save_tiny(directory, "LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    return dict(enumerate([model, *save_adapted(directory, model)]))


def load(directory: Path, **options: Any) -> ModelRunner:
    return load_tiny(directory, max_num_seqs=16, num_kv_blocks=128, **options)


@pytest.fixture
def runner(directory: Path, models: dict[int, Any]) -> ModelRunner:
    """With both adapters, in slots 1 and 2."""
    runner = load(directory)
    load_adapters(runner, directory, {1: "one", 2: "two"})
    return runner


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rows_draw_what_merged_weights_draw(architecture: str, tmp_path: Path):
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED)
    models = dict(enumerate([model, *save_adapted(tmp_path, model)]))
    runner = load(tmp_path)
    load_adapters(runner, tmp_path, {1: "one", 2: "two"})
    whole = run(runner, [0, 1, 2])
    assert_each_draws(whole, models)
    assert_each_draws(run(runner, [2, 0, 1], budget=13), models)
    # The adapters do matter.
    assert len({str(outputs(whole)[slot::3]) for slot in range(3)}) == 3


@pytest.mark.parametrize("architecture", FAMILIES)
def test_modules_that_files_are_checked_against_are_those_of_the_model(architecture: str, tmp_path: Path):
    save_tiny(tmp_path, architecture, **FAMILIES[architecture])
    spec = read_model_spec(tmp_path)
    runner = load(tmp_path)
    table = whole_table(spec, runner._policy)
    found = {
        bare_name(name).removesuffix(".weight"): target.shape
        for name, target in table.items()
        if target.linear is not None and name.endswith("proj.weight") and ".layers." in name
    }
    layers = range(spec.num_layers)
    assert found == {f"layers.{n}.{name}": shape for n in layers for name, shape in module_shapes(spec, n).items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_files_in_gguf_take_the_same_adapters(family: str, tmp_path: Path):
    """Of which some have the rows of q and k in another order, and some their matrices turned."""
    architecture = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[family]
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED)
    models = dict(enumerate([model, *save_adapted(tmp_path, model)]))
    write_gguf(tmp_path / "tiny.gguf", model, family)
    runner = load(tmp_path / "tiny.gguf")
    load_adapters(runner, tmp_path / "tiny.gguf", {1: "one", 2: "two"})
    assert_each_draws(run(runner, [0, 1, 2]), models)


def test_sizes_that_no_kernel_takes(tmp_path: Path):
    changes = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 50}
    model = save_tiny(tmp_path, "LlamaForCausalLM", **changes)
    models = dict(enumerate([model, *save_adapted(tmp_path, model)]))
    runner = load(tmp_path)
    load_adapters(runner, tmp_path, {1: "one", 2: "two"})
    assert_each_draws(run(runner, [0, 1, 2], budget=50), models)


def test_some_modules_of_some_layers_by_scales_of_their_own(tmp_path: Path):
    model = save_tiny(tmp_path, "LlamaForCausalLM")
    shapes = linear_shapes(model)
    names = ["model.layers.0.self_attn.k_proj", "model.layers.2.mlp.up_proj"]
    tensors = [save_adapter(tmp_path / "one", {names[0]: shapes[names[0]]}, 4, size=0.6)]
    tensors += [save_adapter(tmp_path / "one", {names[1]: shapes[names[1]]}, 9, size=0.6)]
    patterns = {"rank_pattern": {"up_proj": 9}, "alpha_pattern": {"layers.2.mlp.up_proj": 6}}
    config = {"r": 4, "lora_alpha": 10, "use_rslora": True, **patterns}
    write_adapter(tmp_path / "one", tensors[0] | tensors[1], config)
    expected = merged(merged(model, tensors[0], 5.0), tensors[1], 2.0)
    runner = load(tmp_path)
    load_adapters(runner, tmp_path, {3: "one"})
    generations = run(runner, [3])
    assert_each_draws(generations, {3: expected})
    assert outputs(generations) != outputs(run(runner, [0]))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_rows_beside_have_the_same_bits(directory: Path, models: dict[int, Any], options: Any):
    """As in a batch of the same rows without adapters, log-probabilities of prompts too."""
    runner = load(directory, **options)
    load_adapters(runner, directory, {1: "one", 2: "two"})

    def told(slots: list[int]) -> list[Any]:
        driver = Driver(runner, 128, 16)
        sampling = Sampling(logprobs=3, prompt_logprobs=2)
        rows = [driver.add(prompt, 8, sampling, slot) for prompt, slot in zip(PROMPTS, slots, strict=True)]
        driver.run(rows, budget=30)
        return [
            (row.output, *(one.logprobs.tobytes() for one in row.logprobs + [p.logprobs for p in row.prompt_logprobs]))
            for row in rows
        ]

    plain, mixed = told([0] * 5), told([0, 1, 0, 2, 0])
    assert mixed[::2] == plain[::2]
    assert mixed[1] != plain[1]
    assert mixed[3] != plain[3]


def test_a_preempted_row_goes_on_with_its_adapter(runner: ModelRunner, models: dict[int, Any]):
    driver = Driver(runner, 128, 16)
    generations = [driver.add(prompt, NUM_TOKENS, adapter=slot) for prompt in PROMPTS for slot in (0, 1, 2)]
    driver.run(generations, num_steps=4)
    for generation in generations[1::2]:
        driver.preempt(generation)
    driver.run(generations, budget=50)
    assert_each_draws(generations, models)


def test_log_probabilities_of_prompts_are_those_of_merged_weights(runner: ModelRunner, models: dict[int, Any]):
    for one in run(runner, [0, 1, 2], budget=50, num_tokens=1, prompt_logprobs=0):
        if one.num_prompt_tokens == 1:
            continue
        prompt = torch.tensor([one.token_ids[: one.num_prompt_tokens]])
        with torch.inference_mode():
            expected = models[one.adapter](prompt).logits[0, :-1].log_softmax(-1)
        told = np.concatenate([part.logprobs.logprobs for part in one.prompt_logprobs])
        wanted = expected.gather(-1, prompt[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(told, wanted, atol=2e-3)


def test_another_adapter_in_the_slot_of_one_that_left(directory: Path, runner: ModelRunner, models: dict[int, Any]):
    first = outputs(run(runner, [1]))
    runner.unload_adapter(1)
    load_adapters(runner, directory, {1: "two"})
    assert_each_draws([*run(runner, [1])], {1: models[2]})
    runner.unload_adapter(1)
    runner.unload_adapter(1)
    runner.unload_adapter(2)
    assert _num_held(runner) == 0
    load_adapters(runner, directory, {1: "one"})
    assert outputs(run(runner, [1])) == first


def test_a_slot_without_an_adapter_fails_the_step_and_no_other(runner: ModelRunner):
    plain = outputs(run(runner, [0]))
    runner.unload_adapter(2)
    for slots in ([0, 2], [3]):
        with pytest.raises(RuntimeError, match=f"no adapter is in slot {slots[-1]}"):
            run(runner, slots)
    assert outputs(run(runner, [0])) == plain


def _num_held(runner: ModelRunner) -> int:
    return sum(
        len(target.linear.added.slots) for target in runner.model.weights().values() if target.linear is not None
    )


class TestRefused:
    """What cannot be loaded leaves nothing."""

    @pytest.fixture
    def tensors(self, directory: Path, models: dict[int, Any]) -> dict[str, np.ndarray]:
        return save_adapter(directory / "bad", linear_shapes(models[0]))

    def refused(self, directory: Path, problem: str) -> None:
        runner = load(directory)
        with pytest.raises(AdapterError, match=problem):
            load_adapters(runner, directory, {1: "bad"})
        assert _num_held(runner) == 0
        with pytest.raises(RuntimeError, match="no adapter is in slot 1"):
            run(runner, [1])
        load_adapters(runner, directory, {1: "one"})
        assert len(outputs(run(runner, [1]))) == len(PROMPTS)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_values_that_are_no_numbers(self, directory: Path, tensors: dict[str, np.ndarray], value: float):
        name = sorted(tensors)[-1]
        tensors[name][1, 2] = value
        write_adapter(directory / "bad", tensors, {"r": 4, "lora_alpha": 8})
        self.refused(directory, f"tensor {name} holds what is no number")

    def test_a_rank_above_that_of_the_workers(self, directory: Path, tensors: dict[str, np.ndarray]):
        runner = load(directory, max_adapter_rank=3)
        with pytest.raises(AdapterError, match="rank 4 is more than the largest"):
            load_adapters(runner, directory, {1: "bad"})

    def test_more_than_the_memory_that_is_there(
        self, directory: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
    ):
        runner = load(directory)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        monkeypatch.setattr("model_runner.device.DevicePolicy.free_memory", lambda policy: needed - 1)
        with pytest.raises(AdapterError, match="needs 1 MiB, and 0 are free"):
            load_adapters(runner, directory, {1: "bad"})
        assert _num_held(runner) == 0
        monkeypatch.setattr("model_runner.device.DevicePolicy.free_memory", lambda policy: needed)
        load_adapters(runner, directory, {1: "bad"})

    def test_memory_that_ends_halfway(
        self, directory: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
    ):
        runner = load(directory)
        made = []

        def make(self: LowRank, parts: Any, original: Any = LowRank.__init__) -> None:
            made.append(self)
            if len(made) == 5:
                raise MemoryError
            original(self, parts)

        monkeypatch.setattr(LowRank, "__init__", make)
        with pytest.raises(MemoryError):
            load_adapters(runner, directory, {1: "bad"})
        assert _num_held(runner) == 0


class TestGraphs:
    """Steps without an adapter are replayed as ever."""

    def test_steps_without_adapters_are_replayed_and_others_not(self, directory: Path, models: dict[int, Any]):
        backend = RecordingBackend()
        runner = make_runner_with(directory, backend)
        load_adapters(runner, directory, {1: "one"})
        plain = outputs(run(runner, [0]))
        assert len(backend.replayed) == NUM_TOKENS - 1
        mixed = run(runner, [0, 1])
        assert len(backend.replayed) == NUM_TOKENS - 1
        assert_each_draws(mixed, models)
        assert outputs(run(runner, [0])) == plain
        assert len(backend.replayed) == 2 * (NUM_TOKENS - 1)


def make_runner_with(directory: Path, backend: RecordingBackend) -> ModelRunner:
    config = build(EngineConfig, max_num_seqs=16, num_kv_blocks=128, dtype="float32")
    runner = make_runner(directory, config, change=lambda policy: replace(policy, graphs=lambda: backend))
    runner.load(directory, lambda done, total: None)
    return runner
