"""The front end: asyncio servicers over AsyncLLM."""

import os

# Both are read when grpc is first imported, so they are set before any module of ours can import it.
# grpcio's EventEngine listener doubles the server's CPU per message (1.80 to 1.85, measured).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
# The C core logs what it also returns; we report errors ourselves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
