"""reference_page: the gRPC reference, in Markdown, from descriptors with their comments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, ServiceDescriptorProto

# Numbers of fields in descriptor.proto: the paths of comments are made of them.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _ONEOF, _NESTED, _VALUE, _METHOD = 2, 8, 3, 2, 2
_HEAD = """# gRPC reference: tailrace.v1

Made from the .proto files by `make protos`; what is said here is said there. An optional scalar that is unset means
what its comment says; all others mean their zero. Errors are statuses with `google.rpc` details.
"""
Path = tuple[int, ...]


def reference_page(files: Iterable[FileDescriptorProto]) -> str:
    """Services first, each with its messages behind it, in the order of the files."""
    parts = [_HEAD]
    for file in files:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        parts.append(f"\n## {file.name}\n")
        for index, service in enumerate(file.service):
            parts += _service(service, (_SERVICE, index), comments)
        for index, message in enumerate(file.message_type):
            parts += _message(message, (_MESSAGE, index), comments)
        for index, enum in enumerate(file.enum_type):
            parts += _enum(enum, (_ENUM, index), comments)
    return "\n".join(parts) + "\n"


def _service(service: ServiceDescriptorProto, path: Path, comments: dict[Path, str]) -> Iterator[str]:
    yield f"### service {service.name}\n\n{_text(comments, path)}\n"
    yield "| method | takes | answers | |\n|---|---|---|---|"
    for index, method in enumerate(service.method):
        takes, answers = (
            f"{'stream of ' * streams}{_link(kind)}"
            for kind, streams in (
                (method.input_type, method.client_streaming),
                (method.output_type, method.server_streaming),
            )
        )
        yield f"| `{method.name}` | {takes} | {answers} | {_cell(comments, (*path, _METHOD, index))} |"
    yield ""


def _message(message: DescriptorProto, path: Path, comments: dict[Path, str]) -> Iterator[str]:
    yield f"### {message.name}\n\n{_text(comments, path)}\n"
    if message.field:
        yield "| | field | type | |\n|---|---|---|---|"
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for index, field in enumerate(message.field):
        said = _cell(comments, (*path, _FIELD, index))
        yield f"| {field.number} | `{field.name}` | {_type(field, message, maps)} | {said} |"
    yield ""


def _enum(enum: EnumDescriptorProto, path: Path, comments: dict[Path, str]) -> Iterator[str]:
    yield f"### enum {enum.name}\n\n{_text(comments, path)}\n\n| | value | |\n|---|---|---|"
    for index, value in enumerate(enum.value):
        yield f"| {value.number} | `{value.name}` | {_cell(comments, (*path, _VALUE, index))} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto, maps: dict[str, Any]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = entry.field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    kind = _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _scalar(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    """To its heading, for types of ours."""
    name = type_name.removeprefix(".tailrace.v1.")
    if name.startswith("."):
        return name.removeprefix(".")
    return f"[{name}](#{name.lower()})"


def _text(comments: dict[Path, str], path: Path) -> str:
    return " ".join(comments.get(path, "").split())


def _cell(comments: dict[Path, str], path: Path) -> str:
    return _text(comments, path).replace("|", "\\|")
