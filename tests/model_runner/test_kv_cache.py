"""Sizing the KV cache: one sequence of the longest length always fits, or the error says what would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.ops import make_ops
from kernels.reference import FP8, ReferenceOps
from model_runner import device
from model_runner.device import CPU_CACHE_LIMIT, DevicePolicy, make_device
from model_runner.kv_cache import allocate_cache, fit_cache
from protos.config import MIB, EngineConfig, build
from protos.errors import StartupError
from protos.model_spec import ModelSpec, RopeSpec
from protos.place import ONLY

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
    rope=RopeSpec(),
)
BLOCK_BYTES = 2 * 4 * 16 * 2 * 64 * 4
"""Keys and values, layers, tokens, heads, dimensions, float32: 64 KiB."""


class Policy(DevicePolicy):
    def free_memory(self) -> int:
        return 300 * MIB


POLICY = Policy(torch.device("cpu"), torch.float32, ReferenceOps(), 1, CPU_CACHE_LIMIT, 1)


def fit(policy: DevicePolicy = POLICY, spec: ModelSpec = SPEC, **options: Any) -> tuple[int, int]:
    size = fit_cache(build(EngineConfig, **options), spec, policy)
    assert size.num_bytes == size.num_blocks * size.block_bytes
    return size.num_blocks, size.max_model_len


def test_a_third_of_the_free_memory_and_on_a_cpu_at_most_a_gibibyte():
    assert fit() == (100 * MIB // BLOCK_BYTES, 8192)
    assert fit(replace(POLICY, cache_limit=10 * MIB), max_model_len=100) == (10 * MIB // BLOCK_BYTES, 100)
    assert CPU_CACHE_LIMIT == 1024 * MIB


def test_cores_on_one_machine_share_what_one_would_take(monkeypatch: pytest.MonkeyPatch):
    assert fit(data_parallel_size=4) == (25 * MIB // BLOCK_BYTES, (25 * MIB // BLOCK_BYTES - 1) * 16)
    assert fit(data_parallel_size=4, kv_cache_memory=200)[0] == 200 * MIB // BLOCK_BYTES
    monkeypatch.setattr(device, "_num_cores", lambda: 8)
    assert device._cores_each(ONLY, on_cpu=True, num_engines=2) == 4
    assert device._cores_each(ONLY, on_cpu=True, num_engines=64) == 1


def test_memory_and_blocks_as_asked():
    assert fit(kv_cache_memory=200) == (200 * MIB // BLOCK_BYTES, 8192)
    assert fit(num_kv_blocks=700) == (700, 8192)


def test_half_the_bytes_hold_twice_the_tokens():
    assert fit(replace(POLICY, dtype=torch.bfloat16))[0] == 2 * fit()[0]


def test_the_longest_sequence_shrinks_to_what_fits():
    assert fit(num_kv_blocks=11) == (11, 160)
    assert fit(kv_cache_memory=1) == (16, 240)
    assert fit(num_kv_blocks=11, max_model_len=160) == (11, 160)
    assert fit(num_kv_blocks=2) == (2, 16)


def test_no_more_blocks_than_sequences_can_fill():
    assert fit(max_num_seqs=2, max_model_len=100) == (1 + 2 * 7, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_kv_blocks": 11, "max_model_len": 161},
            "the KV cache can hold 160 tokens, but a sequence needs 161: "
            "lower --max-model-len to 160, or raise --num-kv-blocks to 12",
        ),
        (
            {"kv_cache_memory": 1, "max_model_len": 8192},
            "the KV cache can hold 240 tokens, but a sequence needs 8192: "
            "lower --max-model-len to 240, or raise --kv-cache-memory to 33",
        ),
        ({"max_model_len": 8193}, "--max-model-len 8193 is over the model's limit; set it to 8192 or less"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(options: dict[str, Any], message: str):
    with pytest.raises(StartupError) as caught:
        fit(**options)
    assert str(caught.value) == message


def test_what_the_error_proposes_fits():
    assert fit(num_kv_blocks=12, max_model_len=161) == (12, 161)
    assert fit(kv_cache_memory=33, max_model_len=8192)[1] == 8192


def test_no_memory_at_all():
    with pytest.raises(StartupError, match="can hold 0 tokens"):
        fit(replace(POLICY, cache_limit=0))


def test_memory_is_not_touched_before_it_is_used():
    config = build(EngineConfig, kv_cache_memory=1000)
    size = fit_cache(config, SPEC, POLICY)

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    caches = allocate_cache(size.num_blocks, SPEC, POLICY, 16)
    assert sum(keys.nbytes + values.nbytes for keys, values in caches.values()) == size.num_bytes
    assert resident() - before < 50 * MIB


def test_the_device_and_dtype_the_config_asks_for(monkeypatch: pytest.MonkeyPatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    policy = make_device(build(EngineConfig, num_threads=1), SPEC)
    assert (policy.device.type, policy.dtype_name, policy.max_steps_in_flight) == ("cpu", "float32", 1)
    assert torch.get_num_threads() == 1
    assert make_device(build(EngineConfig, dtype="bfloat16"), SPEC).dtype == torch.bfloat16
    assert policy.free_memory() > 100 * MIB
    with pytest.raises(StartupError, match="--device cuda: torch finds no usable GPU"):
        make_device(build(EngineConfig, device="cuda"), SPEC)
    torch.set_num_threads(threads)


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {
        "/proc/meminfo": "MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable: 3000 kB\nHugePages_Total: 0\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/memory.current": "500000\n",
        "/sys/fs/cgroup/memory.stat": "anon 400000\ninactive_file 90000\n",
    }
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in files)
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    policy = DevicePolicy(torch.device("cpu"), torch.float32, ReferenceOps(), 1, None, 1)
    assert policy.free_memory() == 3000 * 1024
    files["/sys/fs/cgroup/memory.max"] = "1000000\n"
    assert policy.free_memory() == 590000
    files.clear()
    assert policy.free_memory() > 100 * MIB


@pytest.mark.parametrize(("dtype", "times"), [(FP8, 4), (torch.float16, 2), (torch.float32, 1)])
def test_a_cache_of_fewer_bits_holds_more(dtype: torch.dtype, times: int):
    policy = replace(POLICY, cache_dtype=dtype)
    assert fit(policy, kv_cache_memory=4)[0] == times * fit(kv_cache_memory=4)[0]
    caches = allocate_cache(3, SPEC, policy, 16)
    assert {cache.dtype for pair in caches.values() for cache in pair} == {dtype}


def test_a_cache_of_eight_bits_is_refused_where_it_would_be_slow():
    with pytest.raises(StartupError, match=r"^--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more$"):
        make_device(build(EngineConfig, device="cpu", kv_cache_dtype="fp8"), SPEC)


@pytest.mark.parametrize(
    ("has_integers", "options", "expected"),
    [
        (True, {}, torch.float16),
        (True, {"dtype": "float32"}, None),
        (True, {"kv_cache_dtype": "float32"}, torch.float32),
        (True, {"dtype": "float32", "kv_cache_dtype": "float16"}, torch.float16),
        (False, {}, None),
        (False, {"dtype": "bfloat16", "kv_cache_dtype": "float16"}, torch.float16),
    ],
)
def test_the_type_of_a_cpus_cache(has_integers: bool, options: dict[str, str], expected: torch.dtype | None):
    """Half precision only beside a file's integers, unless it is asked for."""
    if not make_ops(torch.device("cpu"), 16, 1).keeps_integers:
        pytest.skip("there are no kernels for integers here")
    spec = msgspec.structs.replace(SPEC, has_integers=has_integers, dtype="bfloat16")
    policy = make_device(build(EngineConfig, device="cpu", **options), spec)
    assert policy.cache_dtype is expected


def test_a_cache_of_another_type_is_refused_where_kernels_take_one(monkeypatch: pytest.MonkeyPatch):
    ops = ReferenceOps()
    ops.mixes_cache_types = False
    monkeypatch.setattr("model_runner.device.make_ops", lambda *_: ops)

    def cache(dtype: str, kv_cache_dtype: str) -> torch.dtype | None:
        config = build(EngineConfig, device="cpu", dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        return make_device(config, SPEC).cache_dtype

    assert cache("bfloat16", "auto") is None
    assert cache("float16", "float16") is torch.float16
    with pytest.raises(StartupError, match=r"^--kv-cache-dtype float16 needs a CPU, or --dtype float16$"):
        cache("bfloat16", "float16")
