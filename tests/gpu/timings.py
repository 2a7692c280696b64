"""What a device takes for kernels, for steps and for whole requests, beside what its limits allow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.ops import make_ops
from tests.gpu.device_engine import BLOCK_SIZE, DeviceEngine
from tests.gpu.model_checks import make_prompts
from tests.kernels.attention_cases import make_batch

if TYPE_CHECKING:
    from tests.gpu.device_clock import DeviceClock
    from tests.gpu.device_report import DeviceReport
    from tests.gpu.device_sizes import DeviceSizes

WARM_UP_STEPS, TIMED_STEPS = 8, 32


def time_kernels(report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock) -> None:
    report.measure("copy", clock.copy_rate / 1e9, "GB/s read and written")
    report.measure("matrix product", clock.matrix_rate / 1e12, "TFLOP/s")
    _time_decode_attention(report, sizes, clock)
    _time_prefill_attention(report, sizes, clock)
    _time_norm(report, sizes, clock)


def _heads(sizes: DeviceSizes) -> tuple[int, int, int]:
    """Query heads, KV heads, size of a head."""
    heads = sizes.model["num_attention_heads"]
    return heads, sizes.model["num_key_value_heads"], sizes.model["hidden_size"] // heads


def _time_decode_attention(report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock) -> None:
    heads, kv_heads, head_dim = _heads(sizes)
    ops = make_ops(sizes.device, BLOCK_SIZE, 2)
    for rows in (1, 64):
        shape = [(1, sizes.context)] * rows, heads, kv_heads, head_dim, BLOCK_SIZE, sizes.dtype
        batch = make_batch(*shape, device=sizes.device).laid_out_for(ops)
        seconds = clock.seconds(lambda batch=batch: batch.attend(ops))
        read = 2 * rows * sizes.context * kv_heads * head_dim * sizes.dtype.itemsize
        share = read / seconds / clock.copy_rate
        what = f"decode attention, {rows} rows of {sizes.context} keys"
        report.measure(what, seconds * 1e6, "us", share, 0.8 if rows == 64 else float("nan"), "of copying")
        query, key, value = (
            torch.randn(rows, of, length, head_dim, device=sizes.device).to(sizes.dtype)
            for of, length in ((heads, 1), (kv_heads, sizes.context), (kv_heads, sizes.context))
        )

        def theirs(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        report.measure("  torch's own, keys in one piece", clock.seconds(theirs) * 1e6, "us")


def _time_prefill_attention(report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock) -> None:
    heads, kv_heads, head_dim = _heads(sizes)
    ops, tokens = make_ops(sizes.device, BLOCK_SIZE, 2), sizes.prefill_tokens
    shape = [(tokens, tokens)], heads, kv_heads, head_dim, BLOCK_SIZE, sizes.dtype
    batch = make_batch(*shape, device=sizes.device).laid_out_for(ops)
    seconds = clock.seconds(lambda: batch.attend(ops))
    operations = 2 * tokens**2 * heads * head_dim  # two products, of which causality leaves a half
    share = operations / seconds / clock.matrix_rate
    report.measure(f"prefill attention of {tokens} tokens", seconds * 1e3, "ms", share, of="of the matrix rate")
    query, key, value = (
        torch.randn(1, of, tokens, head_dim, device=sizes.device).to(sizes.dtype) for of in (heads, kv_heads, kv_heads)
    )
    theirs = clock.seconds(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
    report.measure("  torch's own, keys in one piece", theirs * 1e3, "ms")


def _time_norm(report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock) -> None:
    ops, size = make_ops(sizes.device, BLOCK_SIZE, 2), sizes.model["hidden_size"]
    x, residual = (torch.randn(4096, size, device=sizes.device).to(sizes.dtype) for _ in range(2))
    weight = torch.ones(size, device=sizes.device)
    moved = 4 * x.nbytes  # x and the residual are read; the residual and the result are written
    seconds = clock.seconds(lambda: ops.rms_norm(x, weight, 1e-5, residual))
    share = moved / seconds / clock.copy_rate
    report.measure("RMS norm with residual, 4096 rows", seconds * 1e6, "us", share, of="of copying")
    narrow = weight.to(sizes.dtype)
    theirs = clock.seconds(lambda: F.rms_norm(residual.add_(x), (size,), narrow, 1e-5))
    report.measure("  torch's own", theirs * 1e6, "us")


def time_model(report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock) -> None:
    for name, options in (
        ("eager", {"graphs": "off", "max_steps_in_flight": 1}),
        ("graphs", {"max_steps_in_flight": 1}),
        ("graphs, two steps in flight", {}),
    ):
        engine = DeviceEngine(sizes, **options)
        for batch in sizes.timed_batches:
            _time_decode(report, sizes, clock, engine, batch, name)
        if not options:
            if sizes.device.type == "cuda":
                _time_busy(report, sizes, engine)
            _time_prefill(report, sizes, clock, engine)
            _time_requests(report, sizes, engine)
        engine.close()


def _time_decode(
    report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock, engine: DeviceEngine, batch: int, name: str
) -> None:
    num_steps = WARM_UP_STEPS + TIMED_STEPS + 4
    engine.start(make_prompts(sizes, batch, seed=batch), num_steps)
    engine.step_until(batch * WARM_UP_STEPS)
    clock.sync()
    host, start = engine.worker.host_seconds, time.perf_counter()
    timed = engine.step_until(batch * TIMED_STEPS) / batch
    seconds = (time.perf_counter() - start) / timed
    host = (engine.worker.host_seconds - host) / timed
    engine.run()
    # What has to be read in a step: all weights but the embeddings, and the keys and values there are.
    embeddings = sizes.model["vocab_size"] * sizes.model["hidden_size"] * sizes.dtype.itemsize
    read = engine.core.ready.weight_bytes - embeddings
    _, kv_heads, head_dim = _heads(sizes)
    per_token = 2 * sizes.model["num_hidden_layers"] * kv_heads * head_dim * sizes.dtype.itemsize
    read += batch * (sizes.prompt_tokens + num_steps // 2) * per_token
    share = read / seconds / clock.copy_rate
    bar = 0.75 if batch == 1 and name == "graphs" else float("nan")
    report.measure(f"decode step of {batch}, {name}", seconds * 1e3, "ms", share, bar, "of copying")
    report.measure("  the host begins it in", host * 1e3, "ms", host / seconds, of="of the step")


def _time_busy(report: DeviceReport, sizes: DeviceSizes, engine: DeviceEngine) -> None:
    """How much of a large decode step the device works, by its own trace."""
    batch = max(sizes.timed_batches)
    engine.start(make_prompts(sizes, batch, seed=batch), WARM_UP_STEPS + TIMED_STEPS)
    engine.step_until(batch * WARM_UP_STEPS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        start = time.perf_counter()
        engine.run()
        torch.cuda.synchronize(sizes.device)
        seconds = time.perf_counter() - start
    busy = sum(event.self_device_time_total for event in trace.key_averages()) / 1e6
    report.measure(f"device busy in decode steps of {batch}", busy * 1e3, "ms", busy / seconds, 0.95, "of the time")


def _time_prefill(report: DeviceReport, sizes: DeviceSizes, clock: DeviceClock, engine: DeviceEngine) -> None:
    limit = engine.core.ready.max_model_len - 1
    lengths = [min(limit, sizes.prefill_tokens // 4)] * 4
    prompts = [torch.randint(sizes.model["vocab_size"], (length,)).tolist() for length in lengths]
    clock.sync()
    start = time.perf_counter()
    engine.generate(prompts, 1)
    seconds = time.perf_counter() - start
    hidden, inner, layers = (sizes.model[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv_heads, head_dim = _heads(sizes)
    weights = layers * hidden * ((heads + 2 * kv_heads) * head_dim + heads * head_dim + 3 * inner)
    share = 2 * weights * sum(lengths) / seconds / clock.matrix_rate
    report.measure("prefill", sum(lengths) / seconds, "tokens/s", share, 0.6, "of the matrix rate, linear layers")


def _time_requests(report: DeviceReport, sizes: DeviceSizes, engine: DeviceEngine) -> None:
    count = 2 * max(sizes.batches)
    prompts = make_prompts(sizes, count, seed=11)
    start = time.perf_counter()
    engine.generate(prompts, sizes.output_tokens)
    seconds = time.perf_counter() - start
    report.measure(f"{count} requests, output", count * sizes.output_tokens / seconds, "tokens/s")
