"""What a core and a front end that comes to it say before either trusts the other.

    core       Challenge(version, nonce)
    front end  Join(nonce, proof)
    core       Welcome(proof, ...), or CoreFailed with the reason

A proof is an HMAC over both nonces under the secret, which itself is never sent; each side's is another, so that
neither can be answered with its own words. A Challenge is understood by every version, present and future.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib.metadata
import secrets
import struct
from typing import Any, Literal

import msgspec

from protos.codec import encode_frame
from protos.config import EngineConfig
from protos.messages import CoreFailed, ToCore, ToFrontEnd

HANDSHAKE_SECONDS = 10.0
"""What the whole of it may take."""
MAX_FIRST_FRAME = 1 << 16
"""Bytes of a frame that comes before its sender is trusted."""
MIN_SECRET = 16
_LENGTH = struct.Struct("<I")


class HandshakeError(Exception):
    """The other side is not one of ours, or not one that knows the secret."""


class Challenge(msgspec.Struct, frozen=True, tag="tailrace-core", array_like=True):
    """The first word of a core."""

    version: str
    nonce: bytes


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """A front end shows that it knows the secret."""

    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """So does the core; and what it serves."""

    proof: bytes
    config: EngineConfig
    eos_token_ids: tuple[int, ...]
    model_digest: str
    """Of the files that say what its tokens mean."""


challenges = msgspec.msgpack.Decoder(Challenge)
joins = msgspec.msgpack.Decoder(Join)
answers = msgspec.msgpack.Decoder(Welcome | CoreFailed)

Side = Literal["core", "front end"]


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def prove(secret: bytes, side: Side, challenge: Challenge, nonce: bytes) -> bytes:
    """That `side` knows the secret; `nonce` is the front end's."""
    text = b"\0".join((side.encode(), challenge.version.encode(), challenge.nonce.hex().encode(), nonce.hex().encode()))
    return hmac.digest(secret, text, "sha256")


def is_proven(proof: bytes, secret: bytes, side: Side, challenge: Challenge, nonce: bytes) -> bool:
    return hmac.compare_digest(proof, prove(secret, side, challenge, nonce))


def frame(message: Challenge | Join | Welcome | CoreFailed) -> bytes:
    return encode_frame(message)


def frame_length(header: bytes) -> int:
    """Bytes that follow the header of a frame. Raises HandshakeError if they are more than a stranger may send."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FIRST_FRAME:
        raise HandshakeError("what came first is no message of ours")
    return int(length)


HEADER_BYTES = _LENGTH.size


def decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    """Raises HandshakeError if the body is none of the decoder's messages."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise HandshakeError("what came first is no message of ours") from None


@functools.cache
def version() -> str:
    """The program's, with a digest of all messages: what differs in either cannot talk."""
    _, schemas = msgspec.json.schema_components([ToCore, ToFrontEnd, Welcome])
    shape = msgspec.json.encode(_without_words(schemas), order="sorted")
    return f"{importlib.metadata.version('tailrace')}-{hashlib.sha256(shape).hexdigest()[:8]}"


def _without_words(schema: Any) -> Any:
    """A schema without what is written for readers only."""
    if isinstance(schema, dict):
        return {
            key: _without_words(value)
            for key, value in schema.items()
            if not (key in ("description", "title") and isinstance(value, str))
        }
    return [_without_words(value) for value in schema] if isinstance(schema, list) else schema
