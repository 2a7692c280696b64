"""The rules of a stream, without one."""

import pytest

from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client.errors import ProtocolError
from tailrace_client.events import TokenLogprobs, ToolCallDelta
from tailrace_client.spec import make_spec
from tailrace_client.stream_state import StreamState

STARTED = pb.GenerateStreamResponse(started=pb.RequestStarted(request_id="r"))
SUMMARY = pb.GenerateStreamResponse(summary=pb.RequestSummary(output_tokens=2))
PROGRESS = pb.GenerateStreamResponse(progress=pb.Progress(queue_position=3))
MAX_TOKENS = pb.SequenceFinish(reason=pb.FINISH_REASON_MAX_TOKENS, output_tokens=2)


def delta(offset, token_ids, index=0, **fields):
    sequence = pb.SequenceDelta(index=index, offset=offset, token_ids=token_ids, **fields)
    return pb.GenerateStreamResponse(delta=pb.OutputDelta(sequences=[sequence]))


def end(offset, index=0):
    return delta(offset, [], index, finish=MAX_TOKENS)


def feed(messages, on_progress=None, **options):
    """(state, deltas) after a whole stream."""
    state = StreamState(make_spec("hi", options), on_progress)
    for message in messages:
        state._accept(message)
    state._accept_end()
    return state, list(state._pending)


def test_a_stream_that_keeps_the_rules():
    heard = []
    state, deltas = feed(
        [STARTED, PROGRESS, delta(0, [7], text="a"), delta(1, [8], finish=MAX_TOKENS), SUMMARY], heard.append
    )
    assert [(d.offset, d.token_ids, d.text) for d in deltas] == [(0, [7], "a"), (1, [8], "")]
    assert state.started.request_id == "r"
    assert state.finish.reason.name == "MAX_TOKENS"
    assert state.summary.output_tokens == 2
    assert [progress.queue_position for progress in heard] == [3]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "without a summary"),
        ([STARTED], "without a summary"),
        ([STARTED, end(0)], "without a summary"),
        ([delta(0, [7])], "delta before started"),
        ([SUMMARY], "summary before started"),
        ([STARTED, STARTED], "started twice"),
        ([STARTED, delta(1, [7])], "at token 1, not at 0"),
        ([STARTED, delta(0, [7, 8]), delta(3, [9])], "at token 3, not at 2"),
        ([STARTED, delta(0, [7, 8]), delta(1, [8])], "at token 1, not at 2"),
        ([STARTED, end(0), delta(0, [7])], "after its end"),
        ([STARTED, delta(0, [7]), SUMMARY], "before every sequence had ended"),
        ([STARTED, SUMMARY], "before every sequence had ended"),
        ([STARTED, delta(0, [7], index=1)], "sequence 1 was not asked for"),
        ([STARTED, end(0), SUMMARY, delta(0, [7])], "delta after the summary"),
        ([STARTED, end(0), SUMMARY, SUMMARY], "summary after the summary"),
    ],
)
def test_a_stream_that_breaks_them(messages, words):
    with pytest.raises(ProtocolError, match=words) as caught:
        feed(messages, request_id="mine")
    assert caught.value.request_id == "mine"
    assert caught.value.reason == "PROTOCOL_VIOLATION"


def test_offsets_start_behind_what_is_resumed():
    feed([STARTED, delta(3, [7], finish=MAX_TOKENS), SUMMARY], resume_from=[4, 5, 6])
    with pytest.raises(ProtocolError, match="at token 0, not at 3"):
        feed([STARTED, delta(0, [7])], resume_from=[4, 5, 6])


def test_without_ids_offsets_only_grow():
    messages = [STARTED, delta(0, [], text="a"), delta(5, [], text="b")]
    feed([*messages, end(9), SUMMARY], want_token_ids=False)
    with pytest.raises(ProtocolError, match="at token 4, not at 5"):
        feed([*messages, end(4), SUMMARY], want_token_ids=False)


def test_sequences_are_counted_apart():
    both = pb.OutputDelta(sequences=[pb.SequenceDelta(index=i, token_ids=[7], finish=MAX_TOKENS) for i in (0, 1)])
    state, deltas = feed([STARTED, pb.GenerateStreamResponse(delta=both), SUMMARY], num_sequences=2)
    assert [d.index for d in deltas] == [0, 1]
    assert state.finishes.keys() == {0, 1}
    with pytest.raises(ProtocolError, match="before every sequence had ended"):
        feed([STARTED, end(0), SUMMARY], num_sequences=2)


def test_prompt_logprobs_may_come_in_pieces():
    def piece(offset):
        logprobs = pb.TokenLogprobs(offset=offset, logprobs=[-1.0], ranks=[1], top_width=2, top_ids=[1, 2])
        return pb.GenerateStreamResponse(started=pb.RequestStarted(prompt_logprobs=logprobs))

    state, _ = feed([piece(0), piece(1), end(0), SUMMARY])
    assert [(p.offset, p.top_ids) for p in state.started.prompt_logprobs] == [(0, [[1, 2]]), (1, [[1, 2]])]
    with pytest.raises(ProtocolError, match="started twice"):
        feed([STARTED, delta(0, [7]), piece(1)])


def test_log_probabilities_come_row_by_row():
    logprobs = pb.TokenLogprobs(
        offset=1, logprobs=[-1, -2], ranks=[3, 4], top_width=2, top_ids=[5, 6, 7, 8], top_logprobs=[-5, -6, -7, -8]
    )
    _, (first, second, last) = feed(
        [STARTED, delta(0, [9]), delta(1, [9, 9], logprobs=logprobs), end(3), SUMMARY], logprobs=2
    )
    assert first.logprobs is None
    assert second.logprobs == TokenLogprobs(1, [-1, -2], [3, 4], [[5, 6], [7, 8]], [[-5, -6], [-7, -8]])
    assert last.finish.cumulative_logprob is None


def test_sum_of_log_probabilities_is_told_even_when_it_is_zero():
    finish = pb.SequenceFinish(reason=pb.FINISH_REASON_MAX_TOKENS, output_tokens=1, cumulative_logprob=0)
    state, _ = feed([STARTED, delta(0, [9], finish=finish), SUMMARY])
    assert state.finish.cumulative_logprob == 0


def test_pieces_of_tool_calls_and_reasoning_are_passed_on():
    call = pb.ToolCallDelta(index=1, id="c", name="f", arguments="{")
    _, (first, _) = feed([STARTED, delta(0, [9], tool_calls=[call], reasoning="hm"), end(1), SUMMARY])
    assert (first.tool_calls, first.reasoning) == ((ToolCallDelta(1, "c", "f", "{"),), "hm")


def test_what_a_newer_server_says_is_passed_over():
    finish = pb.SequenceFinish(reason=99)
    state, _ = feed([STARTED, pb.GenerateStreamResponse(), delta(0, [], finish=finish), SUMMARY])
    assert state.finish.reason.name == "UNSPECIFIED"
