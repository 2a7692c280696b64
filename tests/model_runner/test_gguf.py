"""GGUF: the header's parser, the block formats, and whole tiny models in them; faults in one line."""

from __future__ import annotations

import copy
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from model_runner.dequantise import can_dequantise, dequantise
from model_runner.gguf_rows import QUANTISED_FORMATS
from model_runner.gguf_weights import GGUFCheckpoint
from protos.errors import StartupError
from protos.gguf import BLOCK_FORMATS, read_gguf
from protos.model_files import read_model_spec
from tests.model_runner import gguf_files
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.test_tiny_models import ENDS, LLAMA3, TOKENS
from tests.model_runner.tiny import chunk_logits, kept_weights, load_tiny, reference_logits, save_tiny, tensors

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tiny(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", attention_bias=True)


@pytest.fixture
def file(llama: Any, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama, "llama")
    return path


def one_line(path: Path) -> str:
    """The StartupError that loading the file ends in."""
    with pytest.raises(StartupError) as caught:
        load_tiny(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


# The header ------------------------------------------------------------------------------------


def test_header_equals_the_package_reader(file: Path):
    from gguf import GGUFReader

    theirs, ours = GGUFReader(file), read_gguf(file)
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            value = ours.metadata[field.name]
            assert field.contents() == (value.tolist() if isinstance(value, np.ndarray) else value)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist())[::-1]
        assert (mine.type, mine.offset, mine.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_block_formats_equal_the_package(file: Path):
    from gguf import GGML_QUANT_SIZES

    assert {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()} == BLOCK_FORMATS


def header(*parts: bytes, tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def test_every_kind_of_value(tmp_path: Path):
    path = tmp_path / "values.gguf"
    numbers = [(0, "B", 200), (1, "b", -5), (2, "H", 60000), (3, "h", -3), (4, "I", 1 << 31), (5, "i", -9)]
    numbers += [(6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 63), (11, "q", -(1 << 40)), (12, "d", 0.1)]
    values = [string(f"v{kind}") + struct.pack(f"<I{code}", kind, value) for kind, code, value in numbers]
    arrays = [
        string("strings") + struct.pack("<IIQ", 9, 8, 2) + string("é") + string(""),
        string("floats") + struct.pack("<IIQ2f", 9, 6, 2, 1.5, -2.0),
        string("nested") + struct.pack("<IIQIQ", 9, 9, 1, 5, 2) + struct.pack("<2i", 3, 4),
        string("empty") + struct.pack("<IIQ", 9, 5, 0),
    ]
    path.write_bytes(header(*values, *arrays, values=len(values) + len(arrays), version=2))
    metadata = read_gguf(path).metadata
    assert [metadata[f"v{kind}"] for kind, _, _ in numbers] == [value for _, _, value in numbers]
    assert metadata["strings"] == ["é", ""]
    assert metadata["floats"].tolist() == [1.5, -2.0]
    assert metadata["nested"][0].tolist() == [3, 4]
    assert len(metadata["empty"]) == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"GGU", "was cut short inside magic"),
        (b"PK\x03\x04 some zip file", "is not a GGUF file"),
        (header(version=1), "is version 1 GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is big-endian GGUF"),
        (header(values=1 << 60), "says it has 0 tensors and"),
        (header(tensors=1 << 60), "says it has 1152921504606846976 tensors"),
        (header(struct.pack("<Q", 1 << 62), values=1), "was cut short inside metadata key"),
        (header(string("a"), struct.pack("<I", 99), values=1), "metadata a has unknown type 99"),
        (header(string("a"), struct.pack("<IIQ", 9, 8, 1 << 61), values=1), "was cut short inside metadata a"),
        (header(string("a"), struct.pack("<IIQ", 9, 12, 1 << 61), values=1), "was cut short inside a"),
        (header(string("a"), struct.pack("<IIQ", 9, 9, 1 << 61), values=1), "entries"),
        (header(string("a"), struct.pack("<I", 9) * 9 + bytes(99), values=1), "a"),
        (header(string("general.alignment"), struct.pack("<II", 4, 0), values=1), "general.alignment is 0"),
        (header(string("t"), struct.pack("<I", 9), tensors=1), "tensor t has 9 dimensions"),
        (header(string("t"), struct.pack("<IQIQ", 1, 32, 77, 0), tensors=1), "tensor t has block format 77"),
        (header(string("t"), struct.pack("<IQIQ", 1, 31, 2, 0), tensors=1), "does not divide into Q4_0 blocks"),
        (header(string("t"), struct.pack("<IQIQ", 1, 0, 0, 0), tensors=1), "does not divide into F32 blocks"),
        (header(string("t"), struct.pack("<IQIQ", 1, 8, 0, 0), tensors=1), "tensor t ends"),
        (header(string("t"), struct.pack("<IQIQ", 1, 1 << 62, 0, 1 << 63), tensors=1), "tensor t ends"),
        (header(*2 * [string("a") + struct.pack("<IB", 0, 7)], values=2), "metadata a occurs twice"),
        (header(string("k" * 2000), struct.pack("<IB", 0, 7), values=1), "metadata key has 2000 bytes"),
        (header(string("general.alignment"), struct.pack("<II", 4, 1 << 30), values=1), "general.alignment is 1073"),
        (
            header(*(string(name) + struct.pack("<IQIQ", 1, 8, 0, at) for name, at in (("t", 0), ("u", 16))), tensors=2)
            + bytes(99),
            "tensor u overlaps t",
        ),
    ],
)
def test_a_malformed_header_is_told_in_one_line(content: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"bad\.gguf: ") as caught:
        read_gguf(path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_truncated_or_corrupted_header_escapes_as_another_error(file: Path, tmp_path: Path):
    content = file.read_bytes()
    path = tmp_path / "bad.gguf"
    end = min(tensor.offset for tensor in read_gguf(file).tensors.values())
    generator = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content if generator.random() < 0.7 else content[: generator.randrange(1, end)])
        for _ in range(generator.randrange(4)):
            damaged[generator.randrange(min(len(damaged), end))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read_model_spec(path)
        except StartupError as error:
            refused += len(str(error).splitlines()) == 1
        else:
            refused += damaged[:end] == content[:end] or len(damaged) == len(content)
    assert refused == 400


# Block formats ---------------------------------------------------------------------------------

READABLE = [type_id for type_id in BLOCK_FORMATS if can_dequantise(type_id)]


@pytest.mark.parametrize("type_id", READABLE, ids=lambda type_id: BLOCK_FORMATS[type_id][0])
def test_dequantised_blocks_equal_the_package_bit_for_bit(type_id: int):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = np.random.default_rng(type_id).integers(0, 256, (64, BLOCK_FORMATS[type_id][2]), np.uint8)
    if type_id > 1:
        blocks[:, 1::2] &= 0xBB  # no float16 scale, wherever it lies, is infinite or NaN
    with np.errstate(all="ignore"):
        ours = dequantise(blocks.reshape(-1), type_id)
        theirs = dequantize(blocks, GGMLQuantizationType(type_id)).reshape(-1)
    assert np.array_equal(ours.view(np.uint32), np.ascontiguousarray(theirs, np.float32).view(np.uint32))


@pytest.mark.parametrize("type_id", READABLE, ids=lambda type_id: BLOCK_FORMATS[type_id][0])
def test_weights_of_a_file_equal_the_package_bit_for_bit(type_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model whose matrices are of random blocks: in the order of the file, but for the rows of q and k."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, rng, expected = GGMLQuantizationType(type_id), np.random.default_rng(type_id), {}

    def blocks(array: np.ndarray, _: GGMLQuantizationType) -> np.ndarray:
        _, size, num_bytes = BLOCK_FORMATS[type_id]
        data = rng.integers(0, 256, (len(array), array.shape[1] // size * num_bytes), np.uint8)
        if type_id > 1:
            data[:, 1::2] &= 0xBB
        weights = np.ascontiguousarray(dequantize(data, kind), np.float32)
        expected[len(expected)] = weights
        return data

    monkeypatch.setattr(gguf_files, "quantize", blocks)
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = save_tiny(tmp_path, "LlamaForCausalLM", **shape, num_key_value_heads=1)
    path = tmp_path / "tiny.gguf"
    with np.errstate(all="ignore"):
        write_gguf(path, model, "llama", BLOCK_FORMATS[type_id][0])
        ours = tensors(load_tiny(path))
        kept = kept_weights(load_tiny(path, dtype="auto"))
    assert bool(kept) == (type_id in QUANTISED_FORMATS)
    names = [name for name, weight in model.state_dict().items() if weight.ndim == 2]
    assert len(names) == len(expected) == 9
    for name, weights in zip(names, expected.values(), strict=True):
        if "q_proj" in name or "k_proj" in name:
            weights = weights.reshape(-1, 64, 2, 256).swapaxes(1, 2).reshape(-1, 256)
        assert np.array_equal(ours[name].numpy().view(np.uint32), np.ascontiguousarray(weights).view(np.uint32)), name
        if kept:  # signed integers of four bits may lose a last bit to their minimum
            np.testing.assert_allclose(kept[name].numpy(), weights, rtol=1e-6, atol=1e-6 * np.abs(weights).max())


def test_the_common_formats_are_readable():
    names = {BLOCK_FORMATS[type_id][0] for type_id in READABLE}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"}
    assert names >= {f"Q{bits}_K" for bits in range(2, 7)}


@pytest.mark.parametrize(
    "type_id", sorted(BLOCK_FORMATS.keys() - set(READABLE)), ids=lambda type_id: BLOCK_FORMATS[type_id][0]
)
def test_formats_that_the_package_cannot_read_are_refused_by_name(type_id: int, tmp_path: Path):
    name, size, num_bytes = BLOCK_FORMATS[type_id]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        header(string("blk.0.ffn_up.weight"), struct.pack("<IQQIQ", 2, size, 1, type_id, 0), tensors=1)
        + bytes(32 + num_bytes)
    )
    with pytest.raises(StartupError) as caught:
        GGUFCheckpoint(path, {}, {}).tensors()
    assert str(caught.value) == f"{path}: tensor blk.0.ffn_up.weight is in block format {name}, which cannot be read"


# Whole models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_logits_of_a_llama_file_equal_transformers(kind: str, llama: Any, tmp_path: Path):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    path, model = tmp_path / "tiny.gguf", copy.deepcopy(llama)
    write_gguf(path, model, "llama", kind)
    for weight in model.parameters():
        if weight.ndim == 2:
            blocks = quantize(weight.detach().numpy(), GGMLQuantizationType[kind])
            weight.data = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]).copy())
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_logits_of_a_qwen2_file_equal_transformers(tmp_path: Path):
    model = save_tiny(tmp_path, "Qwen2ForCausalLM", tie_word_embeddings=True)
    write_gguf(tmp_path / "tiny.gguf", model, "qwen2")
    ours = chunk_logits(load_tiny(tmp_path / "tiny.gguf"), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_logits_of_a_file_with_yarn_equal_transformers(tmp_path: Path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    model = save_tiny(tmp_path, "Qwen2ForCausalLM", rope_parameters=rope)
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "qwen2", **scaling, rope__scaling__original_context_length=128)
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_logits_of_a_llama_3_file_with_its_frequency_divisors_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = save_tiny(tmp_path, "LlamaForCausalLM", rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    state = model.state_dict()
    state["rope_freqs.weight"] = plain / scaled
    monkeypatch.setattr(model, "state_dict", lambda: state)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "llama")
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_metadata_becomes_the_spec(file: Path, llama: Any):
    spec = read_model_spec(file)
    assert spec.eos_token_ids == (3, 5)
    assert (spec.vocab_size, spec.num_kv_heads, spec.head_dim) == (199, 2, 16)
    assert spec.attention_bias
    assert spec.attention_out_bias
    assert not spec.mlp_bias
    assert not spec.tie_word_embeddings
    assert spec.dtype == "float32"


# Faults ----------------------------------------------------------------------------------------


def test_a_truncated_file_names_a_tensor(file: Path):
    file.write_bytes(file.read_bytes()[:-100])
    assert "it was cut short" in one_line(file)


def test_a_missing_tensor_is_named(file: Path):
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_v.weight", b"blk.1.attn_w.weight"))
    assert "tensor blk.1.attn_w.weight has no place in this architecture" in one_line(file)
    path = file.with_name("short.gguf")
    path.write_bytes(file.read_bytes().replace(b"blk.1.attn_w.weight", b"blk.2.attn_v.weight"))
    with pytest.raises(StartupError, match=r"tensor blk\.2\.attn_v\.weight occurs twice"):
        load_tiny(path)


def test_an_unsupported_architecture_is_named(file: Path):
    file.write_bytes(file.read_bytes().replace(b"llama", b"lamma"))
    assert "GGUF files of architecture 'lamma' are not supported; if `tailrace models` lists it" in one_line(file)


def test_a_wrong_shape_is_named(file: Path):
    content = bytearray(file.read_bytes())
    at = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4
    content[at : at + 8] = struct.pack("<Q", 32)
    file.write_bytes(content)
    assert "tensor blk.0.attn_norm.weight has shape [32], the config says [64]" in one_line(file)


# Files in parts --------------------------------------------------------------------------------


@pytest.fixture
def parts(llama: Any, tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "tiny.gguf", llama, "llama", split_max_size=120_000)
    return sorted(tmp_path.glob("tiny-*.gguf"))


def test_logits_of_a_file_in_parts_equal_transformers(parts: list[Path], llama: Any):
    assert len(parts) > 3
    ours = chunk_logits(load_tiny(parts[0]), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(llama, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_another_part_than_the_first_is_refused(parts: list[Path]):
    assert f"is one of {len(parts)} parts; name the first, *-00001-of-{len(parts):05}.gguf" in one_line(parts[1])
    renamed = parts[0].rename(parts[0].with_name("tiny.gguf"))
    assert "name the first" in one_line(renamed)


def test_a_part_that_is_missing_or_repeated_is_named(parts: list[Path]):
    content = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(StartupError, match=rf"{parts[2]}: tensor \S+ is in {parts[1]} too"):
        load_tiny(parts[0])
    parts[2].write_bytes(content[:-50])
    with pytest.raises(StartupError, match=rf"{parts[2]}: tensor \S+ ends 50 bytes after the end of the file"):
        load_tiny(parts[0])
    parts[2].unlink()
    with pytest.raises(StartupError, match=f"{parts[2]}: cannot be read: No such file"):
        load_tiny(parts[0])


@pytest.mark.parametrize("count", [1 << 16, -1])
def test_a_number_of_parts_that_makes_no_sense_is_refused(count: int, tmp_path: Path):
    path = tmp_path / "a-00001-of-00002.gguf"
    path.write_bytes(header(string("split.count") + struct.pack("<Ii", 5, count), values=1))
    with pytest.raises(StartupError, match=f"split.count is {count}"):
        read_gguf(path)
