"""Workers over the nodes of a Ray cluster: two on this machine."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from async_engine.llm import LLM
from protos.params import SamplingParams
from tests.e2e.serving import ServerProcess, run, serving, until
from tests.e2e.test_core_recovery import collect, mixed_specs
from tests.e2e.test_generation import assert_works
from tests.gpu_executor.ray_cluster import ray_cluster
from tests.model_runner.hostile import CONFIG, write_directory

NUM_STREAMS = 6
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
RAY = ("null", "--executor", "ray", "--listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


def actors():
    """Processes of workers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and b"ray::RayActor" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it is gone already
            continue
    return found


def test_model_over_two_nodes_generates_what_one_worker_does(cluster, tmp_path):
    """Two stages, a node each, of two workers."""
    write_directory(tmp_path / "model", CONFIG | {"num_hidden_layers": 2})

    def generate(**options):
        small = {"load_format": "dummy", "num_kv_blocks": 32, "max_num_seqs": 4, "num_threads": 1}
        with LLM(str(tmp_path / "model"), progress=False, **small, **options) as llm:
            return [output.token_ids for output in llm.generate(["abc", "hello you " * 6], PARAMS)]

    expected = generate()
    assert len(set(map(tuple, expected))) == 2
    assert generate(executor="ray", tensor_parallel_size=2, pipeline_parallel_size=2) == expected


def test_streams_outlive_a_node_and_a_core(cluster):
    """Two stages of two workers, a stage on each node. The node that dies is replaced while the engine tries again."""

    async def main():
        async with serving(null_step_ms=0) as (_, stub, _):
            alone = await asyncio.gather(*(collect(stub, spec) for spec in mixed_specs(NUM_STREAMS)))
        sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        async with serving(executor="ray", null_step_ms=4, max_steps_in_flight=2, **sizes) as (llm, stub, _):
            first = actors()
            streams = [asyncio.create_task(collect(stub, spec)) for spec in mixed_specs(NUM_STREAMS)]
            await until(lambda: any(state.has_progressed for state in llm._live.values()))
            await asyncio.to_thread(cluster.tell, "remove")
            await until(lambda: llm.recovering)
            await asyncio.to_thread(cluster.tell, "add")
            with_a_node_less = await asyncio.gather(*streams)
            second = actors()
            await assert_works(llm, stub)
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
        await until(lambda: not actors())
        return alone, with_a_node_less, first, second

    alone, with_a_node_less, first, second = run(main)
    assert with_a_node_less == alone
    assert len(first) == len(second) == 4
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("sizes", "address", "problem"),
    [
        (
            ("--tensor-parallel-size", "3"),
            None,
            "too small: each of 1 stages needs 3 CPUs on one node; its nodes have 2",
        ),
        ((), "127.0.0.1:1", "no Ray cluster at RAY_ADDRESS=127.0.0.1:1: "),
    ],
    ids=["too small", "not there"],
)
def test_cluster_that_will_not_do_is_one_line(cluster, sizes, address, problem):
    with ServerProcess(*RAY, *sizes, env={"RAY_ADDRESS": address or cluster.address}) as server:
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    (line,) = errors.strip().splitlines()
    assert problem in line
