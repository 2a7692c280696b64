"""SentencePiece vocabularies in GGUF files: against the algorithm itself, and Gemma's against transformers."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from async_engine.gguf_tokenizer import gguf_tokenizer
from async_engine.tokenizer import Tokenizer, load_tokenizer
from protos.gguf import read_gguf
from tests.async_engine.test_gguf_tokenizer import ROOT, varied_strings
from tests.gemma import gemma_gguf

if TYPE_CHECKING:
    from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SYLLABLES = ["ab", "ba", "abab", "▁a", "▁ab", "▁▁", "▁▁▁", "b▁", "cab", "bc", "abc", "▁cab", "aa", "aaa", "é", "日本"]


def metadata(prefix: bool | None = None, seed: int = 0, **more: Any) -> dict[str, Any]:
    """The layout of Llama 2: three specials, the bytes, then pieces from best to worst, single characters last."""
    pieces = random.Random(seed).sample(SYLLABLES, len(SYLLABLES)) + list("abc▁日本")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "  ", "<tool>", "[PAD]"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED, UNUSED]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * 3
    del tokens[259 + pieces.index("▁▁")], kinds[259 + pieces.index("▁▁")], scores[259 + pieces.index("▁▁")]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "scores": np.array(scores, np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **({} if prefix is None else {"add_space_prefix": prefix}),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def build(values: dict[str, Any]) -> Tokenizer:
    parts = gguf_tokenizer(values)
    return Tokenizer(parts.backend)


def joined_by_score(values: dict[str, Any], text: str, prefix: bool) -> list[int]:
    """What SentencePiece does: the best-scored union of two neighbours first, the leftmost of equals."""
    tokens = values["tokenizer.ggml.tokens"]
    scores = {
        token: score
        for token, kind, score in zip(
            tokens, values["tokenizer.ggml.token_type"], values["tokenizer.ggml.scores"], strict=True
        )
        if kind == NORMAL
    } | {"▁▁": 1.0}
    ids = {token: token_id for token_id, token in enumerate(tokens)} | {"▁▁": tokens.index("  ")}
    symbols = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not unions:
            break
        _, i = min(unions)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_joined_in_the_order_of_their_scores(prefix: bool, seed: int) -> None:
    values = metadata(prefix, seed)
    tokenizer = build(values)
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices([*"aaabbbc   ", "é", "日", "本", "🦩", "\n"], k=rng.randint(1, 30)))
        ids = tokenizer.encode(text, False)
        assert ids == joined_by_score(values, text, prefix), text
        assert tokenizer.decode(ids, True) == text


def test_the_space_before_a_text_is_there_unless_the_file_says_no() -> None:
    space_a, ab = (metadata()["tokenizer.ggml.tokens"].index(piece) for piece in ("▁a", "ab"))
    assert build(metadata()).encode("a", False) == [space_a]
    assert build(metadata(prefix=False)).encode("ab", False) == [ab]


def test_control_and_user_defined_tokens_are_found_in_texts_and_unused_ones_are_not() -> None:
    tokenizer = build(metadata(prefix=False))
    tokens = metadata()["tokenizer.ggml.tokens"]
    assert tokenizer.encode("<s><tool></s>", False) == [1, tokens.index("<tool>"), 2]
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.decode([1, tokens.index("<tool>"), 2], True) == "<tool>"
    assert tokenizer.decode(tokenizer.encode("[PAD]", False), True) == "[PAD]"
    assert tokens.index("[PAD]") not in tokenizer.encode("[PAD]", False)
    assert tokenizer.vocab_size == len(tokens) - 1  # a run of spaces keeps its one id


def test_the_text_of_a_byte_is_not_the_byte() -> None:
    tokenizer = build(metadata(prefix=False))
    assert tokenizer.decode(tokenizer.encode("<0x41>", False), True) == "<0x41>"


def test_a_prompt_starts_with_bos_unless_the_file_says_no() -> None:
    for says, expected in [({}, True), ({"add_bos_token": False}, False), ({"add_eos_token": True}, True)]:
        parts = gguf_tokenizer(metadata(**says))
        assert parts.add_bos is expected
        assert parts.add_eos is bool(says.get("add_eos_token"))
        assert (parts.bos_token, parts.eos_token) == ("<s>", "</s>")


def test_merges_in_the_file_come_before_scores() -> None:
    values = metadata(prefix=False)
    ab = values["tokenizer.ggml.tokens"].index("ab")
    assert build(values | {"tokenizer.ggml.merges": ["a b"]}).encode("abab", False) == [ab, ab]


def test_a_detokenizer_streams_what_decode_says() -> None:
    tokenizer = build(metadata())
    rng = random.Random(3)
    for _ in range(100):
        ids = [rng.randrange(tokenizer.vocab_size + 1) for _ in range(20)]
        stream = tokenizer.new_detokenizer(True)
        assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == tokenizer.decode(ids, True)


# Gemma 3 270M ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma() -> Path:
    return gemma_gguf()


@pytest.mark.gemma
def test_gemma_tokens_of_known_texts(gemma: Path) -> None:
    tokenizer = load_tokenizer(gemma)
    assert tokenizer.vocab_size == 262144
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<bos>", "<eos>", None)
    for text, pieces in {
        "Hello  world\n\n\nfoo\t\tbar": ["Hello", "▁▁", "world", "\n\n\n", "foo", "\t\t", "bar"],
        "▁▁ x": ["▁▁▁", "x"],
        "<start_of_turn>user\nhi<end_of_turn>\n": ["<start_of_turn>", "user", "\n", "hi", "<end_of_turn>", "\n"],
        "<0x0A> <unused5>": ["<", "0", "x", "0", "A", ">", "▁", "<unused5>"],
        "日本語🦩": ["日本語", "<0xF0>", "<0x9F>", "<0xA6>", "<0xA9>"],
        "<table><tr>": ["<table>", "<tr>"],
    }.items():
        ids = tokenizer.encode(text, True)
        assert [tokenizer._backend.id_to_token(token_id) for token_id in ids] == ["<bos>", *pieces]
        assert tokenizer.decode(ids, False) == "<bos>" + text.replace("▁", " ")


@pytest.mark.gemma
@pytest.mark.timeout(300)
def test_gemma_tokenizer_encodes_and_decodes_as_transformers_conversion(gemma: Path) -> None:
    """Its builder, on metadata read by our reader: that of its own reader and of AutoTokenizer takes a minute."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    values = read_gguf(gemma).metadata
    named = {name: values.get(f"tokenizer.{key}") for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    lists = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in named.items()
        if value is not None
    }
    theirs, _ = convert_gguf_tokenizer("gemma3", lists)
    ours = load_tokenizer(gemma)
    rng = random.Random(1)
    vocabulary: list[str] = values["tokenizer.ggml.tokens"]
    texts = varied_strings() + [path.read_text() for path in (ROOT / "kernels").rglob("*.h")]
    for _ in range(500):
        pieces = [rng.choice(vocabulary) if rng.random() < 0.9 else " " * rng.randint(1, 40) for _ in range(12)]
        texts.append("".join(pieces).replace("▁", " "))
    for text in texts:
        ids = ours.encode(text, False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.gemma
def test_gemma_tokenizer_loads_in_seconds_without_torch_or_transformers(gemma: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; start = time.process_time()\n"
        "from async_engine.tokenizer import load_tokenizer\n"
        f"load_tokenizer(Path({str(gemma)!r}))\n"
        "print({'torch', 'transformers'} & sys.modules.keys() or time.process_time() - start)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert float(result.stdout) < 10
