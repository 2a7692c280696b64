"""RequestLog: one structured line per request, when it is over."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_engine.request_state import RequestState
    from protos.messages import Finished

logger = logging.getLogger("tailrace.request")


class Fields(dict[str, Any]):
    """A log message that is key=value pairs as text, and stays a mapping for a formatter that knows it."""

    def __str__(self) -> str:
        return " ".join(f"{key}={_plain(value)}" for key, value in self.items())


class JsonFormatter(logging.Formatter):
    """Each record is one JSON object in one line of ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        fields = record.msg if isinstance(record.msg, Fields) else {"message": record.getMessage()}
        time_utc = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time_utc, "level": record.levelname, "logger": record.name, **fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RequestLog:
    """Counts, reasons and timings; never a prompt or an output unless asked to."""

    def __init__(self, with_text: bool) -> None:
        self._with_text = with_text

    def __call__(self, state: RequestState, finished: Finished) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = Fields(
            request_id=state.request_id,
            finish=finished.reason.name.lower(),
            prompt_tokens=state.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            output_tokens=state.output_tokens,
            drawn_tokens=state.drawn_tokens,
            queue_ms=round(finished.queue_seconds * 1e3, 1),
            prefill_ms=round(finished.prefill_seconds * 1e3, 1),
            decode_ms=round(finished.decode_seconds * 1e3, 1),
            total_ms=round((time.monotonic() - state.arrival_time) * 1e3, 1),
            preemptions=finished.preemptions,
        )
        if state.adapter:
            fields["adapter"] = state.adapter
        if finished.message:
            fields["message"] = finished.message
        if self._with_text:
            fields["prompt"] = state.prompt_text
            fields["output"] = "".join(state.output_text or ())
        logger.info(fields)


def _plain(value: object) -> str:
    """Quoted where it could be taken for more than one value, or do something to a terminal."""
    text = str(value)
    if text and text.isprintable() and " " not in text:
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
