"""The C++ kernels of cpp/, loaded and called: one function that runs lists of calls, and a struct of arguments for each
kernel.

The same source is compiled once per instruction set. A library is loaded after torch, so that it shares torch's OpenMP
runtime and its threads; ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(**groups: str) -> list[tuple[str, type]]:
    """Names of fields by their type, in order; a type that comes again has a number behind it."""
    types = {"pointer": _pointer, "int": _int, "long": _long, "float": _float}
    return [(name, types[kind.rstrip("0123456789")]) for kind, names in groups.items() for name in names.split()]


_NORM = _fields(pointer="x residual weight bias out", long="tokens size", float="eps", int="dtype")
_ARGUMENTS = {
    "attention": _fields(
        pointer="query key_cache value_cache out query_starts seq_lens block_tables",
        long="query_stride table_stride",
        int="num_rows num_heads num_kv_heads head_dim block_size sliding_window dtype cache_dtype",
        float="scale softcap",
    ),
    "write_kv": _fields(
        pointer="key value key_cache value_cache slots",
        long="tokens key_stride value_stride",
        int="dtype cache_dtype kv_heads head_dim block_size",
    ),
    "rms_norm": _NORM,
    "layer_norm": _NORM,
    "norm_heads": _fields(pointer="x weight", long="tokens stride", float="eps", int="dtype heads head_dim"),
    "rotary": _fields(pointer="x cosines sines", long="tokens stride", int="dtype heads head_dim rotated"),
    "gated": _fields(pointer="x out", long="tokens size", int="dtype activation"),
    "gelu": _fields(pointer="x out", long="cells", int="dtype"),
    "softcap": _fields(pointer="x", long="cells", float="cap"),
    "add": _fields(pointer="x y", long="rows size y_stride", int="dtype"),
    "scale": _fields(pointer="x", long="cells", float="factor", int="dtype"),
    "add_low_rank": _fields(pointer="x out a b tokens", long="count ins outs stride", int="rank dtype"),
    "argmax": _fields(pointer="x rows out", long="count size"),
    "draw": _fields(pointer="logits rows temperatures keys limits out", long="count size"),
    "thresholds": _fields(pointer="logits rows temperatures top_k top_p log_min_p out", long="count size"),
    "rows": _fields(pointer="table indices out", long="count bytes stride"),
    "quantised_linear": _fields(
        pointer="tiles x out",
        long="rows size outputs stride",
        int="bits group has_minimums wide_scales activation_bits",
    ),
    "quantised_rows": _fields(
        pointer="tiles indices out", long="count size", int="bits group has_minimums wide_scales"
    ),
    "halves_linear": _fields(pointer="tiles x out", long="rows size outputs stride", int="dtype"),
    "halves_rows": _fields(pointer="tiles indices out", long="count size", int="dtype"),
    "step_tensors": _fields(
        pointer="token_table block_table rows starts query_starts input_ids positions slots out_query_starts seq_lens "
        "block_tables",
        long="token_stride block_stride out_stride num_rows padded_rows padded_tokens width block_size",
    ),
}
"""Of each kernel the fields of its arguments, as cpp/ declares them."""


class Call(ctypes.Structure):
    """A kernel and its arguments."""

    _fields_ = [("kernel", _pointer), ("args", _pointer)]


class Pace(ctypes.Structure):
    """How long a list takes, of which cpp/team.h decides on how many threads it runs."""

    _fields_ = [("alone", ctypes.c_double), ("alone_until", ctypes.c_double)]


class Library:
    """The kernels of one instruction set."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the operating system does not let the process use what the processor has."""
        library = ctypes.CDLL(str(path))
        if not library.tailrace_may_run():
            raise OSError(f"{path.name} may not run here")
        self._run = library.tailrace_run
        self._run.argtypes, self._run.restype = [_pointer, _long, _int, _pointer], None
        library.tailrace_kernel.argtypes, library.tailrace_kernel.restype = [ctypes.c_char_p], _pointer
        self.addresses: dict[str, int] = {name: library.tailrace_kernel(name.encode()) for name in _ARGUMENTS}
        self.vector_width: int = library.tailrace_vector_width()

    def run_list(self, calls: ctypes.Array[Call], count: int, num_threads: int, pace: Pace) -> None:
        """The first so many, one after the other; what was learnt of the same list before is in its pace."""
        self._run(calls, count, num_threads, ctypes.byref(pace))

    def run(self, call: Call, num_threads: int) -> None:
        """Threads are woken only where it pays."""
        self._run(ctypes.byref(call), 1, num_threads, None)


@cache
def load_library(variant: str) -> Library | None:
    """The kernels compiled for an instruction set, or None where they were not built or may not run."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_cpu_{variant}{suffix}")
        if path.exists():
            try:
                return Library(path)
            except OSError as error:
                logger.info("%s", error)
                return None
    return None


def variants() -> list[str]:
    """The instruction sets of this processor, best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    has_avx512 = capability == "AVX512" and torch.cpu._is_vnni_supported()
    has_amx = has_avx512 and torch.cpu._is_amx_tile_supported()
    has_avx2 = capability in ("AVX2", "AVX512")
    return ["amx"] * has_amx + ["avx512"] * has_avx512 + ["avx2"] * has_avx2 + ["generic"]


class Calls:
    """Carries out kernels on some threads, or records that they were called for."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library, self.num_threads = library, num_threads
        self.recording: list[tuple[int, ctypes.Structure]] | None = None
        """Kernels and their arguments, in order, while they are recorded instead of carried out."""

    def kernel(self, name: str) -> Callable[..., None]:
        """Calls a kernel with the values of its arguments, in order."""
        address, run, num_threads = self.library.addresses[name], self.library.run, self.num_threads
        make: type[Any] = type(name, (ctypes.Structure,), {"_fields_": _ARGUMENTS[name]})
        addressof = ctypes.addressof

        def call(*values: Any) -> None:
            arguments = make(*values)
            if self.recording is None:
                run(Call(address, addressof(arguments)), num_threads)
            else:
                self.recording.append((address, arguments))

        return call
