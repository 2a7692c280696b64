"""What is asked of CUDA, in which order, where there is none: recording, copies to the host, memory."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from model_runner.graph_backend import CudaGraphs, NotCapturableError
from model_runner.host_copy import CudaCopier
from model_runner.memory import CudaMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = torch.device("cpu")


class FakeCuda:
    """Stands for torch.cuda; `calls` say who did what on which stream."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream_now = FakeStream(self, "outside")
        self.fault: Exception | None = None
        self.allocated = 100
        self.peak = 0

    def log(self, call: str) -> None:
        self.calls.append(f"{self.stream_now.name}: {call}")

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.stream_now

    def set_stream(self, stream: FakeStream) -> None:
        self.stream_now = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.log("replay"))

    @contextmanager
    def graph(self, graph: Any, pool: str, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        self.log(f"record into {pool}, {capture_error_mode}")
        yield
        if self.fault is not None:
            raise self.fault
        self.log("recorded")
        self.stream_now = before

    def Event(self, blocking: bool) -> SimpleNamespace:
        assert blocking, "who waits must not spin"
        return SimpleNamespace(
            record=lambda stream: self.log(f"event on {stream.name}"), synchronize=lambda: self.log("wait for event")
        )

    def synchronize(self, device: torch.device) -> None:
        self.log("wait for all")

    def empty_cache(self) -> None:
        self.log("give back")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 300, 1000

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name, self.device = cuda, name, DEVICE

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_a_step_runs_once_beside_before_it_is_recorded_and_once_as_recorded(cuda: FakeCuda):
    graphs = CudaGraphs(DEVICE)

    def run(rows: int) -> torch.Tensor:
        cuda.log(f"run {rows}")
        return torch.full((rows, 3), float(rows))

    results = [graphs.capture(lambda rows=rows: run(rows))[0] for rows in (4, 2)]
    assert cuda.calls == [
        call
        for rows in (4, 2)
        for call in (
            "side waits for outside",
            f"side: run {rows}",
            "outside waits for side",
            "side: record into pool, thread_local",
            f"side: run {rows}",
            "side: recorded",
            "outside: replay",
        )
    ]
    assert [result.shape for result in results] == [(4, 3), (2, 3)]
    assert results[0].data_ptr() == results[1].data_ptr(), "one result for all"
    assert results[0].tolist() == [[2.0] * 3] * 2 + [[4.0] * 3] * 2


def test_a_recording_that_fails_is_one_line_and_the_stream_is_as_it_was(cuda: FakeCuda):
    graphs = CudaGraphs(DEVICE)
    cuda.fault = RuntimeError("operation not permitted when stream is capturing\nmore")
    with pytest.raises(NotCapturableError, match=r"^operation not permitted when stream is capturing$"):
        graphs.capture(lambda: torch.zeros(1, 1))
    assert cuda.stream_now.name == "outside"
    cuda.fault = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(lambda: torch.zeros(1, 1))


def test_copies_wait_for_what_was_issued_and_nobody_waits_for_them_before_they_are_asked_for(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kw: empty(*args, **kw) if pin_memory else None)
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream.name))
    copy = CudaCopier(DEVICE)(torch.tensor([1, 2]), torch.tensor([[0.5]]))
    assert cuda.calls == ["side waits for outside", "side: event on side"]
    assert kept == ["side", "side"]
    assert [array.tolist() for array in copy.wait()] == [[1, 2], [[0.5]]]
    assert cuda.calls[2:] == ["outside: wait for event"]


def test_memory_is_looked_at_when_all_is_done_and_given_back(cuda: FakeCuda):
    memory = CudaMemory(DEVICE)
    assert memory.used() == (700, 1000)
    assert cuda.calls == ["outside: wait for all", "outside: give back"]

    def run() -> None:
        cuda.log("run")
        cuda.peak += 40

    assert memory.peak(run) == 40
    assert cuda.calls[2:] == ["outside: wait for all", "outside: run", "outside: wait for all"]
