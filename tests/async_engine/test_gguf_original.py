"""Tokenizers in GGUF files are as they were: trained here, and written as llama.cpp's converter does."""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
from gguf import GGUFWriter, SpecialVocab
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from async_engine.tokenizer import Tokenizer, load_tokenizer
from tests.async_engine.test_gguf_tokenizer import ROOT, varied_strings

if TYPE_CHECKING:
    from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL, USER = ["<s>", "</s>", "<|end|>"], ["<tool>", "      "]
TEMPLATE = "{{ bos_token }}{% for message in messages %}<|end|>{{ message.content }}{% endfor %}"


def corpus() -> list[str]:
    """A few ten thousand words of prose and code, and of what the strings below are made of."""
    files = [*sorted(ROOT.glob("*/README.md")), *sorted((ROOT / "kernels").rglob("*.h"))]
    return [line for file in files for line in file.read_text().splitlines()] + varied_strings()[:100]


TEXTS = varied_strings() + [
    "".join(
        random.Random(seed).choices([*SPECIAL, *USER, " ", "a", "\n", "1234", "don't", "\t", " quux", "zzyzx"], k=9)
    )
    for seed in range(50)
]

# Byte-level ------------------------------------------------------------------------------------

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")


def splits(pattern: str) -> list[Any]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]


GPT2 = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
ORIGINALS: dict[str, tuple[list[Any], dict[str, bool]]] = {
    "gpt-2": (GPT2, {}),
    "olmo": (GPT2, {}),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), *GPT2], {}),
    "llama-bpe": (splits(CL100K), {"bos": True, "ignore_merges": True}),
    "dbrx": (splits(CL100K), {}),
    "qwen2": (splits(QWEN2), {"nfc": True}),
    "tekken": (splits(TEKKEN), {"bos": True, "ignore_merges": True}),
    "gpt-4o": (splits(O200K), {}),
}
"""By tokenizer.ggml.pre: how the tokenizer.json of such models cuts text, and what else is its own."""


def byte_level_original(pre: str) -> Backend:
    steps, own = ORIGINALS[pre]
    backend = Backend(models.BPE(ignore_merges=own.get("ignore_merges", False)))
    backend.normalizer = normalizers.NFC() if own.get("nfc") else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    if own.get("ignore_merges"):  # whole words that no merges lead to, as large vocabularies have them
        parts = json.loads(backend.to_str())["model"]
        vocabulary = parts["vocab"] | {word: 1500 + place for place, word in enumerate(("Ġquux", "zzyzx"))}
        backend.model = models.BPE(vocabulary, [tuple(merge) for merge in parts["merges"]], ignore_merges=True)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER])
    if own.get("bos"):
        ids = [("<s>", backend.token_to_id("<s>"))]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return backend


def write_directory(path: Path, backend: Backend, **config: Any) -> None:
    backend.save(str(path / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(given))


def write_byte_level(path: Path, pre: str, backend: Backend, directory: Path) -> None:
    """Two entries behind the vocabulary pad it to the size of the model's embedding."""
    added = backend.get_added_tokens_decoder()
    size = backend.get_vocab_size(with_added_tokens=True)
    kinds = [
        NORMAL if index not in added else CONTROL if added[index].special else USER_DEFINED for index in range(size)
    ]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*(str(backend.id_to_token(index)) for index in range(size)), "[PAD0]", "[PAD1]"])
    writer.add_token_types([*kinds, UNUSED, UNUSED])
    SpecialVocab(directory, load_merges=True).add_to_gguf(writer, quiet=True)
    close(writer)


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def assert_equal(ours: Tokenizer, original: Tokenizer) -> None:
    assert len(TEXTS) == 250
    for text in TEXTS:
        for special in (True, False):
            ids = original.encode(text, special)
            assert ours.encode(text, special) == ids, text
            assert ours.decode(ids, special) == original.decode(ids, special)
    assert (ours.bos_token, ours.eos_token) == (original.bos_token, original.eos_token) == ("<s>", "</s>")
    assert ours.special_ids == original.special_ids
    assert ours.vocab_size == original.vocab_size
    assert ours.chat_template == original.chat_template == TEMPLATE


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_tokenizers_equal_the_original(pre: str, tmp_path: Path) -> None:
    backend = byte_level_original(pre)
    write_directory(tmp_path, backend)
    write_byte_level(tmp_path / "a.gguf", pre, backend, tmp_path)
    assert_equal(load_tokenizer(tmp_path / "a.gguf"), load_tokenizer(tmp_path))


def test_ways_of_splitting_differ(tmp_path: Path) -> None:
    """Else equality would say little about them."""
    backend = byte_level_original("dbrx")
    write_directory(tmp_path, backend)
    found = set()
    for pre in ORIGINALS:
        write_byte_level(tmp_path / f"{pre}.gguf", pre, backend, tmp_path)
        tokenizer = load_tokenizer(tmp_path / f"{pre}.gguf")
        found.add(tuple(tuple(tokenizer.encode(text, True)) for text in TEXTS))
    assert len(found) == len(ORIGINALS) - 1  # OLMo's is GPT-2's


# SentencePiece ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces() -> Any:
    """Trained with the settings that Llama 2's tokenizer.model tells of."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=1500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_sentencepiece_tokenizers_equal_the_original(pieces: Any, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    ids = range(pieces.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    tests = {UNKNOWN: pieces.is_unknown, CONTROL: pieces.is_control, BYTE: pieces.is_byte}
    writer.add_token_types([next((kind for kind, test in tests.items() if test(i)), NORMAL) for i in ids])
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_chat_template(TEMPLATE)
    close(writer)
    ours = load_tokenizer(tmp_path / "a.gguf")
    assert (ours.bos_token, ours.eos_token, ours.chat_template) == ("<s>", "</s>", TEMPLATE)
    for text in varied_strings():
        ids = pieces.encode(text)
        assert ours.encode(text, True) == [pieces.bos_id(), *ids], text
        assert ours.encode(text, False) == ids
        assert ours.decode(ids, True) == pieces.decode(ids)
