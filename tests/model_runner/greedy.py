"""What transformers' generate draws, and whether ours is the same but for near ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAR_TIE = 1e-3
"""Logits closer than this are not decided by float32."""


class Greedy:
    """Of each prompt, the tokens that a transformers model draws, and the logits [token, vocabulary] it draws from."""

    def __init__(self, model: Any, prompts: Sequence[list[int]], num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.token_ids: list[list[int]] = [[] for _ in prompts]
        self._logits = [torch.empty(0) for _ in prompts]
        # Padding costs as much as prompts do: the short ones together, and the long ones each alone.
        short = [index for index, prompt in enumerate(prompts) if len(prompt) <= 40]
        for group in [short, *([index] for index in range(len(prompts)) if index not in short)]:
            self._generate(model, group, prompts)

    def _generate(self, model: Any, group: list[int], prompts: Sequence[list[int]]) -> None:
        width = max(len(prompts[index]) for index in group)
        padding = [width - len(prompts[index]) for index in group]
        with torch.inference_mode():
            result = model.generate(
                torch.tensor([[0] * size + prompts[index] for size, index in zip(padding, group, strict=True)]),
                attention_mask=torch.tensor([[0] * size + [1] * (width - size) for size in padding]),
                max_new_tokens=self._num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        for place, index in enumerate(group):
            self.token_ids[index] = result.sequences[place, width:].tolist()
            self._logits[index] = torch.stack([step[place] for step in result.logits])

    def num_flips(self, outputs: Sequence[list[int]]) -> int:
        """Outputs that leave theirs at a near tie; any other difference is an AssertionError."""
        flips = 0
        for index, (ours, theirs) in enumerate(zip(outputs, self.token_ids, strict=True)):
            assert len(ours) == len(theirs) == self._num_tokens
            if ours == theirs:
                continue
            place = next(i for i in range(self._num_tokens) if ours[i] != theirs[i])
            logits = self._logits[index][place]
            gap = float(logits.max() - logits[ours[place]])
            assert gap < NEAR_TIE, f"prompt {index}, token {place}: {ours[place]}, not {theirs[place]} (gap {gap})"
            flips += 1
        return flips


def assert_greedy(model: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token of the output is what a transformers model would draw there, but for near ties."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    gaps = logits.max(-1).values - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    assert gaps.max() < NEAR_TIE, f"token {int(gaps.argmax())} is {float(gaps.max())} below the best"
