"""Errors nobody expected: the log has them, the caller an id."""

from __future__ import annotations

import logging
import uuid

from protos.errors import TailraceError

logger = logging.getLogger(__name__)


def hide_error(error: Exception) -> TailraceError:
    """What the caller is told: an id, under which the log has the rest."""
    error_id = uuid.uuid4().hex
    logger.error("unexpected error %s", error_id, exc_info=error)
    return TailraceError(f"internal error {error_id}")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors in a group: a call has one status."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
