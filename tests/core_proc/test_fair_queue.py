"""The turns that callers take, with their accounts."""

from __future__ import annotations

import random

import pytest

from core_proc.fair_queue import FairQueue
from core_proc.request import Request, make_request
from core_proc.request_queue import RequestQueue
from protos.messages import EngineCoreRequest, Sampling
from tests.core_proc.harness import encode_ids


def request(arrival: int, caller: str = "", tokens: int = 1, priority: int = 0) -> Request:
    message = EngineCoreRequest(
        handle=arrival,
        prompt_token_ids=encode_ids([1] * tokens),
        sampling=Sampling(),
        max_tokens=1,
        priority=priority,
        caller=caller,
    )
    made = make_request(message, client=0, block_size=4, max_model_len=1000, now=0.0)
    made.arrival = arrival
    return made


def serve(queue: FairQueue) -> Request:
    first = queue.first()
    assert first is not None
    queue.remove(first)
    queue.admitted(first, first.cost)
    return first


def drain(queue: FairQueue) -> list[int]:
    served = []
    while queue.first() is not None:
        served.append(serve(queue).arrival)
    return served


def test_equal_callers_alternate_and_each_keeps_its_order() -> None:
    queue = FairQueue()
    for arrival in range(4):
        queue.push(request(arrival, "a"))
    for arrival in range(4, 8):
        queue.push(request(arrival, "b"))
    assert drain(queue) == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(("is_set_aside", "order"), [(True, [5, 3, 4]), (False, [3, 5, 4])])
def test_who_was_set_aside_owes_no_more_than_before(is_set_aside: bool, order: list[int]) -> None:
    queue = RequestQueue()

    def serve() -> int:
        first = queue.peek()
        assert first is not None
        queue.remove(first)
        queue.admitted(first, first.cost)
        return first.arrival

    for arrival, caller in enumerate("cdcdd"):
        queue.push(request(arrival, caller, 10))
    one = request(5, "b", 10)
    queue.push(one)
    if is_set_aside:
        queue.set_aside(one)
    else:
        queue.remove(one)
    assert [serve() for _ in range(3)] == [0, 1, 2]
    if is_set_aside:
        queue.take_back(one)
    else:
        queue.push(one)
    assert [serve() for _ in range(3)] == order


def test_who_asks_for_more_gets_fewer_turns() -> None:
    queue = FairQueue()
    for arrival in range(3):
        queue.push(request(arrival, "large", 30))
    for arrival in range(3, 9):
        queue.push(request(arrival, "small", 10))
    assert drain(queue) == [0, 3, 4, 5, 1, 6, 7, 8, 2]


def test_an_early_request_that_was_held_back_takes_its_place_in_line() -> None:
    queue = FairQueue()
    queue.push(request(5, "a"))
    assert queue.first() is not None
    queue.push(request(2, "a"))
    queue.push(request(3, "b"))
    assert drain(queue) == [2, 3, 5]


def test_settling_moves_a_caller_both_ways() -> None:
    queue = FairQueue()
    requests = [request(0, "a", 10), request(1, "b", 10), request(2, "a", 10), request(3, "b", 10)]
    for each in requests:
        queue.push(each)
    assert [serve(queue).arrival, serve(queue).arrival] == [0, 1]
    queue.settle(requests[0], 5.0)
    assert queue.first() is requests[3]
    queue.settle(requests[0], -7.0)
    assert queue.first() is requests[2]


def test_a_new_caller_starts_where_the_others_are() -> None:
    queue = FairQueue()
    for arrival in range(10):
        queue.push(request(arrival, "old", 10))
    for _ in range(5):
        serve(queue)
    for arrival in range(10, 15):
        queue.push(request(arrival, "new", 10))
    # At the account of the last one served, so before the old one, once.
    assert drain(queue) == [10, 5, 11, 6, 12, 7, 13, 8, 14, 9]


def test_when_nobody_waits_nobody_owes() -> None:
    queue = FairQueue()
    queue.push(request(0, "a", 500))
    serve(queue)
    for arrival, caller in enumerate(["b", "a", "b", "a"], 1):
        queue.push(request(arrival, caller, 10))
    assert drain(queue) == [1, 2, 3, 4]


def test_accounts_of_a_million_callers_are_not_kept() -> None:
    queue = FairQueue()
    queue.push(request(0, "waits", 10, priority=0))
    for arrival in range(1, 3000):
        queue.push(request(arrival, f"caller {arrival}", 10))
        serve(queue)
    (tier,) = queue._tiers.values()
    assert len(tier._lines) < 200
    assert len(tier._order) < 300
    for arrival in range(3000, 6000):
        queue.push(request(arrival, "one", 10, priority=arrival))
        queue.remove(queue.first() if queue.first().arrival == arrival else _find(queue, arrival))  # type: ignore[union-attr]
    assert len(queue._tiers) == 1


def _find(queue: FairQueue, arrival: int) -> Request:
    return next(
        each
        for tier in queue._tiers.values()
        for line in tier._lines.values()
        for each in line._requests
        if each.arrival == arrival
    )


def test_requests_that_leave_from_within_a_line_are_not_kept() -> None:
    queue = FairQueue()
    queue.push(request(0, "a"))
    for arrival in range(1, 1000):
        behind = request(arrival, "a")
        queue.push(behind)
        queue.remove(behind)
    (tier,) = queue._tiers.values()
    assert len(tier._lines["a"]._heap) < 100
    assert drain(queue) == [0]


def test_a_caller_whose_requests_cost_less_than_expected_is_entered_but_so_often() -> None:
    queue = FairQueue()
    served = request(0, "a", 500)
    for each in (served, request(1, "a"), request(2, "b")):
        queue.push(each)
    assert serve(queue) is served
    for _ in range(1000):
        queue.settle(served, -0.1)
    (tier,) = queue._tiers.values()
    assert len(tier._order) < 100
    assert drain(queue) == [2, 1]


class Model:
    """The same by looking at everybody each time."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.accounts: dict[int, dict[str, float]] = {}
        self.levels: dict[int, float] = {}

    def in_line(self, priority: int, caller: str) -> list[Request]:
        return [r for r in self.waiting if r.params.priority == priority and r.params.caller == caller]

    def push(self, new: Request) -> None:
        priority, caller = new.params.priority, new.params.caller
        accounts = self.accounts.setdefault(priority, {})
        if not self.in_line(priority, caller):
            accounts[caller] = max(accounts.get(caller, 0.0), self.levels.get(priority, 0.0))
        self.waiting.append(new)

    def first(self) -> Request | None:
        def order(r: Request) -> tuple[int, float, int]:
            return (r.params.priority, self.accounts[r.params.priority][r.params.caller], r.arrival)

        heads = [r for r in self.waiting if r.arrival == min(x.arrival for x in self.in_line(*_line(r)))]
        return min(heads, key=order, default=None)

    def remove(self, gone: Request) -> None:
        self.waiting.remove(gone)
        if not any(r.params.priority == gone.params.priority for r in self.waiting):
            self.accounts.pop(gone.params.priority, None)
            self.levels.pop(gone.params.priority, None)

    def charge(self, served: Request, cost: float, admitted: bool) -> None:
        priority, caller = _line(served)
        if caller in self.accounts.get(priority, {}):
            if admitted:
                self.levels[priority] = max(self.levels.get(priority, 0.0), self.accounts[priority][caller])
            self.accounts[priority][caller] += cost


def _line(r: Request) -> tuple[int, str]:
    return r.params.priority, r.params.caller


@pytest.mark.parametrize("seed", range(8))
def test_equals_looking_at_everybody_each_time(seed: int) -> None:
    rng = random.Random(seed)
    queue, model = FairQueue(), Model()
    running: list[Request] = []
    for arrival in range(600):
        choice = rng.random()
        if choice < 0.5:
            new = request(arrival, rng.choice("abcd"), rng.randint(1, 9), rng.randrange(2))
            if rng.random() < 0.1:
                new.arrival = -arrival  # one that was held back
            queue.push(new)
            model.push(new)
        elif choice < 0.75 and (first := model.first()):
            assert queue.first() is first
            queue.remove(first)
            model.remove(first)
            queue.admitted(first, first.cost)
            model.charge(first, first.cost, admitted=True)
            running.append(first)
        elif choice < 0.9 and running:
            ended, difference = running.pop(rng.randrange(len(running))), float(rng.randint(-5, 5))
            queue.settle(ended, difference)
            model.charge(ended, difference, admitted=False)
        elif model.waiting:
            gone = rng.choice(model.waiting)
            queue.remove(gone)
            model.remove(gone)
        assert queue.first() is model.first()


@pytest.mark.parametrize("seed", range(8))
def test_cost_before_a_request_is_what_is_served_before_it(seed: int) -> None:
    rng = random.Random(seed)
    queue = FairQueue()
    requests = [request(n, rng.choice("aaab"), rng.randint(5, 15), rng.choice([0, 0, 1])) for n in range(60)]
    for each in requests:
        queue.push(each)
    for _ in range(10):
        requests.remove(serve(queue))
    expected = {each: queue.cost_before(each) for each in requests}
    served = 0.0
    for _ in range(len(requests)):
        each = queue.first()
        assert each is not None
        assert served == pytest.approx(expected[each], abs=2 * 17), each
        serve(queue)
        served += each.cost


def test_positions_count_turns() -> None:
    queue = RequestQueue()
    crowd = [request(arrival, "crowd") for arrival in range(10)]
    single, second = request(10, "single"), request(11, "single")
    urgent = request(12, "urgent", priority=-1)
    for each in [*crowd, single, second, urgent]:
        queue.push(each)
    assert queue.position(urgent) == 0
    assert queue.position(single) == 2
    assert queue.position(second) == 4
    assert queue.position(crowd[9]) == 1 + 9 + 2
