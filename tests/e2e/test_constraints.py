"""Constraints, from the request to the text: the null model draws any token its mask allows."""

import json
import re

import grpc
import pytest
from jsonschema import Draft202012Validator

from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import run, serving, stream_request, until
from tests.e2e.test_generation import details_of, failure

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


async def answer(stub, constraint, max_tokens=400, **fields):
    request = stream_request("hi", max_tokens, constraint=constraint, **fields)
    return await stub.Generate(pb.GenerateRequest(spec=request.spec))


def test_output_follows_a_schema_and_ends_by_itself():
    async def main():
        async with serving() as (_, stub, _):
            constraint = pb.Constraint(json_schema=json.dumps(SCHEMA))
            return [await answer(stub, constraint, sampling=pb.SamplingOptions(seed=seed)) for seed in range(5)]

    answers = run(main)
    texts = {answer.output.sequences[0].text for answer in answers}
    assert len(texts) == 5
    for text in texts:
        Draft202012Validator(SCHEMA).validate(json.loads(text))
    for each in answers:
        assert each.output.sequences[0].finish.reason == pb.FINISH_REASON_CONSTRAINT_DONE


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_of_one_request_follow_it_each_by_itself_among_free_ones(depth):
    async def main():
        async with serving(max_steps_in_flight=depth) as (_, stub, _):
            free = stub.Generate(pb.GenerateRequest(spec=stream_request("x", 300).spec))
            constraint = pb.Constraint(choices=pb.StringList(values=["yes", "no", "maybe"]))
            chosen = await answer(stub, constraint, num_sequences=8, sampling=pb.SamplingOptions(seed=1))
            return chosen, await free

    chosen, free = run(main)
    texts = [sequence.text for sequence in chosen.output.sequences]
    assert set(texts) <= {"yes", "no", "maybe"}
    assert len(set(texts)) > 1
    assert len(free.output.sequences[0].token_ids) == 300


def test_resumed_output_goes_on_inside_its_constraint():
    async def main():
        async with serving() as (_, stub, _):
            constraint = pb.Constraint(regex="[a-c]{20}")
            sampling = pb.SamplingOptions(seed=4)
            whole = (await answer(stub, constraint, sampling=sampling)).output.sequences[0]
            parts = [
                await answer(stub, constraint, sampling=sampling, resume_from=pb.TokenIds(ids=whole.token_ids[:cut]))
                for cut in (1, 10, 19, 20)
            ]
            return whole, parts

    whole, parts = run(main)
    assert re.fullmatch("[a-c]{20}", whole.text)
    for cut, part in zip((1, 10, 19, 20), parts, strict=True):
        (sequence,) = part.output.sequences
        assert list(sequence.token_ids) == list(whole.token_ids[cut:])
        assert sequence.finish.reason == pb.FINISH_REASON_CONSTRAINT_DONE


@pytest.mark.parametrize(
    ("field", "constraint"),
    [
        ("constraint.regex", pb.Constraint(regex="(")),
        ("constraint.json_schema", pb.Constraint(json_schema="{")),
        ("constraint.json_schema", pb.Constraint(json_schema='{"type": "nothing"}')),
        ("constraint.grammar", pb.Constraint(grammar="root ::= undefined")),
        ("constraint.choices", pb.Constraint(choices=pb.StringList())),
        ("constraint.structural_tag", pb.Constraint(structural_tag="{}")),
        ("constraint.regex", pb.Constraint(regex="x" * (1 << 20) + "y")),
    ],
)
def test_bad_constraint_names_its_field_and_ends_its_request_alone(field, constraint):
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", 30_000))
            await anext(aiter(call))
            error = await failure(answer(stub, constraint, num_sequences=2))
            assert (await answer(stub, pb.Constraint(regex="ab"))).output.sequences[0].text == "ab"
            await anext(aiter(call))
            call.cancel()
            await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
            return error

    error = run(main)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details_of(error)["BadRequest"].field_violations
    assert violation.field == field


def test_request_given_up_while_its_constraint_compiles_leaves_nothing():
    async def main():
        async with serving() as (llm, stub, _):
            call = stub.GenerateStream(
                stream_request("x", 30_000, constraint=pb.Constraint(regex="(a{1,300}b{1,300}){1,300}"))
            )
            await until(lambda: llm.num_live == 1)
            call.cancel()
            await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
            assert await llm.core.call("reset_prefix_cache") == [1]
            assert (await answer(stub, pb.Constraint(regex="ab"))).output.sequences[0].text == "ab"

    run(main)
