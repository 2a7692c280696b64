"""Tokenizers load fast from every file format, and encode as the originals do."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from async_engine import tokenizer as tokenizer_module
from async_engine.tokenizer import INLINE_CHARACTERS, Tokenizer, byte_tokenizer, load_tokenizer
from protos.errors import InvalidRequestError, StartupError

TABLES_OF_UNICODE = [HealthCheck.too_slow]
"""hypothesis makes them at the first draw of any text in a fresh checkout."""
ROOT = Path(__file__).parents[2]
BYTE_TOKENS = {character: byte for byte, character in enumerate(tokenizer_module.byte_alphabet())}


def byte_backend() -> Backend:
    backend = Backend(models.BPE(dict(BYTE_TOKENS), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return backend


def write_directory(path: Path, config: dict[str, Any] | None = None, backend: Backend | None = None) -> Path:
    (backend or byte_backend()).save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


# The byte tokenizer ---------------------------------------------------------------------------


@given(text=st.text())
@settings(max_examples=200, deadline=None, suppress_health_check=TABLES_OF_UNICODE)
def test_byte_tokenizer_writes_text_as_its_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, False)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids, True) == text


def test_byte_tokenizer_has_special_tokens_and_a_chat_template() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a", True) == [256, ord("a")]
    assert tokenizer.encode("<|eos|>", False) == [257]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eos|>")
    assert tokenizer.decode([256, ord("a"), 257], True) == "a"
    assert tokenizer.decode([256, ord("a"), 257], False) == "<|bos|>a<|eos|>"
    assert tokenizer.chat_template is not None


def test_longest_token_tells_how_much_text_a_token_stands_for() -> None:
    assert byte_tokenizer().max_token_length == len("<|bos|>")


# Any tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", [258, 49_151, 2**31 - 1])
def test_ids_without_a_token_decode_to_nothing(unknown: int) -> None:
    tokenizer = byte_tokenizer()
    ids = [ord("a"), unknown, ord("b")]
    assert tokenizer.decode(ids, True) == "ab"
    detokenizer = tokenizer.new_detokenizer(True)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "b"]
    assert tokenizer.new_detokenizer(True).push(ids) == "ab"
    primed = tokenizer.new_detokenizer(True)
    primed.prime([0xC3, unknown])
    assert primed.push([0xA9]) == "é"


def test_text_that_is_not_unicode_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError):
        byte_tokenizer().encode("\ud800", True)


def test_vocabulary_with_gaps_is_as_large_as_its_largest_id() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert Tokenizer(backend).vocab_size == 8


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    backend = byte_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("abc", False) == list(b"abc")


def test_long_texts_are_encoded_on_another_thread_and_short_ones_here() -> None:
    tokenizer = byte_tokenizer()
    threads: list[str] = []
    encode = tokenizer.encode

    def recorded(text: str, add_special_tokens: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, add_special_tokens)

    tokenizer.encode = recorded  # type: ignore[method-assign]

    async def both() -> None:
        for length in (INLINE_CHARACTERS, INLINE_CHARACTERS + 1):
            assert await tokenizer.encode_async("x" * length, True) == [256, *b"x" * length]

    asyncio.run(both())
    tokenizer.close()
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("tokenizer")


def test_encoding_a_long_text_does_not_hold_up_the_loop() -> None:
    backend = byte_backend()
    tokenizer = Tokenizer(backend)
    text = "A few words and 1234 numbers. " * 10_000

    async def longest_stall() -> float:
        encoding = asyncio.create_task(tokenizer.encode_async(text, False))
        longest, ticks, last = 0.0, 0, time.perf_counter()
        while not encoding.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last, ticks = max(longest, now - last), now, ticks + 1
        assert len(await encoding) == len(text)
        assert ticks > 10
        return longest

    start = time.perf_counter()
    tokenizer.encode(text, False)
    whole = time.perf_counter() - start
    assert min(asyncio.run(longest_stall()) for _ in range(3)) < whole / 3
    tokenizer.close()


def test_one_table_serves_all_streams_of_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[frozenset[str]] = []
    original = tokenizer_module.detokenizer_factory

    def counted(backend: Backend, tokens: list[str | None], hidden: frozenset[str]) -> Any:
        built.append(hidden)
        return original(backend, tokens, hidden)

    monkeypatch.setattr(tokenizer_module, "detokenizer_factory", counted)
    tokenizer = byte_tokenizer()
    for skip in (True, False, True, False):
        tokenizer.new_detokenizer(skip)
        tokenizer.new_detokenizer(skip, frozenset({"<|bos|>", "no token"}))
    assert built == [{"<|bos|>", "<|eos|>"}, {"<|eos|>"}, set(), set()]


def test_sentencepiece_like_model_streams_any_text_it_encoded() -> None:
    pieces = [
        ("<unk>", 0.0),
        *((f"<0x{byte:02X}>", -9.0) for byte in range(256)),
        ("▁", -1.0),
        ("a", -1.0),
        ("▁a", -1.5),
    ]
    backend = Backend(models.Unigram(pieces, 0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    for text in ("", "a", "  a a  ", "日本 a🦩", "\n\x00"):
        detokenizer = tokenizer.new_detokenizer(True)
        pushed = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text, False)]
        assert "".join(pushed) + detokenizer.flush() == text


# Hugging Face directories ---------------------------------------------------------------------


def test_directory_gives_template_and_special_tokens(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "chat_template": "T"}
    tokenizer = load_tokenizer(write_directory(tmp_path, config))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", "T")
    assert tokenizer.encode("a", True) == [ord("a")]
    assert tokenizer.special_ids == {256, 257}


def test_directory_without_config_has_no_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("", "", None)


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_directory(tmp_path, {"chat_template": "from config"})
    (tmp_path / "chat_template.jinja").write_text("from file: é", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "from file: é"


def test_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert load_tokenizer(write_directory(tmp_path, {"chat_template": named})).chat_template == "D"


def test_special_tokens_may_come_from_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    tokenizer = load_tokenizer(write_directory(tmp_path, {"eos_token": "</s>"}))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [257, 97]),
        ({"add_bos_token": True}, [256, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [256, 97, 257]),
        ({"add_bos_token": False}, [97]),
        ({"add_bos_token": None}, [257, 97]),
    ],
)
def test_tokens_around_a_prompt_follow_the_config_then_the_file(
    tmp_path: Path, flags: dict[str, Any], expected: list[int]
) -> None:
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single=["</s>", "$A"], special_tokens=[("</s>", 257)])
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    tokenizer = load_tokenizer(write_directory(tmp_path, config, backend))
    assert tokenizer.encode("a", True) == expected
    assert tokenizer.encode("a", False) == [97]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\n"),
        ("tokenizer_config.json", "[1]"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_broken_file_is_one_line_at_startup(tmp_path: Path, name: str, content: str | bytes) -> None:
    write_directory(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StartupError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_directory_without_any_tokenizer_is_one_line_at_startup(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StartupError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_directory_without_tokenizer_json_is_converted_by_transformers(tmp_path: Path) -> None:
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "play", "##ing"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("playing", False) == [5, 6]
    assert tokenizer.new_detokenizer(True).push([5, 6]) == "playing"
