"""RequestLog: one structured line per request, when it is over."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_engine.request_state import RequestState
    from protos.messages import Finished

logger = logging.getLogger("tailrace.request")


class RequestLog:
    """Counts, reasons and timings; never a prompt or an output unless asked to."""

    def __init__(self, as_json: bool, with_text: bool) -> None:
        self._as_json = as_json
        self._with_text = with_text

    def __call__(self, state: RequestState, finished: Finished) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        reason = state.finish.reason if state.finish is not None else finished.reason
        fields: dict[str, Any] = {
            "request_id": state.request_id,
            "finish": reason.name.lower(),
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": finished.cached_tokens,
            "output_tokens": state.output_tokens,
            "queue_ms": round(finished.queue_seconds * 1e3, 1),
            "prefill_ms": round(finished.prefill_seconds * 1e3, 1),
            "decode_ms": round(finished.decode_seconds * 1e3, 1),
            "total_ms": round((time.monotonic() - state.arrival_time) * 1e3, 1),
            "preemptions": finished.preemptions,
        }
        if finished.message:
            fields["message"] = finished.message
        if self._with_text:
            fields["prompt"] = state.prompt_text
            fields["output"] = "".join(state.output_text or ())
        if self._as_json:
            logger.info("%s", json.dumps(fields, ensure_ascii=False))
        else:
            logger.info("%s", " ".join(f"{key}={_plain(value)}" for key, value in fields.items()))


def _plain(value: object) -> str:
    text = str(value)
    return text if text and " " not in text and "\n" not in text else json.dumps(text, ensure_ascii=False)
