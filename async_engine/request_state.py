"""RequestState and SequenceState: the front end's view of one live request and its sequences, from tokens to text."""

from __future__ import annotations

import sys
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from async_engine.chat_parser import ToolCallDelta
from async_engine.logprobs import Logprobs
from async_engine.outputs import Extra, SequenceFinish, Summary
from protos.messages import Finished, FinishReason

if TYPE_CHECKING:
    from async_engine.chat_parser import ChatParser, Parts
    from async_engine.detokenizer import Detokenizer
    from async_engine.logprobs import LogprobTable
    from async_engine.outputs import OutputSink, SequenceSink
    from async_engine.router import Ticket
    from async_engine.stop_strings import StopMatcher
    from protos.messages import EngineCoreRequest


class RequestState:
    """Its sequences, each under a handle of its own in the core, and what is known of it as a whole."""

    def __init__(self, request_id: str, sink: OutputSink, handles: list[int], caller: str = "") -> None:
        self.request_id = request_id
        self.caller = caller
        self.adapter = ""
        """Name of what computes it with the model; known when it is checked."""
        self.sink = sink
        self.output_text: list[str] | None = None
        """The text that went out. It and the prompt's are kept only when they are to be logged; told before its
        sequences are rendered."""
        self.sequences = [SequenceState(handle, self, sink.sequence(index)) for index, handle in enumerate(handles)]
        self.arrival_time = time.monotonic()
        self.first_token_time = 0.0
        self.cancelled = False
        """Ended by the caller."""
        self.message: EngineCoreRequest | None = None
        """As the core was first told of it; None before that."""
        self.sent_at = 0.0
        self.core: int | None = None
        """Number of the core it is in; None while it waits for one."""
        self.ticket: Ticket | None = None
        """Its place there, where there are several cores."""
        self.prefix_hashes: list[int] = []
        """Of its prompt's blocks, for the router."""
        self.started = False
        """Whether a core has admitted it."""
        self.has_progressed = False
        """Whether a token of it came since a core was last told of it."""
        self.strikes = 0.0
        """Suspicion that it brings cores down; see recovery.py."""
        self.prompt_logprobs_from = 1
        """First position of the prompt whose log-probability has not come yet."""
        self.prompt_tokens = 0
        self.queued_tokens = 0
        """Prompt and resumed tokens, while it waits to be admitted for the first time."""
        self.prompt_text = ""
        self._finished: list[Finished] = []

    def __repr__(self) -> str:
        return f"RequestState({self.request_id}, {self.sequences})"

    @property
    def handle(self) -> int:
        """Of the first sequence, whose admission is the request's."""
        return self.sequences[0].handle

    @property
    def is_ending(self) -> bool:
        """Whether every sequence is complete."""
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def output_tokens(self) -> int:
        return sum(sequence.output_tokens for sequence in self.sequences)

    @property
    def drawn_tokens(self) -> int:
        return sum(sequence.drawn_tokens for sequence in self.sequences)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival; None if no token came."""
        return self.first_token_time - self.arrival_time if self.first_token_time else None

    def inter_token_seconds(self, finished: Finished) -> float | None:
        """The mean between two tokens of a request that is over; None if there were no two."""
        return finished.decode_seconds / (self.drawn_tokens - 1) if self.drawn_tokens > 1 else None

    def ended(self, finished: Finished) -> Finished | None:
        """The core has ended one of the sequences. Once it has ended all: how the request as a whole went."""
        self._finished.append(finished)
        if len(self._finished) < len(self.sequences):
            return None
        first = min(self._finished, key=lambda each: each.handle)
        finish = self.sequences[0].finish
        return Finished(
            handle=self.handle,
            reason=first.reason if finish is None else finish.reason,
            stop_token_id=first.stop_token_id,
            cached_tokens=first.cached_tokens,
            preemptions=sum(each.preemptions for each in self._finished),
            queue_seconds=first.queue_seconds,
            prefill_seconds=first.prefill_seconds,
            decode_seconds=max(each.decode_seconds for each in self._finished),
            message=first.message,
        )

    def summarize(self, finished: Finished) -> Summary:
        return Summary(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            output_tokens=self.drawn_tokens,
            queue_seconds=finished.queue_seconds,
            prefill_seconds=finished.prefill_seconds,
            decode_seconds=finished.decode_seconds,
            preemptions=finished.preemptions,
        )


@dataclass(slots=True)
class Rendering:
    """What turns one sequence's ids into what the caller wants of them."""

    detokenizer: Detokenizer | None = None
    """Primed with the prompt; None makes no text, neither to send nor to match."""
    matcher: StopMatcher | None = None
    parser: ChatParser | None = None
    include_match: bool = False
    min_tokens: int = 0
    wants_text: bool = False
    logprobs_width: int | None = None
    """Candidates reported with each token; None reports nothing."""


class SequenceState:
    """Turns drawn ids into deltas: detokenizes, finds stop strings, parses, trims, and counts.

    A token whose text might begin a stop string is kept back with that text, so that ids and text of
    every delta agree with what the output will turn out to be.
    """

    __slots__ = (
        "_cumulative", "_detokenizer", "_held", "_include_match", "_is_plain", "_logprobs", "_matcher", "_min_tokens",
        "_parser", "_released", "_sink", "_skip_bytes", "_text_end", "_wants_text", "_width", "finish", "handle",
        "new_token_ids", "output_tokens", "request",
    )  # fmt: skip

    def __init__(self, handle: int, request: RequestState, sink: SequenceSink) -> None:
        self.handle = handle
        self.request = request
        self.output_tokens = 0
        """Tokens that count as output so far, resumed ones included."""
        self.new_token_ids = array("i")
        """All that were drawn, held back or not: what another core needs to go on."""
        self.finish: SequenceFinish | None = None
        self._sink = sink
        self._held: list[tuple[int, int]] = []
        """(token id, where its text begins) of tokens kept back; positions count characters of the output."""
        self._text_end = 0
        self._released = 0
        self._skip_bytes = 0
        """UTF-8 length of what the caller of a resumed request has already and is still to come up again."""
        self._cumulative = 0.0
        self._is_plain = False
        """What a token brings is sent as it is: nothing is looked for in its text, kept, or told beside it."""
        self.render(Rendering())

    def __repr__(self) -> str:
        return f"SequenceState({self.request.request_id}, handle={self.handle}, output={self.output_tokens})"

    def render(self, rendering: Rendering) -> None:
        """What tokenizing found out; told before the first token."""
        self._detokenizer = rendering.detokenizer
        self._matcher = rendering.matcher
        self._parser = rendering.parser
        self._include_match = rendering.include_match
        self._min_tokens = rendering.min_tokens
        self._wants_text = rendering.wants_text
        self._width = rendering.logprobs_width
        self._logprobs = None if self._width is None else Logprobs(self._width)
        more = self._matcher, self._parser, self._logprobs, self.request.output_text
        self._is_plain = (self._wants_text or self._detokenizer is None) and all(part is None for part in more)

    def resume(self, token_ids: list[int], text_bytes: int | None) -> SequenceFinish | None:
        """Takes in output made earlier without sending it again; tells if a stop string had ended it already.

        `text_bytes` is the UTF-8 length of the text the caller has, with that of the parts taken out of it. It can be
        more than the tokens alone make certain: text that was held back for a stop string is let go when later tokens,
        not sent yet, rule it out. And less, where text came behind its tokens: what is missing is sent. None is as
        much as is certain.
        """
        self.output_tokens = len(token_ids)
        if self._detokenizer is None:
            return None
        self._skip_bytes = sys.maxsize if text_bytes is None else text_bytes
        finish = None
        for count, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.push((token_id,))
            self._text_end += len(text)
            released, matched = self._match(text, count)
            self._released += len(released)
            self._send([], released)
            if matched is not None:
                finish = SequenceFinish(FinishReason.STOP_STRING, matched_string=matched, output_tokens=count)
                break
        if text_bytes is None:
            self._skip_bytes = 0
        self._is_plain = self._is_plain and not self._skip_bytes
        return finish

    def finish_resumed(self, finish: SequenceFinish) -> None:
        """What was resumed was whole already: `finish` tells how it ended."""
        if finish.matched_string is None:
            self.end(finish.reason, -1 if finish.matched_token_id is None else finish.matched_token_id)
        else:
            self._finish_text()
            self.finish_now(finish)

    @property
    def drawn_tokens(self) -> int:
        return len(self.new_token_ids)

    def push(self, token_id: int, table: LogprobTable | None = None, place: int = 0) -> bool:
        """A drawn token, and what `table` tells of it at `place`. True if it completed a stop string: the sequence is
        to end now."""
        self.new_token_ids.append(token_id)
        self.output_tokens += 1
        if self._is_plain:
            self._sink.tokens([token_id], "" if self._detokenizer is None else self._detokenizer.push((token_id,)))
            return False
        if self._logprobs is not None and table is not None:
            table.append_to(self._logprobs, place)
        if self._detokenizer is None:
            self._send([token_id], "")
            return False
        text = self._detokenizer.push((token_id,))
        if self._matcher is None:
            self._send([token_id], text)
            return False
        self._held.append((token_id, self._text_end))
        return self._take_text(text)

    def _take_text(self, text: str) -> bool:
        """New text of held tokens: lets go of what no stop string can claim any more. True if one was completed."""
        self._text_end += len(text)
        released, matched = self._match(text, self.output_tokens)
        self._released += len(released)
        # A token belongs to the output if its text begins in it, wherever a stop string may cut later.
        kept = 0
        while kept < len(self._held) and self._held[kept][1] < self._released:
            kept += 1
        if kept or released:
            self._send([token_id for token_id, _ in self._held[:kept]], released)
            del self._held[:kept]
        if matched is None:
            return False
        self.output_tokens -= len(self._held)
        self._held.clear()
        self._finish_text()
        self.finish_now(
            SequenceFinish(FinishReason.STOP_STRING, matched_string=matched, output_tokens=self.output_tokens)
        )
        return True

    def end(self, reason: FinishReason, stop_token_id: int = -1) -> None:
        """The core ended the sequence: lets go of what was kept back."""
        if self.finish is not None:
            return
        tail = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._matcher is not None:
            if self._take_text(tail):
                return
            tail = self._matcher.flush()
        token_ids = [token_id for token_id, _ in self._held]
        self._held.clear()
        if token_ids or tail:
            self._send(token_ids, tail)
        self._finish_text()
        matched = stop_token_id if stop_token_id >= 0 else None
        self.finish_now(SequenceFinish(reason, matched_token_id=matched, output_tokens=self.output_tokens))

    def finish_now(self, finish: SequenceFinish) -> None:
        """The sequence is complete; nothing more is sent of it."""
        if self._width is not None:
            finish = msgspec.structs.replace(finish, cumulative_logprob=self._cumulative)
        self.finish = finish
        self._sink.finish(finish)

    def drops(self, finished: Finished) -> bool:
        """Whether the token that ended the sequence stays out of its output."""
        return finished.stop_token_id >= 0 and not self._include_match

    def _match(self, text: str, count: int) -> tuple[str, str | None]:
        """(text that may go out, stop string found) after the output's `count`-th token."""
        if self._matcher is None:
            return text, None
        if count < self._min_tokens:
            return self._matcher.skip(text), None
        return self._matcher.push(text)

    def _send(self, token_ids: list[int], text: str) -> None:
        if self._skip_bytes and self._parser is None:
            text = self._skip(text)
        if self.request.output_text is not None:
            self.request.output_text.append(text)
        extra = None
        if self._logprobs is not None and token_ids:
            logprobs = self._logprobs
            if len(logprobs) == len(token_ids):
                self._logprobs = Logprobs(logprobs.width)
            else:
                logprobs = logprobs.split(len(token_ids))
            self._cumulative += sum(logprobs.logprobs)
            extra = Extra(logprobs)
        if self._parser is not None:
            text, extra = self._parsed(self._parser.push(text), extra)
        if not self._wants_text:
            text = ""
        if token_ids or text or extra is not None:
            self._sink.tokens(token_ids, text, extra)

    def _parsed(self, parts: Parts, extra: Extra | None) -> tuple[str, Extra | None]:
        """The text proper; the other parts join what is beside it."""
        text, reasoning, tool_calls = parts.text, parts.reasoning, parts.tool_calls
        if self._skip_bytes:
            reasoning, text = self._skip(reasoning), self._skip(text)
            tool_calls = [rest for call in tool_calls if (rest := self._skip_call(call)) is not None]
        if reasoning or tool_calls:
            extra = extra or Extra()
            extra.reasoning, extra.tool_calls = reasoning, tool_calls
        return text, extra

    def _skip(self, text: str) -> str:
        """The part of it that the caller of a resumed request does not have yet."""
        data = text.encode()
        text = data[self._skip_bytes :].decode(errors="replace")
        self._skip_bytes = max(0, self._skip_bytes - len(data))
        return text

    def _skip_call(self, call: ToolCallDelta) -> ToolCallDelta | None:
        name, arguments = self._skip(call.name), self._skip(call.arguments)
        if name == call.name:
            return ToolCallDelta(call.index, call.id, name, arguments) if name or arguments else None
        return ToolCallDelta(call.index, "", "", arguments) if arguments else None

    def _finish_text(self) -> None:
        """No more text comes: what the parser kept back is what it is."""
        if self._parser is None:
            return
        text, extra = self._parsed(self._parser.flush(), None)
        if text or extra is not None:
            self._sink.tokens([], text if self._wants_text else "", extra)
