"""SequenceState: ids and text of a stream agree, whatever stops it and wherever it was cut."""

import random

import pytest

from async_engine.chat_parser import new_parser
from async_engine.outputs import SequenceFinish
from async_engine.request_state import Rendering, RequestState
from async_engine.stop_strings import StopMatcher
from async_engine.tokenizer import byte_tokenizer
from protos.messages import Finished, FinishReason

TOKENIZER = byte_tokenizer()


class Recorder:
    """A sink that keeps everything."""

    def __init__(self):
        self.token_ids, self.text, self.deltas, self.finished = [], "", [], None

    def sequence(self, index):
        return self

    def tokens(self, token_ids, text, extra=None):
        assert self.finished is None
        self.token_ids += token_ids
        self.text += text
        self.deltas.append((list(token_ids), text))

    def finish(self, finish):
        assert self.finished is None
        self.finished = finish


def make_state(stop=(), include_match=False, min_tokens=0, wants_text=True):
    sink = Recorder()
    (state,) = RequestState("r", sink, [1]).sequences
    state.render(
        Rendering(
            detokenizer=TOKENIZER.new_detokenizer(True),
            matcher=StopMatcher(stop, include_match) if stop else None,
            include_match=include_match,
            min_tokens=min_tokens,
            wants_text=wants_text,
        )
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
    state, sink = make_state(wants_text=False)
    push_all(state, b"aab")
    assert (bytes(sink.token_ids), sink.text) == (b"aab", "")


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


def test_request_ends_as_its_first_sequence_did_here_and_once_all_have_ended():
    sink = Recorder()
    sink.sequence = lambda index: Recorder()
    request = RequestState("r", sink, [1, 2])
    first, second = request.sequences
    first.render(
        Rendering(detokenizer=TOKENIZER.new_detokenizer(True), matcher=StopMatcher(["a"], False), wants_text=True)
    )
    assert first.push(ord("a"))
    assert not request.is_ending
    second.end(FinishReason.MAX_TOKENS)
    assert request.is_ending
    assert request.ended(Finished(2, FinishReason.MAX_TOKENS)) is None
    assert request.ended(Finished(1, FinishReason.MAX_TOKENS)).reason is FinishReason.STOP_STRING


class Table:
    """Stands for what a message tells: of its token at place i, minus i."""

    def append_to(self, logprobs, place):
        logprobs.logprobs.append(-float(place))
        logprobs.ranks.append(place)


def make_logprob_state(stop=()):
    state, sink = make_state(stop)
    sink.logprobs = []
    tokens = sink.tokens

    def record(token_ids, text, extra=None):
        tokens(token_ids, text)
        if extra is not None:
            assert len(extra.logprobs) == len(token_ids)
            sink.logprobs += extra.logprobs.logprobs

    sink.tokens = record
    state.render(
        Rendering(
            detokenizer=TOKENIZER.new_detokenizer(True),
            matcher=StopMatcher(stop, False) if stop else None,
            wants_text=True,
            logprobs_width=0,
        )
    )
    return state, sink


def test_log_probabilities_stay_with_their_tokens_and_are_trimmed_with_them():
    state, sink = make_logprob_state(["STOP"])
    for place, byte in enumerate(b"abSTxSTOP"):
        state.push(byte, Table(), place)
    assert bytes(sink.token_ids) == b"abSTx"
    assert sink.logprobs == [0, -1, -2, -3, -4]
    assert sink.finished.cumulative_logprob == -10


def test_log_probabilities_that_were_held_back_go_out_at_the_end():
    state, sink = make_logprob_state(["STOP"])
    for place, byte in enumerate(b"aST"):
        state.push(byte, Table(), place)
    assert sink.logprobs == [0]
    state.end(FinishReason.MAX_TOKENS)
    assert sink.logprobs == [0, -1, -2]
    assert sink.finished.cumulative_logprob == -3


def test_requests_that_do_not_ask_have_no_cumulative_log_probability():
    state, sink = make_state()
    push_all(state, b"ab")
    assert sink.finished.cumulative_logprob is None


class PartsRecorder(Recorder):
    def __init__(self):
        super().__init__()
        self.reasoning, self.calls = "", []

    def tokens(self, token_ids, text, extra=None):
        super().tokens(token_ids, text)
        if extra is not None:
            self.reasoning += extra.reasoning
            self.calls += extra.tool_calls


def parsing(stop=()):
    """(state, sink) of an output that is taken apart."""
    sink = PartsRecorder()
    (state,) = RequestState("r", sink, [1]).sequences
    state.render(
        Rendering(
            detokenizer=TOKENIZER.new_detokenizer(True),
            matcher=StopMatcher(stop, False) if stop else None,
            parser=new_parser("hermes", "think", ""),
            wants_text=True,
        )
    )
    return state, sink


def parse(data, stop=()):
    state, sink = parsing(stop)
    push_all(state, data)
    return sink


OUTPUT = b'<think>hm</think>Let me.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_reasoning_and_tool_calls_leave_the_text_and_all_ids_stay():
    sink = parse(OUTPUT)
    assert (sink.text, sink.reasoning) == ("Let me.", "hm")
    assert "".join(call.arguments for call in sink.calls) == '{"a": 1}'
    assert [call.name for call in sink.calls if call.name] == ["f"]
    assert bytes(sink.token_ids) == OUTPUT


def test_what_only_began_like_a_tag_is_text_at_the_end():
    assert parse(b"x <tool_c").text == "x <tool_c"


def test_stop_string_ends_the_text_that_a_format_held_back():
    assert parse(b"x <toolSTOP", stop=["STOP"]).text == "x <tool"


def test_log_probabilities_stay_with_tokens_whose_text_is_taken_apart():
    deltas = []
    sink = Recorder()
    sink.tokens = lambda token_ids, text, extra=None: deltas.append((token_ids, extra))
    (state,) = RequestState("r", sink, [1]).sequences
    state.render(
        Rendering(
            detokenizer=TOKENIZER.new_detokenizer(True),
            parser=new_parser("hermes", "think", ""),
            wants_text=True,
            logprobs_width=0,
        )
    )
    for place, byte in enumerate(OUTPUT):
        state.push(byte, Table(), place)
    assert [len(extra.logprobs) for _, extra in deltas] == [1] * len(OUTPUT)
    assert "".join(extra.reasoning for _, extra in deltas) == "hm"


def parts(sink):
    """All parts, each joined."""
    calls = "".join(call.name + call.arguments for call in sink.calls)
    return sink.text, sink.reasoning, calls, [call.id for call in sink.calls if call.id]


@pytest.mark.parametrize("stop", [(), ("<tool_call>!", "m</think>L!", 'me": "f", "x', "Let mee", "}</t!")])
@pytest.mark.parametrize("lag", [0, 1, 7, 60])
def test_format_goes_on_where_a_resumed_output_was_cut(stop, lag):
    """Cut it after any delta; `lag` deltas before the cut came without the text that belongs to them."""
    whole = parts(parse(OUTPUT, stop))
    for cut in range(len(OUTPUT)):
        state, first = parsing(stop)
        for count, byte in enumerate(OUTPUT[:cut]):
            if count == cut - lag:
                state._sink = late = PartsRecorder()
            state.push(byte)
        token_ids = first.token_ids + (late.token_ids if 0 < lag <= cut else [])
        state, second = parsing(stop)
        text, reasoning, calls, ids = parts(first)
        assert state.resume(token_ids, len((text + reasoning + calls).encode())) is None
        push_all(state, OUTPUT[len(token_ids) :])
        rest = parts(second)
        assert (text + rest[0], reasoning + rest[1], calls + rest[2], ids + rest[3]) == whole


def test_what_was_resumed_counts_as_received_unless_it_is_said_how_much():
    for text_bytes, text in ((None, "de"), (0, "abcde"), (2, "cde"), (4, "e")):
        state, sink = make_state()
        state.resume(list(b"abc"), text_bytes)
        push_all(state, b"de")
        assert (sink.text, bytes(sink.token_ids)) == (text, b"de")


def test_a_whole_output_that_is_resumed_ends_with_the_text_that_was_missing():
    state, sink = make_state(["xyz"])
    assert state.resume(list(b"abxy"), 1) is None
    state.finish_resumed(SequenceFinish(FinishReason.MAX_TOKENS, output_tokens=4))
    assert (sink.text, sink.token_ids, sink.finished.output_tokens) == ("bxy", [], 4)
    state, sink = make_state(["xyz"])
    state.finish_resumed(state.resume(list(b"abxyz"), 1))
    assert (sink.text, sink.finished.matched_string) == ("b", "xyz")
