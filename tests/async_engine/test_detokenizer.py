"""Streams of text equal the full decode, whatever the decoder, the ids and the cuts."""

from __future__ import annotations

from codecs import utf_8_decode
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend

from async_engine.detokenizer import REPLACEMENT, ByteDetokenizer, WindowDetokenizer
from async_engine.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from protos.model_files import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from async_engine.detokenizer import Detokenizer

TABLES_OF_UNICODE = [HealthCheck.too_slow]
"""hypothesis makes them when it first draws any text in a fresh checkout."""
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xA6, 0xA9, 0xFF)]
PIECES = ["▁", "▁▁", "▁a", "a", "b", "##c", "##", "d</w>", "</w>", ".", "▁.", "n't", "|", "é", "¤", "日本", "�", "~"]
LLAMA_2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]

DECODERS = {
    "llama 2": decoders.Sequence(LLAMA_2),
    "gemma": decoders.Sequence(LLAMA_2[:3]),
    "metaspace": decoders.Metaspace(),
    "metaspace without prefix": decoders.Metaspace(prepend_scheme="never"),
    "byte fallback and metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "word piece": decoders.WordPiece(),
    "word piece without cleanup": decoders.WordPiece(cleanup=False),
    "bpe with word ends": decoders.BPEDecoder(),
    "ctc": decoders.CTC(pad_token="b"),
    "joined by spaces": None,
    "strips many spaces": decoders.Sequence([*LLAMA_2[:3], decoders.Strip(" ", 20, 0)]),
    "strip at the end": decoders.Sequence([decoders.Fuse(), decoders.Strip("~", 0, 1)]),
    "byte level in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
}
REACHING_BACK = {
    "rewrites fused text": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a.*b"), "!")]),
    "bytes out of other tokens": decoders.Sequence([decoders.Replace("b", "<0xE2>"), decoders.ByteFallback()]),
}


def synthetic(decoder: Any) -> Tokenizer:
    tokens = [*SPECIAL, *BYTES, *PIECES]
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


SYNTHETIC = {name: synthetic(decoder) for name, decoder in {**DECODERS, **REACHING_BACK}.items()}
VOCAB = len(SPECIAL) + len(BYTES) + len(PIECES)
BYTE_IDS = range(len(SPECIAL), len(SPECIAL) + len(BYTES))


def piece(token: str) -> int:
    return VOCAB - len(PIECES) + PIECES.index(token)


def byte(value: int) -> int:
    return BYTE_IDS[BYTES.index(f"<0x{value:02X}>")]


def ids_of(vocab_size: int) -> st.SearchStrategy[list[int]]:
    """Any ids, some of them without a token, bytes more often than not."""
    return st.lists(st.one_of(st.integers(0, vocab_size + 1), st.sampled_from(BYTE_IDS)), max_size=40)


SOME_BYTES = st.one_of(ids_of(258), st.lists(st.sampled_from([*"é€🦩a".encode(), 256]), max_size=30))


@st.composite
def sliced(draw: st.DrawFn, ids: st.SearchStrategy[list[int]]) -> list[list[int]]:
    values = draw(ids)
    cuts = draw(st.lists(st.integers(0, len(values)), max_size=len(values)))
    if draw(st.booleans()):
        cuts = list(range(len(values)))
    return [values[start:end] for start, end in pairwise(sorted({0, *cuts, len(values)}))]


def stream(detokenizer: Detokenizer, pushes: Iterable[Sequence[int]]) -> str:
    return "".join([detokenizer.push(ids) for ids in pushes]) + detokenizer.flush()


def flat(pushes: Iterable[Sequence[int]]) -> list[int]:
    return [token_id for ids in pushes for token_id in ids]


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer(resolve_model(""))


# Without a prompt -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYNTHETIC)
@given(pushes=sliced(ids_of(VOCAB)), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_stream_of_any_ids_equals_full_decode(name: str, pushes: list[list[int]], skip: bool) -> None:
    tokenizer = SYNTHETIC[name]
    if name == "strip at the end":  # the library's own decode panics on an empty text
        pushes = [[piece("é")], *pushes]
    assert stream(tokenizer.new_detokenizer(skip), pushes) == tokenizer.decode(flat(pushes), skip)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_every_pair_of_tokens_streams_as_it_decodes(name: str) -> None:
    tokenizer = SYNTHETIC[name]
    for first in range(VOCAB):
        for second in range(VOCAB):
            ids = [piece("é"), first, second, first, second]
            pushes = ([token_id] for token_id in ids)
            assert stream(tokenizer.new_detokenizer(True), pushes) == tokenizer.decode(ids, True)


@given(pushes=sliced(SOME_BYTES), skip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_stream_of_any_bytes_equals_full_decode(pushes: list[list[int]], skip: bool) -> None:
    tokenizer = byte_tokenizer()
    assert stream(tokenizer.new_detokenizer(skip), pushes) == tokenizer.decode(flat(pushes), skip)


@given(text=st.text(), data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=TABLES_OF_UNICODE)
def test_stream_of_any_text_is_that_text(text: str, data: st.DataObject) -> None:
    tokenizer = byte_tokenizer()
    pushes = data.draw(sliced(st.just(tokenizer.encode(text, False))))
    assert stream(tokenizer.new_detokenizer(True), pushes) == text


@pytest.mark.embedded
@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=TABLES_OF_UNICODE)
def test_stream_of_the_embedded_model_equals_full_decode(embedded: Tokenizer, data: st.DataObject) -> None:
    text = embedded.encode(data.draw(st.text()), False)
    ids = st.one_of(st.just(text), ids_of(embedded.vocab_size), ids_of(512))
    pushes = data.draw(sliced(ids))
    skip = data.draw(st.booleans())
    assert stream(embedded.new_detokenizer(skip), pushes) == embedded.decode(flat(pushes), skip)


def test_added_tokens_outside_the_byte_alphabet_stand_for_themselves() -> None:
    backend = Backend(models.BPE({"a": 0, "Ã": 1, "©": 2}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["日本", " x", "Ã!", "\xa0"])
    tokenizer = Tokenizer(backend)
    detokenizer = tokenizer.new_detokenizer(False)
    assert isinstance(detokenizer, ByteDetokenizer)
    assert [detokenizer.push([token_id]) for token_id in (1, 2, 3, 4, 6, 0)] == ["", "é", "日本", " x", "\xa0", "a"]
    assert stream(tokenizer.new_detokenizer(False), [[5, 0]]) == tokenizer.decode([5, 0], False) == "�!a"


def test_byte_level_decoder_alone_in_a_sequence_uses_the_byte_table() -> None:
    assert isinstance(synthetic(decoders.Sequence([decoders.ByteLevel()])).new_detokenizer(True), ByteDetokenizer)
    assert isinstance(SYNTHETIC["llama 2"].new_detokenizer(True), WindowDetokenizer)


def test_special_tokens_are_skipped_or_kept_as_asked() -> None:
    tokenizer = byte_tokenizer()
    eos = tokenizer.vocab_size - 1
    assert stream(tokenizer.new_detokenizer(True), [[ord("a")], [eos], [ord("b")]]) == "ab"
    assert stream(tokenizer.new_detokenizer(False), [[ord("a")], [eos], [ord("b")]]) == "a<|eos|>b"


# When text becomes certain --------------------------------------------------------------------


def test_text_is_released_with_the_token_that_completes_it() -> None:
    detokenizer = byte_tokenizer().new_detokenizer(True)
    assert [detokenizer.push([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]


def test_generation_that_ends_inside_a_character_flushes_a_replacement() -> None:
    detokenizer = byte_tokenizer().new_detokenizer(True)
    assert [detokenizer.push([byte]) for byte in b"a\xf0\x9f\xa6"] == ["a", "", "", ""]
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_byte_run_is_held_until_a_token_ends_it() -> None:
    detokenizer = SYNTHETIC["gemma"].new_detokenizer(True)
    ids = [piece("a"), *map(byte, "€".encode()), piece("b")]
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "", "", "€b"]


def test_unfinished_character_of_a_longer_byte_level_decoder_is_held() -> None:
    detokenizer = SYNTHETIC["byte level in a sequence"].new_detokenizer(True)
    assert [detokenizer.push([piece(token)]) for token in "é¤¤"] == ["", "", b"\xe9\xa4\xa4".decode()]


def test_spaces_are_stripped_from_the_start_of_the_text_only() -> None:
    tokenizer = SYNTHETIC["strips many spaces"]
    detokenizer = tokenizer.new_detokenizer(True)
    assert [detokenizer.push([piece("▁")]) for _ in range(30)] == [""] * 20 + [" "] * 10
    assert [detokenizer.push([piece("é")]), detokenizer.push([piece("▁")])] == ["é", " "]


@pytest.mark.parametrize("name", REACHING_BACK)
def test_text_that_a_decoder_may_yet_change_is_held_to_the_end(name: str) -> None:
    tokenizer = SYNTHETIC[name]
    ids = [piece(token) for token in "aéba"]
    detokenizer = tokenizer.new_detokenizer(True)
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * len(ids)
    assert detokenizer.flush() == tokenizer.decode(ids, True)


@pytest.mark.parametrize("name", ["llama 2", "gemma", "metaspace", "word piece", "joined by spaces"])
def test_ordinary_text_is_released_token_by_token(name: str) -> None:
    detokenizer = SYNTHETIC[name].new_detokenizer(True)
    pushed = [detokenizer.push([piece("é")]) for _ in range(30)]
    assert all(pushed)
    assert len(set(pushed[1:])) == 1


@pytest.mark.parametrize("name", DECODERS)
def test_cost_of_a_push_does_not_grow_with_the_stream(name: str) -> None:
    tokenizer = SYNTHETIC[name]
    detokenizer = tokenizer.new_detokenizer(False)
    assert isinstance(detokenizer, WindowDetokenizer)
    longest = 0
    decode = detokenizer._rules.decode

    def measured(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer._rules.decode = measured
    try:
        for index in range(2000):
            detokenizer.push([index * 7 % len(PIECES) + VOCAB - len(PIECES)])
    finally:
        detokenizer._rules.decode = decode
    assert 0 < longest < 12


# Behind a prompt ------------------------------------------------------------------------------


@given(prompt=SOME_BYTES, pushes=sliced(SOME_BYTES), skip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_primed_byte_stream_continues_the_finished_characters_of_the_prompt(
    prompt: list[int], pushes: list[list[int]], skip: bool
) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = tokenizer.new_detokenizer(skip)
    detokenizer.prime(prompt)
    output = stream(detokenizer, pushes)
    if not tokenizer.decode(flat(pushes), skip):
        assert output == ""
        return
    specials = {256: b"" if skip else b"<|bos|>", 257: b"" if skip else b"<|eos|>"}
    given_bytes = b"".join(specials.get(token_id) or bytes([token_id] * (token_id < 256)) for token_id in prompt)
    finished = utf_8_decode(given_bytes, "replace", False)[0]
    assert finished + output == tokenizer.decode([*prompt, *flat(pushes)], skip)


def visible(ids: Iterable[int], skip: bool) -> list[int]:
    return [token_id for token_id in ids if (len(SPECIAL) if skip else 0) <= token_id < VOCAB]


def finished_characters(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> int:
    """By the definition in the module's docstring, from the full decode alone."""
    prompt, output = visible(prompt, skip), visible(output, skip)
    start = next((index for index in reversed(range(len(prompt))) if prompt[index] not in BYTE_IDS), -1) + 1
    end = next((index for index, token_id in enumerate(output) if token_id not in BYTE_IDS), len(output))
    run = bytes(int(BYTES[token_id - BYTE_IDS[0]][3:5], 16) for token_id in prompt[start:] + output[:end])
    own = run[: len(prompt) - start]
    try:
        finished = utf_8_decode(own, "strict", False)[1]
    except UnicodeDecodeError:
        finished = len(own)
    try:
        run.decode()
    except UnicodeDecodeError:
        return len(tokenizer.decode(prompt[:start], skip)) + finished
    return len(tokenizer.decode(prompt[: start + finished], skip))


@pytest.mark.parametrize("name", ["llama 2", "gemma", "byte fallback and metaspace"])
@given(
    prompt=ids_of(VOCAB),
    pushes=sliced(ids_of(VOCAB)),
    skip=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_primed_byte_fallback_stream_continues_the_finished_characters_of_the_prompt(
    name: str, prompt: list[int], pushes: list[list[int]], skip: bool
) -> None:
    tokenizer = SYNTHETIC[name]
    detokenizer = tokenizer.new_detokenizer(skip)
    detokenizer.prime(prompt)
    output = flat(pushes)
    full = tokenizer.decode([*prompt, *output], skip)
    expected = full[finished_characters(tokenizer, prompt, output, skip) :] if visible(output, skip) else ""
    assert stream(detokenizer, pushes) == expected


@pytest.mark.parametrize("name", ["metaspace", "metaspace without prefix", "word piece", "joined by spaces"])
@given(prompt=ids_of(VOCAB), pushes=sliced(ids_of(VOCAB)), skip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_primed_stream_is_what_the_full_decode_has_beyond_the_prompt(
    name: str, prompt: list[int], pushes: list[list[int]], skip: bool
) -> None:
    tokenizer = SYNTHETIC[name]
    detokenizer = tokenizer.new_detokenizer(skip)
    detokenizer.prime(prompt)
    full = tokenizer.decode([*prompt, *flat(pushes)], skip)
    assert tokenizer.decode(prompt, skip) + stream(detokenizer, pushes) == full


def test_prompt_that_ends_inside_a_character_neither_leaks_nor_loses_it() -> None:
    tokenizer = byte_tokenizer()
    data = "the prompt 🦩 and more".encode()
    for cut in range(len(data)):
        detokenizer = tokenizer.new_detokenizer(True)
        detokenizer.prime(list(data[:cut]))
        finished = utf_8_decode(data[:cut], "strict", False)[0]
        assert finished + stream(detokenizer, ([byte] for byte in data[cut:])) == data.decode()


def test_character_of_the_prompt_that_the_output_leaves_unfinished_is_a_replacement() -> None:
    detokenizer = byte_tokenizer().new_detokenizer(True)
    detokenizer.prime(list("a€".encode()[:-1]))
    assert [detokenizer.push(b"b"), detokenizer.flush()] == [REPLACEMENT + "b", ""]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), SYNTHETIC["gemma"]], ids=["byte table", "window"])
def test_no_output_is_no_text_even_if_the_prompt_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    unfinished = [0xE2, 0x82] if tokenizer.vocab_size > VOCAB else [byte(0xE2), byte(0x82)]
    detokenizer = tokenizer.new_detokenizer(True)
    detokenizer.prime(unfinished)
    assert detokenizer.push([tokenizer.vocab_size]) == ""
    assert detokenizer.flush() == ""


def test_leading_space_survives_behind_a_prompt() -> None:
    tokenizer = SYNTHETIC["llama 2"]
    word = piece("▁a")
    detokenizer = tokenizer.new_detokenizer(True)
    detokenizer.prime([1, word])
    assert detokenizer.push([word]) == " a"
    assert tokenizer.new_detokenizer(True).push([word]) == "a"


@given(ids=SOME_BYTES, resumed=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_resumed_output_is_pushed_and_the_rest_is_the_rest(ids: list[int], resumed: int) -> None:
    tokenizer = byte_tokenizer()
    whole, rest = tokenizer.new_detokenizer(True), tokenizer.new_detokenizer(True)
    sent = [whole.push([token_id]) for token_id in ids]
    rest.push(ids[:resumed])
    assert stream(rest, ([token_id] for token_id in ids[resumed:])) == "".join(sent[resumed:]) + whole.flush()


class CountingIds(list[int]):
    """Counts what `prime` looks at."""

    reads = 0

    def __reversed__(self) -> Any:
        for token_id in super().__reversed__():
            self.reads += 1
            yield token_id


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), SYNTHETIC["llama 2"]], ids=["byte table", "window"])
def test_priming_reads_a_few_tokens_of_a_long_prompt(tokenizer: Tokenizer) -> None:
    prompt = CountingIds([VOCAB - 1] * 100_000)
    tokenizer.new_detokenizer(True).prime(prompt)
    assert 0 < prompt.reads <= 4
