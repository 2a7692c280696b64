"""KServe v2 with tritonclient, which lives in an environment of its own: it needs an older protobuf than we allow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_engine.compat.kserve import read_tensors
from protos.compat import kserve_pb2 as pb
from protos.errors import InvalidRequestError
from tests.e2e.gateways import Worker

REQUIREMENT = "tritonclient[grpc]==2.73.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SCRIPT = Path(__file__).with_name("triton_calls.py")


@pytest.fixture(scope="session")
def triton_python(tmp_path_factory):
    """The interpreter of an environment with tritonclient, made once for this user."""
    environment = CACHE / "tailrace-tests" / f"{REQUIREMENT}-{sys.version_info.major}.{sys.version_info.minor}"
    python = environment / "bin" / "python"
    if not python.exists():
        fresh = tmp_path_factory.mktemp("venv") / "triton"
        subprocess.run([sys.executable, "-m", "venv", fresh], check=True)
        install = [fresh / "bin" / "python", "-m", "pip", "install", "--quiet", REQUIREMENT]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{REQUIREMENT} cannot be had: {done.stderr.strip().splitlines()[-1]}")
        environment.parent.mkdir(parents=True, exist_ok=True)
        fresh.rename(environment)
    return python


@pytest.fixture(scope="module")
def worker(triton_python):
    with Worker("--services", "kserve") as worker:
        yield worker


@pytest.fixture
def does(triton_python, worker):
    """What came of a scenario of triton_calls.py."""

    def run(scenario):
        command = [triton_python, SCRIPT, scenario, worker.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_what_clients_ask_first(does):
    found = does("discovery")
    assert (found["live"], found["ready"], found["models"], found["decoupled"]) == (True, True, [True, False], True)
    assert found["inputs"][:2] == [["text_input", "BYTES"], ["stream", "BOOL"]]
    assert found["optional"] == ["stream", "sampling_parameters", "exclude_input_in_output"]


def test_one_answer_to_one_request(does):
    found = does("unary")
    echoed, bare, default = found["texts"]
    assert found["id"] == "one"
    assert (echoed, len(bare), len(default)) == ("abc" + bare, 8, 16)
    assert [len(text) for text in found["several"]] == [8] * 3
    assert len({*found["several"]}) == 3
    assert [status for status, _ in found["errors"]] == ["StatusCode.INVALID_ARGUMENT"] * 3
    assert "colour" in found["errors"][2][1]


def test_many_requests_share_a_stream_and_their_answers_have_their_ids(does):
    outcome = does("stream")
    found, whole = outcome["found"], outcome["whole"]
    for name in "ab":
        assert name + found[name]["text"] == whole[name]
        assert found[name]["finals"] == [False] * (len(found[name]["finals"]) - 1) + [True]
        assert len(found[name]["finals"]) > 1
    assert (found["c"]["text"], found["c"]["finals"]) == (whole["c"], [True])
    assert "num_sequences" in found["d"]["error"]
    assert "no model 'nope'" in found["e"]["error"]


def test_sequences_stream_side_by_side_until_the_last_has_ended(does):
    found = does("several")
    assert found["streamed"] == found["whole"]
    assert [len(text) for text in found["whole"]] == [20, 20]


@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_a_stream_that_ends_early_frees_its_requests(does, worker, way):
    before = worker.output_tokens
    outcome = does(way)
    worker.wait_live(0)
    if way == "cancel":
        assert outcome == {"first": None}
    else:  # by our message or by the client's own clock, whichever is first
        assert "deadline" in outcome["error"].lower()
    assert worker.output_tokens - before < 4000


def test_the_asynchronous_client(does):
    assert [len(text) for text in does("asynchronous").values()] == [5, 5]


def tensor(name="text_input", datatype="BYTES", **contents):
    return pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=[1], contents=pb.InferTensorContents(**contents)
    )


def test_tensors_come_raw_or_typed():
    raw = pb.ModelInferRequest(
        inputs=[tensor(), tensor("stream", "BOOL")], raw_input_contents=[b"\x02\0\0\0hi", b"\x01"]
    )
    typed = pb.ModelInferRequest(
        inputs=[tensor(bytes_contents=[b"hi"]), tensor("stream", "BOOL", bool_contents=[True])]
    )
    assert read_tensors(raw) == read_tensors(typed) == {"text_input": b"hi", "stream": True}


@pytest.mark.parametrize(
    "bad",
    [
        pb.ModelInferRequest(inputs=[tensor("image")]),
        pb.ModelInferRequest(inputs=[tensor(datatype="INT32")]),
        pb.ModelInferRequest(inputs=[tensor()]),
        pb.ModelInferRequest(inputs=[tensor(bytes_contents=[b"a", b"b"])]),
        pb.ModelInferRequest(inputs=[tensor()], raw_input_contents=[b"a", b"b"]),
        *(pb.ModelInferRequest(inputs=[tensor()], raw_input_contents=[raw]) for raw in (b"", b"\x09\0\0\0hi", b"\1\0")),
        pb.ModelInferRequest(inputs=[tensor("stream", "BOOL")], raw_input_contents=[b"\1\1"]),
    ],
)
def test_tensors_that_are_none_of_ours_are_refused(bad):
    with pytest.raises(InvalidRequestError):
        read_tensors(bad)
