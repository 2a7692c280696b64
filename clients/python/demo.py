"""Starts a server with the embedded model, streams one chat completion from it, and stops it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY = "tailrace ready on "
MESSAGES = [{"role": "user", "content": "In two sentences: what is a tailrace?"}]


def main() -> int:
    command = [sys.executable, "-m", "async_engine.cli", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    # Its standard error is ours, so that the progress bar is seen.
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        address = wait_ready(server)
        if address is None:
            return server.wait()
        stream_chat(address)
    except KeyboardInterrupt:
        return 130
    finally:
        server.terminate()
        server.wait()
    return 0


def wait_ready(server: subprocess.Popen[str]) -> str | None:
    """The address the server says it listens on; None if it ends instead."""
    assert server.stdout is not None
    for line in server.stdout:
        sys.stdout.write(line)
        if line.startswith(READY):
            return line.removeprefix(READY).partition(": ")[0]
    return None


def stream_chat(address: str) -> None:
    from tailrace_client import Client

    sys.stdout.write(f"\n> {MESSAGES[0]['content']}\n")
    sent, first = time.monotonic(), 0.0
    with Client(address) as client, client.generate(MESSAGES, max_tokens=64, temperature=0.0) as stream:
        for delta in stream:
            first = first or time.monotonic()
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        ended = time.monotonic()
    assert stream.summary is not None
    rate = (stream.summary.output_tokens - 1) / (ended - first)
    sys.stdout.write(f"\n\n{rate:.1f} tokens/s, first token after {first - sent:.2f} s\n")


if __name__ == "__main__":
    sys.exit(main())
