"""Figures of a benchmark as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Names at the left, figures at the right under their headings; floats with three significant digits."""
    cells = [list(header), *([_format(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = []
    for name, *figures in cells:
        padded = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines) + "\n"


def _format(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    magnitude = abs(cell)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    return f"{cell:,.{decimals}f}"
