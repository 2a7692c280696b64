"""KVCache: how many blocks fit into the memory allowed, and the tensors that hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from model_runner.shard import kv_heads
from model_runner.stage import stage_layers
from protos.config import MIB
from protos.errors import StartupError

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import KVCaches
    from model_runner.memory import MemoryPlan
    from protos.config import EngineConfig
    from protos.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What was decided: the blocks (null block included), and the longest sequence that surely fits."""

    num_blocks: int
    max_model_len: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def fit_cache(config: EngineConfig, spec: ModelSpec, policy: DevicePolicy, plan: MemoryPlan | None = None) -> CacheSize:
    """Sizes the cache so that one sequence of max_model_len always fits, into what a plan leaves if there is one.

    All workers decide alike: by the one with the least memory. Raises StartupError, with the number that would fit,
    where the config asks for more than there is.
    """
    block_size, limit = config.cache.block_size, spec.max_position_embeddings
    wanted = config.model.max_model_len
    if wanted > limit and not spec.stretches:
        raise StartupError(f"--max-model-len {wanted} is over the model's limit; set it to {limit} or less")
    key_shape, value_shape = _shapes(1, spec, policy, block_size)
    num_layers = len(stage_layers(spec.num_layers, policy.workers.place))
    block_bytes = num_layers * _dtype(policy).itemsize * (math.prod(key_shape) + math.prod(value_shape))
    num_blocks = config.cache.num_kv_blocks or policy.workers.least(_budget(config, policy, plan) // block_bytes)
    capacity = max(0, num_blocks - 1) * block_size
    if capacity < max(wanted, 1):
        raise StartupError(_too_small(config, capacity, max(wanted, 1), block_bytes, plan))
    max_model_len = wanted or min(limit, capacity)
    if not config.cache.num_kv_blocks:
        # Blocks that no set of running sequences could fill would be memory for nothing.
        num_blocks = min(num_blocks, 1 + config.scheduler.max_num_seqs * -(-max_model_len // block_size))
    return CacheSize(num_blocks, max_model_len, block_bytes)


def _too_small(config: EngineConfig, capacity: int, wanted: int, block_bytes: int, plan: MemoryPlan | None) -> str:
    blocks, told = 1 + -(-wanted // config.cache.block_size), ""
    if plan is not None and not (config.cache.num_kv_blocks or config.cache.kv_cache_memory):
        told, share = f" ({plan})", plan.utilization_for(blocks * block_bytes)
        fix = "lower --max-num-batched-tokens, or spread the model with --tensor-parallel-size"
        if share is not None:
            fix = f"raise --gpu-memory-utilization to {share:g}"
    elif config.cache.num_kv_blocks:
        fix = f"raise --num-kv-blocks to {blocks}"
    else:
        fix = f"raise --kv-cache-memory to {-(-blocks * block_bytes // MIB)}"
    if capacity:
        fix = f"lower --max-model-len to {capacity}, or {fix}"
    return f"the KV cache can hold {capacity} tokens, but a sequence needs {wanted}{told}: {fix}"


def allocate_cache(num_blocks: int, spec: ModelSpec, policy: DevicePolicy, block_size: int) -> KVCaches:
    """Keys and values of each layer of the stage. Not filled: on a CPU, memory that no sequence reaches is never
    resident."""
    key_shape, value_shape = _shapes(num_blocks, spec, policy, block_size)
    dtype, device = _dtype(policy), policy.device
    return {
        layer: (
            torch.empty(key_shape, dtype=dtype, device=device),
            torch.empty(value_shape, dtype=dtype, device=device),
        )
        for layer in stage_layers(spec.num_layers, policy.workers.place)
    }


def _dtype(policy: DevicePolicy) -> torch.dtype:
    return policy.cache_dtype or policy.dtype


def _shapes(
    num_blocks: int, spec: ModelSpec, policy: DevicePolicy, block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the keys and of the values of one layer, as far as this worker holds them."""
    held = kv_heads(spec.num_kv_heads, policy.workers.place).size
    return policy.ops.kv_cache_shapes(num_blocks, held, spec.head_dim, block_size)


def _budget(config: EngineConfig, policy: DevicePolicy, plan: MemoryPlan | None) -> int:
    """Bytes the cache may take."""
    if config.cache.kv_cache_memory:
        return config.cache.kv_cache_memory * MIB
    if plan is not None:
        return plan.cache
    free = policy.free_memory() // 3
    if policy.cache_limit is None:
        return free
    # Cores on one machine share its memory.
    return min(free, policy.cache_limit) // config.parallel.data_parallel_size
