"""Recovery: what a new core is told, and what becomes of a request that kills cores."""

import os

import numpy as np
import pytest

from async_engine.output_processor import OutputProcessor
from async_engine.outputs import SequenceFinish
from async_engine.recovery import MAX_BACKOFF_SECONDS, Recovery, resubmissions
from async_engine.request_state import RequestState
from core_proc.black_box import MAX_ENTRIES, BlackBox, make_box
from protos.errors import RequestFailedError
from protos.messages import EngineCoreOutputs, EngineCoreRequest, Finished, FinishReason, Sampling, Sibling
from tests.async_engine.test_output_processor import Sink

PROMPT = np.array([7, 8], "<i4").tobytes()


class Rig:
    """Requests that a core was told of, and the recovery from its deaths."""

    def __init__(self, most_in_vain=3):
        self.live, self.ended = [], []
        self.processor = OutputProcessor(
            lambda state: None,
            lambda state, finished: self.ended.append((state.request_id, finished.reason)),
        )
        self.recovery = Recovery(self.processor, self.live.__contains__, most_in_vain)

    def add(self, handle, num_sequences=1, **fields):
        state = RequestState(f"r{handle}", Sink(), list(range(handle, handle + num_sequences)))
        state.message = EngineCoreRequest(
            handle,
            PROMPT,
            Sampling(seed=handle, prompt_logprobs=1),
            max_tokens=50,
            siblings=[Sibling(handle + i, 1000 + i) for i in range(1, num_sequences)],
            **fields,
        )
        state.sent_at, state.core = state.arrival_time, 0
        self.processor.sequences |= {sequence.handle: sequence for sequence in state.sequences}
        self.live.append(state)
        return state

    def tokens(self, *handles):
        self.processor.process(
            EngineCoreOutputs(
                handles=np.array(handles, "<i8").tobytes(), token_ids=np.arange(len(handles), dtype="<i4").tobytes()
            )
        )
        return [message.handle for message in self.recovery.core_works()]

    def die(self, *entering, killed=False):
        """The core dies and another takes over: the handles it is told of at once."""
        return [message.handle for message in self.die_and_resume(*entering, killed=killed)]

    def die_and_resume(self, *entering, killed=False):
        going_on = self.recovery.core_died(entering, killed)
        return [*(message for state in going_on for message in resubmissions(state)), *self.recovery.core_started()]


def output_of(message):
    return np.frombuffer(message.output_token_ids, "<i4").tolist()


def test_request_goes_on_behind_the_tokens_that_are_out():
    rig = Rig()
    rig.add(1, output_token_ids=np.array([5], "<i4").tobytes())
    rig.tokens(1)
    rig.tokens(1)
    (message,) = rig.die_and_resume()
    assert output_of(message) == [5, 0, 0]
    assert (message.prompt_token_ids, message.sampling.seed) == (PROMPT, 1)


def test_request_of_which_nothing_is_out_is_told_as_the_first_time():
    rig = Rig()
    state = rig.add(1, num_sequences=3)
    (message,) = rig.die_and_resume()
    assert message == state.message


def test_sequences_of_a_request_go_on_each_by_itself_with_its_seed():
    rig = Rig()
    state = rig.add(1, num_sequences=4)
    rig.tokens(1, 2)
    state.sequences[2].finish_now(SequenceFinish(FinishReason.STOP_STRING))
    messages = rig.die_and_resume()
    assert [(message.handle, message.sampling.seed, output_of(message)) for message in messages] == [
        (1, 1, [0]),
        (2, 1001, [1]),
        (4, 1003, []),
    ]
    assert all(not message.siblings for message in messages)
    assert [message.sampling.prompt_logprobs for message in messages] == [1, None, None]


def test_times_that_are_up_meanwhile_are_up():
    rig = Rig()
    state = rig.add(1, deadline=5.0, time_limit=6.0, queue_timeout=7.0)
    state.sent_at -= 4.0
    (message,) = rig.die_and_resume()
    assert message.deadline < 1.1 < message.time_limit < 2.1 < message.queue_timeout < 3.1
    assert not message.was_admitted
    state.started = True
    (message,) = rig.die_and_resume()
    assert message.queue_timeout is None
    assert message.was_admitted


def test_what_was_over_but_for_being_told_so_ends():
    rig = Rig()
    stopped, cancelled, left, running = (rig.add(handle) for handle in range(1, 5))
    stopped.sequences[0].finish_now(SequenceFinish(FinishReason.STOP_STRING))
    cancelled.cancelled = True
    rig.live.remove(left)
    assert rig.die() == [running.handle]
    assert rig.ended == [
        ("r1", FinishReason.STOP_STRING),
        ("r2", FinishReason.ABORTED),
        ("r3", FinishReason.ABORTED),
    ]
    assert cancelled.sink.log[-1][0] == "summary"


def test_suspects_are_tried_one_at_a_time_behind_the_others():
    rig = Rig()
    for handle in range(1, 5):
        rig.add(handle)
    assert rig.die(2, 3) == [1, 4, 2]
    assert rig.tokens(1, 4) == []
    assert rig.tokens(2) == [3]
    assert rig.tokens(3) == []


def test_suspect_that_ends_makes_way_for_the_next():
    rig = Rig()
    for handle in (1, 2, 3):
        rig.add(handle)
    assert rig.die(1, 2, 3) == [1]
    rig.processor.process(EngineCoreOutputs(finished=[Finished(1, FinishReason.TIME_LIMIT)]))
    assert [message.handle for message in rig.recovery.core_works()] == [2]
    rig.live.remove(rig.live[1])  # its caller leaves
    assert [message.handle for message in rig.recovery.core_works()] == [3]


def test_request_that_kills_two_cores_is_given_up_and_the_others_live():
    rig = Rig()
    guilty, innocent, other = (rig.add(handle) for handle in (1, 2, 3))
    assert rig.die(1, 2) == [3, 1]
    assert rig.die(1) == [3, 2]
    assert rig.tokens(2, 3) == [1]
    assert rig.die(1) == [2, 3]
    ((name, error),) = guilty.sink.log
    assert (name, type(error)) == ("failed", RequestFailedError)
    assert rig.tokens(2, 3) == []
    assert innocent.strikes == other.strikes == 0


def test_request_that_is_alone_is_given_up_after_the_second_time():
    rig = Rig()
    guilty = rig.add(1)
    assert rig.die(1) == [1]
    assert rig.die(1) == []
    assert guilty.sink.log[0][0] == "failed"


def test_suspects_of_a_place_that_stays_empty_are_tried_in_another_one_at_a_time():
    rig = Rig()
    for handle in (1, 2, 3):
        rig.add(handle)
    other = Recovery(rig.processor, rig.live.__contains__, 3, core=1)
    assert [state.handle for state in rig.recovery.core_died([1, 2], was_killed=False)] == [3]
    suspects = rig.recovery.give_suspects_away()
    assert [message.handle for message in other.take_suspects(suspects)] == [1]
    assert [state.core for state in suspects] == [1, 1]
    assert list(other.take_suspects([])) == []
    assert list(rig.recovery.core_started()) == []
    assert [state.handle for state in other.core_died([1], was_killed=False)] == []
    assert [message.handle for message in other.core_started()] == [2]
    assert suspects[0].strikes == 1


def test_while_others_serve_a_core_is_replaced_for_ever_if_at_all():
    recovery = Rig(most_in_vain=2).recovery
    delays = [recovery.next_delay(others_serve=True) for _ in range(40)]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_BACKOFF_SECONDS
    assert recovery.next_delay() is None
    assert Rig(most_in_vain=0).recovery.next_delay(others_serve=True) is None


def test_none_is_given_up_for_deaths_in_company():
    rig = Rig()
    states = [rig.add(handle) for handle in (1, 2)]
    for _ in range(9):
        rig.die(1, 2)
    assert not any(state.sink.log for state in states)


def test_cores_that_were_killed_from_outside_count_less():
    rig = Rig()
    state = rig.add(1)
    for _ in range(4):
        assert rig.die(1, killed=True) == [1]
    assert rig.die(1, killed=True) == []
    assert state.sink.log[0][0] == "failed"


def test_requests_that_had_come_through_a_step_are_no_suspects():
    rig = Rig()
    state = rig.add(1)
    rig.tokens(1)
    for _ in range(5):
        assert rig.die(1) == [1]
        rig.tokens(1)
    assert state.strikes == 0


def test_strikes_are_forgotten_once_a_core_got_through():
    rig = Rig()
    state = rig.add(1)
    rig.die(1)
    rig.tokens(1)
    assert rig.die() == [1]
    assert rig.die(1) == [1]
    assert state.strikes == 1


def test_where_nobody_knows_what_a_core_was_at_all_that_had_no_token_are_suspects():
    rig = Rig()
    for handle in (1, 2, 3):
        rig.add(handle)
    rig.tokens(1)
    going_on = rig.recovery.core_died(None, was_killed=True)
    assert [request.handle for request in going_on] == [1]
    assert [message.handle for message in rig.recovery.core_started()] == [2]
    assert rig.tokens(2) == [3]


def test_cores_that_do_nothing_are_replaced_ever_later_and_not_for_ever():
    recovery = Rig(most_in_vain=9).recovery
    delays = [recovery.next_delay() for _ in range(10)]
    assert delays[0] == 0
    assert delays[1:9] == sorted(delays[1:9])
    assert max(delays[:9]) == MAX_BACKOFF_SECONDS
    assert delays[9] is None
    list(recovery.core_works())
    assert recovery.next_delay() == 0
    assert Rig(most_in_vain=0).recovery.next_delay() is None


@pytest.mark.parametrize("entries", [[], [(0, 5)], [(n % 3, n) for n in range(10_000)]])
def test_black_box_is_read_by_another_map_of_the_same_file(entries):
    descriptor = make_box()
    ours, theirs = BlackBox(descriptor), BlackBox(descriptor)
    os.close(descriptor)
    theirs.write([(0, 1), (1, 2), (2, 3)])
    theirs.write(entries)
    assert ours.read() == entries[:MAX_ENTRIES]
