"""What clients ask of a server besides generating: models, and the way between text and ids."""

import asyncio

import pytest

from tailrace_client import AsyncClient, Client, NotFoundError, RequestCancelledError, UnavailableError
from tests.e2e.serving import run, serving

MESSAGES = [{"role": "user", "content": "hi"}]


async def use_async(address):
    async with AsyncClient(address) as client:
        (model,) = await client.models()
        answers = [
            await client.tokenize("Grüße"),
            await client.tokenize("Grüße", add_special_tokens=False),
            await client.detokenize([256, *"Grüße".encode()]),
            await client.detokenize([256, 97], skip_special_tokens=False),
            await client.render_chat(MESSAGES),
            await client.render_chat(MESSAGES, add_generation_prompt=False),
        ]
        with pytest.raises(NotFoundError):
            await client.tokenize("a", model="other")
    with pytest.raises(RequestCancelledError):
        await client.models()
    return model, answers


def use_sync(address):
    with Client(address) as client:
        (model,) = client.models()
        answers = [
            client.tokenize("Grüße"),
            client.tokenize("Grüße", add_special_tokens=False),
            client.detokenize([256, *"Grüße".encode()]),
            client.detokenize([256, 97], skip_special_tokens=False),
            client.render_chat(MESSAGES),
            client.render_chat(MESSAGES, add_generation_prompt=False),
        ]
        with pytest.raises(NotFoundError):
            client.tokenize("a", model="other")
    with pytest.raises(RequestCancelledError):
        client.models()
    return model, answers


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_models_and_the_way_between_text_and_ids(kind):
    async def main():
        async with serving() as (_, _, channel):
            if kind == "async":
                return await use_async(channel.address)
            return await asyncio.to_thread(use_sync, channel.address)

    model, (ids, plain, text, special, prompt, short) = run(main)
    assert (model.name, model.max_context_tokens) == ("null", 32768)
    assert plain == list("Grüße".encode())
    assert ids == [256, *plain]
    assert text == "Grüße"
    assert special != "a" == special[-1]
    assert prompt[0] == "user: hi\nassistant: "
    assert prompt[1][-3:] == list(b"t: ")
    assert short[0] == "user: hi\n"


def test_they_are_asked_again_of_another_server(tmp_path):
    gone = f"unix:{tmp_path}/gone"

    async def main():
        async with serving() as (_, _, channel):
            async with AsyncClient(gone, channel.address) as client:
                assert await client.tokenize("a") == [256, 97]
            with Client(gone, channel.address) as client:
                assert await asyncio.to_thread(client.tokenize, "a") == [256, 97]
            async with AsyncClient(gone, resume=None) as client:
                with pytest.raises(UnavailableError):
                    await client.tokenize("a")

    run(main)
