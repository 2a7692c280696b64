"""GGUFFile: the header of a GGUF file (versions 2 and 3), parsed directly and bounds-checked.

The format is public (ggml, docs/gguf.md): magic, version, two counts, then typed key-value pairs,
then tensor descriptions, then the tensor data, aligned. All of it little-endian. The package
reader makes an object per string, which takes seconds for a vocabulary; this one takes 0.1 s.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protos.errors import StartupError

BLOCK_FORMATS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""By ggml type id: name, weights per block, bytes per block."""

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64, _TYPE_AND_COUNT = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_PROBLEM = 300
_MAX_TENSORS, _MAX_VALUES = 1 << 18, 1 << 16
_MAX_NAME = 1 << 10
"""Bytes of a key's or a tensor's name; llama.cpp's tensors have 64."""
_MAX_STRING = 16 << 20
_MAX_STRINGS, _MAX_NESTED = 1 << 24, 1 << 12
"""Of an array. Its bytes lie in the file, but what Python makes of them is larger."""
_MAX_ALIGNMENT = 1 << 20
_MAX_PARTS = 1 << 10
_PART_NAME = re.compile(r"(.*)-00001-of-\d{5}\.gguf", re.DOTALL)
"""The first of several files, as llama.cpp's gguf-split names them."""


class GGUFTensor(msgspec.Struct, frozen=True):
    """Where one tensor lies, and in which block format."""

    path: str
    """Its file."""
    name: str
    shape: tuple[int, ...]
    """Row-major: the reverse of ggml's dimensions. Blocks run along the last axis."""
    type: int
    """ggml type id, a key of BLOCK_FORMATS."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFFile(msgspec.Struct, frozen=True):
    """The header of a GGUF file, with the tensors of the files that go on where it ends. Metadata values: scalars
    as Python's, arrays of strings as lists, arrays of numbers as one-dimensional numpy arrays."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: str | Path) -> GGUFFile:
    """Parses the header, and those of the other parts where a file is the first of several.

    Raises StartupError, one line naming the file and what is wrong with it.
    """
    first = _read_one(path)
    count = first.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= _MAX_PARTS:
        raise StartupError(f"{path}: split.count is {count!r}")
    if count < 2:
        return first
    parted = _PART_NAME.fullmatch(str(path))
    if parted is None:
        raise StartupError(f"{path}: is one of {count} parts; name the first, *-00001-of-{count:05}.gguf")
    tensors = dict(first.tensors)
    for part in range(2, count + 1):
        other = _read_one(f"{parted[1]}-{part:05}-of-{count:05}.gguf")
        for name, tensor in other.tensors.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise StartupError(f"{other.path}: tensor {name} is in {tensors[name].path} too")
    return GGUFFile(first.path, first.metadata, tensors)


def _read_one(path: str | Path) -> GGUFFile:
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _Header(str(path), data).parse()
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # mmap of an empty file
        raise StartupError(f"{path}: is empty") from None
    return GGUFFile(str(path), metadata, tensors)


class _Header:
    """A cursor over the mapped file; every read is checked against the file's end."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4, "magic") != b"GGUF":
            raise self._error("is not a GGUF file")
        version = self._uint32("version")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            kind = "big-endian" if big_endian else f"version {version}"
            raise self._error(f"is {kind} GGUF; only little-endian versions 2 and 3 can be read")
        num_tensors, num_values = self._uint64("tensor count"), self._uint64("metadata count")
        if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
            raise self._error(f"says it has {num_tensors} tensors and {num_values} values; it is damaged")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string("metadata key", _MAX_NAME)
            if key in metadata:
                raise self._error(f"metadata {key} occurs twice")
            metadata[key] = self._value(self._uint32(key), key, 0)
        return metadata, self._tensors(num_tensors, metadata.get("general.alignment", 32))

    def _tensors(self, count: int, alignment: object) -> dict[str, GGUFTensor]:
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise self._error(f"general.alignment is {alignment!r}")
        rows = [self._tensor_info() for _ in range(count)]
        data_start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, type_id, relative in rows:
            if type_id not in BLOCK_FORMATS:
                raise self._error(f"tensor {name} has block format {type_id}, which is not known")
            format_name, block_size, block_bytes = BLOCK_FORMATS[type_id]
            if math.prod(shape) == 0 or shape[-1] % block_size:
                raise self._error(f"tensor {name} of shape {shape} does not divide into {format_name} blocks")
            offset, nbytes = data_start + relative, math.prod(shape) // block_size * block_bytes
            if offset + nbytes > self._size:
                missing = offset + nbytes - self._size
                raise self._error(f"tensor {name} ends {missing} bytes after the end of the file; it was cut short")
            if name in tensors:
                raise self._error(f"tensor {name} occurs twice")
            tensors[name] = GGUFTensor(self._path, name, shape, type_id, offset, nbytes)
        self._check_overlaps(tensors)
        return tensors

    def _check_overlaps(self, tensors: dict[str, GGUFTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._error(f"tensor {tensor.name} overlaps {before}")
            end, before = tensor.offset + tensor.nbytes, tensor.name

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("tensor name", _MAX_NAME)
        num_dims = self._uint32(name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._uint64(name) for _ in range(num_dims))[::-1]
        return name, shape, self._uint32(name), self._uint64(name)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self._take(dtype.itemsize, key), dtype)[0].item()
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            raise self._error(f"metadata {key} has unknown type {kind}")
        item_kind, count = _TYPE_AND_COUNT.unpack(self._take(_TYPE_AND_COUNT.size, key))
        if item_kind in _SCALARS:
            dtype = _SCALARS[item_kind]
            return np.frombuffer(self._take(count * dtype.itemsize, key), dtype)
        if item_kind == _STRING:
            return self._strings(count, key)
        if count > _MAX_NESTED:
            raise self._error(f"metadata {key} has {count} entries")
        return [self._value(item_kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[str]:
        """A vocabulary has 100,000 of these, so the loop holds nothing but what it needs."""
        data, at, end, length_at = self._data, self._at, self._size, _U64.unpack_from
        if count > _MAX_STRINGS and count * 8 <= end - at:
            raise self._error(f"metadata {key} has {count} entries")
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    raise self._error(f"was cut short inside metadata {key}")
                strings.append(data[start:at].decode("utf-8", "replace"))
        except struct.error:
            raise self._error(f"was cut short inside metadata {key}") from None
        self._at = at
        return strings

    def _string(self, what: str, longest: int = _MAX_STRING) -> str:
        length = self._uint64(what)
        if longest < length <= self._size - self._at:
            raise self._error(f"{what} has {length} bytes")
        return self._take(length, what).decode("utf-8", "replace")

    def _uint32(self, what: str) -> int:
        (value,) = _U32.unpack(self._take(4, what))
        return int(value)

    def _uint64(self, what: str) -> int:
        (value,) = _U64.unpack(self._take(8, what))
        return int(value)

    def _take(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error(f"was cut short inside {what}")
        start, self._at = self._at, end
        return self._data[start:end]

    def _error(self, problem: str) -> StartupError:
        # A name in a damaged file can be anything; the message stays one readable line.
        printable = "".join(character if character.isprintable() else "?" for character in problem)
        return StartupError(f"{self._path}: {printable[:_MAX_PROBLEM]}")
