"""Ahead: what a core imports while whoever started it finds out what it is to hold."""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import TYPE_CHECKING

from gpu_executor.factory import slow_module

if TYPE_CHECKING:
    from protos.config import EngineConfig


def module_ahead(config: EngineConfig) -> str:
    """The name of a module that such a core needs, and that takes longest; empty if there is none."""
    return slow_module(config)


def import_ahead(module: str) -> threading.Thread:
    """Imports a module on a thread, if it has a name. If it cannot be had, whoever needs it will say so."""

    def run() -> None:
        if module:
            with contextlib.suppress(Exception):
                importlib.import_module(module)

    thread = threading.Thread(target=run, name="import", daemon=True)
    thread.start()
    return thread
