"""StepDraft: what a step will change in the worker's batch, while it is being put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.step import NewRow

if TYPE_CHECKING:
    from core_proc.request import Request
    from core_proc.shares import Share


@dataclass(slots=True)
class StepDraft:
    """Columns of rows and the blocks they got are parallel."""

    new_rows: list[NewRow] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    grown: set[int] = field(default_factory=set)
    """Rows that got blocks: the only decoding ones that may have filled one."""
    share: Share | None = None
    """The most it may take, where it has to leave work to other steps."""

    def enter(self, request: Request) -> None:
        """A request has got a row."""
        self.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=list(request.block_ids),
                sampling=request.params.sampling,
                prompt_logprobs_from=request.prompt_logprobs_from,
                adapter=0 if request.adapter is None else request.adapter.slot,
            )
        )

    def grow(self, row: int, blocks: list[int]) -> None:
        """A row has got more blocks."""
        self.block_rows += [row] * len(blocks)
        self.block_ids += blocks
        self.grown.add(row)
