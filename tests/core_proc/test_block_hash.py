"""Names of KV blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from core_proc.block_hash import chain_root, extend_chain

ROOT = Path(__file__).parents[2]
PRINT_HASHES = """
import numpy as np
from core_proc.block_hash import chain_root, extend_chain
hashes = []
extend_chain(hashes, chain_root([("salt", "tenant-7")]), np.arange(40, dtype=np.int32), 16)
print(*(h.hex() for h in hashes))
"""


def chain(token_ids: list[int], root: bytes = b"", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root, np.array(token_ids, np.int32), block_size)
    return hashes


def test_hash_covers_all_tokens_up_to_the_end_of_its_block() -> None:
    ones, twos = [1] * 4, [2] * 4
    first, second = chain([*ones, *ones])
    assert first != second, "same tokens, other parent"
    assert chain([*twos, *ones])[1] not in (first, second)
    assert chain([*ones, *twos])[0] == first


def test_only_full_blocks_are_hashed() -> None:
    assert [len(chain([1] * n)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_chain_grows_as_if_made_at_once() -> None:
    token_ids = np.arange(30, dtype=np.int32)
    hashes: list[bytes] = []
    for length in (2, 4, 5, 15, 16, 16, 30):
        extend_chain(hashes, b"root", token_ids[:length], 4)
    assert hashes == chain(list(range(30)), b"root")


def test_salt_and_adapter_of_one_name_have_different_roots() -> None:
    roots = {
        chain_root(extra)
        for extra in (
            [],
            [("salt", "")],
            [("salt", "x")],
            [("adapter", "x")],
            [("salt", "x"), ("adapter", "x")],
            [("adapter", "x"), ("salt", "x")],
            [("salt", "xadapterx")],
            [("sal", "tx")],
        )
    }
    assert len(roots) == 8


def test_root_goes_into_every_hash_of_its_chain() -> None:
    plain, salted = (chain(list(range(12)), chain_root(extra)) for extra in ([], [("salt", "x")]))
    assert not set(plain) & set(salted)


def test_restart_reproduces_the_hashes() -> None:
    hashes: list[bytes] = []
    extend_chain(hashes, chain_root([("salt", "tenant-7")]), np.arange(40, dtype=np.int32), 16)
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [sys.executable, "-c", PRINT_HASHES], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [block_hash.hex() for block_hash in hashes]
    # Across releases, too: caches outside the process may outlive it.
    assert [block_hash.hex() for block_hash in hashes] == [
        "f9cf1bb5af2cf3f30d015254451a4aeb",
        "60a46be5971c95b0a15b3d6953fd4601",
    ]
