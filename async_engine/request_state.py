"""RequestState: the front end's view of one live request, from its tokens to its text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from async_engine.outputs import SequenceFinish, Summary
from protos.messages import FinishReason

if TYPE_CHECKING:
    from async_engine.detokenizer import Detokenizer
    from async_engine.outputs import OutputSink
    from async_engine.stop_strings import StopMatcher
    from protos.messages import Finished


class RequestState:
    """Turns drawn ids into deltas: detokenizes, finds stop strings, trims, and counts.

    A token whose text might begin a stop string is kept back with that text, so that ids and text of
    every delta agree with what the output will turn out to be.
    """

    def __init__(self, handle: int, request_id: str, sink: OutputSink) -> None:
        self.handle = handle
        self.request_id = request_id
        self.sink = sink
        self.arrival_time = time.monotonic()
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.cancelled = False
        """Ended by the caller before it was sent to the core."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        """Tokens that count as output so far, resumed ones included."""
        self.drawn_tokens = 0
        self.finish: SequenceFinish | None = None
        self.prompt_text = ""
        self.output_text: list[str] | None = None
        """The text that went out. It and the prompt's are kept only when they are to be logged."""
        self._include_match = False
        self._min_tokens = 0
        self._wants_text = False
        self._detokenizer: Detokenizer | None = None
        self._matcher: StopMatcher | None = None
        self._held: list[tuple[int, int]] = []
        """(token id, where its text begins) of tokens kept back; positions count characters of the output."""
        self._text_end = 0
        self._released = 0
        self._skip_bytes = 0
        """Text the caller of a resumed request has already, beyond what is certain from its tokens alone."""

    def __repr__(self) -> str:
        return f"RequestState({self.request_id}, handle={self.handle}, output={self.output_tokens}, {self.finish})"

    def prepare(
        self,
        *,
        prompt_tokens: int,
        detokenizer: Detokenizer | None,
        matcher: StopMatcher | None,
        include_match: bool,
        min_tokens: int,
        wants_text: bool,
    ) -> None:
        """What tokenizing found out. `detokenizer` is primed with the prompt; None makes no text, neither to send
        (`wants_text`) nor to match."""
        self.prompt_tokens = prompt_tokens
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._include_match = include_match
        self._min_tokens = min_tokens
        self._wants_text = wants_text

    def resume(self, token_ids: list[int], text_bytes: int) -> SequenceFinish | None:
        """Takes in output made earlier without sending it again; tells if a stop string had ended it already.

        `text_bytes` is the UTF-8 length of the text the caller has. It can be more than the tokens alone make
        certain: text that was held back for a stop string is let go when later tokens, not sent yet, rule it out.
        """
        self.output_tokens = len(token_ids)
        if self._detokenizer is None:
            return None
        for count, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.push((token_id,))
            self._text_end += len(text)
            released, matched = self._match(text, count)
            self._released += len(released)
            text_bytes -= len(released.encode())
            if matched is not None:
                return SequenceFinish(FinishReason.STOP_STRING, matched_string=matched, output_tokens=count)
        self._skip_bytes = max(0, text_bytes)
        return None

    def push(self, token_id: int) -> bool:
        """A drawn token. True if it completed a stop string: the request is to end now."""
        self.drawn_tokens += 1
        self.output_tokens += 1
        if self._detokenizer is None:
            self.sink.tokens([token_id], "")
            return False
        text = self._detokenizer.push((token_id,))
        if self._matcher is None:
            self._send([token_id], text)
            return False
        self._held.append((token_id, self._text_end))
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
        self.finish_now(
            SequenceFinish(FinishReason.STOP_STRING, matched_string=matched, output_tokens=self.output_tokens)
        )
        return True

    def end(self, reason: FinishReason, stop_token_id: int) -> None:
        """The core ended the sequence: lets go of what was kept back."""
        if self.finish is not None:
            return
        tail = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._matcher is not None:
            tail = self._matcher.flush() + tail
        token_ids = [token_id for token_id, _ in self._held]
        self._held.clear()
        if token_ids or tail:
            self._send(token_ids, tail)
        matched = stop_token_id if stop_token_id >= 0 else None
        self.finish_now(SequenceFinish(reason, matched_token_id=matched, output_tokens=self.output_tokens))

    def finish_now(self, finish: SequenceFinish) -> None:
        """The sequence is complete; nothing more is sent of it."""
        self.finish = finish
        self.sink.finish(finish)

    def drops(self, finished: Finished) -> bool:
        """Whether the token that ended the sequence stays out of its output."""
        return finished.stop_token_id >= 0 and not self._include_match

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

    def _match(self, text: str, count: int) -> tuple[str, str | None]:
        """(text that may go out, stop string found) after the output's `count`-th token."""
        if self._matcher is None:
            return text, None
        if count < self._min_tokens:
            return self._matcher.skip(text), None
        return self._matcher.push(text)

    def _send(self, token_ids: list[int], text: str) -> None:
        if self._skip_bytes and text:
            data = text.encode()
            text = data[self._skip_bytes :].decode(errors="replace")
            self._skip_bytes = max(0, self._skip_bytes - len(data))
        if self.output_text is not None:
            self.output_text.append(text)
        self.sink.tokens(token_ids, text if self._wants_text else "")
