"""Hashes that name the content of KV blocks.

The hash of a block covers all tokens up to its end, because keys and values depend on them:
H(hash of the block before, tokens of this block). The chain starts from a root that holds whatever
else they depend on or must be isolated by, each item with its kind, so that a cache salt never
meets an adapter of the same name. Nothing random goes in: a restart finds the same hashes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

DIGEST_SIZE = 16
SHORT_SIZE = 8
"""Bytes of a hash that are told to others: enough to guess by, which is what they do."""


def request_root(cache_salt: str, adapter: str) -> bytes:
    """Root of a request's chain; `adapter` is the digest of its adapter's files, empty without one."""
    return chain_root([("salt", cache_salt), *([("adapter", adapter)] if adapter else [])])


def chain_root(extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """Root of a chain; `extra` are (kind, value) pairs such as ("salt", "tenant-7")."""
    digest = blake2b(digest_size=DIGEST_SIZE)
    for item in extra:
        for part in item:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def extend_chain(hashes: list[bytes], root: bytes, token_ids: npt.NDArray[np.int32], block_size: int) -> None:
    """Appends the hashes of the full blocks of `token_ids` (from position 0) that `hashes` lacks."""
    parent = hashes[-1] if hashes else root
    width = token_ids.itemsize * block_size
    data = token_ids[len(hashes) * block_size : len(token_ids) // block_size * block_size].tobytes()
    for start in range(0, len(data), width):
        digest = blake2b(parent, digest_size=DIGEST_SIZE)
        digest.update(data[start : start + width])
        parent = digest.digest()
        hashes.append(parent)
