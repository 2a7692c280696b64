"""JSON schemas of real kinds, each with documents that are valid, in the property order that the schema gives."""

from __future__ import annotations

from typing import Any

Json = Any


def obj(properties: dict[str, Json], required: list[str] | None = None, **more: Json) -> dict[str, Json]:
    """A closed object whose properties are all required, unless said otherwise."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def array(items: Json, **more: Json) -> dict[str, Json]:
    return {"type": "array", "items": items, **more}


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
PERSON = obj({"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 130}})
TREE = obj({"value": INTEGER, "children": array({"$ref": "#/$defs/tree"}, maxItems=2)})
EXPRESSION = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 9},
        obj({"op": {"enum": ["+", "-", "*"]}, "left": {"$ref": "#/$defs/e"}, "right": {"$ref": "#/$defs/e"}}),
    ]
}

SCHEMAS: dict[str, tuple[Json, list[Json]]] = {
    # Types
    "string": (STRING, ["", "plain", 'quote " backslash \\ line \n', "naïve 你好 😀"]),
    "integer": (INTEGER, [0, -7, 123456]),
    "number": (NUMBER, [0, -1.5, 2e10]),
    "boolean": (BOOLEAN, [True, False]),
    "null": ({"type": "null"}, [None]),
    "several types": ({"type": ["integer", "boolean", "null"]}, [3, True, None]),
    "anything": ({}, [None, [1, {"a": []}], "x"]),
    "anything, as true": (True, [{"a": 1}]),
    "any object": ({"type": "object"}, [{}, {"a": {"b": [1, "c"]}}]),
    "any array": ({"type": "array"}, [[], [1, [2, "x"], {}]]),
    # Objects
    "flat object": (PERSON, [{"name": "Ada", "age": 36}]),
    "optional properties": (
        obj({"a": INTEGER, "b": STRING, "c": BOOLEAN}, ["b"]),
        [{"b": "x"}, {"a": 1, "b": "", "c": True}],
    ),
    "all optional": (obj({"a": INTEGER, "b": INTEGER}, []), [{}, {"b": 2}, {"a": 1, "b": 2}]),
    "nested objects": (obj({"a": obj({"b": obj({"c": obj({"d": INTEGER})})})}), [{"a": {"b": {"c": {"d": 1}}}}]),
    "open object": (
        {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]},
        [{"id": 1, "extra": [None]}],
    ),
    "map of integers": ({"type": "object", "additionalProperties": INTEGER}, [{}, {"x": 1, "y": -2}]),
    "map with bounds": (
        {"type": "object", "additionalProperties": BOOLEAN, "minProperties": 1, "maxProperties": 3},
        [{"a": True}, {"a": True, "b": False, "c": True}],
    ),
    "pattern properties": (
        {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": INTEGER}, "additionalProperties": False},
        [{}, {"x_ab": 1}],
    ),
    "properties of two patterns": (
        {
            "type": "object",
            "properties": {"id": INTEGER},
            "required": ["id"],
            "patternProperties": {"^s_": {"type": "string", "maxLength": 3}, "^n_": NUMBER},
            "additionalProperties": False,
        },
        [{"id": 1, "s_a": "x", "n_b": 0.5}],
    ),
    "required but not declared": (
        {"type": "object", "required": ["z"], "additionalProperties": INTEGER},
        [{"z": 1, "a": 2}],
    ),
    "empty closed object": (obj({}), [{}]),
    # Arrays
    "array of strings": (array({"type": "string", "maxLength": 4}), [[], ["a", "b"]]),
    "array with bounds": (array(INTEGER, minItems=2, maxItems=4), [[1, 2], [1, 2, 3, 4]]),
    "array of objects": (array(PERSON, maxItems=2), [[{"name": "Bo", "age": 1}]]),
    "matrix": (array(array(INTEGER, minItems=2, maxItems=2), minItems=2, maxItems=2), [[[1, 2], [3, 4]]]),
    "tuple": (
        {"type": "array", "prefixItems": [STRING, INTEGER, BOOLEAN], "items": False, "minItems": 3},
        [["a", 1, True]],
    ),
    "tuple with a tail": (
        {"type": "array", "prefixItems": [BOOLEAN], "items": INTEGER, "minItems": 1},
        [[True], [False, 1, 2]],
    ),
    "fixed length": (array(BOOLEAN, minItems=3, maxItems=3), [[True, False, True]]),
    # Values
    "enum of strings": ({"enum": ["red", "green", "dark blue"]}, ["red", "dark blue"]),
    "enum of kinds": ({"enum": [1, "1", None, True, [1, 2], {"a": 1}]}, [1, "1", None, True, [1, 2], {"a": 1}]),
    "enum in a type": ({"type": "string", "enum": ["a", "b", "\\", '"', "é"]}, ["a", "\\", '"', "é"]),
    "const string": ({"const": "fixed ünïcode"}, ["fixed ünïcode"]),
    "const object": ({"const": {"a": [1, None], "b": "x"}}, [{"a": [1, None], "b": "x"}]),
    # Strings
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 5}, ["ab", "abcde", "é😀"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}, ["AB-123"]),
    "pattern in the middle": ({"type": "string", "pattern": "ab+c", "maxLength": 12}, ["xxabbcxx", "abc"]),
    "pattern of choices": ({"type": "string", "pattern": "^(foo|bar(baz)?)(,(foo|bar))*$"}, ["foo", "barbaz,foo"]),
    "pattern with escapes": ({"type": "string", "pattern": '^[\\w.]+\\\\"/$'}, ['a_b.c\\"/']),
    "pattern and length": ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4}, ["ab", "abcd"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"]),
    "time": ({"type": "string", "format": "time"}, ["12:30:00Z", "23:59:59.5+02:00"]),
    "date-time": ({"type": "string", "format": "date-time"}, ["2024-02-29T12:30:00Z"]),
    "duration": ({"type": "string", "format": "duration"}, ["P1DT2H", "PT5M"]),
    "email": ({"type": "string", "format": "email"}, ["ada@example.org"]),
    "hostname": ({"type": "string", "format": "hostname"}, ["api.example.org"]),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["192.168.0.1"]),
    "ipv6": ({"type": "string", "format": "ipv6"}, ["2001:db8::1"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"]),
    "uri": ({"type": "string", "format": "uri"}, ["https://example.org/a?b=c#d"]),
    # Numbers
    "integer bounds": ({"type": "integer", "minimum": -5, "maximum": 120}, [-5, 0, 99, 120]),
    "exclusive bounds": ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000}, [1, 999]),
    "number bounds": ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1]),
    "exclusive number bounds": ({"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.5}, [-1.25, 2]),
    "no lower bound": ({"type": "integer", "maximum": -10}, [-10, -1234]),
    "multiple of 5": ({"type": "integer", "multipleOf": 5}, [0, 5, -25, 100]),
    "multiple of 0.01": ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 100}, [0.25, 99.5, 7]),
    # Combinations
    "anyOf": ({"anyOf": [INTEGER, obj({"error": STRING})]}, [1, {"error": "x"}]),
    "oneOf apart by type": ({"oneOf": [INTEGER, BOOLEAN, {"type": "null"}]}, [1, True, None]),
    "oneOf apart by a const": (
        {"oneOf": [obj({"kind": {"const": "a"}, "n": INTEGER}), obj({"kind": {"const": "b"}, "s": STRING})]},
        [{"kind": "a", "n": 1}, {"kind": "b", "s": "x"}],
    ),
    "allOf": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": True}],
    ),
    "allOf of bounds": ({"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 9}]}, [3, 9]),
    "nullable": (obj({"x": {"anyOf": [STRING, {"type": "null"}]}}), [{"x": None}, {"x": "y"}]),
    "nullable by type": (obj({"x": {"type": ["number", "null"]}}), [{"x": None}, {"x": 1.5}]),
    # References
    "$ref to $defs": (
        {**obj({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}}), "$defs": {"p": PERSON}},
        [{"from": {"name": "A", "age": 1}, "to": {"name": "B", "age": 2}}],
    ),
    "$ref to definitions": (
        {"$ref": "#/definitions/id", "definitions": {"id": {"type": "integer", "minimum": 1}}},
        [1],
    ),
    "$ref beside keywords": (
        {"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"type": "integer", "minimum": 0}}},
        [0, 5],
    ),
    "recursive tree": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
        [{"value": 1, "children": [{"value": 2, "children": []}]}],
    ),
    "recursive list": (
        {
            "$ref": "#/$defs/l",
            "$defs": {"l": {"anyOf": [{"type": "null"}, obj({"head": INTEGER, "tail": {"$ref": "#/$defs/l"}})]}},
        },
        [None, {"head": 1, "tail": {"head": 2, "tail": None}}],
    ),
    "recursive root": (
        obj({"name": STRING, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        [{"name": "a", "next": None}],
    ),
    "recursive expression": (
        {"$ref": "#/$defs/e", "$defs": {"e": EXPRESSION}},
        [7, {"op": "+", "left": 1, "right": {"op": "*", "left": 2, "right": 3}}],
    ),
    # Keys
    "unicode keys": (obj({"größe": INTEGER, "名前": STRING, "😀": BOOLEAN}), [{"größe": 1, "名前": "x", "😀": True}]),
    "escaped keys": (
        obj({'a"b': INTEGER, "back\\slash": INTEGER, "new\nline": INTEGER, "a/b": INTEGER, "$": INTEGER}),
        [{'a"b': 1, "back\\slash": 2, "new\nline": 3, "a/b": 4, "$": 5}],
    ),
    "odd keys": (
        obj({"": INTEGER, " ": INTEGER, "type": INTEGER, "$ref": INTEGER}, []),
        [{"": 1, " ": 2, "type": 3, "$ref": 4}],
    ),
    # As applications send them
    "tool call": (
        obj(
            {
                "name": {"const": "get_weather"},
                "arguments": obj(
                    {
                        "location": {"type": "string", "description": "City and country", "maxLength": 30},
                        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                        "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    },
                    ["location"],
                ),
            }
        ),
        [{"name": "get_weather", "arguments": {"location": "Oslo, Norway", "unit": "celsius"}}],
    ),
    "several tools": (
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "anyOf": [
                    obj(
                        {"name": {"const": "search"}, "arguments": obj({"query": STRING, "limit": INTEGER}, ["query"])}
                    ),
                    obj({"name": {"const": "open"}, "arguments": obj({"url": {"type": "string", "format": "uri"}})}),
                ]
            },
        },
        [[{"name": "search", "arguments": {"query": "x"}}, {"name": "open", "arguments": {"url": "http://a.b/c"}}]],
    ),
    "pydantic model": (
        {
            "$defs": {
                "Level": {"enum": ["low", "high"], "title": "Level", "type": "string"},
                "Step": {
                    "properties": {
                        "explanation": {"title": "Explanation", "type": "string"},
                        "level": {"$ref": "#/$defs/Level"},
                    },
                    "required": ["explanation", "level"],
                    "title": "Step",
                    "type": "object",
                },
            },
            "properties": {
                "steps": {"items": {"$ref": "#/$defs/Step"}, "title": "Steps", "type": "array"},
                "answer": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Answer"},
            },
            "required": ["steps"],
            "title": "Reasoning",
            "type": "object",
            "additionalProperties": False,
        },
        [{"steps": [{"explanation": "think", "level": "high"}], "answer": None}],
    ),
    "invoice": (
        obj(
            {
                "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
                "issued": {"type": "string", "format": "date"},
                "lines": array(
                    obj(
                        {
                            "sku": {"type": "string", "pattern": "^[A-Z0-9]{3,8}$"},
                            "quantity": {"type": "integer", "minimum": 1},
                            "price": {"type": "number", "minimum": 0},
                        }
                    ),
                    minItems=1,
                    maxItems=3,
                ),
                "currency": {"enum": ["EUR", "USD"]},
                "paid": BOOLEAN,
            }
        ),
        [
            {
                "number": "INV-0042",
                "issued": "2024-05-01",
                "lines": [{"sku": "ABC1", "quantity": 2, "price": 9.99}],
                "currency": "EUR",
                "paid": False,
            }
        ],
    ),
    "extraction": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Entities",
            **obj(
                {
                    "entities": array(
                        obj(
                            {
                                "text": {"type": "string", "minLength": 1, "maxLength": 20},
                                "label": {"enum": ["PERSON", "ORG", "GPE"]},
                                "span": {
                                    "type": "array",
                                    "prefixItems": [INTEGER, INTEGER],
                                    "items": False,
                                    "minItems": 2,
                                },
                                "confidence": {"type": "number", "minimum": 0, "maximum": 1},
                            },
                            ["text", "label", "span"],
                        ),
                        maxItems=3,
                    )
                }
            ),
        },
        [{"entities": [{"text": "Ada", "label": "PERSON", "span": [0, 3], "confidence": 0.5}]}],
    ),
    "geojson point": (
        obj(
            {
                "type": {"const": "Point"},
                "coordinates": {
                    "type": "array",
                    "prefixItems": [
                        {"type": "number", "minimum": -180, "maximum": 180},
                        {"type": "number", "minimum": -90, "maximum": 90},
                    ],
                    "items": False,
                    "minItems": 2,
                },
            }
        ),
        [{"type": "Point", "coordinates": [10.75, 59.9]}],
    ),
    "openapi parameter": (
        obj(
            {
                "name": {"type": "string", "pattern": "^[a-z_]+$"},
                "in": {"enum": ["query", "path"]},
                "required": BOOLEAN,
                "schema": {
                    "anyOf": [
                        obj({"type": {"const": "string"}, "maxLength": INTEGER}, ["type"]),
                        obj({"type": {"const": "array"}, "items": obj({"type": {"enum": ["string", "integer"]}})}),
                    ]
                },
            },
            ["name", "in"],
        ),
        [{"name": "page_size", "in": "query", "schema": {"type": "array", "items": {"type": "integer"}}}],
    ),
    "chess move": (
        obj(
            {
                "piece": {"enum": ["K", "Q", "R", "B", "N", "P"]},
                "to": {"type": "string", "pattern": "^[a-h][1-8]$"},
                "captures": {"type": ["string", "null"], "maxLength": 1},
            }
        ),
        [{"piece": "N", "to": "f3", "captures": None}],
    ),
    "deep nesting": (
        obj(
            {
                "a": array(
                    obj(
                        {"b": array(obj({"c": array(obj({"d": array(INTEGER, maxItems=1)}), maxItems=1)}), maxItems=1)}
                    ),
                    maxItems=1,
                )
            }
        ),
        [{"a": [{"b": [{"c": [{"d": [1]}]}]}]}],
    ),
    "forty properties": (
        obj({f"field_{i}": [INTEGER, BOOLEAN, {"enum": ["x", "y"]}][i % 3] for i in range(40)}),
        [{f"field_{i}": [1, True, "x"][i % 3] for i in range(40)}],
    ),
}
