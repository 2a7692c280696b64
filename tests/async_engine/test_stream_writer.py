"""StreamWriter: messages of many streams, of which those of tokens alone are one and the same."""

from types import SimpleNamespace

import pytest

from async_engine.logprobs import Logprobs
from async_engine.outputs import Delta, Extra, SequenceFinish, Summary
from async_engine.to_proto import Answer, PlainDelta, StreamWriter
from protos.messages import FinishReason
from protos.tailrace.v1 import generation_pb2 as pb

FINISH = SequenceFinish(FinishReason.MAX_TOKENS, output_tokens=3)


def make_writer(plain, token_ids=True, num_sequences=1):
    spec = pb.GenerationSpec(output=pb.OutputOptions(text=True, token_ids=token_ids), num_sequences=num_sequences)
    return StreamWriter(Answer("r", spec, SimpleNamespace(params=SimpleNamespace(n=num_sequences))), plain)


def write(writer, event, *more):
    """What is on the wire."""
    left = list(more)
    data = writer.message(event, lambda: left.pop(0) if left else None).SerializeToString()
    return pb.GenerateStreamResponse.FromString(data)


def sequences(response):
    return [(each.index, each.offset, list(each.token_ids), each.text) for each in response.delta.sequences]


def test_streams_in_turns_have_each_its_own_ids_and_text():
    plain = PlainDelta()
    first, second, without_ids = make_writer(plain), make_writer(plain), make_writer(plain, token_ids=False)
    for offset in range(3):
        assert sequences(write(first, Delta(offset, [1, 2], "ab"))) == [(0, offset, [1, 2], "ab")]
        assert sequences(write(without_ids, Delta(offset, [4], "d"))) == [(0, offset, [], "d")]
        assert sequences(write(second, Delta(7, [3], ""))) == [(0, 7, [3], "")]


@pytest.mark.parametrize(
    "event",
    [Delta(1, [2], "b", FINISH), Delta(1, [2], "b", None, 0, Extra(reasoning="r")), Summary(1, 0, 1, 0, 0, 0, 0)],
)
def test_nothing_of_another_message_is_left_behind(event):
    plain = PlainDelta()
    writer = make_writer(plain)
    alone = write(make_writer(PlainDelta()), event)
    write(writer, Delta(0, [1], "a"))
    assert write(writer, event) == alone
    assert sequences(write(writer, Delta(5, [6], "f"))) == [(0, 5, [6], "f")]
    assert not write(writer, Delta(5, [6], "f")).delta.sequences[0].HasField("finish")


def test_deltas_of_several_sequences_share_a_message():
    writer = make_writer(PlainDelta(), num_sequences=2)
    assert sequences(write(writer, Delta(0, [1], "a"), Delta(3, [2], "b", None, 1))) == [
        (0, 0, [1], "a"),
        (1, 3, [2], "b"),
    ]


def test_log_probabilities_are_told():
    logprobs = Logprobs(0)
    logprobs.logprobs.append(-0.5)
    logprobs.ranks.append(1)
    (sequence,) = write(make_writer(PlainDelta()), Delta(0, [1], "a", None, 0, Extra(logprobs))).delta.sequences
    assert list(sequence.logprobs.logprobs) == [-0.5]


def test_the_message_gives_way_before_it_has_kept_many_texts():
    plain = PlainDelta()
    writer = make_writer(plain)
    messages = [writer.message(Delta(0, [1], "x"), lambda: None) for _ in range(3 * PlainDelta.LIFETIME)]
    assert len({id(message) for message in messages}) == 3
