"""Workers in processes of their own die or hang under streams: these go on, to the token, and nothing is left."""

import asyncio
import logging
import os
import signal

import pytest

from tests.e2e.serving import ServerProcess, children, is_alive, run, serving, until
from tests.e2e.test_core_recovery import collect, mixed_specs
from tests.e2e.test_generation import assert_works

NUM_STREAMS = 6


async def begun(llm):
    await until(lambda: any(state.has_progressed for state in llm._live.values()))


async def replaced(llm, count):
    await until(lambda: llm.cores.num_restarts == count and not llm.recovering)


def test_worker_killed_under_streams_and_between_them_changes_no_token(caplog):
    async def main():
        async with serving(null_step_ms=2, tensor_parallel_size=2) as (llm, stub, _):
            undisturbed = await asyncio.gather(*(collect(stub, spec) for spec in mixed_specs(NUM_STREAMS)))
            streams = [asyncio.create_task(collect(stub, spec)) for spec in mixed_specs(NUM_STREAMS)]
            cores = [llm.core]
            for count, index in ((1, 0), (2, 1)):
                await begun(llm)
                os.kill(children(llm.core.pid)[index], signal.SIGKILL)
                await replaced(llm, count)
                cores.append(llm.core)
            disturbed = await asyncio.gather(*streams)
            await assert_works(llm, stub)
            os.kill(children(llm.core.pid)[1], signal.SIGKILL)
            await replaced(llm, 3)
            await assert_works(llm, stub)
            return undisturbed, disturbed, [core.was_killed for core in cores]

    with caplog.at_level(logging.ERROR):
        undisturbed, disturbed, were_killed = run(main)
    assert disturbed == undisturbed
    assert were_killed == [True] * 3
    told = [record.getMessage() for record in caplog.records if "starting another" in record.getMessage()]
    assert [text[text.index("worker") :].partition(" (pid")[0] for text in told] == ["worker 0", "worker 1", "worker 1"]
    assert all("was ended by SIGKILL; it" in text for text in told)


def test_worker_that_hangs_is_replaced_and_its_streams_go_on():
    async def main():
        async with serving(server={"hang_timeout": 1.5}, null_step_ms=2, tensor_parallel_size=2) as (llm, stub, _):
            (spec,) = mixed_specs(1)
            undisturbed = await collect(stub, spec)
            stream = asyncio.create_task(collect(stub, spec))
            await begun(llm)
            workers = children(llm.core.pid)
            os.kill(workers[0], signal.SIGSTOP)
            disturbed = await stream
            await assert_works(llm, stub)
            return undisturbed, disturbed, workers

    undisturbed, disturbed, workers = run(main)
    assert disturbed == undisturbed
    assert not any(is_alive(pid) for pid in workers)


@pytest.fixture(scope="module")
def shared_memory_before():
    return set(os.listdir("/dev/shm"))


def test_core_that_is_killed_leaves_no_worker_and_no_memory(shared_memory_before):
    async def main():
        async with serving(null_step_ms=2, tensor_parallel_size=2) as (llm, stub, _):
            workers = children(llm.core.pid)
            os.kill(llm.core.pid, signal.SIGKILL)
            await replaced(llm, 1)
            await until(lambda: not any(is_alive(pid) for pid in workers))
            await assert_works(llm, stub)
            last = children(llm.core.pid)
        return workers, last

    workers, last = run(main)
    assert len(workers) == len(last) == 2
    assert not any(is_alive(pid) for pid in last)
    assert set(os.listdir("/dev/shm")) <= shared_memory_before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["null", "--executor", "uniproc", "--tensor-parallel-size", "2"], "--executor: uniproc is one worker, not 2"),
        (["/no/such/model", "--tensor-parallel-size", "2"], "no such file or directory"),
    ],
)
def test_workers_that_cannot_be_are_one_line(arguments, problem):
    with ServerProcess(*arguments, "--listen", "127.0.0.1:0") as server:
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    (line,) = errors.strip().splitlines()
    assert problem in line
