"""Each worker's part of the weights: the right part of every tensor, from every file format, and no more is read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from gpu_executor.worker import Worker
from kernels.reference import ReferenceOps
from model_runner.device import DevicePolicy
from model_runner.layers.vocabulary import Vocabulary
from model_runner.parallel import Workers
from protos.architectures import ARCHITECTURES
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.place import Place
from tests.model_runner.gguf_files import gguf_name, write_gguf
from tests.model_runner.hostile import write_directory
from tests.model_runner.test_load_peak import CONFIG, ROOT, SLACK
from tests.model_runner.test_tiny_greedy import FAMILIES, IN_GGUF
from tests.model_runner.tiny import make_runner, save_tiny, tensors

if TYPE_CHECKING:
    from model_runner.target import Target

MIB = 1 << 20


class Alone(Workers):
    """One of several, that needs the others for nothing here."""


def assert_parts(path: Path, **options: Any) -> None:
    """What every worker of 2 and of 4 holds is its part of what one alone holds, and all is held by somebody."""
    config = build(EngineConfig, num_kv_blocks=8, max_num_seqs=2, num_threads=1, dtype="float32", **options)

    def load(place: Place) -> tuple[dict[str, Target], dict[str, torch.Tensor], list[tuple[int, int]]]:
        runner, reports = make_runner(path, config, Alone(place)), []
        info = runner.load(path, lambda done, total: reports.append((done, total)))
        assert info.weight_bytes == sum(tensor.nbytes for tensor in tensors(runner).values())
        return runner.model.weights(), tensors(runner), reports

    _, whole, reports = load(Place())
    for size in (2, 4):
        held = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in whole.items()}
        for rank in range(size):
            table, _, part_reports = load(Place(rank=rank, tensor_size=size))
            for name, target in table.items():
                for part, view in target.pieces():
                    assert torch.equal(view, whole[name][part]), f"{name} of worker {rank} of {size}"
                    held[name][part] = True
            assert part_reports[-1][0] == part_reports[-1][1] < reports[-1][1]
        assert all(places.all() for places in held.values())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_parts_of_safetensors(architecture: str, tmp_path: Path):
    save_tiny(tmp_path, architecture, **FAMILIES[architecture])
    assert_parts(tmp_path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", IN_GGUF)
def test_parts_of_a_gguf_file(architecture: str, kind: str, tmp_path: Path):
    """Columns are cut in the middle of blocks, too; rows that lie in pairs, between heads."""
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | {"use_sliding_window": False})
    write_gguf(tmp_path / "tiny.gguf", model, ARCHITECTURES[architecture].gguf_name, kind)
    assert_parts(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("architecture", ["Phi3ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_parts_of_dummy_weights_are_of_the_same_model(architecture: str, tmp_path: Path):
    save_tiny(tmp_path, architecture, **FAMILIES[architecture])
    assert_parts(tmp_path, load_format="dummy")


def test_a_tensor_as_small_as_a_part_is_refused_by_the_shape_of_the_whole(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name][:48].clone()}, tmp_path / "model.safetensors")
    config = build(EngineConfig, model=str(tmp_path), num_kv_blocks=8, num_threads=1)
    with pytest.raises(StartupError, match=rf"{name} has shape \[48, 64\], the config says \[96, 64\]$"):
        Worker(config, (), Place(tensor_size=2, rendezvous="nowhere://x")).load(lambda done, total: None)


@pytest.mark.parametrize("vocab_size", [8, 9, 5], ids=["even", "one short", "one with none"])
def test_every_token_is_embedded_and_scored_by_one_worker(vocab_size: int):
    workers = [Alone(Place(rank=rank, tensor_size=4)) for rank in range(4)]
    cpu = DevicePolicy(torch.device("cpu"), torch.float32, ReferenceOps(), 1, None, 1)
    parts = [Vocabulary(vocab_size, 3, replace(cpu, workers=one)) for one in workers]
    whole = torch.randn(vocab_size, 3)
    for part in parts:
        for ours, view in part.slices("x")["x.weight"].pieces():
            view.copy_(whole[ours])
    token_ids = torch.randint(vocab_size, (20,))
    embedded = torch.stack([part.embed(token_ids) for part in parts])
    assert torch.equal(embedded.sum(0), F.embedding(token_ids, whole))
    assert embedded.any(-1).sum() == 20
    hidden = torch.randn(2, 3)
    logits = torch.cat([part.weight.times(hidden) for part in parts], -1)
    torch.testing.assert_close(logits[:, :vocab_size], F.linear(hidden, whole))


# What is read ---------------------------------------------------------------------------------

VOCAB, HIDDEN = 1 << 16, 64
"""Of a model that is almost all vocabulary, whose rows are cut. Where columns are, the kernel may map what lies between
the pages that are read, too."""
MATRICES = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm"]


def wide_model() -> dict[str, tuple[int, ...]]:
    shapes = dict.fromkeys(MATRICES, (HIDDEN, HIDDEN)) | dict.fromkeys(NORMS, (HIDDEN,))
    layer = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    return layer | {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}


def write_wide_safetensors(directory: Path) -> None:
    directory.mkdir()
    changes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(
        {name: torch.ones(shape, dtype=torch.float32) for name, shape in wide_model().items()},
        directory / "model.safetensors",
    )


def write_wide_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in wide_model().items():
        writer.add_tensor(gguf_name(name, "llama"), np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_a_worker_reads_its_part_only(tmp_path: Path):
    """What of a mapped file has been looked at counts as memory of the process."""
    write_wide_safetensors(tmp_path / "wide")
    write_wide_gguf(tmp_path / "wide.gguf")
    write_directory(tmp_path / "small")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "tests.model_runner.load_peak", "1", "2"),
            *(str(tmp_path / name) for name in ("small", "wide", "wide.gguf")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    half = 4 * VOCAB * HIDDEN // 2
    for line in result.stdout.splitlines():
        weight_bytes, peak = map(int, line.split())
        assert half < weight_bytes < half + SLACK
        assert half * 0.8 < peak - weight_bytes < half + SLACK
    assert len(result.stdout.splitlines()) == 2
