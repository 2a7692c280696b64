"""GGUF files give the tokenizer that the model was trained with."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from async_engine import tokenizer as tokenizer_module
from async_engine.detokenizer import byte_alphabet
from async_engine.gguf_tokenizer import gguf_tokenizer
from async_engine.tokenizer import Tokenizer, load_tokenizer
from protos.errors import StartupError
from protos.gguf import read_gguf
from protos.model_files import resolve_model

ROOT = Path(__file__).parents[2]
BYTE_TOKENS = list(byte_alphabet())


def metadata(
    pre: str, tokens: list[str], merges: list[str], kinds: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array(kinds or [1] * len(tokens), np.int32),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def words(pre: str, text: str) -> list[str]:
    """The words that a text is cut into before merging."""
    parts = gguf_tokenizer(metadata(pre, BYTE_TOKENS, []))
    assert parts.backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in parts.backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["default", "gpt-2", "phi-2"])
def test_gpt2_splitting(pre: str) -> None:
    assert words(pre, "I'll pay 1234€  now\n\n") == ["I", "'ll", " pay", " 1234", "€", " ", " now", "\n\n"]


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_digit_by_digit_splitting(pre: str) -> None:
    assert words(pre, "pay 123 now") == ["pay", " ", "1", "2", "3", " now"]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3"])
def test_llama_3_splitting(pre: str) -> None:
    assert words(pre, "I'LL pay 12345!!\n\n  (now)") == [
        "I",
        "'LL",
        " pay",
        " ",
        "123",
        "45",
        "!!\n\n",
        " ",
        " (",
        "now",
        ")",
    ]


def test_qwen_2_splitting() -> None:
    assert words("qwen2", "I'LL pay 12!\n x") == ["I", "'LL", " pay", " ", "1", "2", "!\n", " x"]


def test_tekken_splitting() -> None:
    assert words("tekken", "HelloWorld 12 a/b\n") == ["Hello", "World", " ", "1", "2", " a", "/b", "\n"]


def test_qwen_2_composes_characters_first() -> None:
    parts = gguf_tokenizer(metadata("qwen2", BYTE_TOKENS, []))
    assert bytes(parts.backend.encode("e\u0301").ids) == "é".encode()


def test_gguf_merges_control_user_and_unused_tokens() -> None:
    tokens = [*BYTE_TOKENS, "ab", "<|end|>", "<tool>", "[PAD]"]
    kinds = [1] * 257 + [3, 4, 5]
    parts = gguf_tokenizer(metadata("gpt-2", tokens, ["a b"], kinds, eos_token_id=257))
    tokenizer = Tokenizer(parts.backend)
    assert tokenizer.encode("abc<|end|><tool>[PAD]", True) == [256, ord("c"), 257, 258, *b"[PAD]"]
    assert tokenizer.special_ids == {257}
    assert tokenizer.decode([256, 257, 258, 259], True) == "ab<tool>"
    assert (parts.bos_token, parts.eos_token, parts.chat_template) == ("", "<|end|>", "")


def test_llama_3_takes_whole_words_over_merges() -> None:
    tokens = [*BYTE_TOKENS, "bc", "abc", "<s>"]
    parts = {pre: gguf_tokenizer(metadata(pre, tokens, ["b c"], bos_token_id=258)) for pre in ("gpt-2", "llama-bpe")}
    assert [part.backend.encode("abc").ids for part in parts.values()] == [[97, 256], [257]]
    assert [part.add_bos for part in parts.values()] == [False, True]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            metadata("new", ["a"], []),
            "tokenizer.ggml.pre is 'new', a way to cut text into words that is not known here",
        ),
        ({**metadata("gpt-2", ["a"], []), "tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; known are"),
        ({}, "tokenizer.ggml.model is None; known are 'gpt2' and 'llama'"),
    ],
)
def test_unknown_gguf_kinds_are_refused_in_one_line(
    values: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File:
        metadata = values

    monkeypatch.setattr(tokenizer_module, "read_gguf", lambda path: File)
    with pytest.raises(StartupError) as caught:
        load_tokenizer(Path("a.gguf"))
    assert str(caught.value).startswith(f"a.gguf: the tokenizer cannot be loaded: {problem}")
    assert "\n" not in str(caught.value)


def test_a_gguf_file_that_does_not_say_how_to_split_is_read_as_gpt_2_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class File:
        metadata = metadata("gpt-2", BYTE_TOKENS, [])

    monkeypatch.setattr(tokenizer_module, "read_gguf", lambda path: File)
    load_tokenizer(Path("a.gguf"))
    assert not caplog.messages
    del File.metadata["tokenizer.ggml.pre"]
    assert load_tokenizer(Path("a.gguf")).encode("ab", False) == [*b"ab"]
    (message,) = caplog.messages
    assert message.startswith("a.gguf: has no tokenizer.ggml.pre; ")


@pytest.mark.parametrize(
    "broken",
    [
        metadata("gpt-2", ["a", "b"], ["a c"]),
        metadata("gpt-2", ["a", "b"], ["ab"]),
        metadata("gpt-2", ["a", "b"], [], [1]),
        metadata("gpt-2", ["a"], [], eos_token_id=1),
        {"tokenizer.ggml.model": "gpt2"},
    ],
)
def test_gguf_that_contradicts_itself_is_one_line_at_startup(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]
) -> None:
    class File:
        metadata = broken

    monkeypatch.setattr(tokenizer_module, "read_gguf", lambda path: File)
    with pytest.raises(StartupError, match=r"broken\.gguf: the tokenizer cannot be loaded") as caught:
        load_tokenizer(Path("broken.gguf"))
    assert "\n" not in str(caught.value)


def test_what_a_gguf_file_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class File:
        metadata = metadata("gpt-2", ["a"], [])

    del File.metadata["tokenizer.ggml.tokens"]
    monkeypatch.setattr(tokenizer_module, "read_gguf", lambda path: File)
    with pytest.raises(StartupError, match=r"a\.gguf: .* cannot be loaded: it has no tokenizer\.ggml\.tokens$"):
        load_tokenizer(Path("a.gguf"))


@pytest.mark.parametrize(("add_bos", "add_eos", "expected"), [(True, True, [256, 97, 257]), (False, False, [97])])
def test_gguf_tokens_around_a_prompt_follow_the_file(
    monkeypatch: pytest.MonkeyPatch, add_bos: bool, add_eos: bool, expected: list[int]
) -> None:
    class File:
        metadata = metadata(
            "llama-bpe", [*BYTE_TOKENS, "<s>", "</s>"], [], [1] * 256 + [3, 3],
            bos_token_id=256, eos_token_id=257, add_bos_token=add_bos, add_eos_token=add_eos,
        )  # fmt: skip

    monkeypatch.setattr(tokenizer_module, "read_gguf", lambda path: File)
    assert load_tokenizer(Path("a.gguf")).encode("a", True) == expected


# The embedded model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer(resolve_model(""))


@pytest.fixture(scope="session")
def converted_by_transformers() -> Any:
    from transformers import AutoTokenizer

    path = resolve_model("")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def varied_strings() -> list[str]:
    rng = random.Random(7)
    pieces = [
        *("The quick brown fox", " don't you'll WE'RE", "\n\n", "    indented(code)[0] = x**2;\t\r\n", "  ", " "),
        *(
            " 3.14159 and 2026",
            "½ ² ³",
            "日本語のテキスト",
            " 안녕하세요",
            "Привет мир",
            "مرحبا",
            "🦩👩\u200d👩\u200d👧🎉",
        ),
        *(
            " naïve café",
            "e\u0301",
            "<|im_start|>",
            "<|im_end|>",
            "<file_sep>",
            "\u200b\ufeff",
            "\x00\x7f",
            "ﬁ—…",
            "مرحبا",
        ),
        *("http://a.b/c?d=e&f=g", "snake_case CamelCase kebab-case"),
    ]
    made = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(150)]
    noise = [[rng.choice([rng.randint(32, 126), rng.randint(160, 0x2FFF)]) for _ in range(40)] for _ in range(50)]
    return made + ["".join(map(chr, codes)) for codes in noise]


@pytest.mark.embedded
def test_embedded_tokenizer_encodes_and_decodes_as_transformers_conversion(
    embedded: Tokenizer, converted_by_transformers: Any
) -> None:
    converted = converted_by_transformers.backend_tokenizer
    texts = varied_strings()
    without_digits = [text for text in texts if not any(character.isnumeric() for character in text)]
    assert len(texts) == 200
    assert len(without_digits) > 50
    for text in without_digits:
        assert embedded.encode(text, True) == converted.encode(text).ids
    # The conversion leaves out the model's own splitting by digits; with it, all is the same.
    converted.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in texts:
        ids = embedded.encode(text, True)
        assert ids == converted.encode(text).ids
        for skip in (True, False):
            assert embedded.decode(ids, skip) == converted.decode(ids, skip_special_tokens=skip)
    assert embedded.chat_template == converted_by_transformers.chat_template
    assert embedded.bos_token == converted_by_transformers.bos_token
    assert embedded.eos_token == converted_by_transformers.eos_token
    assert embedded.special_ids == set(range(17))
    assert embedded.vocab_size == len(converted_by_transformers)


@pytest.mark.embedded
def test_embedded_tokenizer_splits_numbers_into_digits(embedded: Tokenizer) -> None:
    assert [embedded.decode([token_id], False) for token_id in embedded.encode("a 1234", False)] == [*"a 1234"]


@pytest.mark.embedded
def test_embedded_tokenizer_loads_within_a_second_without_torch_or_transformers() -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from async_engine.tokenizer import load_tokenizer\n"
        "from protos.model_files import resolve_model\n"
        "load_tokenizer(resolve_model(''))\n"
        "print({'torch', 'transformers'} & sys.modules.keys() or time.process_time() - start)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert float(result.stdout) < 1.0


@pytest.mark.embedded
def test_embedded_tokenizer_is_built_from_metadata_in_half_a_second() -> None:
    contents = read_gguf(resolve_model("")).metadata
    start = time.process_time()
    gguf_tokenizer(contents)
    assert time.process_time() - start < 0.5
