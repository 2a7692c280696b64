"""JSON files that come with a model, which may be damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from protos.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 64 << 20
"""Indices of the largest models have a few megabytes."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, or StartupError naming the file that is too large or no JSON object."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StartupError(f"{path}: is larger than {MAX_BYTES >> 20} MiB")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except RecursionError:
        raise StartupError(f"{path}: cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path}: is not a JSON object")
    return content
