"""Workers, in four processes as two stages of two: what each is told is what the others said."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from model_runner.parallel import Workers, make_workers
from protos.errors import StartupError
from protos.place import ONLY, Place
from tests.model_runner.ranks import Ranks


def _listening() -> set[str]:
    """IPv4 addresses that this process listens on, as the kernel writes them."""
    numbers = [number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")]
    own = {os.readlink(f"/proc/self/fd/{number}") for number in numbers}
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


def _talk(workers: Workers) -> None:
    place, rank = workers.place, workers.place.rank
    first = rank - rank % 2
    assert workers.all_reduce(torch.tensor([1.0 + rank])).item() == 2 * first + 3
    gathered = workers.all_gather(torch.tensor([[rank, 10], [20, rank]]))
    assert gathered.tolist() == [[first, 10, first + 1, 10], [20, first, 20, first + 1]]
    assert workers.least(7 - rank) == 4
    if place.is_first_stage:
        workers.send(torch.full((3, 2), float(rank)))
    else:
        received = torch.empty(3, 2)
        workers.receive(received)
        assert (received == rank - 2).all()
    if sys.platform == "linux":
        assert _listening() == {"0100007F"}, "the loopback alone"


def test_two_stages_of_two_meet_over_the_loopback_alone(tmp_path: Path):
    ranks = Ranks(tmp_path, tensor_size=2, pipeline_size=2)
    ranks.run(_talk)
    ranks.stop()


def test_one_worker_asks_nobody():
    workers = make_workers(ONLY, torch.device("cpu"))
    assert type(workers) is Workers
    workers.meet()
    tensor = torch.ones(2, 3)
    assert workers.all_reduce(tensor) is tensor
    assert workers.all_gather(tensor) is tensor
    assert workers.least(5) == 5
    workers.leave()


def test_a_meeting_that_cannot_be_is_one_line():
    place = Place(rank=1, tensor_size=2, local_rank=1, local_size=2, rendezvous="nowhere://x")
    with pytest.raises(StartupError, match=r"^worker 1 of 2 cannot meet the others: .*nowhere.*$") as caught:
        make_workers(place, torch.device("cpu")).meet()
    assert "\n" not in str(caught.value)
