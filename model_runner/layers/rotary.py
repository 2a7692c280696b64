"""Rotary: position embedding by rotation (RoFormer), and the ways to stretch it over longer contexts.

Every pair of dimensions turns by position * frequency. The kinds differ in the frequencies, which are
fixed here once, for the longest sequence the engine serves: frequencies that followed the length of
a growing sequence would make a token's numbers depend on what comes after it, or on its batch-mates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.ops import Ops
    from protos.model_spec import ModelSpec, RopeSpec


class Rotary:
    """Cosines and sines of a step's positions, looked up once for all layers that turn alike."""

    def __init__(self, spec: ModelSpec, max_model_len: int, device: torch.device, ops: Ops) -> None:
        frequencies, magnitude = rope_frequencies(spec, max_model_len)
        self._ops = ops
        # On the host: to compute on a device without memory, torch imports its compiler, which takes a second.
        angles = torch.arange(max_model_len).float()[:, None] * frequencies
        # Of all positions: a few hundred bytes for each, beside the kilobytes of its keys and values.
        self._cosines, self._sines = (part.mul_(magnitude).to(device) for part in (angles.cos(), angles.sin()))

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cosines and sines [T, pairs] in float32 of positions [T], below max_model_len."""
        return self._ops.rows(self._cosines, positions), self._ops.rows(self._sines, positions)


def rope_frequencies(spec: ModelSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, float32, and the factor on cosines and sines.

    Raises ValueError for parameters that give none.
    """
    rotated = int(spec.head_dim * spec.rope.partial_factor)
    trained = spec.rope.original_max_position or spec.max_position_embeddings
    try:
        frequencies, magnitude = _KINDS[spec.rope.kind](spec, rotated, trained, max_model_len)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"the rope parameters make no sense: {error}") from None
    if not (bool(frequencies.isfinite().all()) and math.isfinite(magnitude)):
        raise ValueError("the rope parameters make no sense: a frequency would be infinite")
    return frequencies, magnitude


def _powers(rope: RopeSpec, rotated: int, theta: float | None = None) -> torch.Tensor:
    """theta ** (2i / rotated): positions per radian of pair i."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    powers: torch.Tensor = (theta or rope.theta) ** exponents
    return powers


def _default(spec: ModelSpec, rotated: int, trained: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(spec.rope, rotated), 1.0


def _linear(spec: ModelSpec, rotated: int, trained: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Positions divided by the factor (position interpolation)."""
    return 1.0 / _powers(spec.rope, rotated) / spec.rope.scaling["factor"], 1.0


def _dynamic(spec: ModelSpec, rotated: int, trained: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware: the base grows with the length, so that only low frequencies are stretched."""
    limit, factor = spec.max_position_embeddings, spec.rope.scaling["factor"]
    stretch = factor * max(max_model_len, limit) / limit - (factor - 1)
    theta = spec.rope.theta * stretch ** (rotated / (rotated - 2))
    return 1.0 / _powers(spec.rope, rotated, theta), 1.0


def _llama3(spec: ModelSpec, rotated: int, trained: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Long wavelengths are stretched by the factor, short ones are not, those between in part."""
    scaling = spec.rope.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequencies = 1.0 / _powers(spec.rope, rotated)
    turns = trained * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling["factor"]), 1.0


def _yarn(spec: ModelSpec, rotated: int, trained: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """YaRN: pairs that turn often in the trained context stay, slow ones are stretched, a ramp between."""
    scaling = spec.rope.scaling
    factor = scaling.get("factor") or spec.max_position_embeddings / trained

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns this often within the trained context."""
        return rotated * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.rope.theta))

    low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2).float() - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    frequencies = 1.0 / _powers(spec.rope, rotated)
    return frequencies * (1 - stretched) + frequencies / factor * stretched, _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(spec: ModelSpec, rotated: int, trained: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE: a divisor per pair, found by search; a table for engines that serve no more than the trained
    context, and one for those that serve more."""
    scaling = spec.rope.scaling
    divisors = torch.tensor(scaling["long_factor" if max_model_len > trained else "short_factor"]).float()
    factor = scaling.get("factor") or spec.max_position_embeddings / trained
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return 1.0 / (divisors * _powers(spec.rope, rotated)), float(magnitude)


_KINDS: dict[str, Callable[[ModelSpec, int, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
