"""FrontEndReport: what one front end knows of its requests, for operators."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from async_engine.recent import Recent
from protos.front_ends import LiveRequests, Report
from protos.tailrace.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from async_engine.async_llm import AsyncLLM
    from async_engine.request_state import RequestState


class FrontEndReport:
    """Observes an AsyncLLM from now on."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._recent = Recent()
        llm.on_end.append(self._recent)

    def report(self) -> Report:
        recent = self._recent
        return Report(
            self._llm.num_live,
            dict(recent.finished),
            list(recent.time_to_first_token),
            list(recent.inter_token),
            list(recent.end_to_end),
        )

    def live(self, limit: int) -> LiveRequests:
        live = self._llm.live_requests
        now = time.monotonic()
        shown = [_live_request(state, now).SerializeToString() for state in live[:limit]]
        return LiveRequests(shown, len(live))


def together(reports: list[Report]) -> Report:
    """Of several front ends."""
    finished: dict[str, int] = {}
    for report in reports:
        for reason, count in report.finished.items():
            finished[reason] = finished.get(reason, 0) + count
    return Report(
        sum(report.live_requests for report in reports),
        finished,
        [value for report in reports for value in report.time_to_first_token],
        [value for report in reports for value in report.inter_token],
        [value for report in reports for value in report.end_to_end],
    )


def _live_request(state: RequestState, now: float) -> pb.LiveRequest:
    if state.first_token_time:
        phase = pb.REQUEST_PHASE_DECODE
    else:
        phase = pb.REQUEST_PHASE_PREFILL if state.started else pb.REQUEST_PHASE_QUEUED
    return pb.LiveRequest(
        request_id=state.request_id,
        caller=state.caller,
        phase=phase,
        age=duration(now - state.arrival_time),
        prompt_tokens=state.prompt_tokens,
        output_tokens=state.output_tokens,
        sequences=len(state.sequences),
        adapter=state.adapter,
    )


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
