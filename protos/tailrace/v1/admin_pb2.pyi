import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]
    ENGINE_STATE_RECOVERING: _ClassVar[EngineState]
    ENGINE_STATE_HUNG: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_FAILED: _ClassVar[EngineState]

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_UNSPECIFIED: _ClassVar[RequestPhase]
    REQUEST_PHASE_QUEUED: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILL: _ClassVar[RequestPhase]
    REQUEST_PHASE_DECODE: _ClassVar[RequestPhase]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_PAUSED: EngineState
ENGINE_STATE_RECOVERING: EngineState
ENGINE_STATE_HUNG: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_FAILED: EngineState
REQUEST_PHASE_UNSPECIFIED: RequestPhase
REQUEST_PHASE_QUEUED: RequestPhase
REQUEST_PHASE_PREFILL: RequestPhase
REQUEST_PHASE_DECODE: RequestPhase

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "model", "version", "uptime", "live_requests", "running_sequences", "waiting_sequences", "queue_wait", "kv_usage", "kv_capacity_tokens", "prompt_tokens", "output_tokens", "prefix_queries", "prefix_hits", "preemptions", "steps", "core_restarts", "core_silence", "finished_requests", "time_to_first_token", "inter_token", "end_to_end")
    class FinishedRequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CORE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    CORE_SILENCE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TO_END_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    model: str
    version: str
    uptime: _duration_pb2.Duration
    live_requests: int
    running_sequences: int
    waiting_sequences: int
    queue_wait: _duration_pb2.Duration
    kv_usage: float
    kv_capacity_tokens: int
    prompt_tokens: int
    output_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
    core_restarts: int
    core_silence: _duration_pb2.Duration
    finished_requests: _containers.ScalarMap[str, int]
    time_to_first_token: LatencyPercentiles
    inter_token: LatencyPercentiles
    end_to_end: LatencyPercentiles
    def __init__(self, state: _Optional[_Union[EngineState, str]] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., live_requests: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_usage: _Optional[float] = ..., kv_capacity_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., steps: _Optional[int] = ..., core_restarts: _Optional[int] = ..., core_silence: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., finished_requests: _Optional[_Mapping[str, int]] = ..., time_to_first_token: _Optional[_Union[LatencyPercentiles, _Mapping]] = ..., inter_token: _Optional[_Union[LatencyPercentiles, _Mapping]] = ..., end_to_end: _Optional[_Union[LatencyPercentiles, _Mapping]] = ...) -> None: ...

class LatencyPercentiles(_message.Message):
    __slots__ = ("p50", "p90", "p99")
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    p50: _duration_pb2.Duration
    p90: _duration_pb2.Duration
    p99: _duration_pb2.Duration
    def __init__(self, p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., p90: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size",)
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    def __init__(self, page_size: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "omitted")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    omitted: int
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., omitted: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "caller", "phase", "age", "prompt_tokens", "output_tokens", "sequences", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    caller: str
    phase: RequestPhase
    age: _duration_pb2.Duration
    prompt_tokens: int
    output_tokens: int
    sequences: int
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., caller: _Optional[str] = ..., phase: _Optional[_Union[RequestPhase, str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("freeze",)
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    freeze: bool
    def __init__(self, freeze: bool = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("restart_running",)
    RESTART_RUNNING_FIELD_NUMBER: _ClassVar[int]
    restart_running: bool
    def __init__(self, restart_running: bool = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchKvEventsRequest(_message.Message):
    __slots__ = ("snapshot", "token_ids")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    token_ids: bool
    def __init__(self, snapshot: bool = ..., token_ids: bool = ...) -> None: ...

class WatchKvEventsResponse(_message.Message):
    __slots__ = ("data_parallel_rank", "sequence_number", "cleared", "removed_block_hashes", "stored_blocks", "has_more", "block_size")
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    data_parallel_rank: int
    sequence_number: int
    cleared: bool
    removed_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    stored_blocks: _containers.RepeatedCompositeFieldContainer[CachedBlock]
    has_more: bool
    block_size: int
    def __init__(self, data_parallel_rank: _Optional[int] = ..., sequence_number: _Optional[int] = ..., cleared: bool = ..., removed_block_hashes: _Optional[_Iterable[int]] = ..., stored_blocks: _Optional[_Iterable[_Union[CachedBlock, _Mapping]]] = ..., has_more: bool = ..., block_size: _Optional[int] = ...) -> None: ...

class CachedBlock(_message.Message):
    __slots__ = ("block_hash", "parent_block_hash", "cache_salt", "token_ids", "adapter")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    parent_block_hash: int
    cache_salt: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: str
    def __init__(self, block_hash: _Optional[int] = ..., parent_block_hash: _Optional[int] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[str] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("duration",)
    DURATION_FIELD_NUMBER: _ClassVar[int]
    duration: _duration_pb2.Duration
    def __init__(self, duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ProfileFile]
    def __init__(self, files: _Optional[_Iterable[_Union[ProfileFile, _Mapping]]] = ...) -> None: ...

class ProfileFile(_message.Message):
    __slots__ = ("path", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "max_adapters")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_adapters: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_adapters: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest", "rank", "size_bytes", "unloading")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNLOADING_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    rank: int
    size_bytes: int
    unloading: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., size_bytes: _Optional[int] = ..., unloading: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("time_limit",)
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    time_limit: _duration_pb2.Duration
    def __init__(self, time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("cut_requests",)
    CUT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    cut_requests: int
    def __init__(self, cut_requests: _Optional[int] = ...) -> None: ...
