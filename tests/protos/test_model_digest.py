"""model_digest: who has the same files has the same digest, and nobody else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFWriter

from protos.model_files import model_digest

if TYPE_CHECKING:
    from pathlib import Path


def directory(path: Path, **files: object) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_directories_differ_in_what_their_tokens_mean(tmp_path: Path) -> None:
    one = directory(tmp_path / "one", config={"vocab_size": 10}, tokenizer={"model": 1})
    same = directory(tmp_path / "same", config={"vocab_size": 10}, tokenizer={"model": 1})
    (same / "model.safetensors").write_bytes(b"weights of another kind")
    other_tokenizer = directory(tmp_path / "tokenizer", config={"vocab_size": 10}, tokenizer={"model": 2})
    other_config = directory(tmp_path / "config", config={"vocab_size": 11}, tokenizer={"model": 1})
    swapped = directory(tmp_path / "swapped", config={"model": 1}, tokenizer={"vocab_size": 10})
    assert model_digest(one) == model_digest(same)
    assert len({*map(model_digest, (one, other_tokenizer, other_config, swapped))}) == 4


def gguf(path: Path, tokens: list[str], scores: list[float]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_tensor("some.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_file_is_known_by_its_metadata(tmp_path: Path) -> None:
    scores = [float(n) for n in range(5000)]
    one = gguf(tmp_path / "one.gguf", ["a", "b"], scores)
    same = gguf(tmp_path / "same.gguf", ["a", "b"], scores)
    other_tokens = gguf(tmp_path / "tokens.gguf", ["a", "c"], scores)
    # In the middle of a long array, too, which numpy's own words for it leave out.
    other_scores = gguf(tmp_path / "scores.gguf", ["a", "b"], [*scores[:2500], -1.0, *scores[2501:]])
    assert model_digest(one) == model_digest(same)
    assert len({*map(model_digest, (one, other_tokens, other_scores))}) == 3
