"""Promises about the code itself: what it never imports, never trusts, and never listens on."""

import ast
import os
import re
from pathlib import Path

import pytest

from tests.e2e.serving import ServerProcess
from tests.test_architecture import IMPORTS, MODULES

UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "multiprocessing", "joblib"}
"""Modules that turn bytes from a peer into code."""
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_unpickles():
    for name, targets in IMPORTS.items():
        found = {target.partition(".")[0] for target in targets} & UNSAFE
        assert not found, f"{name} imports {found}"


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_no_text_is_run_as_code_and_no_weights_are_unpickled():
    for name, path in MODULES.items():
        for call in calls(path):
            if isinstance(call.func, ast.Name):
                assert call.func.id not in UNSAFE_CALLS, f"{name}: {call.func.id}"
            elif isinstance(call.func, ast.Attribute):
                called = ast.unparse(call.func)
                assert called not in ("torch.load", "np.load", "numpy.load", "os.system", "yaml.load"), name
            assert not any(keyword.arg == "shell" for keyword in call.keywords), name
            assert not any(keyword.arg == "allow_pickle" for keyword in call.keywords), name


def test_code_that_comes_with_a_model_is_never_trusted():
    loaders = [
        call
        for path in MODULES.values()
        for call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]
    assert loaders
    for call in loaders:
        trust = {keyword.arg: keyword.value for keyword in call.keywords}["trust_remote_code"]
        assert isinstance(trust, ast.Constant)
        assert trust.value is False


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}


def unix_sockets(pid: int) -> dict[str, tuple[int, str]]:
    """By inode, the flags and the path, if it has one, of all unix sockets."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return {row[6]: (int(row[3], 16), row[7] if len(row) > 7 else "") for row in rows}


LISTENS = 0x10000


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="Linux only")
def test_the_cores_socket_has_no_address():
    """Nobody can connect to it: it was made with both its ends, and one of them inherited."""
    with ServerProcess("null", "--listen", "127.0.0.1:0") as server:
        server.wait_ready()
        core = server.core_pid
        held = sockets(core)
        assert held
        table = unix_sockets(core)
        for inode in held:
            flags, path = table[inode]  # a KeyError: one of the core's sockets is of the network
            assert not path
            assert not flags & LISTENS
        ours = [unix_sockets(server.process.pid).get(inode) for inode in sockets(server.process.pid)]
        assert not [row for row in ours if row is not None and (row[1] or row[0] & LISTENS)]
        assert server.stop() == 0
