"""The order in which requests wait."""

from __future__ import annotations

import random

import pytest

from core_proc.request import Request, make_request
from core_proc.request_queue import RequestQueue
from protos.messages import EngineCoreRequest, Sampling
from tests.core_proc.harness import encode_ids


def request(arrival: int, priority: int = 0) -> Request:
    message = EngineCoreRequest(
        handle=arrival, prompt_token_ids=encode_ids([1]), sampling=Sampling(), max_tokens=1, priority=priority
    )
    made = make_request(message, client=0, block_size=4, max_model_len=8, now=0.0)
    made.arrival = arrival
    return made


def drain(queue: RequestQueue) -> list[tuple[int, int]]:
    keys = []
    while (head := queue.peek()) is not None:
        keys.append(head.key)
        queue.remove(head)
    return keys


def test_smaller_priority_first_then_arrival() -> None:
    queue = RequestQueue()
    for arrival, priority in enumerate([1, 0, -1, 0, 1, -1]):
        queue.push(request(arrival, priority))
    assert drain(queue) == [(-1, 2), (-1, 5), (0, 1), (0, 3), (1, 0), (1, 4)]


def test_removing_from_the_middle_keeps_the_order() -> None:
    queue = RequestQueue()
    requests = [request(n) for n in range(6)]
    for each in requests:
        queue.push(each)
    for each in (requests[3], requests[1]):
        queue.remove(each)
    assert [queue.position(requests[n]) for n in (0, 2, 5)] == [0, 1, 3]
    assert [arrival for _, arrival in drain(queue)] == [0, 2, 4, 5]


def test_request_put_back_is_served_before_later_ones() -> None:
    queue = RequestQueue()
    first, second = request(0), request(1)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.push(first)
    assert queue.peek() is first


def test_request_put_back_to_be_held_is_not_served_by_the_place_it_had() -> None:
    queue = RequestQueue()
    first, second = request(0), request(1)
    queue.push(first)
    queue.push(second)
    queue.remove(second)
    queue.hold(second)
    queue.remove(first)
    assert queue.peek() is None
    queue.release(second)
    assert queue.peek() is second


@pytest.mark.parametrize("seed", range(5))
def test_queue_equals_a_sorted_list_under_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    queue = RequestQueue()
    model: list[Request] = []
    left: list[Request] = []
    for arrival in range(1500):
        if left and rng.random() < 0.2:
            model.append(left.pop(rng.randrange(len(left))))
            queue.push(model[-1])
        if rng.random() < 0.55:
            model.append(request(arrival, rng.randrange(3)))
            queue.push(model[-1])
        elif model:
            left.append(model.pop(rng.randrange(len(model))))
            queue.remove(left[-1])
        model.sort(key=lambda each: each.key)
        assert queue.peek() is (model[0] if model else None)
        assert len(queue) == len(model)
        assert set(queue) == set(model)
    assert drain(queue) == [each.key for each in model]


def test_held_requests_wait_without_being_served_until_they_are_released() -> None:
    queue = RequestQueue()
    requests = [request(arrival) for arrival in range(6)]
    for each in requests:
        (queue.hold if each.arrival in (0, 2, 5) else queue.push)(each)
    assert (len(queue), queue.num_ready) == (6, 3)
    assert queue.position(requests[3]) == 3
    assert queue.peek() is requests[1]
    queue.remove(requests[5])
    assert (len(queue), queue.num_ready) == (5, 3)
    queue.release(requests[2])
    queue.release(requests[0])
    queue.release(requests[5])
    queue.release(requests[1])
    assert (len(queue), queue.num_ready) == (5, 5)
    assert drain(queue) == [(0, arrival) for arrival in range(5)]
    assert queue.peek() is None
