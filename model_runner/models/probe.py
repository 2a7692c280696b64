"""Probe: one forward pass without values, on the meta device, that shows what a module's layers ask of attention.

Our attention is causal, over the sequence's own keys, with a window at most. A module may ask for anything else: in
the mask it makes, in arguments of attention, by calling it twice or not at all. So it is run once on shapes alone, with
masks that tell which function of two positions they are of. What it asks for beyond is a reason to refuse it.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from model_runner.models.hf_module import Refused, attending, call_attention, split_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    Seen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """seen(batch, head, query position, key position)"""

ATTENTION = "tailrace_probe"
TOKENS = 13
MAX_TEXT = 200
"""Characters shown of an error that is not ours."""
_NEEDS = {
    "s_aux": "attention sinks",
    "position_bias": "attention biases",
    "encoder_hidden_states": "cross attention",
}
"""Arguments of attention that change what is computed, in words."""
_HARMLESS = {"sliding_window", "position_ids", "use_cache", "cache_position", "is_causal", "output_attentions"}
"""Arguments of attention that say what its mask says too, or nothing that matters here."""
_OWN_MASK = "it makes attention masks of its own"


@dataclass(frozen=True, slots=True)
class Mask:
    """In the place of a mask. Who does more than hand it on is refused."""

    seen: Seen

    def __getattr__(self, name: str) -> Any:
        raise Refused(_OWN_MASK)

    def __getitem__(self, index: object) -> Any:
        raise Refused(_OWN_MASK)


@dataclass(slots=True)
class Probe:
    """What the layers asked for."""

    heads: set[tuple[int, int]] = field(default_factory=set)
    """Number and size of the KV heads."""
    masks: list[Mask] = field(default_factory=list)
    """Of each layer."""

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: Any = None,
        softcap: Any = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> torch.Tensor:
        layer, expected = getattr(module, "layer_idx", None), len(self.masks)
        if layer != expected:
            skipped = isinstance(layer, int) and layer > expected
            raise Refused(
                f"its layer {expected} has no attention" if skipped else "its layers do not call attention once each"
            )
        for name, option in options.items():
            if name not in _HARMLESS and option is not None and option is not False:
                raise Refused(f"it needs {_NEEDS.get(name, f'{name} in attention')}")
        if not isinstance(attention_mask, Mask):
            raise Refused(_OWN_MASK)
        if not isinstance(scaling, float | int) or not isinstance(softcap, float | int | None) or dropout:
            raise Refused("its attention has no one scale")
        _, heads, tokens, size = query.shape
        if tokens != TOKENS or key.shape[2] != TOKENS or key.shape[3] != size or value.shape[3] > size:
            raise Refused("its queries, keys and values are of different sizes")
        if value.shape[1] != key.shape[1] or heads % key.shape[1]:
            raise Refused(f"its {heads} attention heads do not share {key.shape[1]} KV heads evenly")
        self.masks.append(attention_mask)
        self.heads.add((key.shape[1], size))
        return query.new_zeros(1, tokens, heads, value.shape[3])


def _call_mask(*_: Any, mask_function: Seen, **__: Any) -> Mask:
    return Mask(mask_function)


AttentionInterface.register(ATTENTION, call_attention)
AttentionMaskInterface.register(ATTENTION, _call_mask)


@contextmanager
def _no_packing() -> Iterator[None]:
    """Positions have no values here, so nobody can look for several sequences in them."""
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def run_probe(module: PreTrainedModel, num_layers: int, vocab_size: int) -> Probe:
    """Runs a module, built for ATTENTION on the meta device, and takes it apart. Raises Refused."""
    probe = Probe()
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        trunk, head = split_head(module)
        if "position_ids" not in inspect.signature(trunk.forward).parameters:
            raise Refused("it numbers its tokens itself")
        if any(isinstance(part, torch.nn.Conv1d) for part in trunk.modules()):
            raise Refused("it mixes tokens by convolutions")
        with _no_packing(), torch.inference_mode(), attending(probe.attention):
            hidden = trunk(input_ids=tokens, position_ids=tokens, use_cache=False)[0]
            shape = tuple(head(hidden[0]).shape)
    except Refused:
        raise
    except Exception as error:
        # Another library's code, which may fail in any way.
        raise Refused(f"its code does not run on shapes alone ({one_line(error)})") from None
    if len(probe.masks) != num_layers:
        raise Refused(f"only {len(probe.masks)} of its {num_layers} layers are attention")
    if len(probe.heads) != 1:
        raise Refused("its layers have KV heads of different sizes or numbers")
    if shape != (TOKENS, vocab_size):
        raise Refused(f"it has logits of {shape[-1]} tokens, the config says {vocab_size}")
    return probe


def window(mask: Mask, limit: int) -> int:
    """How many keys a query sees at most among `limit` positions; 0 is all before it. Raises Refused for a mask that
    is not of the last ones."""

    def seen(query: int) -> torch.Tensor:
        zero, keys = torch.zeros(1, dtype=torch.long), torch.arange(query + 2)
        return mask.seen(zero, zero, torch.tensor([query]), keys).expand(query + 2)

    def is_of_last(query: int, size: int) -> bool:
        distance = query - torch.arange(query + 2)
        return torch.equal(seen(query), (distance >= 0) & (distance < size))

    try:
        size = int(seen(limit - 1).sum())
        queries = {0, 1, size - 1, size, size + size // 2, limit // 2, limit - 1}
        if all(is_of_last(query, size) for query in queries if 0 <= query < limit):
            return 0 if size == limit else size
    except RuntimeError:  # the mask is of more than two positions
        pass
    raise Refused("its attention is not causal, with a window at most")


def one_line(error: Exception) -> str:
    """The text of another library's error."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
