"""PrefixMap: which blocks of prompts each core holds in its prefix cache, as far as the front end knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from core_proc.block_hash import SHORT_SIZE, extend_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from protos.kv_changes import KVChanges


def prefix_hashes(token_ids: npt.NDArray[np.int32], block_size: int, root: bytes) -> list[int]:
    """Short hashes of the blocks of a prompt that a core may find in its cache: all full ones but that of the last
    token, which is always computed. `root` is the `request_root`."""
    chain: list[bytes] = []
    extend_chain(chain, root, token_ids[: len(token_ids) - 1], block_size)
    return [int.from_bytes(block_hash[:SHORT_SIZE], "little") for block_hash in chain]


class PrefixMap:
    """For each short hash the set of cores that hold the block, as bits of a number.

    A core is taken to hold what it told, and what requests will leave there that it was given: so a burst of equal
    prompts meets before the first one is computed. About 180 bytes per block of each core.
    """

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._num_bytes = -(-num_cores // 8)
        self._cores_of: dict[int, int] = {}
        self._stored: list[set[int]] = [set() for _ in range(num_cores)]
        self._expected: list[dict[int, int]] = [{} for _ in range(num_cores)]
        """Of each core, by hash: requests that are on their way with this block."""

    def __len__(self) -> int:
        """Blocks known, in however many cores."""
        return len(self._cores_of)

    def update(self, core: int, changes: KVChanges) -> None:
        """Takes in what a core tells."""
        stored, expected, bit = self._stored[core], self._expected[core], 1 << core
        cores_of = self._cores_of
        new = np.frombuffer(changes.stored, "<u8").tolist()
        for short_hash in new:
            stored.add(short_hash)
            cores_of[short_hash] = cores_of.get(short_hash, 0) | bit
        gone = stored.difference(new) if changes.is_all else np.frombuffer(changes.removed, "<u8").tolist()
        for short_hash in gone:
            # What came and went between two messages was never told of.
            if short_hash in stored:
                stored.remove(short_hash)
                if short_hash not in expected:
                    self._take_out(short_hash, bit)

    def expect(self, core: int, hashes: Iterable[int]) -> None:
        """A request goes to a core that will store these blocks."""
        expected, bit = self._expected[core], 1 << core
        for short_hash in hashes:
            expected[short_hash] = expected.get(short_hash, 0) + 1
            self._cores_of[short_hash] = self._cores_of.get(short_hash, 0) | bit

    def settle(self, core: int, hashes: Iterable[int]) -> None:
        """Undoes `expect`: what is stored by now has been told."""
        expected, stored, bit = self._expected[core], self._stored[core], 1 << core
        for short_hash in hashes:
            count = expected.pop(short_hash) - 1
            if count:
                expected[short_hash] = count
            elif short_hash not in stored:
                self._take_out(short_hash, bit)

    def forget(self, core: int) -> None:
        """A core is gone, and what it held and was to hold."""
        bit = 1 << core
        for short_hash in self._stored[core] | self._expected[core].keys():
            self._take_out(short_hash, bit)
        self._stored[core].clear()
        self._expected[core].clear()

    def lookup(self, hashes: Sequence[int]) -> npt.NDArray[np.int64]:
        """[num_cores]: how many of a prompt's first blocks each core holds."""
        found = np.zeros(self._num_cores, np.int64)
        cores, depth = (1 << self._num_cores) - 1, 0
        cores_of = self._cores_of
        for short_hash in hashes:
            further = cores & cores_of.get(short_hash, 0)
            if further != cores:
                found[self._members(cores & ~further)] = depth
                cores = further
                if not cores:
                    return found
            depth += 1
        found[self._members(cores)] = depth
        return found

    def _members(self, cores: int) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(cores.to_bytes(self._num_bytes, "little"), np.uint8)
        return np.unpackbits(bits, count=self._num_cores, bitorder="little").view(np.bool_)

    def _take_out(self, short_hash: int, bit: int) -> None:
        cores = self._cores_of[short_hash] & ~bit
        if cores:
            self._cores_of[short_hash] = cores
        else:
            del self._cores_of[short_hash]

    def audit(self) -> None:
        """Asserts that the two views of it agree."""
        assert all(self._cores_of.values())
        for core, (stored, expected) in enumerate(zip(self._stored, self._expected, strict=True)):
            held = {short_hash for short_hash, cores in self._cores_of.items() if cores >> core & 1}
            assert held == stored | expected.keys(), f"core {core}"
