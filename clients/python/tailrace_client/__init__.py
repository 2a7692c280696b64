"""Client of a Tailrace server: AsyncClient for event loops, Client for all other programs.

async with AsyncClient("127.0.0.1:50051") as client:
    async with client.generate("Once upon a time", max_tokens=64) as stream:
        async for delta in stream:
            print(delta.text, end="", flush=True)
"""

from tailrace_client.async_client import AsyncClient, AsyncStream
from tailrace_client.channel import Tls
from tailrace_client.client import Client, Stream
from tailrace_client.errors import (
    AuthenticationError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    ServerError,
    TailraceError,
    UnavailableError,
    UnsupportedError,
)
from tailrace_client.events import (
    Completion,
    Delta,
    Finish,
    FinishReason,
    Progress,
    Started,
    Summary,
    TokenLogprobs,
    ToolCallDelta,
)
from tailrace_client.resume import ResumePolicy
from tailrace_client.spec import Options

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "Client",
    "Completion",
    "DeadlineError",
    "Delta",
    "DuplicateRequestError",
    "Finish",
    "FinishReason",
    "InvalidRequestError",
    "NotFoundError",
    "Options",
    "OverloadedError",
    "Progress",
    "ProtocolError",
    "RequestCancelledError",
    "ResumePolicy",
    "ServerError",
    "Started",
    "Stream",
    "Summary",
    "TailraceError",
    "Tls",
    "TokenLogprobs",
    "ToolCallDelta",
    "UnavailableError",
    "UnsupportedError",
]
