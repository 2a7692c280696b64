"""What `generate`, `chat`, `serve` and the demo do at a terminal, in a pipe, and on Ctrl-C."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT, children

TAILRACE = [sys.executable, "-m", "async_engine.cli"]
NULL = ["--model", "null"]
CTRL_C, CTRL_D = b"\x03", b"\x04"
SECONDS = 60


class Terminal:
    """A command at a terminal of its own, which is its controlling one. A context manager."""

    def __init__(self, *command, size=(24, 80)):
        self.output = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            os.chdir(ROOT)
            os.execv(command[0], command)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._fd)  # hangs up
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def type(self, keys):
        os.write(self._fd, keys)

    def wait_for(self, text):
        """Reads until there is such a text; what came with it."""
        end = time.monotonic() + SECONDS
        while text not in self.output:
            assert self._read(end), f"no {text!r} in {self.output!r}"
        before, _, self.output = self.output.partition(text)
        return before + text

    def wait_idle(self):
        """Until the program waits, which right behind a prompt or an echo it may not do yet: Python's line editor
        does not see a signal that comes in between."""
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "S":
            os.sched_yield()

    def wait_end(self):
        """The exit code, and the rest of the output."""
        end = time.monotonic() + SECONDS
        while self._read(end):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status), self.output

    def _read(self, end):
        ready, _, _ = select.select([self._fd], [], [], max(0, end - time.monotonic()))
        assert ready, f"nothing more than {self.output!r}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.output += data.decode()
        return bool(data)


def tailrace(*arguments, stdin=b"", **options):
    return subprocess.run(
        [*TAILRACE, *arguments], cwd=ROOT, input=stdin, capture_output=True, timeout=SECONDS, check=False, **options
    )


def test_a_turn_that_cannot_be_served_leaves_the_conversation_as_it_was():
    with Terminal(*TAILRACE, "chat", *NULL, "--max-model-len", "64", "--max-tokens", "4") as terminal:
        terminal.wait_for("> ")
        terminal.type(b"one\n")
        terminal.wait_for("[4 tokens, ")
        terminal.wait_for("> ")
        terminal.type(b"x" * 60 + b"\n")
        assert "tailrace: chat: " in terminal.wait_for("leave no room in the context of 64 tokens\r\n")
        terminal.wait_for("> ")
        terminal.type(b"two\n")
        terminal.wait_for("[4 tokens, ")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        code, rest = terminal.wait_end()
    assert code == 0
    assert rest.endswith("\r\n"), "the shell's prompt is on a line of its own"


def test_a_core_that_dies_does_not_end_the_conversation():
    with Terminal(*TAILRACE, "chat", *NULL, "--max-tokens", "5") as terminal:
        terminal.wait_for("> ")
        (core,) = children(terminal.pid)
        os.kill(core, signal.SIGKILL)
        terminal.type(b"hi\n")
        terminal.wait_for("5 tokens")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.wait_end()[0] == 0


def test_ctrl_c_ends_the_turn_or_drops_the_line_but_not_the_program():
    with Terminal(*TAILRACE, "chat", *NULL, "--null-step-ms", "5") as terminal:
        terminal.wait_for("> ")
        terminal.type(b"endless\n")
        terminal.wait_for("endless\r\n")
        assert terminal._read(time.monotonic() + SECONDS)
        terminal.type(CTRL_C)
        terminal.wait_for("\r\n> ")
        terminal.type(b"dropped")
        terminal.wait_for("dropped")
        terminal.wait_idle()
        terminal.type(CTRL_C)
        terminal.wait_for("(Ctrl-D ends)\r\n> ")
        terminal.type(CTRL_D)
        code, rest = terminal.wait_end()
    assert code == 0
    assert "Traceback" not in rest


def test_ctrl_c_ends_generate_with_130():
    with Terminal(*TAILRACE, "generate", "hi", *NULL, "--null-step-ms", "5", "--ignore-eos", size=(0, 0)) as terminal:
        assert "loading weights" in terminal.wait_for("\r "), "a terminal may not know its size"
        while not terminal.output.strip():  # the bar is wiped out before there is text
            assert terminal._read(time.monotonic() + SECONDS)
        terminal.type(CTRL_C)
        code, rest = terminal.wait_end()
    assert code == 130
    assert rest.endswith("\r\n")
    assert "Traceback" not in rest


def test_text_and_figures_are_lines():
    result = tailrace("generate", "hi", *NULL, "--max-tokens", "5", "--seed", "7")
    assert result.returncode == 0
    assert len(result.stdout) == 6
    assert result.stdout.endswith(b"\n")
    (figures,) = result.stderr.splitlines(keepends=True)
    assert figures.startswith(b"[5 tokens, ")
    assert figures.endswith(b", seed 7]\n")


def test_the_seed_that_is_told_repeats_the_output():
    first = tailrace("generate", "hi", *NULL, "--max-tokens", "20")
    seed = first.stderr.rpartition(b"seed ")[2].strip(b"]\n").decode()
    again = tailrace("generate", "hi", *NULL, "--max-tokens", "20", "--seed", seed)
    assert again.stdout == first.stdout


def test_chat_in_a_pipe_prints_answers_only():
    result = tailrace(
        "chat", *NULL, "--max-tokens", "5", stdin=b"one\n\nbad \xff\ntwo\n", env={**os.environ, "LC_ALL": "C"}
    )
    assert result.returncode == 0
    assert [len(line) for line in result.stdout.splitlines()] == [5, 5]
    assert b"not valid Unicode" in result.stderr


def test_a_reader_that_leaves_ends_generate_in_silence():
    command = [*TAILRACE, "generate", "hi", *NULL, "--null-step-ms", "5"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(SECONDS) == 141


@pytest.mark.parametrize("serve", [["serve", "null", "--listen", "127.0.0.1:0"], ["generate", "hi", *NULL]])
def test_ctrl_c_while_the_core_starts_is_silent(serve):
    with Terminal(*TAILRACE, *serve) as terminal:
        while not (cores := children(terminal.pid)):
            time.sleep(0.005)
        while "core_proc" not in Path(f"/proc/{cores[0]}/cmdline").read_text():
            time.sleep(0.001)
        assert os.getpgid(cores[0]) != os.getpgid(terminal.pid), "the terminal's signals are not for the core"
        terminal.type(CTRL_C)
        code, output = terminal.wait_end()
    assert code == 130
    assert output.replace("^C", "").strip() == ""


def test_ctrl_c_while_tailrace_is_imported_is_silent():
    code = (
        "import builtins, os, signal, sys\n"
        "real = builtins.__import__\n"
        "def load(name, *rest):\n"
        "    if name == sys.argv[1]:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = load\n"
        "from async_engine.cli import main\n"
        "sys.exit(main(['generate', 'hi', '--model', 'null']))\n"
    )
    for module in ("msgspec", "async_engine.bench.options", "uvloop"):
        command = [sys.executable, "-c", code, module]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
        assert (result.returncode, result.stderr) == (130, b""), module


@pytest.mark.embedded
def test_ctrl_c_ends_the_demo_in_silence():
    with Terminal(sys.executable, str(ROOT / "clients/python/demo.py")) as terminal:
        while not (servers := children(terminal.pid)) or not children(servers[0]):
            time.sleep(0.005)
        terminal.type(CTRL_C)
        code, output = terminal.wait_end()
    assert code == 130
    assert "Traceback" not in output
