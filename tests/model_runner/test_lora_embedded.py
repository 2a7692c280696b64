"""LoRA adapters of the embedded model, which computes with the integers of its file and keeps q and k in pair order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from gpu_executor.worker import Worker
from protos.adapter_files import module_shapes, read_adapter
from protos.config import EngineConfig, build
from protos.messages import Sampling
from protos.model_files import read_model_spec, resolve_model
from tests.adapter_files import save_adapter
from tests.model_runner.driver import Driver
from tests.model_runner.prompts import load_prompts
from tests.model_runner.tiny import tensors

if TYPE_CHECKING:
    from pathlib import Path

    from protos.adapter import Adapter

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]
NUM_TOKENS, NUM_BLOCKS = 24, 512
SCALE = 2.0


def worker(dtype: str = "auto") -> Worker:
    worker = Worker(build(EngineConfig, num_kv_blocks=NUM_BLOCKS, max_model_len=512, dtype=dtype), (2,))
    worker.load(lambda done, total: None)
    return worker


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """Of all modules of some layers."""
    directory: Path = tmp_path_factory.mktemp("adapter")
    spec: Any = read_model_spec(resolve_model(""))
    layers = range(0, spec.num_layers, 7)
    shapes = {f"model.layers.{n}.{name}": shape for n in layers for name, shape in module_shapes(spec, n).items()}
    save_adapter(directory, shapes, rank=8, size=0.05)
    return read_adapter("one", directory, spec, 64)


@pytest.fixture(scope="module")
def integers(adapter: Adapter) -> Worker:
    one = worker()
    one.load_adapter(1, adapter)
    return one


def told(one: Worker, slots: list[int], budget: int = 4096) -> list[tuple[list[int], bytes]]:
    """By prompt, one in each slot: what is drawn, and the log-probabilities to the bit."""
    driver = Driver(one, NUM_BLOCKS, 256)
    prompts = load_prompts(resolve_model(""))[: len(slots)]
    sampling = Sampling(logprobs=2)
    rows = [driver.add(prompt, NUM_TOKENS, sampling, slot) for prompt, slot in zip(prompts, slots, strict=True)]
    driver.run(rows, budget)
    return [(row.output, b"".join(one.logprobs.tobytes() for one in row.logprobs)) for row in rows]


def test_a_row_has_the_same_bits_whatever_adapters_are_beside_it(integers: Worker) -> None:
    """Recorded steps and others, chunks and whole prompts."""
    plain, adapted = told(integers, [0] * 6), told(integers, [1] * 6, budget=60)
    assert told(integers, [0, 1, 0, 1, 1, 0]) == [
        adapted[place] if slot else plain[place] for place, slot in enumerate([0, 1, 0, 1, 1, 0])
    ]
    assert told(integers, [1]) == adapted[:1]
    assert all(one[1] != other[1] for one, other in zip(plain, adapted, strict=True))
    assert sum(one[0] != other[0] for one, other in zip(plain, adapted, strict=True)) >= 3


def test_a_program_recorded_while_an_adapter_is_there_has_nothing_of_it(adapter: Adapter) -> None:
    one: Any = worker()
    one.load_adapter(1, adapter)
    beside, with_it = told(one, [0, 1])
    assert one._runner._graphs._program is None, "steps with an adapter's row are not recorded"
    assert told(one, [0]) == [beside] == told(worker(), [0])
    assert one._runner._graphs._program is not None
    assert told(one, [0, 1]) == [beside, with_it]


def test_it_draws_what_merged_weights_draw(integers: Worker, adapter: Adapter) -> None:
    merged = worker("float32")
    weights, factors = tensors(merged._loaded()), load_file(f"{adapter.path}/adapter_model.safetensors")
    for name in [name for name in factors if "lora_A" in name]:
        weight = weights[name.removeprefix("base_model.model.").replace("lora_A.", "")]
        weight += SCALE * factors[name.replace("lora_A", "lora_B")] @ factors[name]
    expected = told(merged, [0] * 6)
    ours = told(integers, [1] * 6)
    # Integers round what they are multiplied with to 16 bits: few texts part from float32's.
    assert sum(one[0] == other[0] for one, other in zip(ours, expected, strict=True)) >= 5
    assert all(one[0][:4] == other[0][:4] for one, other in zip(ours, expected, strict=True))
