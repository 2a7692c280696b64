"""Router: prefixes against load, bursts, deaths, and that its books balance whatever happens."""

import random

import msgspec
import pytest

from async_engine.router import FIRST_OUTPUT_TOKENS, OUTPUT_COST, SLACK_SEQUENCES, Router
from protos.messages import NO_STATS
from tests.async_engine.test_prefix_map import changes

BLOCK = 16
ROWS = 64


def router(num_cores=3, num_rows=ROWS):
    return Router([num_rows] * num_cores, BLOCK)


def prompt(group, blocks=64):
    """(hashes, tokens) of a prompt of full blocks and a bit."""
    return [group * 1000 + block for block in range(blocks)], blocks * BLOCK + 1


def test_a_prompt_goes_where_its_prefix_is():
    routes = router()
    hashes, num_tokens = prompt(1)
    routes.update(2, changes(hashes))
    ticket = routes.route(hashes, num_tokens)
    assert (ticket.core, ticket.cached_tokens, ticket.pending_tokens, ticket.expected) == (2, 64 * BLOCK, 1, [])


def test_the_longer_part_of_it_wins():
    routes = router()
    hashes, num_tokens = prompt(1)
    routes.update(1, changes(hashes[:20]))
    routes.update(2, changes(hashes[:40]))
    assert routes.route(hashes, num_tokens).core == 2


def test_a_burst_of_equal_prompts_meets_before_the_first_is_computed():
    routes = router()
    assert len({routes.route(*prompt(1)).core for _ in range(SLACK_SEQUENCES)}) == 1


def test_prompts_that_share_nothing_go_where_least_is_to_be_done():
    routes = router()
    first = routes.route(*prompt(1, 100))
    cores = [routes.route(*prompt(group, 10)).core for group in range(2, 6)]
    assert first.core not in cores
    assert sorted(cores) == sorted([*({0, 1, 2} - {first.core})] * 2)


def test_equals_take_turns():
    routes = router()
    cores = []
    for group in range(30):
        ticket = routes.route(*prompt(group))
        cores.append(ticket.core)
        routes.ended(ticket)
    assert [cores.count(core) for core in range(3)] == [10] * 3


def test_a_short_prefix_is_not_worth_much_load():
    routes = router(2)
    routes.update(0, changes(prompt(1, 4)[0]))
    assert routes.route(*prompt(1, 4)).core == 0
    routes.observe(0, msgspec.structs.replace(NO_STATS, running=8))
    assert routes.route(*prompt(1, 4)).core == 1
    routes.observe(0, NO_STATS)
    assert routes.route(*prompt(1, 4)).core == 0


def test_among_many_sequences_some_more_are_not_much():
    routes = router(num_rows=512)
    hashes, num_tokens = prompt(1, 2000)
    routes.update(0, changes(hashes))
    for core, running in enumerate((240, 200, 200)):
        routes.observe(core, msgspec.structs.replace(NO_STATS, running=running))
    assert routes.route(hashes, num_tokens).core == 0
    routes.observe(0, msgspec.structs.replace(NO_STATS, running=270))
    assert routes.route(hashes, num_tokens).core == 1


@pytest.mark.parametrize("blocks", [64, 2000])
def test_a_prefix_that_many_want_comes_to_be_in_several_cores(blocks):
    routes = router()
    tickets = [routes.route(*prompt(1, blocks)) for _ in range(90)]
    counts = [sum(ticket.core == core for ticket in tickets) for core in range(3)]
    assert max(counts) - min(counts) <= SLACK_SEQUENCES + 1
    assert min(counts) > 0


def test_no_prefix_is_worth_waiting_for_a_place():
    routes = router(2, num_rows=4)
    routes.update(0, changes(prompt(1, 8)[0]))
    cores = [routes.route(*prompt(1, 8)).core for _ in range(8)]
    assert sorted(cores) == [0] * 4 + [1] * 4


def test_a_prompt_weighs_until_its_first_token_and_an_output_until_its_end():
    routes = router(2)
    long, short = routes.route([], 10_000), routes.route([], 10)
    assert long.core != short.core
    assert routes.route([], 10).core == short.core
    routes.computed(long)
    routes.computed(long)
    assert routes.route([], 10).core == long.core
    routes.ended(long)
    assert routes._sequences.tolist() == ([1, 2] if long.core == 0 else [2, 1])


def test_sequences_of_a_request_weigh_each():
    routes = router(2)
    several = routes.route([], 100, num_sequences=8)
    assert {routes.route([], 100).core for _ in range(4)} == {1 - several.core}


def test_outputs_are_taken_to_be_as_long_as_those_before():
    routes = router()
    assert routes.sequence_cost == OUTPUT_COST * FIRST_OUTPUT_TOKENS
    for _ in range(500):
        routes.ended(routes.route([], 10, 2), num_output_tokens=1000)
    assert routes.sequence_cost == pytest.approx(OUTPUT_COST * 500, rel=0.01)
    routes.ended(routes.route([], 10))
    assert routes.sequence_cost == pytest.approx(OUTPUT_COST * 500, rel=0.01), "one that was cut off tells nothing"


def test_what_others_gave_a_core_counts():
    routes = router(2)
    own = routes.route([], 10)
    routes.observe(own.core, msgspec.structs.replace(NO_STATS, running=1))
    assert routes._others.tolist() == [0, 0]
    routes.observe(1 - own.core, msgspec.structs.replace(NO_STATS, running=20, waiting=3))
    assert {routes.route([], 10).core for _ in range(10)} == {own.core}


def test_a_core_that_died_gets_nothing_and_comes_back_empty():
    routes = router(2)
    hashes, num_tokens = prompt(1)
    ticket = routes.route(hashes, num_tokens)
    routes.lost(ticket.core)
    assert {routes.route(hashes, num_tokens).core for _ in range(50)} == {1 - ticket.core}
    routes.lost(1 - ticket.core)
    assert routes.route(hashes, num_tokens) is None
    routes.found(ticket.core)
    again = routes.route(hashes, num_tokens)
    assert (again.core, again.cached_tokens) == (ticket.core, 0)
    routes.ended(ticket)  # of its life before
    assert routes._sequences[ticket.core] == 1
    assert routes.map.lookup(hashes)[ticket.core] == 64


@pytest.mark.parametrize("seed", range(3))
def test_when_all_is_over_nothing_weighs_and_the_same_calls_give_the_same_places(seed):
    def play():
        chance = random.Random(seed)
        routes, tickets, places, stored = router(5), [], [], [set() for _ in range(5)]
        down = set()
        for _ in range(1500):
            core = chance.randrange(5)
            match chance.randrange(12):
                case 0 | 1 | 2 | 3 | 4:
                    ticket = routes.route(*prompt(chance.randrange(8), chance.randrange(1, 30)), chance.randrange(1, 4))
                    places.append(None if ticket is None else ticket.core)
                    assert ticket is None or ticket.core not in down
                    tickets += [] if ticket is None else [ticket]
                case 5 | 6 if tickets:
                    routes.computed(chance.choice(tickets))
                case 7 | 8 | 9 if tickets:
                    routes.ended(tickets.pop(chance.randrange(len(tickets))), chance.choice([None, 50]))
                case 10 if core not in down:
                    new = set(prompt(chance.randrange(8), 5)[0])
                    gone = set(chance.sample(sorted(stored[core]), len(stored[core]) // 2)) - new
                    routes.update(core, changes(new, gone))
                    stored[core] = (stored[core] | new) - gone
                case 11 if chance.random() < 0.2:
                    (routes.found if core in down else routes.lost)(core)
                    stored[core].clear()
                    down ^= {core}
            routes.map.audit()
        for ticket in tickets:
            routes.ended(ticket)
        assert not routes._sequences.any()
        assert not routes._pending.any()
        assert not any(routes.map._expected)
        return places

    assert play() == play()
