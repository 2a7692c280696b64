"""Command-line flags, derived from the structs that declare the knobs."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from protos.config import refusal

if TYPE_CHECKING:
    from collections.abc import Collection

    from protos.errors import InvalidRequestError

# How a value is read, and what stands for it in --help where its description names no unit.
_PARSERS: dict[type[inspect.Type], tuple[type, str]] = {
    inspect.IntType: (int, "N"),
    inspect.FloatType: (float, "X"),
    inspect.StrType: (str, "TEXT"),
}
_UNITS = re.compile(r"\b(HOST:PORT|FILE|URL|MiB|milliseconds|seconds|name)\b")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. So do the parsers of its subcommands, which are of this class too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tailrace: {message}; see `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Knows all or fails: a subcommand names its own unknown arguments."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class VersionAction(argparse.Action):
    """Prints the version and ends. Looked up only then, as that takes as long as all else."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('tailrace')}\n")
        parser.exit()


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show, and leaves room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", [], argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def add_flags(parser: argparse.ArgumentParser, section: type[msgspec.Struct], skip: Collection[str] = ()) -> None:
    """One group with one flag per field of a struct that has a description. The first sentence of the struct's
    docstring is its title."""
    group = parser.add_argument_group((section.__doc__ or section.__name__).partition(".")[0])
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if field.name not in skip:
            _add_flag(group, field)


def _add_flag(group: argparse._ArgumentGroup, field: inspect.Field) -> None:
    kind, text = _strip(field.type)
    if not text:
        return
    unit = _UNITS.search(text)
    options: dict[str, Any] = {"default": field.default, "help": text.replace("%", "%%")}
    if isinstance(kind, inspect.BoolType):
        options["action"] = argparse.BooleanOptionalAction
    elif isinstance(kind, inspect.LiteralType):
        options["choices"] = kind.values
    elif isinstance(kind, inspect.VarTupleType):
        parse, metavar = _PARSERS[type(kind.item_type)]
        options |= {"action": "append", "default": [], "type": parse, "metavar": metavar}
        options["help"] += "; may be repeated"
    else:
        parse, metavar = _PARSERS[type(kind)]
        options |= {"type": parse, "metavar": unit[0].upper() if unit else metavar}
    group.add_argument(flag_name(field.name), **options)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def explain(error: InvalidRequestError, arguments: argparse.Namespace) -> str:
    """The error, naming the flag instead of the field where the field came from one."""
    name = {"stop.strings": "stop", "stop.token_ids": "stop_token_ids"}.get(error.field, error.field.rpartition(".")[2])
    if not hasattr(arguments, name):
        return str(error)
    return f"{flag_name(name)}{'' if error.description.startswith('must ') else ':'} {error.description}"


def _strip(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """The type itself, without description and None."""
    text = ""
    while True:
        if isinstance(kind, inspect.Metadata):
            text = (kind.extra_json_schema or {}).get("description", text)
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            (kind,) = (option for option in kind.types if not isinstance(option, inspect.NoneType))
        else:
            return kind, text


def values(arguments: argparse.Namespace, *sections: type[msgspec.Struct]) -> dict[str, Any]:
    """The parsed values that belong to these structs, by field name."""
    names = [field.name for section in sections for field in msgspec.structs.fields(section)]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


def parse(kind: type[OptionsT], arguments: argparse.Namespace) -> OptionsT:
    """The parsed values as the struct they belong to. Raises InvalidRequestError naming the option."""
    given = values(arguments, kind)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, given) from None
