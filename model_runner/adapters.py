"""Adapters: those that are loaded, by slot, and which tokens of a step are whose."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open

from kernels.low_rank import LowRank, LowRankPart
from model_runner.shard import all_of
from model_runner.target import Target
from protos.adapter_files import WEIGHTS, adapter_modules
from protos.config import MIB
from protos.errors import AdapterError
from protos.tensor_names import bare_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kernels.low_rank import Tokens
    from model_runner.device import DevicePolicy
    from model_runner.layers.added import Added
    from protos.adapter import Adapter
    from protos.adapter_files import AdapterModule
    from protos.model_spec import BasicSpec

    Int32s = npt.NDArray[np.int32]


class Adapters:
    """Each Linear of the model adds the products of those that have something for it; a step without adapters is as
    if there were none."""

    def __init__(self, spec: BasicSpec, table: dict[str, Target], max_rank: int, policy: DevicePolicy) -> None:
        """`table` is the model's, whole or of a stage."""
        self._spec, self._max_rank, self._policy = spec, max_rank, policy
        self._targets = {
            bare_name(name).removesuffix(".weight"): target
            for name, target in table.items()
            if target.linear is not None and name.endswith(".weight")
        }
        self._groups: list[tuple[int, Tokens]] = []
        self._loaded: set[int] = set()
        for added in self._all():
            added.groups = self._groups

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        """Reads this worker's part of an adapter into an empty slot. Raises AdapterError where the files do not fit,
        or not into memory; then the slot is empty."""
        modules = adapter_modules(adapter, self._spec, self._max_rank)
        of_worker = [module for module in modules if self._is_here(adapter, module)]
        self._check_memory(adapter, of_worker)
        parts: dict[Added, list[LowRankPart]] = {}
        with safe_open(Path(adapter.path) / WEIGHTS, framework="pt") as file:
            for module in of_worker:
                target = self._target(module)
                assert target.linear is not None
                parts.setdefault(target.linear.added, []).append(self._read(adapter, module, target, file))
        factors = {added: LowRank(some) for added, some in parts.items()}
        for added, one in factors.items():
            added.slots[slot] = one
        self._loaded.add(slot)

    def unload(self, slot: int) -> None:
        """Empties a slot, if it is not."""
        self._loaded.discard(slot)
        for added in self._all():
            added.slots.pop(slot, None)

    @contextmanager
    def of_rows(self, slots: Int32s, counts: Int32s) -> Iterator[None]:
        """Within it the model computes a step whose rows have these slots, 0 for none, and so many tokens each.

        Raises RuntimeError for a slot that is not loaded.
        """
        try:
            if slots.any():
                self._group(slots, counts)
            yield
        finally:
            self._groups.clear()

    def _group(self, slots: Int32s, counts: Int32s) -> None:
        if missing := set(slots.tolist()) - self._loaded - {0}:
            raise RuntimeError(f"no adapter is in slot {min(missing)}")
        of_tokens = np.repeat(slots, counts)
        order = np.argsort(of_tokens, kind="stable")
        on_device = self._policy.tensor(order)
        present, firsts = np.unique(of_tokens[order], return_index=True)
        for slot, first, end in zip(present.tolist(), firsts, [*firsts[1:], len(order)], strict=True):
            if slot:
                least, most = int(order[first]), int(order[end - 1])
                are_neighbours = most - least == end - 1 - first
                self._groups.append((slot, slice(least, most + 1) if are_neighbours else on_device[first:end]))

    def _all(self) -> set[Added]:
        return {target.linear.added for target in self._targets.values() if target.linear is not None}

    def _target(self, module: AdapterModule) -> Target:
        return self._targets[bare_name(module.name)]

    def _is_here(self, adapter: Adapter, module: AdapterModule) -> bool:
        """Whether the module is of this stage. Raises AdapterError if it is of none."""
        if bare_name(module.name) in self._targets:
            return True
        if self._policy.workers.place.pipeline_size == 1:
            raise AdapterError(f"{Path(adapter.path) / WEIGHTS}: the model has no linear module {module.name}")
        return False

    def _check_memory(self, adapter: Adapter, modules: list[AdapterModule]) -> None:
        """A device with memory of its own says by itself that it has no more; a host may end us instead."""
        needed = sum(4 * module.rank * sum(self._target(module).tensor.shape) for module in modules)
        if self._policy.shares_memory and needed > (free := self._policy.free_memory()):
            raise AdapterError(f"{adapter.path}: needs {needed // MIB + 1} MiB, and {free // MIB} are free")

    def _read(self, adapter: Adapter, module: AdapterModule, target: Target, file: safe_open) -> LowRankPart:
        """What of a module's factors is for this worker's inputs and outputs."""
        rank, (outs, ins) = (all_of(module.rank),), target.axes
        a, b = (torch.empty(module.rank, size) for size in target.tensor.shape[::-1])
        for name, part in ((module.a, Target(a, (rank, ins))), (module.b, Target(b.mT, (outs, rank)))):
            whole = file.get_tensor(name)
            if tuple(whole.shape) != part.shape:
                raise AdapterError(
                    f"{Path(adapter.path) / WEIGHTS}: tensor {name} has shape {list(whole.shape)}, not "
                    f"{list(part.shape)} as module {module.name} wants"
                )
            if not whole.isfinite().all():
                raise AdapterError(f"{Path(adapter.path) / WEIGHTS}: tensor {name} holds what is no number")
            for place, view in part.pieces():
                view.copy_(whole[place])
        assert target.linear is not None
        return LowRankPart(target.linear.first, *(half.to(self._policy.device) for half in (a, b * module.scale)))
