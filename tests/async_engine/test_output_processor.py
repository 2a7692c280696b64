"""OutputProcessor: columns in, each request's events out."""

import numpy as np
import pytest

from async_engine.output_processor import OutputProcessor
from async_engine.request_state import RequestState
from async_engine.stop_strings import StopMatcher
from async_engine.tokenizer import byte_tokenizer
from protos.errors import CoreDiedError, DeadlineError, QueueTimeoutError, RequestFailedError, TailraceError
from protos.messages import Admitted, EngineCoreOutputs, Finished, FinishReason

EOS = 257


class Sink:
    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        return lambda *values: self.log.append((name, *values))


class Rig:
    """An OutputProcessor and what it called back."""

    def __init__(self):
        self.stopped, self.ended = [], []
        self.processor = OutputProcessor(self.stopped.extend, lambda state, finished: self.ended.append(state.handle))

    def add(self, handle, stop=(), include_match=False):
        sink = Sink()
        state = RequestState(handle, f"r{handle}", sink)
        state.prepare(
            prompt_tokens=3,
            detokenizer=byte_tokenizer().new_detokenizer(True),
            matcher=StopMatcher(stop, include_match) if stop else None,
            include_match=include_match,
            min_tokens=0,
            wants_text=True,
        )
        self.processor.states[handle] = state
        return sink

    def process(self, tokens=(), admitted=(), finished=()):
        self.processor.process(
            EngineCoreOutputs(
                handles=np.array([handle for handle, _ in tokens], "<i8").tobytes(),
                token_ids=np.array([token for _, token in tokens], "<i4").tobytes(),
                admitted=list(admitted),
                finished=list(finished),
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
    assert not rig.processor.states


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


def test_a_request_whose_text_breaks_fails_alone(caplog):
    rig = Rig()
    bad, good = rig.add(1), rig.add(2)
    rig.processor.states[1].push = lambda token_id: 1 / 0
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
