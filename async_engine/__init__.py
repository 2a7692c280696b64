"""The front end: asyncio servicers over AsyncLLM."""

import os

# grpcio's EventEngine listener doubles the server's CPU per message (1.80 to 1.85, measured);
# the variable is read when grpc is first imported, so it is set before any module of ours can.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
