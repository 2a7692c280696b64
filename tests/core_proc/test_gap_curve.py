"""tests.bench.gap_curve: its gaps are those aimed at, and a longer one makes the prompt sooner."""

from __future__ import annotations

from argparse import Namespace

from tests.bench.gap_curve import AIMS, CPU, rows


def test_gaps_are_those_aimed_at_and_the_prompt_is_sooner_with_longer_ones() -> None:
    table = rows(CPU, Namespace(prompt_tokens=2000, streams=8, tokens=700, noise=0.0))
    without, *limited = table
    medians = [float(str(row[1]).split(" / ")[0]) for row in limited]
    for aim, median in zip(AIMS, medians, strict=True):
        assert 0.9 * aim < median < 1.05 * aim
    assert float(str(without[1]).split(" / ")[0]) > 2 * max(AIMS)
    times = [float(str(row[3])) for row in (*limited, without)]
    assert times == sorted(times, reverse=True)
    assert without[5] == "0.0%"
