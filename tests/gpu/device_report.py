"""DeviceReport: what a check of a device found, told as it goes and again as a table."""

from __future__ import annotations

import math
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def tell(line: str) -> None:
    """At once, also where the output is a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    what: str
    value: str
    share: str
    """Of the limit, where there is one."""
    bar: str
    """What was asked for; empty where nothing was."""
    is_met: bool


class DeviceReport:
    def __init__(self, asks_speed: bool) -> None:
        """`asks_speed`: shares of limits are held against their bars."""
        self.rows: list[Row] = []
        self._asks_speed = asks_speed
        self._section = ""
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._start

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What is found inside belongs to it. An exception is a check that failed, and the next section goes on."""
        self._section = name
        tell(f"\n{name} ({self.seconds:.0f} s)")
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._add("ran to its end", f"{type(error).__name__}: {error}".partition("\n")[0][:120], "", "yes", False)

    def check(self, what: str, is_met: bool, detail: str = "") -> None:
        """Something that is right or wrong."""
        self._add(what, detail or ("right" if is_met else "wrong"), "", "right", is_met)

    def near(self, what: str, error: float, bound: float) -> None:
        """An error that may not be over a bound; NaN is over every one."""
        self._add(what, f"{error:.2g}", "", f"at most {bound:.2g}", error <= bound)

    def measure(
        self, what: str, value: float, unit: str, share: float = math.nan, bar: float = math.nan, of: str = ""
    ) -> None:
        """A measured number; `share` of a limit (`of` says which), that should be `bar` at least."""
        told = "" if math.isnan(share) else f"{share:.0%} {of}".rstrip()
        is_asked = self._asks_speed and not math.isnan(bar)
        asked = f"at least {bar:.0%}" if is_asked else ""
        self._add(what, f"{_figure(value)} {unit}".rstrip(), told, asked, not is_asked or share >= bar)

    def _add(self, what: str, value: str, share: str, bar: str, is_met: bool) -> None:
        self.rows.append(Row(self._section, what, value, share, bar, is_met))
        asked = f" ({bar})" if bar else ""
        tell(f"  {'ok  ' if is_met else 'MISS'} {what}: {value} {share}{asked}".rstrip())

    def table(self) -> str:
        """Markdown, section by section."""
        lines = ["| | what | found | of the limit | asked | |", "|---|---|---|---|---|---|"]
        section = ""
        for row in self.rows:
            head, section = ("" if row.section == section else row.section), row.section
            met = "" if not row.bar else "yes" if row.is_met else "**no**"
            lines.append(f"| {head} | {row.what} | {row.value} | {row.share} | {row.bar} | {met} |")
        return "\n".join(lines)

    @property
    def num_missed(self) -> int:
        return sum(not row.is_met for row in self.rows)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
