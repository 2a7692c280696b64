"""EngineCoreProc and adapters: who is told what and when, with several front ends of one core."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from core_proc.black_box import BlackBox, make_box
from core_proc.connection import Connection
from core_proc.proc import EngineCoreProc
from protos.config import EngineConfig, build
from protos.messages import (
    Abort,
    Adapters,
    ControlReply,
    CoreReady,
    EngineCoreRequest,
    FinishReason,
    Hello,
    LoadAdapter,
    Sampling,
    UnloadAdapter,
)
from tests.core_proc.test_proc import ENDLESS, PROMPT, FrontEnd, Rig
from tests.fakes import make_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protos.messages import ToFrontEnd


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(max_adapters=2)
    yield rig
    rig.end()


def add(front_end: FrontEnd, handle: int, adapter: str, max_tokens: int = 5) -> None:
    front_end.send(EngineCoreRequest(handle, PROMPT, Sampling(), max_tokens, adapter=adapter))


def replies(front_end: FrontEnd) -> list[ControlReply]:
    return [message for message in front_end.messages if isinstance(message, ControlReply)]


def answered(front_end: FrontEnd, message: LoadAdapter | UnloadAdapter) -> tuple[list[ToFrontEnd], ControlReply]:
    """What came before the answer, and the answer."""
    front_end.messages.clear()
    front_end.send(message)
    front_end.read_until(lambda: bool(replies(front_end)))
    (reply,) = replies(front_end)
    assert reply.call_id == message.call_id
    return front_end.messages[: front_end.messages.index(reply)], reply


def told(front_end: FrontEnd) -> Adapters:
    """The last list, once the main loop has seen all that was sent before."""
    before = list(front_end.messages)
    front_end.ping()
    return [message for message in [*before, *front_end.messages] if isinstance(message, Adapters)][-1]


def test_the_list_comes_first_and_before_the_answer_that_tells_of_a_change(rig: Rig) -> None:
    adapter, others = make_adapter("a", 1), rig.join()
    before, reply = answered(rig.owner, LoadAdapter(7, adapter))
    assert (reply.result, reply.error) == ([1], "")
    assert Adapters([adapter]) in before
    assert told(others) == Adapters([adapter])
    late = rig.join()
    late.read_until(lambda: any(isinstance(message, CoreReady) for message in late.messages))
    assert late.messages[0] == Adapters([adapter])
    assert answered(others, LoadAdapter(8, adapter))[1].result == [0], "it is there already"


def test_what_cannot_be_loaded_is_answered_with_its_reason_and_told_to_nobody(rig: Rig) -> None:
    answered(rig.owner, LoadAdapter(1, make_adapter("a", 1)))
    before, reply = answered(rig.owner, LoadAdapter(2, make_adapter("a", 2)))
    assert (reply.reason, "other weights" in reply.error) == ("ADAPTER_EXISTS", True)
    answered(rig.owner, LoadAdapter(3, make_adapter("b", 2)))
    _, reply = answered(rig.owner, LoadAdapter(4, make_adapter("c", 3)))
    assert reply.reason == "ADAPTER_LIMIT"
    assert not any(isinstance(message, Adapters) for message in before)


def test_tokens_are_the_adapters(rig: Rig) -> None:
    answered(rig.owner, LoadAdapter(1, make_adapter("a", 0x1234_5678 << 96)))
    for handle, name in enumerate(("", "a", "a")):
        add(rig.owner, handle, name)
    rig.owner.read_until(lambda: len(rig.owner.ends) == 3)
    assert rig.owner.token_ids[0] != rig.owner.token_ids[1] == rig.owner.token_ids[2]


def test_a_request_for_one_that_is_not_there_fails(rig: Rig) -> None:
    add(rig.owner, 1, "a")
    rig.owner.read_until(lambda: 1 in rig.owner.ends)
    assert rig.owner.ends == {1: FinishReason.NO_ADAPTER}


def test_unloading_is_answered_when_other_front_ends_requests_are_over(rig: Rig) -> None:
    other = rig.join()
    answered(rig.owner, LoadAdapter(1, make_adapter("a", 1)))
    add(other, 1, "a", ENDLESS)
    other.read_until(lambda: len(other.token_ids[1]) > 0)
    rig.owner.messages.clear()
    rig.owner.send(UnloadAdapter(2, "a"))
    assert told(rig.owner).leaving == ["a"]
    add(rig.owner, 9, "a")
    rig.owner.read_until(lambda: 9 in rig.owner.ends)
    assert rig.owner.ends[9] is FinishReason.NO_ADAPTER
    assert not replies(rig.owner)
    other.send(Abort([1]))
    rig.owner.read_until(lambda: bool(replies(rig.owner)))
    assert told(rig.owner) == told(other) == Adapters()


def test_unloading_goes_on_without_the_front_end_that_asked_and_ends_with_the_one_that_used_it(rig: Rig) -> None:
    asks, uses = rig.join(), rig.join()
    answered(rig.owner, LoadAdapter(1, make_adapter("a", 1)))
    add(uses, 1, "a", ENDLESS)
    uses.read_until(lambda: len(uses.token_ids[1]) > 0)
    asks.send(UnloadAdapter(2, "a"))
    assert told(asks).leaving == ["a"]
    for front_end in (asks, uses):
        front_end.socket.shutdown(socket.SHUT_RDWR)
    _, reply = answered(rig.owner, UnloadAdapter(3, "a"))
    assert not reply.error
    assert told(rig.owner) == Adapters()
    answered(rig.owner, LoadAdapter(4, make_adapter("a", 2)))


def test_what_nobody_uses_is_unloaded_at_once_and_what_is_not_there_too(rig: Rig) -> None:
    answered(rig.owner, LoadAdapter(1, make_adapter("a", 1)))
    before, _ = answered(rig.owner, UnloadAdapter(2, "a"))
    assert [message for message in before if isinstance(message, Adapters)][-1] == Adapters()
    assert not answered(rig.owner, UnloadAdapter(3, "a"))[1].error


def test_a_core_has_what_the_last_one_had_before_anybody_is_let_in() -> None:
    ours, theirs = socket.socketpair()
    box = make_box()
    black_box, held = BlackBox(box), Adapters([make_adapter("a", 1), make_adapter("b", 2)], ["b"])
    proc = EngineCoreProc(Connection(theirs), Hello(build(EngineConfig, model="null"), (), adapters=held), black_box)
    proc.load()
    front_end = FrontEnd(ours)
    front_end.read_until(lambda: len(front_end.messages) >= 3)
    _, first, second = front_end.messages
    assert first == held
    assert isinstance(second, CoreReady)
    ours.close()
    proc.clients.flush_and_close()
    black_box.close()
    os.close(box)
