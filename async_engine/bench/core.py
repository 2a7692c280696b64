"""CoreBench: what a step of the core costs while requests only decode."""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np

from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from protos import codec
from protos.config import EngineConfig, build
from protos.messages import EngineCoreRequest, Sampling

BATCHES = (1, 32, 256, 1024)
DEPTHS = (1, 2)
"""Steps in flight."""
DEVICE_STEPS = 16
BLOCK_SIZE = 16
PROMPT_TOKENS = 16


class CoreBench:
    """An EngineCore over the null worker, in this process, with `batch` requests that have their first token."""

    def __init__(self, batch: int, num_steps: int, depth: int = 1, device_ms: float = 0.0) -> None:
        """`device_ms` is what a step takes the simulated device, `depth` how many steps are in flight."""
        max_tokens = num_steps + 64
        self._batch = batch
        config = build(
            EngineConfig,
            model="null",
            block_size=BLOCK_SIZE,
            num_kv_blocks=1 + batch * -(-(PROMPT_TOKENS + max_tokens) // BLOCK_SIZE),
            max_model_len=PROMPT_TOKENS + max_tokens,
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch * PROMPT_TOKENS, 1),
            max_steps_in_flight=depth,
            null_step_ms=device_ms,
        )
        self._core = EngineCore(config, eos_token_ids=())
        ready = self._core.ready
        for handle in range(batch):
            # Each prompt its own: nothing is shared, as between strangers.
            prompt = np.full(PROMPT_TOKENS, 1 + handle % 255, "<i4")
            prompt[0] = handle // 255
            message = EngineCoreRequest(
                handle=handle,
                prompt_token_ids=prompt.tobytes(),
                sampling=Sampling(ignore_eos=True),
                max_tokens=max_tokens,
            )
            self._core.scheduler.add(make_request(message, 0, BLOCK_SIZE, ready.max_model_len, time.monotonic()))
        while self._step() < batch:
            pass

    def _step(self) -> int:
        """One step and its outputs, as the core process does it; the number of tokens it brought."""
        self._core.step()
        num_tokens = 0
        for outputs in self._core.scheduler.events.take().values():
            codec.encode_frame(outputs)
            num_tokens += len(outputs.token_ids) // 4
        return num_tokens

    def round(self, num_steps: int) -> float:
        """CPU microseconds per request and step."""
        gc.collect()
        start = time.process_time()
        for _ in range(num_steps):
            num_tokens = self._step()
            assert num_tokens == self._batch, "a request did not decode"
        return (time.process_time() - start) / num_steps / self._batch * 1e6

    def busy(self, num_steps: int, device_ms: float) -> float:
        """Share of the time by the clock in which the device computes."""
        start = time.monotonic()
        for _ in range(num_steps):
            self._step()
        return num_steps * device_ms / 1e3 / (time.monotonic() - start)

    def close(self) -> None:
        self._core.shutdown()


def measure_core(rounds: int, tokens_per_round: int) -> dict[int, float]:
    """By batch size, microseconds per request and step: the median of some rounds, which alternate between sizes."""
    # Whole blocks, so that each round allocates as often as any other.
    steps = {batch: BLOCK_SIZE * max(1, min(64, tokens_per_round // batch // BLOCK_SIZE)) for batch in BATCHES}
    benches = {batch: CoreBench(batch, rounds * steps[batch]) for batch in BATCHES}
    results: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for _ in range(rounds):
        for batch, bench in benches.items():
            results[batch].append(bench.round(steps[batch]))
    for bench in benches.values():
        bench.close()
    return {batch: statistics.median(times) for batch, times in results.items()}


def measure_busy(rounds: int, device_ms: float) -> dict[int, dict[int, float]]:
    """By steps in flight and batch size, the share of the time in which a device that takes so long for a step is
    busy: the median of some rounds, which alternate."""
    results: dict[int, dict[int, float]] = {depth: {} for depth in DEPTHS}
    for batch in BATCHES:
        benches = {depth: CoreBench(batch, (rounds + 1) * DEVICE_STEPS, depth, device_ms) for depth in DEPTHS}
        shares: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        for _ in range(rounds):
            for depth, bench in benches.items():
                bench.busy(2, device_ms)  # the device was idle while it was the other one's turn
                shares[depth].append(bench.busy(DEVICE_STEPS - 2, device_ms))
        for depth, bench in benches.items():
            bench.close()
            results[depth][batch] = statistics.median(shares[depth])
    return results
