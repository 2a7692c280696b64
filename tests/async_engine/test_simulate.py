"""The simulation of fleets: it runs, counts what it says, and gives the same for the same seed."""

import sys

import pytest

from tests.bench import simulate
from tests.bench.fleet import Fleet
from tests.bench.fleet_load import Load
from tests.bench.step_models import DEVICES
from tests.core_proc.harness import ManualClock
from tests.core_proc.plant import PLAIN

TALK = Load(rate=10, seconds=2, groups=4, prefix=64, output=(16, 48), turns=3, think=(0.1, 0.3))


def play(load, num_cores=2):
    fleet = Fleet(num_cores, DEVICES["h200-8b"].plant(load.longest + 1), ManualClock())
    fleet.run(load.visits())
    return fleet


def test_a_row_for_each_size(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate", "--quick", "--bursty", "--rate", "20"])
    assert simulate.main() == 0
    about, what, _, header, rule, row = capsys.readouterr().out.splitlines()
    assert "8 billion" in about
    assert "in bursts" in what
    assert header.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "4"
    assert int(cells[1].replace(",", "")) > 40


def test_turns_find_what_was_said_before_wherever_it_is():
    fleet = play(TALK)
    assert fleet.times.requests == 3 * sum(1 for _ in TALK.visits())
    # All of a turn before but a part of a block is the head of the next one.
    assert fleet.results().hit_rate > 0.5
    assert play(Load(**{**vars(TALK), "turns": 1})).results().hit_rate < 0.35


def test_a_turn_is_behind_the_one_before_and_its_answer():
    visit = next(TALK.visits())
    before, then = visit.make_prompt().tolist(), visit.then.make_prompt().tolist()
    said = before + [PLAIN] * visit.length
    assert then[: len(said)] == said
    assert len(said) < len(then) <= TALK.longest


def test_the_same_seed_gives_the_same_to_the_token():
    first, second = play(TALK), play(TALK)
    assert first.times.first == second.times.first
    assert first.times.gaps == second.times.gaps
    assert first.results() == second.results()


def test_bursts_have_the_mean_rate():
    steady, bursts = ([visit.at for visit in Load(100, 40, 4, bursty=bursty).visits()] for bursty in (False, True))
    assert len(steady) == pytest.approx(4000, rel=0.1)
    assert len(bursts) == pytest.approx(4000, rel=0.1)
    in_bursts = sum(int(at) % 4 == 0 for at in bursts)
    assert in_bursts == pytest.approx(0.75 * len(bursts), rel=0.1)
