"""GenericModel: any causal language model of transformers, by its own code, over our paged attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from model_runner.models.hf_module import attending, build_module, hooked_linears, split_head, weight_table
from model_runner.target import Target

if TYPE_CHECKING:
    import torch

    from kernels.ops import Ops
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from model_runner.models.generic_spec import GenericSpec


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of the tokens of one step, as layers of transformers call it."""

    batch: ForwardBatch
    windows: tuple[int, ...]
    ops: Ops

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float,
        softcap: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[1, heads, T, head_dim] each to [1, T, heads, head_dim of value]. The options not used here are known, from
        the probe, to change nothing."""
        batch, size = self.batch, value.shape[-1]
        if size < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - size))
        query, key, value = map(_by_token, (query, key, value))
        key_cache, value_cache = batch.kv_caches[module.layer_idx]
        self.ops.write_kv(key, value, key_cache, value_cache, batch.slots)
        attended = self.ops.attention(
            query,
            key_cache,
            value_cache,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            scaling,
            self.windows[module.layer_idx],
            softcap or 0.0,
        )
        return attended[None, :, :, :size]


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, size] as [T, heads, size], dense even where there is one head."""
    return x[0].transpose(0, 1).flatten(1).unflatten(1, (-1, x.shape[-1]))


class GenericModel:
    """The tokens of a step are one sequence to transformers; only attention knows where one ends."""

    def __init__(self, spec: GenericSpec, max_model_len: int, policy: DevicePolicy) -> None:
        module = build_module(spec.model_class, spec.config, max_model_len, policy.dtype, policy.device)
        linears = hooked_linears(module, policy.ops)
        self._weights = {
            name: replace(Target.whole(tensor), linear=linears.get(name))
            for name, tensor in weight_table(module).items()
        }
        self._trunk, self._head = split_head(module)
        self._windows, self._ops = spec.windows, policy.ops

    def weights(self) -> dict[str, Target]:
        return self._weights

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        with attending(PagedAttention(batch, self._windows, self._ops)):
            output = self._trunk(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False)
        return output[0][0, batch.output_tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden).float()
