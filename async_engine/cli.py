"""The `tailrace` command. Each subcommand is imported when it is called, so that --help is instant."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from async_engine.flags import HelpFormatter, add_flags, values
from protos.config import (
    CacheOptions,
    EngineConfig,
    ExecutorOptions,
    ModelOptions,
    SchedulerOptions,
    ServeConfig,
    ServerOptions,
    build,
)
from protos.errors import TailraceError
from protos.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE_SECTIONS = (ModelOptions, CacheOptions, SchedulerOptions, ExecutorOptions)
MODEL_HELP = "Hugging Face directory or hub id, .gguf file, or 'null'; default: the embedded SmolLM2-135M-Instruct"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace", description="A streaming engine for large language models with a gRPC interface."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, formatter_class=HelpFormatter)

    serve = command("serve", "Serve a model over gRPC.")
    serve.add_argument("model", nargs="?", default="", metavar="MODEL", help=MODEL_HELP)
    _add_sections(serve, ServerOptions, *ENGINE_SECTIONS)

    generate = command("generate", "Continue a prompt and print the text as it comes.")
    generate.add_argument("prompt", help="text to continue; '-' reads it from standard input")
    generate.add_argument("--model", default="", help=MODEL_HELP)
    generate.add_argument("--chat", action="store_true", help="treat the prompt as a user's message")
    _add_sections(generate, SamplingParams, *ENGINE_SECTIONS)

    chat = command("chat", "Talk with a model; Ctrl-C ends the turn, Ctrl-D the program.")
    chat.add_argument("--model", default="", help=MODEL_HELP)
    chat.add_argument("--system", default="", help="a system message to begin with")
    _add_sections(chat, SamplingParams, *ENGINE_SECTIONS)

    bench = command("bench", "Measure a running server, or the control plane without a model.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    from async_engine.bench.options import NullBenchOptions, ServeBenchOptions

    for kind, text, options in (
        ("serve", "Load a running server; report TTFT, inter-token latency and tokens/s.", ServeBenchOptions),
        ("null", "Time the core and the front end with scripted tokens.", NullBenchOptions),
    ):
        add_flags(kinds.add_parser(kind, help=text, description=text, formatter_class=HelpFormatter), options)
    return parser


def _add_sections(parser: argparse.ArgumentParser, *sections: type) -> None:
    for section in sections:
        add_flags(parser, section, skip={"model"})


def run(arguments: argparse.Namespace) -> int:
    """Runs a parsed command; the exit code."""
    match arguments.command:
        case "serve":
            from async_engine.commands import serve

            sections = (ServerOptions, *ENGINE_SECTIONS)
            return serve(build(ServeConfig, **values(arguments, *sections)))
        case "generate" | "chat":
            from async_engine import commands

            config = build(EngineConfig, **values(arguments, *ENGINE_SECTIONS))
            params = SamplingParams(**values(arguments, SamplingParams))
            if arguments.command == "chat":
                return commands.chat(config, params, arguments.system)
            prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
            return commands.generate(config, params, prompt, as_chat=arguments.chat)
        case "bench" if arguments.bench == "serve":
            from async_engine.bench import serve as bench_serve
            from async_engine.bench.options import ServeBenchOptions, parse

            return bench_serve.main(parse(ServeBenchOptions, arguments))
        case _:
            from async_engine.bench import null as bench_null
            from async_engine.bench.options import NullBenchOptions, parse

            return bench_null.main(parse(NullBenchOptions, arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: errors of ours are one line and exit code 2."""
    arguments = make_parser().parse_args(argv)
    try:
        return run(arguments)
    except TailraceError as error:
        sys.stderr.write(f"tailrace: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
