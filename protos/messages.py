"""Messages between a front end and a core: requests down, columns of tokens up.

Handles are numbers a front end gives its requests; a core tells front ends apart by their
connection, so equal handles of two front ends never meet. Times are relative seconds: the two
ends need not share a clock.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from protos.adapter import Adapter
from protos.config import EngineConfig
from protos.kv_changes import KVChanges, MoreKV, UnwatchKV, WatchKV


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Below 100: the public reasons, with their numbers in `tailrace.v1`.
    From 100: failures, which become a gRPC status."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_FULL = 5
    TIME_LIMIT = 6
    ABORTED = 7
    CONSTRAINT_DONE = 8
    REPETITION = 9
    DEADLINE = 100
    QUEUE_TIMEOUT = 101
    ERROR = 102
    INVALID = 103
    OVERLOADED = 104
    SHED = 105
    NO_ADAPTER = 106

    @property
    def is_failure(self) -> bool:
        return self >= 100

    @property
    def is_complete(self) -> bool:
        """Whether the output came to an end, rather than being cut off from outside."""
        return not self.is_failure and self not in (FinishReason.ABORTED, FinishReason.TIME_LIMIT)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """What the device needs to draw a request's tokens; every default is filled in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last one is not drawn behind the others."""
    logprobs: int | None = None
    """Candidates to report beside each drawn token; 0 is the token alone, None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids reported at every position behind the candidates."""
    processed_logprobs: bool = False
    """Report what tokens are drawn from, rather than what the model said."""


class Adapters(msgspec.Struct, frozen=True, tag="adapters", array_like=True):
    """What a core holds beside the model. Core to front end: first of all, and whenever it changes."""

    loaded: list[Adapter] = []
    leaving: list[str] = []
    """Names of those that take no new requests, and go with the last one they have."""


# Front end to core ---------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """First message of the one that started the core: how to run."""

    config: EngineConfig
    eos_token_ids: tuple[int, ...]
    secret: bytes = b""
    """What other front ends must know to be let in, where the core listens for some."""
    model_digest: str = ""
    """For them to compare with that of their own files."""
    adapters: Adapters = Adapters()
    """What the core held that this one replaces: loaded before anybody is let in. Those that leave take requests until
    their unloading is asked for again, since such requests were the last core's."""


GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choices", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the output must look like."""

    kind: GrammarKind
    value: str = ""
    """Source of the kind; of choices, a JSON list of strings; of json_object, nothing."""


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary", array_like=True):
    """What the tokens spell: sent once, before the first request with a grammar."""

    tokens: list[bytes]
    """By id, what each adds to the UTF-8 text; empty where that is nothing."""
    special_token_ids: tuple[int, ...]
    """Control tokens: they are no text even where they have a spelling."""
    eos_token_ids: tuple[int, ...]


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """One more sequence from the same prompt."""

    handle: int
    seed: int


class Repetition(msgspec.Struct, frozen=True, array_like=True):
    """An output ends when its last tokens are one pattern, of `min_size` to `max_size` tokens, `count` times over."""

    min_size: int
    max_size: int
    count: int


class EngineCoreRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """One sequence to continue. Token ids are little-endian int32 bytes."""

    handle: int
    prompt_token_ids: bytes
    sampling: Sampling
    max_tokens: int
    """Output tokens at most, `output_token_ids` included."""
    output_token_ids: bytes = b""
    """Output made earlier, elsewhere or before a break: prefilled, counted as output, not sent again."""
    priority: int = 0
    cache_salt: str = ""
    bypass_cache: bool = False
    deadline: float | None = None
    """Seconds until the caller gives up; the request then fails."""
    time_limit: float | None = None
    """Seconds until the output ends with what there is."""
    queue_timeout: float | None = None
    """Seconds the request may wait for admission."""
    siblings: list[Sibling] = []
    """More sequences from the prompt: they start once it is computed, and share its blocks."""
    repetition: Repetition | None = None
    grammar: GrammarSpec | None = None
    prompt_logprobs_from: int = 1
    """First position of the prompt whose log-probability is wanted, where any is."""
    caller: str = ""
    """Who asks. Callers get their turns in fairness, whatever each of them asks for."""
    was_admitted: bool = False
    """By a core before this one: it goes on before what is new, and is not refused."""
    adapter: str = ""
    """Name of the adapter that it is computed with; empty is none."""


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Ends requests; unknown handles are ignored."""

    handles: list[int]
    stopped: bool = False
    """They are complete, by a stop string, rather than given up."""


ControlOp = Literal[
    "pause", "freeze", "resume", "reset_prefix_cache", "progress", "start_profile", "stop_profile", "sync"
]


class Control(msgspec.Struct, frozen=True, tag="control", array_like=True):
    """One of a closed set of commands, answered by a ControlReply.

    pause: admit nothing more, finish what runs. freeze: schedule nothing. resume: undo both.
    reset_prefix_cache: forget all cached blocks; answers [0] while one is in use, else [1].
    start_profile: record what core and workers do with their time; answers [0] if that is done already, else [1].
    stop_profile: the files of what was recorded for this front end.
    progress: of the request `argument`: [requests ahead in the queue, prompt tokens computed].
    sync: nothing; what changed before has been told.
    """

    call_id: int
    op: ControlOp
    argument: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """Answered by a ControlReply: [1], [0] if it is there already, or why not. Its Adapters come before."""

    call_id: int
    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """No new requests for an adapter. Answered by a ControlReply, when the last one is over and the adapter gone."""

    call_id: int
    name: str


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Asks the main loop for a Pong: silence then means a hung step."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Asks the core to leave."""


# Core to front end ---------------------------------------------------------------------------


class LoadProgress(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    """How far the weights are, in bytes."""

    done: int
    total: int


class CoreReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The engine can serve; what it turned out to hold."""

    max_model_len: int
    kv_capacity_tokens: int
    block_size: int
    max_num_seqs: int
    dtype: str
    device: str
    weight_bytes: int
    kv_cache_bytes: int
    max_adapters: int = 0
    max_adapter_rank: int = 0
    weights: str = ""
    """What matrices are held as, in words, where that is not `dtype`."""


class CoreFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Last message of a core that cannot go on: the root cause in one line."""

    message: str
    was_killed: bool = False
    """A worker was, from outside: that says little about the requests it was at."""


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A request was scheduled for the first time."""

    handle: int
    cached_tokens: int
    queue_seconds: float


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request is over. Sent once for each that was added."""

    handle: int
    reason: FinishReason
    stop_token_id: int = -1
    """The end-of-sequence token or stop id that ended it, else -1."""
    cached_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    message: str = ""
    """For failures: what to tell the caller."""
    field: str = ""
    """For INVALID: the field of the request at fault."""
    retry_after: float = 0.0
    """For SHED: seconds after which it might have been in time."""


class CoreStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges and, from `prompt_tokens` to `aborted_tokens`, totals since start."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction of the KV blocks in use, in [0, 1]."""
    steps_in_flight: int
    prompt_tokens: int
    output_tokens: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    preemptions: int
    steps: int
    aborted_tokens: int
    """Tokens computed for requests that were then aborted."""
    queue_seconds: float = 0.0
    """Until what waits now will have been admitted, by estimate."""

    def after(self, past: CoreStats) -> CoreStats:
        """With the totals of cores before this one added."""
        return msgspec.structs.replace(self, **{name: getattr(self, name) + getattr(past, name) for name in TOTALS})


TOTALS = CoreStats.__struct_fields__[
    CoreStats.__struct_fields__.index("prompt_tokens") : CoreStats.__struct_fields__.index("queue_seconds")
]
"""Fields of CoreStats that only grow, as long as the core lives."""
NO_STATS = CoreStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0)


class LogprobColumns(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n tokens. Little-endian int32 and float32 bytes."""

    index: bytes
    """Of each row, the token it describes: its place among the tokens of the message that carries the columns."""
    logprobs: bytes
    ranks: bytes
    """1 for the most likely token."""
    widths: bytes
    """Candidates of each row; the two columns below hold them row after row."""
    top_ids: bytes
    """Most likely first, then the ids the request asked for."""
    top_logprobs: bytes


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive tokens of a prompt, the first at `offset`, which is at least 1."""

    handle: int
    offset: int
    columns: LogprobColumns


class EngineCoreOutputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """What one step brought for one front end, in columns.

    `handles` is int64 and `token_ids` int32, little-endian, parallel: one new token each. A
    request is in `admitted` before its first token and in `finished` with or after its last.
    """

    handles: bytes = b""
    token_ids: bytes = b""
    admitted: list[Admitted] = []
    finished: list[Finished] = []
    stats: CoreStats | None = None
    logprobs: LogprobColumns | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    kv_changes: list[KVChanges] = []


class ControlReply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """Answer to a Control, a LoadAdapter or an UnloadAdapter."""

    call_id: int
    result: list[int]
    files: dict[str, bytes] = {}
    """By name."""
    error: str = ""
    """Why it cannot be done: one line."""
    reason: str = ""
    """Of the error that it is, in protos.errors."""


class Pong(msgspec.Struct, frozen=True, tag="pong", array_like=True):
    """Answer to a Ping, from the main loop between two steps."""


ToCore = (
    Hello
    | Vocabulary
    | EngineCoreRequest
    | Abort
    | Control
    | LoadAdapter
    | UnloadAdapter
    | WatchKV
    | MoreKV
    | UnwatchKV
    | Ping
    | Shutdown
)
ToFrontEnd = LoadProgress | CoreReady | CoreFailed | Adapters | EngineCoreOutputs | ControlReply | Pong
