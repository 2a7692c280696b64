"""NotCapturableError: what those who record operations say of others."""

from __future__ import annotations


class NotCapturableError(Exception):
    """Something in what is to be recorded cannot be: one line, why."""
