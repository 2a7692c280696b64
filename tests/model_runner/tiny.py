"""Tiny random models, made by transformers, saved as it saves them; and ours, loaded from the files."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.quantised import QuantisedMatrix
from model_runner.device import make_device
from model_runner.models import full_spec
from model_runner.runner import ModelRunner
from protos.config import EngineConfig, build
from protos.model_files import read_model_spec
from protos.step import NewRow, SchedulerOutput
from tests.model_runner.driver import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernels.halves import HalvesMatrix
    from model_runner.device import DevicePolicy
    from model_runner.parallel import Workers

VOCAB = 199
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def save_tiny(directory: Path, architecture: str, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """A random model of transformers, whose config and weights now lie in the directory."""
    import transformers

    config_class = getattr(transformers, architecture).config_class
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_class(**SHAPE | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name or ".ln_" in name:
                parameter.normal_(1.0, 0.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def make_runner(
    path: Path,
    config: EngineConfig,
    workers: Workers | None = None,
    change: Callable[[DevicePolicy], DevicePolicy] = lambda policy: policy,
) -> ModelRunner:
    """Not loaded yet; of workers that have met, the part of one; `change` makes another policy of the config's."""
    spec = full_spec(path, read_model_spec(path))
    policy = make_device(config, spec) if workers is None else make_device(config, spec, workers.place)
    if workers is not None:
        policy = replace(policy, workers=workers)
    return ModelRunner(config, spec, (), change(policy))


def save_shape(directory: Path, **changes: Any) -> None:
    """The config of a Llama, which `--load-format dummy` makes random weights for."""
    directory.joinpath("config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **changes})
    )


def tensors(runner: ModelRunner) -> dict[str, torch.Tensor]:
    """The model's, by the names of the checkpoint."""
    return {name: target.tensor for name, target in runner.model.weights().items()}


def load_tiny(path: Path, **options: Any) -> ModelRunner:
    config = build(EngineConfig, **{"max_num_seqs": 8, "num_kv_blocks": 64, "dtype": "float32", **options})
    runner = make_runner(path, config)
    runner.load(path, lambda done, total: None)
    return runner


def as_floats(weights: QuantisedMatrix | HalvesMatrix | torch.Tensor | None) -> torch.Tensor:
    """Of a part of a matrix, in whatever way it is kept."""
    assert weights is not None
    return weights if isinstance(weights, torch.Tensor) else torch.cat(list(weights.chunks()))


def kept_weights(runner: ModelRunner) -> dict[str, torch.Tensor]:
    """In floats, the tensors that the model keeps as integers. Only before it has run."""
    return {
        name: torch.cat([as_floats(kept.weights) for kept in target.kept])
        for name, target in runner.model.weights().items()
        if target.kept and all(isinstance(kept.weights, QuantisedMatrix) for kept in target.kept)
    }


def chunk_logits(runner: ModelRunner, token_ids: list[int], ends: list[int], block_size: int = 16) -> torch.Tensor:
    """[chunk, vocabulary]: logits after each chunk of one sequence; chunks end before the positions of `ends`."""
    rows = np.array([3], np.int32)
    blocks = list(range(1, 1 + -(-len(token_ids) // block_size)))[::-1]
    new_rows = [NewRow(3, np.array(token_ids, np.int32), len(token_ids), blocks, GREEDY)]
    found = []
    for start, end in zip([0, *ends], ends, strict=False):
        starts, counts = np.array([start], np.int32), np.array([end - start], np.int32)
        runner.execute(SchedulerOutput(end, rows, starts, counts, np.array([True]), new_rows))
        logits = runner.model.logits(runner._hidden) if runner._scores is None else runner._scores[0]
        found.append(logits[0].clone())
        new_rows = []
    return torch.stack(found)


def reference_logits(model: Any, token_ids: list[int], ends: list[int]) -> torch.Tensor:
    """The same from transformers, which computes the whole sequence at once; of a float32 model in float64, as
    transformers would add rounding errors of its own, others on each kind of processor."""
    if model.dtype == torch.float32:
        model = copy.deepcopy(model).double()
        model.set_experts_implementation("eager")  # the others know no float64
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits[[end - 1 for end in ends]].float()
