"""OutputProcessor: columns in, each request's events out."""

import numpy as np
import pytest

from async_engine.output_processor import OutputProcessor
from async_engine.request_state import Rendering, RequestState
from async_engine.stop_strings import StopMatcher
from async_engine.tokenizer import byte_tokenizer
from protos.errors import (
    CoreDiedError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    QueueTimeoutError,
    RequestFailedError,
    TailraceError,
)
from protos.messages import (
    Admitted,
    EngineCoreOutputs,
    Finished,
    FinishReason,
    LogprobColumns,
    PromptLogprobs,
)

EOS = 257


class Sink:
    def __init__(self):
        self.log = []

    def sequence(self, index):
        return self

    def tokens(self, token_ids, text, extra=None):
        self.log.append(("tokens", token_ids, text))

    def __getattr__(self, name):
        return lambda *values: self.log.append((name, *values))


class SeveralSink(Sink):
    """Tells the sequences apart."""

    def __init__(self):
        super().__init__()
        self.sequences = []

    def sequence(self, index):
        self.sequences.append(Sink())
        return self.sequences[-1]


class Rig:
    """An OutputProcessor and what it called back."""

    def __init__(self):
        self.stopped, self.admitted, self.ended, self.finished = [], [], [], []
        self.processor = OutputProcessor(self.admitted.append, self._on_end)

    def _on_end(self, state, finished):
        self.ended.append(state.handle)
        self.finished.append(finished)

    def add_several(self, handles):
        """One request with a sequence per handle."""
        sink = SeveralSink()
        state = RequestState("several", sink, handles)
        for sequence in state.sequences:
            sequence.render(Rendering(detokenizer=byte_tokenizer().new_detokenizer(True), wants_text=True))
            self.processor.sequences[sequence.handle] = sequence
        return sink

    def add(self, handle, stop=(), include_match=False):
        sink = Sink()
        state = RequestState(f"r{handle}", sink, [handle])
        state.prompt_tokens = 3
        state.sequences[0].render(
            Rendering(
                detokenizer=byte_tokenizer().new_detokenizer(True),
                matcher=StopMatcher(stop, include_match) if stop else None,
                include_match=include_match,
                wants_text=True,
            )
        )
        self.processor.sequences[handle] = state.sequences[0]
        return sink

    def process(self, tokens=(), admitted=(), finished=(), **columns):
        self.stopped += self.processor.process(
            EngineCoreOutputs(
                handles=np.array([handle for handle, _ in tokens], "<i8").tobytes(),
                token_ids=np.array([token for _, token in tokens], "<i4").tobytes(),
                admitted=list(admitted),
                finished=list(finished),
                **columns,
            )
        )


def test_tokens_of_unknown_requests_are_ignored():
    rig = Rig()
    sink = rig.add(1)
    rig.process([(7, 65), (1, 66), (8, 67)], [Admitted(9, 0, 0.0)], [Finished(10, FinishReason.EOS)])
    assert sink.log == [("tokens", [66], "B")]


def test_events_come_in_the_order_started_tokens_finish_summary():
    rig = Rig()
    sink = rig.add(1)
    rig.process([(1, 65)], [Admitted(1, 2, 0.0)], [Finished(1, FinishReason.MAX_TOKENS)])
    assert [entry[0] for entry in sink.log] == ["started", "tokens", "finish", "summary"]
    assert rig.ended == [1]
    assert not rig.processor.sequences


def test_eos_is_not_in_the_output_but_counts_as_drawn():
    rig = Rig()
    sink = rig.add(1)
    rig.process([(1, 65)])
    rig.process([(1, EOS)], finished=[Finished(1, FinishReason.EOS, stop_token_id=EOS)])
    (_, tokens, _), (_, finish), (_, summary) = sink.log
    assert tokens == [65]
    assert (finish.reason, finish.matched_token_id, finish.output_tokens) == (FinishReason.EOS, EOS, 1)
    assert summary.output_tokens == 2


def test_eos_is_in_the_output_when_asked_for():
    rig = Rig()
    sink = rig.add(1, include_match=True)
    rig.process([(1, EOS)], finished=[Finished(1, FinishReason.EOS, stop_token_id=EOS)])
    assert sink.log[0] == ("tokens", [EOS], "")
    assert sink.log[1][1].output_tokens == 1


def test_a_stop_string_ends_the_request_in_the_core_once_and_later_tokens_are_dropped():
    rig = Rig()
    sink = rig.add(1, stop=["B"])
    rig.process([(1, 65)])
    rig.process([(1, 66)])
    rig.process([(1, 67)])
    assert rig.stopped == [1]
    assert [entry[0] for entry in sink.log] == ["tokens", "finish"]
    rig.process(finished=[Finished(1, FinishReason.ABORTED, cached_tokens=1)])
    assert sink.log[-1][0] == "summary"
    assert sink.log[1][1].reason is FinishReason.STOP_STRING
    assert sink.log[-1][1].cached_tokens == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.DEADLINE, DeadlineError),
        (FinishReason.QUEUE_TIMEOUT, QueueTimeoutError),
        (FinishReason.ERROR, RequestFailedError),
        (FinishReason.OVERLOADED, OverloadedError),
    ],
)
def test_a_failure_becomes_its_error(reason, error):
    rig = Rig()
    sink = rig.add(1)
    rig.process(finished=[Finished(1, reason, message="why")])
    ((name, raised),) = sink.log
    assert name == "failed"
    assert type(raised) is error
    assert str(raised) == "why"
    assert rig.finished == [Finished(1, reason, message="why")]


def test_a_request_whose_text_breaks_fails_alone(caplog):
    rig = Rig()
    bad, good = rig.add(1), rig.add(2)
    bad.tokens = lambda *values: 1 / 0
    rig.process([(1, 65), (2, 66)])
    ((name, error),) = bad.log
    assert name == "failed"
    assert type(error) is TailraceError
    assert "division" not in str(error)
    assert "division" in caplog.text
    assert good.log == [("tokens", [66], "B")]
    assert rig.stopped == [1]


def test_the_death_of_the_core_fails_every_request():
    rig = Rig()
    sinks = [rig.add(1), rig.add(2)]
    rig.processor.fail_all(CoreDiedError("gone"))
    assert [sink.log[0][0] for sink in sinks] == ["failed", "failed"]
    assert sorted(rig.ended) == [1, 2]
    assert not rig.processor.sequences


def test_several_sequences_start_with_the_first_and_sum_up_at_the_last():
    rig = Rig()
    sink = rig.add_several([4, 5, 6])
    rig.process([], [Admitted(4, 3, 0.5)])
    rig.process([(4, 65), (5, 66)], [Admitted(5, 8, 0.0), Admitted(6, 8, 0.0)])
    ends = [
        Finished(handle, FinishReason.MAX_TOKENS, cached_tokens=cached, preemptions=1, decode_seconds=handle)
        for handle, cached in ((5, 8), (6, 8), (4, 3))
    ]
    rig.process([(6, 67)], finished=ends[:2])
    assert sink.log == [("started", 3)]
    rig.process(finished=ends[2:])
    assert [sequence.log[0] for sequence in sink.sequences] == [("tokens", [c], chr(c)) for c in (65, 66, 67)]
    assert [sequence.log[1][0] for sequence in sink.sequences] == ["finish"] * 3
    (_, summary) = sink.log[1]
    assert (summary.output_tokens, summary.cached_tokens, summary.preemptions) == (3, 3, 3)
    assert summary.decode_seconds == 6
    assert rig.ended == [4]
    assert not rig.processor.sequences


def test_failure_of_one_sequence_fails_the_request_and_ends_the_others():
    rig = Rig()
    sink = rig.add_several([4, 5, 6])
    rig.process(
        [(4, 65)], finished=[Finished(4, FinishReason.MAX_TOKENS), Finished(5, FinishReason.ERROR, message="x")]
    )
    assert [entry[0] for entry in sink.log] == ["failed"]
    assert rig.stopped == [6]
    assert rig.ended == [4]
    assert not rig.processor.sequences
    rig.process([(6, 67)], finished=[Finished(6, FinishReason.STOP_STRING)])
    assert len(sink.log) == 1


def test_invalid_grammar_is_an_error_of_its_field():
    rig = Rig()
    sink = rig.add(1)
    rig.process(finished=[Finished(1, FinishReason.INVALID, message="is broken", field="constraint.regex")])
    ((_, error),) = sink.log
    assert type(error) is InvalidRequestError
    assert (error.field, error.description) == ("constraint.regex", "is broken")


def columns(index, logprobs, widths, top_ids):
    ints = [np.array(values, "<i4").tobytes() for values in (index, range(1, len(index) + 1), widths, top_ids)]
    floats = [np.array(values, "<f4").tobytes() for values in (logprobs, [-i for i in range(len(top_ids))])]
    return LogprobColumns(ints[0], floats[0], ints[1], ints[2], ints[3], floats[1])


class LogprobSink(Sink):
    def tokens(self, token_ids, text, extra=None):
        self.log.append((token_ids, None if extra is None else extra.logprobs))


def test_log_probabilities_reach_the_tokens_they_are_of():
    rig = Rig()
    sinks = {}
    for handle, width in ((1, None), (2, 0), (3, 2)):
        sinks[handle] = LogprobSink()
        state = RequestState(f"r{handle}", sinks[handle], [handle])
        state.sequences[0].render(Rendering(logprobs_width=width))
        rig.processor.sequences[handle] = state.sequences[0]
    rig.process([(1, 65), (2, 66), (3, 67)], logprobs=columns([1, 2], [-0.5, -0.25], [0, 2], [7, 8]))
    ((_, first),), ((_, second),), ((_, third),) = (sinks[handle].log for handle in (1, 2, 3))
    assert first is None
    assert (second.logprobs, second.ranks, second.top_ids) == ([-0.5], [1], [])
    assert (third.logprobs, third.ranks, third.candidates(0)) == ([-0.25], [2], {7: 0, 8: -1})


def test_prompt_log_probabilities_are_passed_on_with_their_place():
    rig = Rig()
    sink = rig.add(1)
    part = PromptLogprobs(1, 5, columns([0, 1], [-0.5, -0.25], [1, 1], [7, 8]))
    rig.process(prompt_logprobs=[part])
    ((name, offset, logprobs),) = sink.log
    assert (name, offset, logprobs.logprobs, logprobs.top_ids) == ("prompt_logprobs", 5, [-0.5, -0.25], [7, 8])


def test_failure_of_a_sequence_that_a_stop_string_had_completed_is_nobodys():
    rig = Rig()
    sink = rig.add(1, stop=["B"])
    rig.process([(1, 66)])
    rig.process(finished=[Finished(1, FinishReason.ERROR, message="x")])
    assert [entry[0] for entry in sink.log] == ["finish", "summary"]
    assert rig.finished[0].reason is FinishReason.STOP_STRING
