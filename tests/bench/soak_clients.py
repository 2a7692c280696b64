"""The clients of a soak: what each kind does, and what it has to show for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

WORDS = ("river", "mill", "wheel", "stone", "heron", "gate", "race", "pool")
CONSTRAINTS = (
    pb.Constraint(regex="[a-c]{5,20}"),
    pb.Constraint(choices=pb.StringList(values=["left", "right", "straight on"])),
    pb.Constraint(json_schema='{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'),
)


@dataclass
class Sequence:
    """What came of one sequence; `reason` is 0 while it is not over."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    reason: int = 0

    def add(self, delta: pb.SequenceDelta) -> None:
        assert delta.offset == len(self.token_ids), f"a delta at {delta.offset} behind {len(self.token_ids)} tokens"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs.logprobs
        if delta.HasField("finish"):
            assert not self.reason, "finished twice"
            self.reason = delta.finish.reason

    def differs(self, alone: Sequence, record: Record) -> str:
        """In what it is not what it should be, if it is over, or not the begin of that."""
        ids, logprobs, text = alone.token_ids, alone.logprobs, alone.text
        if record.ids_only:
            text = ""
        is_whole = self.reason not in (0, pb.FINISH_REASON_ABORTED)
        if not is_whole:
            ids, logprobs = ids[: len(self.token_ids)], logprobs[: len(self.logprobs)]
        if self.token_ids != ids:
            return f"ids {self.token_ids} should be {ids}"
        if self.logprobs != logprobs:
            return "other log-probabilities"
        if is_whole and (self.text != text or self.reason != alone.reason):
            return f"{self.reason} {self.text!r} should be {alone.reason} {text!r}"
        # An output that was cut short shows what a stop string might have taken back, and U+FFFD for half a character.
        sure = len(self.text.removesuffix("\ufffd")) - max(map(len, record.spec.stop.strings), default=0)
        if not is_whole and self.text[: max(0, sure)] != text[: max(0, sure)]:
            return f"{self.text!r} is no begin of {text!r}"
        return ""


@dataclass
class Record:
    """A request and what came of it."""

    kind: str
    spec: pb.GenerationSpec
    sequences: dict[int, Sequence] = field(default_factory=dict)
    ids_only: bool = False

    def add(self, output: pb.OutputDelta) -> None:
        for delta in output.sequences:
            self.sequences.setdefault(delta.index, Sequence()).add(delta)

    @property
    def is_over(self) -> bool:
        wanted = self.spec.num_sequences or 1
        return len(self.sequences) == wanted and all(sequence.reason for sequence in self.sequences.values())


def collect(output: pb.OutputDelta) -> dict[int, Sequence]:
    record = Record("", pb.GenerationSpec())
    record.add(output)
    return record.sequences


def random_spec(rng: random.Random) -> pb.GenerationSpec:
    """A request that gives the same each time."""
    spec = pb.GenerationSpec(
        text=" ".join(rng.choices(WORDS, k=rng.choice([1, 3, 30, 120]))),
        sampling=pb.SamplingOptions(seed=rng.getrandbits(53), temperature=rng.choice([0.0, 1.0])),
        stop=pb.StopOptions(max_tokens=rng.choice([1, 5, 40, 200])),
        output=pb.OutputOptions(text=True, token_ids=True),
    )
    if rng.random() < 0.25:
        spec.num_sequences = rng.randrange(2, 4)
    if rng.random() < 0.25:
        spec.output.logprobs = rng.randrange(4)
    if rng.random() < 0.2:
        spec.constraint.CopyFrom(rng.choice(CONSTRAINTS))
    if rng.random() < 0.3:
        spec.stop.strings.extend(rng.sample(["a", "zq", "The", "0x", "~"], 2))
    if rng.random() < 0.2:
        spec.output.coalesce_tokens = rng.randrange(2, 9)
    if rng.random() < 0.2:
        spec.scheduling.priority = rng.randrange(-1, 2)
    return spec


async def _read(call: Any, record: Record, most: int = 1 << 30) -> bool:
    """Takes in at most so many messages; whether the summary was among them."""
    while most > 0:
        message = await call.read()
        assert message is not grpc.aio.EOF, "the stream ended without a summary"
        most -= 1
        match message.WhichOneof("event"):
            case "delta":
                record.add(message.delta)
            case "summary":
                assert record.is_over, "a summary before the end"
                return True
    return False


def _stream(stub: Any, spec: pb.GenerationSpec, **options: Any) -> Any:
    return stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), **options)


async def stream(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    record = Record("stream", spec)
    await _read(_stream(stub, spec), record)
    return [record]


async def unary(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    response = await stub.Generate(pb.GenerateRequest(spec=spec))
    return [Record("unary", spec, collect(response.output))]


async def attach(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    """A few requests on one call, some of which want ids alone, which come as columns."""
    records: dict[str, Record] = {}
    slots: dict[int, Sequence] = {}
    call = stub.Attach()
    for _ in range(rng.randrange(1, 5)):
        sent = random_spec(rng)
        sent.request_id = f"{rng.getrandbits(64):x}"
        ids_only = rng.random() < 0.5
        if ids_only:
            sent.output.CopyFrom(pb.OutputOptions(text=False, token_ids=True))
            sent.ClearField("num_sequences")
        records[sent.request_id] = Record("attach", sent, ids_only=ids_only)
        await call.write(pb.AttachRequest(submit=sent))
    await call.done_writing()
    while (frame := await call.read()) is not grpc.aio.EOF:
        rest = []
        for event in frame.events:
            if event.WhichOneof("event") == "started":
                first = records[event.request_id].sequences.setdefault(0, Sequence())
                slots[event.slot] = first
            else:
                rest.append(event)
        at = 0
        for index, slot in enumerate(frame.tokens.slots):
            count = frame.tokens.counts[index] if frame.tokens.counts else 1
            slots[slot].token_ids += frame.tokens.token_ids[at : at + count]
            at += count
        for event in rest:
            assert event.WhichOneof("event") != "status", event
            if event.WhichOneof("event") == "delta":
                records[event.request_id].add(event.delta)
    for record in records.values():
        assert record.is_over, "a request on Attach has no end"
    return list(records.values())


async def cancel(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    """Cancel by id: the stream ends with what there is."""
    spec.request_id = f"{rng.getrandbits(64):x}"
    record = Record("cancel", spec)
    call = _stream(stub, spec)
    if not await _read(call, record, rng.randrange(1, 6)):
        await stub.Cancel(pb.CancelRequest(request_ids=[spec.request_id]))
        await _read(call, record)
    spec.request_id = ""
    return [record]


async def leave(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    """The call is dropped after some messages."""
    record = Record("leave", spec)
    call = _stream(stub, spec)
    await _read(call, record, rng.randrange(1, 6))
    call.cancel()
    return [record]


async def deadline(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    record = Record("deadline", spec)
    try:
        await _read(_stream(stub, spec, timeout=rng.uniform(0.005, 0.3)), record)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    return [record]


async def never_read(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    """Takes the first message, and much later all others."""
    spec.stop.max_tokens = 1000
    record = Record("never read", spec)
    call = _stream(stub, spec)
    over = await _read(call, record, 1)
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    if rng.random() < 0.5:
        call.cancel()
    elif not over:
        await _read(call, record)
    return [record]


async def resume(stub: Any, rng: random.Random, spec: pb.GenerationSpec) -> list[Record]:
    """Leaves in the middle, and goes on behind what came."""
    spec.ClearField("num_sequences")
    record = Record("resume", spec)
    call = _stream(stub, spec)
    over = await _read(call, record, rng.randrange(2, 6))
    call.cancel()
    first = record.sequences.get(0, Sequence())
    if over or first.reason or not first.token_ids:
        return [record]
    again = pb.GenerationSpec()
    again.CopyFrom(spec)
    again.resume_from.ids.extend(first.token_ids)
    again.resume_text_bytes = len(first.text.encode())
    joined = Record("resume", spec, {0: first})
    rest = Record("", again, joined.sequences)
    await _read(_stream(stub, again), rest)
    return [joined]


KINDS: dict[str, Callable[[Any, random.Random, pb.GenerationSpec], Awaitable[list[Record]]]] = {
    "stream": stream,
    "unary": unary,
    "attach": attach,
    "cancel": cancel,
    "leave": leave,
    "deadline": deadline,
    "never read": never_read,
    "resume": resume,
}
