"""DevicePolicy: all that differs between kinds of device, asked once; the only file that asks cpu or cuda."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernels.ops import make_ops
from kernels.reference import FP8
from model_runner.graph_backend import CudaGraphs
from model_runner.host_copy import CudaCopier, copy_here
from model_runner.kept import type_name
from model_runner.memory import CudaMemory
from model_runner.parallel import Workers, make_workers
from protos.config import MIB
from protos.errors import StartupError
from protos.model_spec import ModelSpec
from protos.place import ONLY

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from kernels.ops import Ops
    from model_runner.graph_backend import GraphBackend
    from model_runner.host_copy import HostCopier
    from model_runner.memory import MemoryMeter
    from protos.config import EngineConfig
    from protos.model_spec import BasicSpec
    from protos.place import Place

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHT_BITS = {"int8": 8, "int4": 4}
CPU_CACHE_LIMIT = 1024 * MIB
"""Largest KV cache taken without being asked for, bytes: a CPU's memory is shared with everything else."""


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """Where tensors live, of which type, what computes them, and who else has a part of them."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    max_steps_in_flight: int
    """Steps that may be scheduled ahead, unless the config says otherwise."""
    cache_limit: int | None
    """Bytes of the host's that the KV cache takes at most by itself."""
    chunk_cells: int
    """Numbers to take through a chain of elementwise operations at a time: on a CPU, what its cache holds."""
    cache_dtype: torch.dtype | None = None
    """Of keys and values in the KV cache; None is the type of all else."""
    workers: Workers = field(default_factory=Workers)
    keeps_weights: bool = False
    """Products take weights as a checkpoint has them, integers or floats of 16 bits, instead of floats of `dtype`."""
    weight_bits: int = 0
    """Of the integers that a checkpoint's floats become then; 0 where they stay floats."""
    activation_bits: int = 16
    """Of what integers are multiplied with."""
    shares_memory: bool = True
    """The device computes on the host's memory: what numpy writes there, tensors see."""
    graphs: Callable[[], GraphBackend] | None = None
    """Makes what records steps that decode."""
    has_program: bool = False
    """Steps of any size are one list of kernels. With neither, every step runs operation by operation."""
    memory: MemoryMeter | None = None
    """Of a device with memory of its own, which weights, steps and KV cache share."""
    to_host: HostCopier = copy_here
    """Starts a copy of tensors to the host; nobody waits for the device before `wait` is called on what it returns."""

    @property
    def dtype_name(self) -> str:
        return type_name(self.dtype)

    def tensor(self, array: npt.NDArray[np.generic[Any]]) -> torch.Tensor:
        """A copy or view of a numpy array on the device; on a CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        if self.shares_memory:
            return tensor
        # Of pinned memory the copy is made whenever the device gets there; torch keeps the memory until then.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def mirror(self, array: npt.NDArray[np.generic[Any]]) -> torch.Tensor:
        """What the device has of an array of zeros that will change: its memory, or a tensor that is to be told."""
        tensor = torch.from_numpy(array)
        return tensor if self.shares_memory else torch.zeros_like(tensor, device=self.device)

    def answers(self) -> bool:
        """Whether the device still computes: a fault in a kernel makes a GPU useless for the rest of the process."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def free_memory(self) -> int:
        """Bytes of the host's that can be allocated now: the share of one of its workers."""
        return _free_host_memory() // self.workers.place.local_size


def make_device(config: EngineConfig, spec: BasicSpec, place: Place = ONLY) -> DevicePolicy:
    """The policy the config asks for, for a model, on the devices that are this worker's. Raises StartupError where
    there are none.

    Sets the number of threads torch computes with, for the whole process.
    """
    kind: str = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    elif kind == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no usable GPU; use --device cpu, or a torch built for this GPU")
    on_cpu = kind == "cpu"
    num_threads = config.executor.num_threads or _cores_each(place, on_cpu, config.parallel.data_parallel_size)
    torch.set_num_threads(num_threads)
    name: str = config.model.dtype
    name_is_auto = name == "auto"
    if name_is_auto:
        name = "float32" if on_cpu else spec.dtype
    device = torch.device("cpu") if on_cpu else _gpu(place)
    ops = make_ops(device, config.cache.block_size, num_threads)
    weight_bits = _weight_bits(config, spec, ops)
    has_weights_to_keep = config.model.load_format == "auto" and _has_weights_to_keep(config, spec)
    keeps_weights = weight_bits > 0 or (name_is_auto and has_weights_to_keep and ops.keeps_integers)
    has_integers = keeps_weights and (weight_bits > 0 or spec.has_integers)
    return DevicePolicy(
        device=device,
        dtype=_DTYPES[name],
        ops=ops,
        max_steps_in_flight=1 if on_cpu else 2,
        cache_limit=CPU_CACHE_LIMIT // place.local_size if on_cpu else None,
        chunk_cells=1 << 18 if on_cpu else 1 << 26,
        cache_dtype=_cache_dtype(config, ops, _DTYPES[name], has_integers),
        workers=make_workers(place, device),
        keeps_weights=keeps_weights,
        weight_bits=weight_bits,
        activation_bits=int(config.model.activation_bits),
        shares_memory=on_cpu,
        graphs=None if on_cpu or not _records(config, place) else lambda: CudaGraphs(device),
        # Torch's own products of floats are no part of a program, nor is what workers add up.
        has_program=keeps_weights and place.tensor_size == 1 and _records(config, place),
        memory=None if on_cpu else CudaMemory(device),
        to_host=copy_here if on_cpu else CudaCopier(device),
    )


def _weight_bits(config: EngineConfig, spec: BasicSpec, ops: Ops) -> int:
    """What floats become as --quantization says; 0 for floats. Raises StartupError where they cannot."""
    name = config.model.quantization
    if name not in _WEIGHT_BITS:
        return 0
    if not ops.keeps_integers:
        raise StartupError(f"--quantization {name} is for a CPU with the C++ kernels; leave it at auto")
    if config.model.dtype != "auto":
        raise StartupError(f"--quantization {name} does not go with --dtype {config.model.dtype}; leave that at auto")
    if not isinstance(spec, ModelSpec):
        raise StartupError(
            f"--quantization {name}: architecture {spec.architecture} is computed by transformers' own code, on floats"
        )
    return _WEIGHT_BITS[name]


def _has_weights_to_keep(config: EngineConfig, spec: BasicSpec) -> bool:
    """Whether the files have more than floats of 32 bits; in place of integers, floats may be asked for."""
    if not isinstance(spec, ModelSpec):
        return False
    return config.model.quantization != "none" if spec.has_integers else spec.dtype != "float32"


def _cache_dtype(config: EngineConfig, ops: Ops, dtype: torch.dtype, has_integers: bool) -> torch.dtype | None:
    wanted: str = config.cache.kv_cache_dtype
    if wanted == "auto":
        # Products with integers are not float32's to the last bit either: see tests.bench.agreement.
        return torch.float16 if has_integers else None
    if wanted == "fp8":
        if not ops.takes_fp8_cache:
            raise StartupError("--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more")
        return FP8
    if _DTYPES[wanted] is not dtype and not ops.mixes_cache_types:
        raise StartupError(f"--kv-cache-dtype {wanted} needs a CPU, or --dtype {wanted}")
    return _DTYPES[wanted]


def _records(config: EngineConfig, place: Place) -> bool:
    """What a stage waits for and hands on is not part of a recording."""
    return config.executor.graphs != "off" and place.pipeline_size == 1


def _gpu(place: Place) -> torch.device:
    """The one of its node that this worker takes."""
    if place.local_size > torch.cuda.device_count():
        raise StartupError(
            f"this node has {torch.cuda.device_count()} GPUs for {place.local_size} workers; lower "
            "--tensor-parallel-size or --pipeline-parallel-size"
        )
    return torch.device("cuda", place.local_rank)


def _cores_each(place: Place, on_cpu: bool, num_engines: int) -> int:
    """CPU cores for each worker of this node so that no two share one; as many engines share the node."""
    cores = max(1, _num_cores() // num_engines)
    if on_cpu and place.local_size > cores:
        raise StartupError(
            f"this node has {cores} cores for {place.local_size} workers; lower --tensor-parallel-size or "
            "--pipeline-parallel-size, or set --num-threads 1 to let them share"
        )
    return max(1, cores // place.local_size)


def _num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_host_memory() -> int:
    """What the machine has left, or the control group where that is less; the page cache counts as free."""
    meminfo = _numbers(Path("/proc/meminfo"))
    free = meminfo.get("MemAvailable:", 0) * 1024 or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used + _numbers(group / "memory.stat").get("inactive_file", 0))
    return max(0, free)


def _number(path: Path) -> int | None:
    """A file that holds one number; None where it does not exist or says `max`."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines that start with a name and a number."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: int(number) for name, number, *_ in map(str.split, lines)}
