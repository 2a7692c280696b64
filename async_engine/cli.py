"""The `tailrace` command. Each subcommand is imported when it is called, so that --help is instant."""

from __future__ import annotations

import sys

try:
    import os
    from typing import TYPE_CHECKING

    from async_engine.flags import HelpFormatter, Parser, VersionAction, add_flags, explain, parse, values
    from protos.adapter_config import AdapterOptions
    from protos.config import (
        CacheOptions,
        CoreConfig,
        EngineConfig,
        ExecutorOptions,
        ModelOptions,
        SchedulerOptions,
        ServeConfig,
        build,
    )
    from protos.errors import InvalidRequestError, TailraceError
    from protos.parallel_config import ParallelOptions
    from protos.params import SamplingParams
    from protos.scale_config import CoreServerOptions, ScaleOptions
    from protos.server_config import AdmissionOptions, ServerOptions
except KeyboardInterrupt:
    sys.exit(130)  # Ctrl-C may come this early

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ENGINE_SECTIONS = (ModelOptions, AdapterOptions, CacheOptions, SchedulerOptions, ExecutorOptions, ParallelOptions)
SERVE_SECTIONS = (ServerOptions, AdmissionOptions, ScaleOptions, *ENGINE_SECTIONS)
CORE_SECTIONS = (CoreServerOptions, *ENGINE_SECTIONS)
MODEL_HELP = "Hugging Face directory or hub id, .gguf file, or 'null'; default: the embedded SmolLM2-135M-Instruct"
ADAPTER_HELP = "name of one of --adapters to compute with; default: the model alone"
MAX_VOCAB_SIZE = 1 << 31
"""Of any model: parameters are checked before the model is there, and its own vocabulary then."""


def make_parser() -> Parser:
    parser = Parser(prog="tailrace", description="A streaming engine for large language models with a gRPC interface.")
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> Parser:
        return commands.add_parser(name, help=text, description=text, formatter_class=HelpFormatter)

    serve = command("serve", "Serve a model over gRPC.")
    serve.add_argument("model", nargs="?", default="", metavar="MODEL", help=MODEL_HELP)
    _add_sections(serve, *SERVE_SECTIONS)

    core = command("core", "Run the core of an engine, for `tailrace serve --core` on other machines.")
    core.add_argument("model", nargs="?", default="", metavar="MODEL", help=MODEL_HELP)
    _add_sections(core, *CORE_SECTIONS)

    generate = command("generate", "Continue a prompt and print the text as it comes.")
    generate.add_argument("input", metavar="PROMPT", help="text to continue; '-' reads it from standard input")
    generate.add_argument("--model", default="", help=MODEL_HELP)
    generate.add_argument("--chat", dest="as_chat", action="store_true", help="treat the prompt as a user's message")
    generate.add_argument("--adapter", default="", help=ADAPTER_HELP)
    _add_sections(generate, SamplingParams, *ENGINE_SECTIONS)

    chat = command("chat", "Talk with a model; Ctrl-C ends the turn, Ctrl-D the program.")
    chat.add_argument("--model", default="", help=MODEL_HELP)
    chat.add_argument("--system", default="", help="a system message to begin with")
    chat.add_argument("--adapter", default="", help=ADAPTER_HELP)
    _add_sections(chat, SamplingParams, *ENGINE_SECTIONS)

    top = command("top", "Show a running engine on the terminal: load, latencies, live requests.")
    from async_engine.top_options import TopOptions

    add_flags(top, TopOptions)

    command("models", "List the architectures that are supported, and what computes each.")

    bench = command("bench", "Measure a running server, or the control plane without a model.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    from async_engine.bench.options import NullBenchOptions, ServeBenchOptions

    for kind, text, options in (
        ("serve", "Load a running server; report TTFT, inter-token latency and tokens/s.", ServeBenchOptions),
        ("null", "Time the core and the front end with scripted tokens.", NullBenchOptions),
    ):
        add_flags(kinds.add_parser(kind, help=text, description=text, formatter_class=HelpFormatter), options)
    return parser


def _add_sections(parser: Parser, *sections: type) -> None:
    for section in sections:
        add_flags(parser, section, skip={"model"})


def run(arguments: argparse.Namespace) -> int:
    """Runs a parsed command; the exit code."""
    match arguments.command:
        case "serve":
            from async_engine.commands import serve

            return serve(build(ServeConfig, **values(arguments, *SERVE_SECTIONS)))
        case "core":
            from async_engine.commands import core

            return core(build(CoreConfig, **values(arguments, *CORE_SECTIONS)))
        case "generate" | "chat":
            from async_engine import commands

            config = build(EngineConfig, **values(arguments, *ENGINE_SECTIONS))
            params = SamplingParams(**values(arguments, SamplingParams))
            params.verify(MAX_VOCAB_SIZE)
            if arguments.command == "chat":
                return commands.chat(config, params, arguments.system, arguments.adapter)
            prompt = read_prompt(arguments.input)
            return commands.generate(config, params, prompt, arguments.as_chat, arguments.adapter)
        case "top":
            from async_engine import top
            from async_engine.top_options import TopOptions

            return top.main(parse(TopOptions, arguments))
        case "models":
            from async_engine.commands import models

            return models()
        case "bench" if arguments.bench == "serve":
            from async_engine.bench import serve as bench_serve
            from async_engine.bench.options import ServeBenchOptions

            return bench_serve.main(parse(ServeBenchOptions, arguments))
        case _:
            from async_engine.bench import null as bench_null
            from async_engine.bench.options import NullBenchOptions

            return bench_null.main(parse(NullBenchOptions, arguments))


def read_prompt(text: str) -> str:
    """The text, or for '-' standard input. Raises TailraceError if it is empty or not UTF-8."""
    source = "standard input" if text == "-" else "the prompt"
    try:
        if text == "-":
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
            text = sys.stdin.read()
        text.encode()
    except UnicodeError:
        raise TailraceError(f"{source} is not UTF-8") from None
    if not text:
        raise TailraceError(f"{source} is empty")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: errors of ours are one line and exit code 2."""
    try:
        arguments = make_parser().parse_args(argv)
        code = run(arguments)
        sys.stdout.flush()
        return code
    except TailraceError as error:
        text = explain(error, arguments) if isinstance(error, InvalidRequestError) else str(error)
        sys.stderr.write(f"tailrace: {text}\n")
        return 2
    except BrokenPipeError:
        # Nobody reads us any more; what Python still flushes at the end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
