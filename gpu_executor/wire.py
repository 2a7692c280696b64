"""What travels between an executor and workers in processes of their own, and how it is encoded.

Arrays travel as bytes in msgpack extensions, whose code says what they hold: nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from protos.adapter import Adapter
from protos.config import EngineConfig
from protos.place import Place
from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo

_DTYPES = {1: np.dtype("<i4"), 2: np.dtype("<f4"), 3: np.dtype("?")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
MATRIX = 16
"""Added to the code of an array of two dimensions; its data starts with the number of columns, an int32."""

# Executor to workers ---------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """First message to a worker: what to load."""

    config: EngineConfig
    eos_token_ids: tuple[int, ...]
    place: Place
    spin_seconds: float
    """How long to look for the next message before sleeping."""


class Execute(msgspec.Struct, frozen=True, tag="execute", array_like=True):
    """Run the forward pass of a step."""

    step: SchedulerOutput


class Sample(msgspec.Struct, frozen=True, tag="sample", array_like=True):
    """Draw the tokens of the step last executed."""

    mask: GrammarMask | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """Fill a slot, and tell."""

    slot: int
    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """Empty a slot, if it is filled."""

    slot: int


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile", array_like=True):
    """Record what you do with your time."""


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile", array_like=True):
    """Tell what you recorded."""


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """Leave."""


# Workers to executor ---------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    """How far a worker's weights are, in bytes."""

    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """A worker can run steps."""

    info: WorkerInfo


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed", array_like=True):
    """A worker could not start, and leaves."""

    message: str
    is_known: bool
    """It is a StartupError: likelier a cause than what came of another worker's end."""
    time: float
    """Seconds since the epoch: of several that fail, the first is the cause."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn", array_like=True):
    """What a step drew, from the one worker that tells."""

    output: ModelRunnerOutput


class StepFailed(msgspec.Struct, frozen=True, tag="step_failed", array_like=True):
    """A step raised on a worker."""

    step_id: int
    error: str
    """Type and text, in one line."""


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded", array_like=True):
    """A worker has an adapter, or not."""

    error: str = ""
    """Why not, in one line."""


class Profiled(msgspec.Struct, frozen=True, tag="profiled", array_like=True):
    """What a worker recorded: files by their names."""

    files: dict[str, bytes]


ToWorker = Execute | Sample | LoadAdapter | UnloadAdapter | StartProfile | StopProfile | Stop
FromWorker = Loading | Loaded | LoadFailed | Drawn | StepFailed | AdapterLoaded | Profiled


def one_line(error: BaseException) -> str:
    """Type and text of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} does not travel")
    if value.ndim == 1:
        return msgspec.msgpack.Ext(_CODES[value.dtype], value.tobytes())
    columns = np.int32(value.shape[1]).tobytes()
    return msgspec.msgpack.Ext(MATRIX + _CODES[value.dtype], columns + value.tobytes())


def _decode_array(code: int, data: memoryview) -> npt.NDArray[Any]:
    """A copy: aligned, writable, and independent of the message."""
    if code < MATRIX:
        return np.frombuffer(data, _DTYPES[code]).copy()
    columns = int(np.frombuffer(data[:4], "<i4")[0])
    return np.frombuffer(data[4:], _DTYPES[code - MATRIX]).reshape(-1, columns).copy()


def _accept_array(kind: type, value: Any) -> Any:
    """The extension made an array of it already."""
    return value


encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
start = msgspec.msgpack.Decoder(Start)
to_worker = msgspec.msgpack.Decoder(ToWorker, ext_hook=_decode_array, dec_hook=_accept_array)
from_worker = msgspec.msgpack.Decoder(FromWorker, ext_hook=_decode_array, dec_hook=_accept_array)
