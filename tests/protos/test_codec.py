"""Frames: what goes in comes out, and what is no frame is told."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import codec
from protos.adapter import Adapter
from protos.codec import MAX_FRAME_BYTES, FrameDecoder, FrameError, encode_frame
from protos.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from protos.kv_changes import CachedBlocks, KVChanges, KVDetail, MoreKV, UnwatchKV, WatchKV
from protos.messages import (
    Abort,
    Adapters,
    Admitted,
    Control,
    ControlOp,
    ControlReply,
    CoreFailed,
    CoreReady,
    CoreStats,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Hello,
    LoadAdapter,
    LoadProgress,
    LogprobColumns,
    Ping,
    Pong,
    PromptLogprobs,
    Repetition,
    Sampling,
    Shutdown,
    Sibling,
    ToCore,
    ToFrontEnd,
    UnloadAdapter,
    Vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

examples = settings(deadline=None, max_examples=60)

ints = st.integers(-(2**63), 2**63 - 1)
sizes = st.integers(0, 2**63 - 1)
ids = st.lists(sizes, max_size=5)
floats = st.floats(allow_nan=False)
seconds = st.none() | floats
text = st.text(max_size=20)
data = st.binary(max_size=40)

sampling = st.builds(
    Sampling,
    temperature=floats,
    top_k=ints,
    top_p=floats,
    min_p=floats,
    seed=st.integers(0, 2**64 - 1),
    min_tokens=ints,
    stop_token_ids=ids.map(tuple),
    ignore_eos=st.booleans(),
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=st.dictionaries(sizes, floats, max_size=3),
    allowed_token_ids=ids.map(tuple),
    bad_words=st.lists(ids.map(tuple), max_size=3).map(tuple),
    logprobs=st.none() | sizes,
    prompt_logprobs=st.none() | sizes,
    logprob_token_ids=ids.map(tuple),
    processed_logprobs=st.booleans(),
)
grammars = st.builds(GrammarSpec, st.sampled_from(get_args(GrammarKind)), text)
logprob_columns = st.builds(LogprobColumns, data, data, data, data, data, data)
configs = st.builds(
    EngineConfig,
    model=st.builds(
        ModelOptions, model=text, dtype=st.sampled_from(["auto", "bfloat16"]), max_model_len=st.integers(0, 1 << 24)
    ),
    cache=st.builds(CacheOptions, block_size=st.integers(8, 256), prefix_caching=st.booleans()),
    scheduler=st.builds(SchedulerOptions, max_num_seqs=st.integers(1, 4096), max_steps_in_flight=st.integers(0, 8)),
)
admitted = st.builds(Admitted, handle=ints, cached_tokens=ints, queue_seconds=floats)
finished = st.builds(
    Finished,
    handle=ints,
    reason=st.sampled_from(FinishReason),
    stop_token_id=ints,
    cached_tokens=ints,
    preemptions=ints,
    queue_seconds=floats,
    prefill_seconds=floats,
    decode_seconds=floats,
    message=text,
    field=text,
)
stats = st.tuples(
    *[floats if name in ("kv_usage", "queue_seconds") else ints for name in CoreStats.__struct_fields__]
).map(lambda values: CoreStats(*values))

cached_blocks = st.builds(CachedBlocks, data, st.lists(text, max_size=3), data, st.lists(text, max_size=3))
kv_changes = st.builds(KVChanges, data, data, st.booleans(), ints, st.none() | cached_blocks, st.booleans())

adapter = st.builds(Adapter, text, text, text, sizes, sizes)
adapters = st.builds(Adapters, st.lists(adapter, max_size=3), st.lists(text, max_size=3))

MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    Hello: st.builds(Hello, configs, ids.map(tuple), data, text, adapters),
    EngineCoreRequest: st.builds(
        EngineCoreRequest,
        handle=ints,
        prompt_token_ids=data,
        sampling=sampling,
        max_tokens=ints,
        output_token_ids=data,
        priority=ints,
        cache_salt=text,
        bypass_cache=st.booleans(),
        deadline=seconds,
        time_limit=seconds,
        queue_timeout=seconds,
        siblings=st.lists(st.builds(Sibling, ints, sizes), max_size=3),
        repetition=st.none() | st.builds(Repetition, ints, ints, ints),
        grammar=st.none() | grammars,
        adapter=text,
    ),
    Vocabulary: st.builds(Vocabulary, st.lists(data, max_size=5), ids.map(tuple), ids.map(tuple)),
    Abort: st.builds(Abort, ids),
    Control: st.builds(Control, ints, st.sampled_from(get_args(ControlOp)), ints),
    LoadAdapter: st.builds(LoadAdapter, ints, adapter),
    UnloadAdapter: st.builds(UnloadAdapter, ints, text),
    Adapters: adapters,
    WatchKV: st.builds(WatchKV, ints, st.sampled_from(get_args(KVDetail)), st.booleans(), st.booleans()),
    MoreKV: st.builds(MoreKV, ints),
    UnwatchKV: st.builds(UnwatchKV, ints),
    Ping: st.just(Ping()),
    Shutdown: st.just(Shutdown()),
    LoadProgress: st.builds(LoadProgress, ints, ints),
    CoreReady: st.builds(CoreReady, sizes, sizes, sizes, sizes, text, text, sizes, sizes, sizes, sizes),
    CoreFailed: st.builds(CoreFailed, text, st.booleans()),
    EngineCoreOutputs: st.builds(
        EngineCoreOutputs,
        handles=data,
        token_ids=data,
        admitted=st.lists(admitted, max_size=3),
        finished=st.lists(finished, max_size=3),
        stats=st.none() | stats,
        logprobs=st.none() | logprob_columns,
        prompt_logprobs=st.lists(st.builds(PromptLogprobs, ints, ints, logprob_columns), max_size=3),
        kv_changes=st.lists(kv_changes, max_size=3),
    ),
    ControlReply: st.builds(
        ControlReply, ints, st.lists(ints, max_size=4), st.dictionaries(text, data, max_size=3), text, text
    ),
    Pong: st.just(Pong()),
}
DOWN, UP = get_args(ToCore), get_args(ToFrontEnd)
DIRECTIONS = pytest.mark.parametrize(
    ("kinds", "make_decoder"),
    [(DOWN, lambda: FrameDecoder(codec.to_core)), (UP, lambda: FrameDecoder(codec.to_front_end))],
    ids=["to core", "to front end"],
)
MakeDecoder = Callable[[], FrameDecoder[Any]]


def decoder_of(kind: type) -> FrameDecoder[Any]:
    return FrameDecoder[Any](codec.to_core if kind in DOWN else codec.to_front_end)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def stream_of(kinds: Sequence[type]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of([MESSAGES[kind] for kind in kinds]), max_size=6)


def feed_in_pieces(decoder: FrameDecoder[Any], stream: bytes, seed: int) -> list[Any]:
    rng = random.Random(seed)
    messages: list[Any] = []
    start = 0
    while start < len(stream):
        end = start + rng.choice([1, 2, 3, 5, 17, 400])
        messages += decoder.feed(stream[start:end])
        start = end
    return messages


def test_every_message_is_covered_here() -> None:
    assert set(MESSAGES) == {*DOWN, *UP}


@DIRECTIONS
@examples
@given(st.data(), st.integers(0, 1000))
def test_messages_survive_any_slicing_of_the_stream(
    kinds: tuple[type, ...], make_decoder: MakeDecoder, draw: st.DataObject, seed: int
) -> None:
    messages = draw.draw(stream_of(kinds))
    stream = b"".join(encode_frame(message) for message in messages)
    assert feed_in_pieces(make_decoder(), stream, seed) == messages
    assert list(make_decoder().feed(memoryview(stream))) == messages


@pytest.mark.parametrize("kind", [*DOWN, *UP])
@examples
@given(st.data())
def test_message_keeps_its_type_and_every_field(kind: type, draw: st.DataObject) -> None:
    message = draw.draw(MESSAGES[kind])
    (received,) = decoder_of(kind).feed(encode_frame(message))
    assert type(received) is kind
    assert received == message


def with_newer_fields(value: Any) -> Any:
    """A message as a later release may send it: array structs have more items, map structs more keys."""
    if isinstance(value, msgspec.Struct):
        if not value.__struct_config__.array_like:
            fields = {name: with_newer_fields(getattr(value, name)) for name in value.__struct_fields__}
            return fields | {"newer": [1, {"a": None}]}
        tag = [value.__struct_config__.tag] if value.__struct_config__.tag else []
        items = [with_newer_fields(getattr(value, name)) for name in value.__struct_fields__]
        return [*tag, *items, "newer", {"a": [None]}, 3]
    if isinstance(value, list):
        return [with_newer_fields(item) for item in value]
    return value


@pytest.mark.parametrize("kind", [*DOWN, *UP])
@examples
@given(st.data())
def test_unknown_newer_fields_are_ignored(kind: type, draw: st.DataObject) -> None:
    message = draw.draw(MESSAGES[kind])
    body = msgspec.msgpack.encode(with_newer_fields(message))
    decoder = decoder_of(kind)
    assert list(decoder.feed(frame(body))) == [message]


def test_fields_that_an_older_peer_does_not_send_have_their_defaults() -> None:
    body = msgspec.msgpack.encode(["add", 7, b"", [], 5])
    (message,) = FrameDecoder(codec.to_core).feed(frame(body))
    assert message == EngineCoreRequest(7, b"", Sampling(), 5)
    (outputs,) = FrameDecoder(codec.to_front_end).feed(frame(msgspec.msgpack.encode(["outputs"])))
    assert outputs == EngineCoreOutputs()


@DIRECTIONS
@examples
@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(kinds: tuple[type, ...], make_decoder: MakeDecoder, body: bytes) -> None:
    try:
        (message,) = make_decoder().feed(frame(body))
    except FrameError:
        return
    assert isinstance(message, kinds)


@DIRECTIONS
@examples
@given(st.data())
def test_damaged_message_is_a_message_or_an_error(
    kinds: tuple[type, ...], make_decoder: MakeDecoder, draw: st.DataObject
) -> None:
    body = bytearray(encode_frame(draw.draw(st.one_of([MESSAGES[kind] for kind in kinds])))[4:])
    for _ in range(draw.draw(st.integers(1, 3))):
        body[draw.draw(st.integers(0, len(body) - 1))] = draw.draw(st.integers(0, 255))
    try:
        (message,) = make_decoder().feed(frame(bytes(body)))
    except FrameError:
        return
    assert isinstance(message, kinds)


@pytest.mark.parametrize("kind", [*DOWN, *UP])
@examples
@given(st.data())
def test_truncated_message_is_an_error(kind: type, draw: st.DataObject) -> None:
    body = encode_frame(draw.draw(MESSAGES[kind]))[4:]
    cut = body[: draw.draw(st.integers(0, len(body) - 1))]
    with pytest.raises(FrameError, match="malformed"):
        list(decoder_of(kind).feed(frame(cut)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xff" * 30,
        msgspec.msgpack.encode(["nonsense", 1]),
        msgspec.msgpack.encode({"handles": [1]}),
        msgspec.msgpack.encode(["abort"]),
        msgspec.msgpack.encode(["abort", ["1"]]),
        msgspec.msgpack.encode(["abort", [1]]) + b"\x00",
        msgspec.msgpack.encode(["abort", [1]]).replace(b"abort", b"ab\xff\xfet"),
        msgspec.msgpack.encode(["control", 1, "explode"]),
        msgspec.msgpack.encode(["hello", {"scheduler": {"max_num_seqs": 0}}, []]),
        encode_frame(Pong())[4:],
        b"\x93\xa5abort\x91\x01" + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=[
        "empty",
        "invalid opcode",
        "no message",
        "unknown tag",
        "no array",
        "missing field",
        "wrong type",
        "trailing bytes",
        "invalid UTF-8",
        "unknown choice",
        "config out of bounds",
        "other direction",
        "endless nesting",
    ],
)
def test_malformed_message_is_an_error(body: bytes) -> None:
    with pytest.raises(FrameError, match="malformed"):
        list(FrameDecoder(codec.to_core).feed(frame(body)))


def test_oversized_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameError, match=f"{MAX_FRAME_BYTES + 1} bytes is over the limit"):
        list(FrameDecoder(codec.to_core).feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))
    assert list(FrameDecoder(codec.to_core).feed(struct.pack("<I", MAX_FRAME_BYTES))) == []


def test_messages_before_a_malformed_one_are_delivered() -> None:
    messages = FrameDecoder(codec.to_core).feed(encode_frame(Ping()) + frame(b"\xc1"))
    assert next(messages) == Ping()
    with pytest.raises(FrameError):
        next(messages)


def test_messages_not_asked_for_yet_come_with_the_next_feed() -> None:
    decoder = FrameDecoder(codec.to_core)
    assert next(iter(decoder.feed(encode_frame(Ping()) + encode_frame(Abort([3]))))) == Ping()
    assert list(decoder.feed(b"")) == [Abort([3])]
