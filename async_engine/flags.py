"""Command-line flags, derived from the structs that declare the knobs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Collection

_PARSERS: dict[type[inspect.Type], type] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show, and leaves room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", (), False, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def add_flags(parser: argparse.ArgumentParser, section: type[msgspec.Struct], skip: Collection[str] = ()) -> None:
    """One group with one flag per field of a struct; its title is the first line of the struct's docstring."""
    group = parser.add_argument_group((section.__doc__ or section.__name__).partition("\n")[0].rstrip("."))
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if field.name not in skip:
            _add_flag(group, field)


def _add_flag(group: argparse._ArgumentGroup, field: inspect.Field) -> None:
    kind, text = _strip(field.type)
    flag = "--" + field.name.replace("_", "-")
    options: dict[str, Any] = {"default": field.default, "help": text.replace("%", "%%")}
    if isinstance(kind, inspect.BoolType):
        options["action"] = argparse.BooleanOptionalAction
    elif isinstance(kind, inspect.LiteralType):
        options["choices"] = kind.values
    elif isinstance(kind, inspect.VarTupleType):
        options |= {"nargs": "+", "type": _PARSERS[type(kind.item_type)], "metavar": field.name.upper()}
    else:
        options |= {"type": _PARSERS[type(kind)], "metavar": type(kind).__name__.removesuffix("Type").upper()}
    group.add_argument(flag, **options)


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
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
