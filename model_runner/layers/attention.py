"""Attention: grouped-query attention over the paged KV cache, with its projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_runner.layers.linear import Linear
from model_runner.layers.norm import RMSNorm, SpreadNorm
from model_runner.shard import all_of, evenly, kv_heads

if TYPE_CHECKING:
    import torch

    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from model_runner.shard import Shard
    from model_runner.target import Target
    from protos.model_spec import ModelSpec

    Angles = tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines [T, pairs] of the tokens' positions."""


class Attention:
    """Workers each have some of the query heads, and the KV heads that these look at."""

    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._layer = layer
        place = policy.workers.place
        heads, held = evenly(spec.num_heads, place), kv_heads(spec.num_kv_heads, place)
        self._heads, self._kv_heads, self._head_dim = heads.size, held.size, spec.head_dim
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._softcap = spec.attention_softcap
        self._sliding_window = spec.window(layer)
        self._ops = policy.ops
        hidden, queries, keys = all_of(spec.hidden_size), heads.times(spec.head_dim), held.times(spec.head_dim)
        self._qkv_names = ["qkv_proj"] if spec.merged_projections else ["q_proj", "k_proj", "v_proj"]
        self.qkv = Linear(hidden, [queries, keys, keys], spec.attention_bias, policy)
        self.out = Linear(queries, [hidden], spec.attention_out_bias, policy)
        self.query_norm = self.key_norm = None
        if spec.qk_norm:
            sizes = [all_of(spec.head_dim)] * 2 if spec.qk_norm == "head" else [queries, keys]
            self.query_norm, self.key_norm = (_norm(size, spec.norm_eps, policy) for size in sizes)

    def weights(self) -> dict[str, Target]:
        table = self.qkv.slices(self._qkv_names) | self.out.slices(["o_proj"])
        for part, norm in (("q_norm", self.query_norm), ("k_norm", self.key_norm)):
            if norm is not None:
                table |= {f"{part}.{name}": target for name, target in norm.weights().items()}
        return table

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, angles: Angles | None) -> torch.Tensor:
        """x [T, hidden]; without angles, queries and keys are not turned."""
        tokens = x.shape[0]
        heads = self.qkv(x).view(tokens, -1, self._head_dim)
        with_keys = self._heads + self._kv_heads
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.norm_heads(heads[:, : self._heads])
            self.key_norm.norm_heads(heads[:, self._heads : with_keys])
        key_cache, value_cache = batch.kv_caches[self._layer]
        if angles is None:
            key, value = heads[:, self._heads : with_keys], heads[:, with_keys:]
            self._ops.write_kv(key, value, key_cache, value_cache, batch.slots)
        else:
            self._ops.rotate_and_write(heads, self._kv_heads, *angles, key_cache, value_cache, batch.slots)
        attended = self._ops.attention(
            heads[:, : self._heads],
            key_cache,
            value_cache,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            self._scale,
            self._sliding_window,
            self._softcap,
        )
        return self.out(attended.view(tokens, -1))


def _norm(size: Shard, eps: float, policy: DevicePolicy) -> RMSNorm | SpreadNorm:
    return RMSNorm(size.size, eps, policy) if size.is_whole else SpreadNorm(size, eps, policy)
