"""What loading takes at its peak: the model, and of its files one shard, or the part of one that is mapped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from model_runner.safetensors_weights import MAPPED_BYTES
from tests.model_runner.gguf_files import gguf_name
from tests.model_runner.hostile import write_directory

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
HIDDEN, INNER, LAYERS, VOCAB = 512, 2048, 12, 4096
TOTAL = 4 * (LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN) + VOCAB * HIDDEN + HIDDEN)
"""Bytes in float32."""
SLACK = 3 * MIB
"""For what is made on the way, and for allocators."""
PAGE = 2 * MIB
"""Packed weights lie in pages of this size, of which one may be held for little in each piece of memory."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}


def layer(number: int) -> dict[str, tuple[int, ...]]:
    attention = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    mlp = {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    norms = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in (attention | mlp | norms).items()}


def shards() -> list[dict[str, tuple[int, ...]]]:
    """Of 16 MiB in float32, but for the first."""
    rest = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return [rest, *(layer(number) for number in range(LAYERS))]


def write_safetensors(
    directory: Path, files: list[dict[str, tuple[int, ...]]], dtype: torch.dtype, told: str = "float32"
) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | {"dtype": told}))
    for number, shapes in enumerate(files):
        tensors = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
        save_file(tensors, directory / f"model-{number:05}.safetensors")


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    for shapes in shards():
        for name, shape in shapes.items():
            writer.add_tensor(gguf_name(name, "llama"), np.ones(shape, np.float16 if len(shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_beside_the_model_a_load_holds_one_shard(tmp_path: Path):
    write_safetensors(tmp_path / "same", shards(), torch.float32)
    write_safetensors(tmp_path / "cast", shards(), torch.float16)
    whole = {name: shape for shard in shards() for name, shape in shard.items()}
    write_safetensors(tmp_path / "single", [whole], torch.float32)
    write_safetensors(tmp_path / "kept", shards(), torch.float16, "float16")
    write_gguf(tmp_path / "tiny.gguf")
    write_directory(tmp_path / "small")
    names = ["same", "cast", "single", "kept", "tiny.gguf", "int4:kept"]
    loads = [":".join([*how, str(tmp_path / name)]) for *how, name in (name.split(":") for name in names)]
    result = subprocess.run(
        [sys.executable, "-m", "tests.model_runner.load_peak", "0", "1", str(tmp_path / "small"), *loads],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    beside = {name: peak - weight_bytes for name, (weight_bytes, peak) in zip(names, lines, strict=True)}
    norms = 4 * HIDDEN * (2 * LAYERS + 1)
    halves = (TOTAL - norms) // 2 + norms
    embedding, matrices = VOCAB * HIDDEN, (halves - norms) // 2 - VOCAB * HIDDEN
    integers = matrices * 20 // 32 + embedding * 34 // 32 + norms
    assert [weight_bytes for weight_bytes, _ in lines] == [TOTAL, TOTAL, TOTAL, halves, halves, integers]
    assert 0 < beside["same"] < 16 * MIB + SLACK
    assert 0 < beside["cast"] < 8 * MIB + SLACK
    assert 0 < beside["kept"] < 8 * MIB + SLACK
    assert 0 < beside["int4:kept"] < 8 * MIB + 2 * SLACK + 2 * PAGE
    assert 0 < beside["single"] < MAPPED_BYTES + 4 * MIB + SLACK
    assert 0 < beside["tiny.gguf"] < 4 * MIB + SLACK
