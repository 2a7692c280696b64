"""The client's own wheel: what is in it, and that it works with nothing but grpcio and protobuf beside it."""

import asyncio
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import grpc
import pytest

from tailrace_client import AsyncClient
from tests.e2e.serving import ROOT, run, serving

PROGRAM = """
import sys
from importlib.util import find_spec
from tailrace_client import Client

with Client(sys.argv[1]) as client, client.generate("abc", max_tokens=20, seed=1) as stream:
    sys.stdout.write(stream.text())
assert not any(map(find_spec, ("async_engine", "protos.config", "torch", "google.rpc")))
"""


def project(path):
    return tomllib.loads(path.read_text())["project"]


def test_it_goes_with_the_engine_and_needs_no_more():
    client, engine = project(ROOT / "clients/python/pyproject.toml"), project(ROOT / "pyproject.toml")
    assert client["version"] == engine["version"]
    assert client["requires-python"] == engine["requires-python"]
    assert set(client["dependencies"]) <= set(engine["dependencies"])
    assert [name.partition(">")[0] for name in client["dependencies"]] == ["grpcio", "protobuf"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # A copy, as building leaves files beside the sources.
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for folder in ("clients/python", "protos/tailrace"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", tree, "clients/python"]
    subprocess.run([sys.executable, "-m", *command], cwd=tree, check=True)
    (made,) = tree.glob("*.whl")
    return made


def test_the_wheel_has_the_library_and_the_stubs(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    library = {f"tailrace_client/{path.name}" for path in (ROOT / "clients/python/tailrace_client").glob("*.py*")}
    stubs = {f"protos/tailrace/v1/{path.name}" for path in (ROOT / "protos/tailrace/v1").glob("*.p*")}
    assert set(names) == library | {"tailrace_client/py.typed", "protos/tailrace/__init__.py"} | stubs


def test_the_wheel_works_alone(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    # What grpcio and protobuf install, and no more of what is here.
    (site / "google").mkdir()
    for name in ("grpc", "google/protobuf", "google/_upb", "typing_extensions.py"):
        (site / name).symlink_to(Path(grpc.__file__).parents[1] / name)
    command = [tmp_path / "venv/bin/python", "-I", "-c", PROGRAM]

    async def main():
        async with serving() as (_, _, channel), AsyncClient(channel.address) as client:
            whole = await client.complete("abc", max_tokens=20, seed=1)
            process = await asyncio.create_subprocess_exec(*command, channel.address, stdout=subprocess.PIPE)
            out, _ = await process.communicate()
            return process.returncode, out.decode(), whole.text

    code, out, expected = run(main)
    assert code == 0
    assert out == expected
