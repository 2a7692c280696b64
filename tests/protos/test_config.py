"""Options: each bound is kept, and an error names the option."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from protos.config import EngineConfig, ServeConfig, build, sections
from protos.errors import InvalidRequestError


def _declared() -> dict[str, Any]:
    """Types of all options as msgspec sees them."""
    types = {}
    for section in sections(ServeConfig).values():
        for field in inspect.type_info(section).fields:  # type: ignore[attr-defined]
            assert field.name not in types, f"{field.name} is an option of two sections"
            assert isinstance(field.type, inspect.Metadata), f"{field.name} has no help"
            types[field.name] = field.type.type
    return types


OPTIONS = _declared()
NUMBERS = {name: t for name, t in OPTIONS.items() if isinstance(t, inspect.IntType | inspect.FloatType)}
BELOW = [(name, t.gt if t.ge is None else t.ge - 1) for name, t in NUMBERS.items()]
ABOVE = [(name, t.le + 1) for name, t in NUMBERS.items() if t.le is not None]
AT_BOUND = [(name, bound) for name, t in NUMBERS.items() for bound in (t.ge, t.le) if bound is not None]
FLOATS = [name for name, t in NUMBERS.items() if isinstance(t, inspect.FloatType)]
CHOICES = [name for name, t in OPTIONS.items() if isinstance(t, inspect.LiteralType)]
FITTING: dict[type, tuple[type, ...]] = {
    inspect.IntType: (int,),
    inspect.FloatType: (int, float),
    inspect.BoolType: (bool,),
    inspect.StrType: (str,),
    inspect.LiteralType: (),
    inspect.VarTupleType: (list,),
}
VALUES: tuple[object, ...] = ("words", 64.5, 64, True, None, [64], {})
MISTYPED = [
    (name, value)
    for name, declared in OPTIONS.items()
    for value in VALUES
    if type(value) not in FITTING[type(declared)]
]


def rejected(**option: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        build(ServeConfig, **option)
    return caught.value


def test_every_number_has_a_lower_bound() -> None:
    assert [name for name, t in NUMBERS.items() if t.ge is None and t.gt is None] == []


@pytest.mark.parametrize(("name", "value"), [*BELOW, *ABOVE, *((name, math.nan) for name in FLOATS)])
def test_value_out_of_bounds_is_refused_by_name(name: str, value: float) -> None:
    error = rejected(**{name: value})
    assert error.field == name
    assert error.status == "INVALID_ARGUMENT"
    assert str(error) == f"{name}: {error.description}"


@pytest.mark.parametrize(("name", "value"), AT_BOUND)
def test_value_at_a_bound_is_taken(name: str, value: float) -> None:
    config = build(ServeConfig, **{name: value})
    assert [getattr(s, name) for s in msgspec.structs.astuple(config) if hasattr(s, name)] == [value]


@pytest.mark.parametrize(("name", "value"), MISTYPED)
def test_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    assert rejected(**{name: value}).field == name


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_choice_is_refused_by_name(name: str) -> None:
    error = rejected(**{name: "nonsense"})
    assert error.field == name
    assert "nonsense" in error.description


def test_unknown_option_is_refused_by_name() -> None:
    error = rejected(max_num_sequences=4)
    assert (error.field, error.description) == ("max_num_sequences", "no such option")


@pytest.mark.parametrize("block_size", [9, 20, 255])
def test_block_size_must_be_a_multiple_of_8(block_size: int) -> None:
    error = rejected(block_size=block_size)
    assert error.field == "block_size"
    assert str(block_size) in error.description


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max_num_seqs", 0, "must be at least 1, not 0"),
        ("max_num_seqs", 4097, "must be at most 4096, not 4097"),
        ("drain_timeout", -0.5, "must be at least 0, not -0.5"),
        ("step_timeout", 0, "must be more than 0, not 0"),
    ],
)
def test_a_bound_is_told_with_the_value(name: str, value: float, problem: str) -> None:
    assert rejected(**{name: value}).description == problem


def test_too_few_blocks_for_anything_are_refused_with_a_useful_number() -> None:
    assert "129 hold a context of 2048" in rejected(num_kv_blocks=1).description
    assert "501 hold a context of 4000" in rejected(num_kv_blocks=1, block_size=8, max_model_len=4000).description
    assert build(EngineConfig, num_kv_blocks=2).cache.num_kv_blocks == 2


def test_options_go_to_their_sections_and_the_rest_keeps_its_default() -> None:
    config = build(ServeConfig, model="null", block_size=32, max_num_seqs=3, num_threads=1, listen="unix:/tmp/x")
    default = ServeConfig()
    assert config.model == msgspec.structs.replace(default.model, model="null")
    assert config.cache == msgspec.structs.replace(default.cache, block_size=32)
    assert config.scheduler == msgspec.structs.replace(default.scheduler, max_num_seqs=3)
    assert config.executor == msgspec.structs.replace(default.executor, num_threads=1)
    assert config.server == msgspec.structs.replace(default.server, listen="unix:/tmp/x")
    assert config.engine == build(EngineConfig, model="null", block_size=32, max_num_seqs=3, num_threads=1)


def test_engine_has_no_server_options() -> None:
    with pytest.raises(InvalidRequestError, match="no such option"):
        build(EngineConfig, listen="127.0.0.1:1")


def test_built_config_cannot_be_changed() -> None:
    config = build(EngineConfig)
    with pytest.raises(AttributeError):
        config.cache = None  # type: ignore[misc,assignment]
    with pytest.raises(AttributeError):
        config.cache.block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize("kind", [EngineConfig, ServeConfig])
def test_defaults_are_within_their_own_bounds(kind: type[EngineConfig | ServeConfig]) -> None:
    assert build(kind) == kind()  # type: ignore[type-var]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kind()), type=kind) == kind()
