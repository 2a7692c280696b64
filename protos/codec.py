"""One encoder and decoder per direction, and the framing that carries them over a byte stream.

A frame is a little-endian uint32 length and that many bytes of msgpack.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from protos.messages import ToCore, ToFrontEnd

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
to_core = msgspec.msgpack.Decoder(ToCore)
to_front_end = msgspec.msgpack.Decoder(ToFrontEnd)


class FrameError(Exception):
    """The peer sent bytes that are not a frame of ours."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """The frame of a message, length included."""
    return frame(message, _encoder)


def frame(message: msgspec.Struct, encoder: msgspec.msgpack.Encoder) -> bytes:
    """The same for messages between others."""
    buffer = bytearray(_LENGTH.size)
    encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


def prefixed(body: bytes) -> bytes:
    """The frame of a message that is encoded already."""
    return _LENGTH.pack(len(body)) + body


MessageT = TypeVar("MessageT")


def read_frames(sock: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]) -> Iterator[MessageT]:
    """What comes on a socket that blocks, until the other side closes it."""
    frames = FrameDecoder(decoder)
    while data := sock.recv(1 << 16):
        yield from frames.feed(data)


class FrameDecoder(Generic[MessageT]):
    """Cuts a byte stream into messages. Unknown newer fields are ignored.

    `feed` raises FrameError for bytes that are no valid frame; the stream is then unusable.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[MessageT]:
        """Yields the messages that `data` completes."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[start + _LENGTH.size : end])
                start = end
                try:
                    message = self._decoder.decode(body)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise FrameError(f"malformed message: {error}") from None
                yield message
        finally:
            del buffer[:start]
