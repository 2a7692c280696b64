"""The command line: flags, help, and errors that are one line, before anything is loaded."""

import io
import re
import sys

import pytest

from async_engine import cli, commands
from async_engine.bench.options import NullBenchOptions, ServeBenchOptions
from async_engine.flags import add_flags, values
from protos.architectures import REGISTRY
from protos.params import SamplingParams


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """What the commands would be called with; a test of this file loads no model."""
    calls = []
    for name in ("serve", "generate", "chat"):
        monkeypatch.setattr(commands, name, lambda *args, **named: calls.append((*args, *named.values())) or 0)
    return calls


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("serve --block-size 7", "--block-size must be at least 8, not 7"),
        ("serve --drain-timeout -1", "--drain-timeout must be at least 0, not -1.0"),
        ("serve --num-kv-blocks 1", "--num-kv-blocks must be more than 1"),
        ("bench serve --concurrency 0", "--concurrency must be at least 1, not 0"),
        ("bench null --seconds 0", "--seconds must be more than 0, not 0.0"),
        ("generate hi --top-p 2", "--top-p must be in (0, 1], not 2.0"),
        ("generate hi --max-tokens 0", "--max-tokens must be in [1, 4294967295], not 0"),
        ("generate hi --temperature -1", "--temperature must be in [0, 100], not -1.0"),
        ("generate hi --stop-token-ids -1", "--stop-token-ids: -1 is outside the vocabulary"),
        ("chat --max-tokens 2 --min-tokens 3", "--min-tokens: 3 is more than max_tokens, 2"),
    ],
)
def test_a_bad_value_names_its_flag_before_anything_is_loaded(line, problem, capsys, nothing_runs):
    assert cli.main(line.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"tailrace: {problem}")
    assert nothing_runs == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("serve --nope", "unrecognized arguments: --nope; see `tailrace serve --help`"),
        ("bench serve --nope", "unrecognized arguments: --nope; see `tailrace bench serve --help`"),
        ("serve --block-size x", "argument --block-size: invalid int value: 'x'; see `tailrace serve --help`"),
        ("generate", "the following arguments are required: PROMPT; see `tailrace generate --help`"),
        ("", "the following arguments are required: COMMAND; see `tailrace --help`"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(line, error, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"tailrace: {error}\n"


@pytest.mark.parametrize(
    ("prompt", "stdin", "problem"),
    [
        ("", b"", "the prompt is empty"),
        ("\udcff", b"", "the prompt is not UTF-8"),
        ("-", b"", "standard input is empty"),
        ("-", b"a\xff", "standard input is not UTF-8"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt, stdin, problem, capsys, monkeypatch, nothing_runs):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
    assert cli.main(["generate", prompt]) == 2
    assert capsys.readouterr().err == f"tailrace: {problem}\n"
    assert nothing_runs == []


def test_a_prompt_from_standard_input(monkeypatch, nothing_runs):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode()), "ascii"))
    assert cli.main(["generate", "-"]) == 0
    ((*_, prompt, as_chat, adapter),) = nothing_runs
    assert (prompt, as_chat, adapter) == ("é\n", False, "")


def test_flags_of_several_values_are_repeated_and_leave_the_prompt_alone(nothing_runs):
    line = ["generate", "--stop", "7", "--stop", "x y", "--stop-token-ids", "3", "1, 2, 3,", "--chat", "--adapter", "a"]
    assert cli.main(line) == 0
    ((_, params, prompt, as_chat, adapter),) = nothing_runs
    assert params == SamplingParams(stop=("7", "x y"), stop_token_ids=(3,))
    assert (prompt, as_chat, adapter) == ("1, 2, 3,", True, "a")


def test_no_flag_is_the_default(nothing_runs):
    assert cli.main(["chat"]) == 0
    ((_, params, system, adapter),) = nothing_runs
    assert (params, system, adapter) == (SamplingParams(), "", "")


def help_of(line, capsys):
    with pytest.raises(SystemExit):
        cli.main([*line.split(), "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_units_and_defaults_and_no_types(capsys):
    texts = [help_of(line, capsys) for line in ("serve", "generate", "bench serve", "bench null")]
    for text in texts:
        assert not re.search(r" (INT|FLOAT|STR|VARTUPLE)\b", text)
    serve, generate, bench, _ = texts
    for part in (
        "--listen HOST:PORT",
        "--kv-cache-memory MIB",
        "--drain-timeout SECONDS",
        "(default: 127.0.0.1:50051)",
    ):
        assert part in serve
    assert "How tokens are drawn, and when the output ends: " in generate
    assert "--top-p X" in generate
    assert "--stop TEXT" in generate
    assert "reach this probability, in (0, 1]; default: 1 " in generate
    assert "0 has --concurrency (default: 0.0)" in bench
    assert "of prompts and arrivals (default: 0)" in bench


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"tailrace \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_models_lists_every_architecture(capsys):
    assert cli.main(["models"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in lines] == list(REGISTRY)
    assert ["Gemma3ForCausalLM", "fused", "not: images; capped scores; attention both ways"] in lines


@pytest.mark.parametrize("options", [ServeBenchOptions, NullBenchOptions])
def test_flags_give_back_the_defaults_of_their_struct(options):
    parser = cli.Parser()
    add_flags(parser, options)
    assert options(**values(parser.parse_args([]), options)) == options()
