"""RequestState: ids and text of a stream agree, whatever stops it and wherever it was cut."""

import random

import pytest

from async_engine.request_state import RequestState
from async_engine.stop_strings import StopMatcher
from async_engine.tokenizer import byte_tokenizer
from protos.messages import Finished, FinishReason

TOKENIZER = byte_tokenizer()


class Recorder:
    """A sink that keeps everything."""

    def __init__(self):
        self.token_ids, self.text, self.deltas, self.finished = [], "", [], None

    def tokens(self, token_ids, text):
        assert self.finished is None
        self.token_ids += token_ids
        self.text += text
        self.deltas.append((list(token_ids), text))

    def finish(self, finish):
        assert self.finished is None
        self.finished = finish


def make_state(stop=(), include_match=False, min_tokens=0, wants_text=True):
    sink = Recorder()
    state = RequestState(1, "r", sink)
    state.prepare(
        prompt_tokens=1,
        detokenizer=TOKENIZER.new_detokenizer(True),
        matcher=StopMatcher(stop, include_match) if stop else None,
        include_match=include_match,
        min_tokens=min_tokens,
        wants_text=wants_text,
    )
    return state, sink


def push_all(state, data):
    """Pushes bytes as tokens until a stop string ends it; how many were pushed."""
    for count, byte in enumerate(data, 1):
        if state.push(byte):
            return count
    state.end(FinishReason.MAX_TOKENS, -1)
    return len(data)


def test_stop_string_across_tokens_trims_text_and_ids_to_match():
    state, sink = make_state(["STOP"])
    assert push_all(state, b"one STOP two") == 8
    assert sink.text == "one "
    assert bytes(sink.token_ids) == b"one "
    assert sink.finished.reason is FinishReason.STOP_STRING
    assert sink.finished.matched_string == "STOP"
    assert sink.finished.output_tokens == 4


def test_include_match_keeps_the_match_in_text_and_ids():
    state, sink = make_state(["STOP"], include_match=True)
    push_all(state, b"one STOP two")
    assert sink.text == "one STOP"
    assert bytes(sink.token_ids) == b"one STOP"


def test_stop_string_at_the_start_leaves_an_empty_output():
    state, sink = make_state(["on"])
    push_all(state, b"one")
    assert (sink.text, sink.token_ids, sink.finished.output_tokens) == ("", [], 0)


def test_stop_string_across_an_emoji():
    state, sink = make_state(["🦩!"])
    push_all(state, "a🦩? b🦩! c".encode())
    assert sink.text == "a🦩? b"
    assert bytes(sink.token_ids).decode() == "a🦩? b"


def test_ids_are_held_back_with_the_text_that_might_begin_a_stop_string():
    state, sink = make_state(["abc"])
    for byte in b"xab":
        state.push(byte)
    assert (bytes(sink.token_ids), sink.text) == (b"x", "x")
    state.push(ord("d"))
    assert (bytes(sink.token_ids), sink.text) == (b"xabd", "xabd")


def test_text_held_back_is_let_go_at_the_end():
    state, sink = make_state(["abc"])
    push_all(state, b"xab")
    assert (bytes(sink.token_ids), sink.text) == (b"xab", "xab")
    assert sink.finished.output_tokens == 3


def test_output_that_ends_inside_a_character_flushes_a_replacement():
    state, sink = make_state()
    push_all(state, "é".encode()[:1])
    assert sink.text == "\ufffd"


def test_stop_string_below_min_tokens_does_not_end_the_output():
    state, sink = make_state(["a"], min_tokens=4)
    assert push_all(state, b"aaaaaa") == 4
    assert sink.text == "aaa"


def test_without_text_only_ids_go_out_and_stop_strings_still_end_it():
    state, sink = make_state(["b"], wants_text=False)
    push_all(state, b"aab")
    assert (bytes(sink.token_ids), sink.text) == (b"aa", "")


@pytest.mark.parametrize("include_match", [False, True])
def test_the_token_that_ended_it_stays_out_unless_asked_for(include_match):
    state, _ = make_state(include_match=include_match)
    assert state.drops(Finished(1, FinishReason.EOS, stop_token_id=257)) is not include_match
    assert not state.drops(Finished(1, FinishReason.MAX_TOKENS))


@pytest.mark.parametrize("seed", range(300))
def test_resumed_output_continues_without_a_lost_or_doubled_token_or_character(seed):
    """Cut a stream after any delta; resume with the ids and the text length received so far."""
    rng = random.Random(seed)
    alphabet = ["a", "b", "ab", "é", "🦩", " "]
    data = "".join(rng.choice(alphabet) for _ in range(30)).encode()
    stops = ["".join(rng.choice("ab é🦩") for _ in range(rng.randint(2, 5))) for _ in range(rng.randint(0, 3))]

    whole_state, whole = make_state(stops)
    push_all(whole_state, data)

    first_state, first = make_state(stops)
    cut = rng.randint(0, len(data))
    if any(first_state.push(byte) for byte in data[:cut]):
        return  # it was over before the cut
    second_state, second = make_state(stops)
    assert second_state.resume(first.token_ids, len(first.text.encode())) is None
    push_all(second_state, data[len(first.token_ids) :])
    assert first.text + second.text == whole.text
    assert first.token_ids + second.token_ids == whole.token_ids
    assert second.finished == whole.finished


def test_resuming_an_output_that_a_stop_string_had_ended_tells_so():
    state, _ = make_state(["STOP"])
    finish = state.resume(list(b"one STOP"), 0)
    assert finish is not None
    assert finish.matched_string == "STOP"
