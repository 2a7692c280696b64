"""The module of transformers that computes a generic model: how it is built, taken apart and filled.

What is registered with transformers is one attention function. It computes nothing: it hands the call of a layer on
to what the forward pass under way has for it.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_runner.layers.added import Added, AddedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedConfig

    from kernels.ops import Ops

    Attention = Callable[..., torch.Tensor]
    """attention(module, query, key, value, attention_mask, **options): query, key and value [1, heads, T, head_dim] of
    one layer to [1, T, heads, head_dim of value]."""

ATTENTION = "tailrace"
"""What our attention is called in transformers. A name for which no mask is registered: so none is made."""


class Refused(Exception):
    """The reason why a model is not supported."""


_attention: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Layers called inside call this."""
    outer = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(outer)


def call_attention(*call: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attention.get()(*call, **options), None


AttentionInterface.register(ATTENTION, call_attention)


def build_module(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> PreTrainedModel:
    """The module with its weights allocated but not filled; what follows from the config alone is computed."""
    with torch.device(device), no_init_weights():
        module = model_class._from_config(
            copy.deepcopy(config), dtype=dtype, **{"attn_implementation": ATTENTION, **options}
        )
    module.tie_weights()
    # What is not in a checkpoint is computed again where the default type is float32, as for a model that is loaded.
    for tensor in module.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    module.initialize_weights()
    _pin_rotary(module, max_model_len)
    module.requires_grad_(False)
    return module.eval()


def _pin_rotary(module: PreTrainedModel, max_model_len: int) -> None:
    """Fixes frequencies that would follow the longest sequence of a batch: for the longest one served."""
    for rotary in module.modules():
        kinds = getattr(rotary, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind not in ("dynamic", "longrope"):
                continue
            if kind == "longrope":
                name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
                old = getattr(rotary, name)
                new, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, old.device, max_model_len, layer_type)
                old.copy_(new)
            # Dynamic frequencies, as built, are those within the trained context: no more is served.
            if layer_type is None:
                rotary.rope_type = "pinned"
            else:
                kinds[layer_type] = "pinned"


def hooked_linears(module: PreTrainedModel, ops: Ops) -> dict[str, AddedRows]:
    """Where adapters add to the products of linear modules, by the names of their weights: those of all that see every
    token of a step, once. Others are not known to: experts see some, and heads only what is drawn from."""
    found = {}
    for name, linear in module.base_model.named_modules(prefix=module.base_model_prefix):
        if type(linear) is torch.nn.Linear and "experts" not in name.split("."):
            added = Added(ops)
            linear.register_forward_hook(_adder(added))
            found[f"{name}.weight"] = AddedRows(added, 0)
    return found


def _adder(added: Added) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
    def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        """Of [1, T, size] each."""
        if added.groups:
            added(inputs[0].flatten(0, -2).contiguous(), y.view(-1, y.shape[-1]))

    return add


class _Known(MoeModelOutputWithPast):
    """Has no other outputs, whatever they are called."""

    def __getattr__(self, name: str) -> None:
        return None


class _Passthrough(torch.nn.Module):
    """Stands for the trunk where its output is already known."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Known:
        return _Known(last_hidden_state=inputs_embeds)


def split_head(module: PreTrainedModel) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """The trunk, which makes hidden states; and what makes logits [S, vocabulary] of them [S, hidden].

    The latter is the module's own code with whatever it scales, caps or adds. The module cannot be used otherwise then.
    """
    ((name, trunk),) = ((name, child) for name, child in module.named_children() if isinstance(child, PreTrainedModel))
    setattr(module, name, _Passthrough())

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = module(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    return trunk, head


class _KeepViews(TorchFunctionMode):
    """Tensors stay views of what they are parts of."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))


def weight_table(module: PreTrainedModel, with_tied: bool = False) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint belongs, by the name it has there: a part of the module's own tensors.

    transformers keeps some models in another layout than their checkpoints have (experts in one tensor), and knows the
    way back, for saving. Taken with views it leads from a checkpoint's tensors to their places. Tensors that are others
    under a second name are in the table if asked for. Raises Refused where a tensor would have to be computed.
    """
    tied = () if with_tied else module.all_tied_weights_keys
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in tied}
    owned = {tensor.untyped_storage()._cdata for tensor in state.values()}
    with _KeepViews():
        table: dict[str, torch.Tensor] = revert_weight_conversion(module, state)
    for name, tensor in table.items():
        if tensor.untyped_storage()._cdata not in owned:
            raise Refused(f"its checkpoints hold tensor {name} in a form that has to be computed")
    return table
