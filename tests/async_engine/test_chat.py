"""Chat templates render as transformers renders them, and cannot harm the engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from async_engine import chat
from async_engine.chat import render_chat
from async_engine.tokenizer import byte_tokenizer, load_tokenizer
from protos.errors import InvalidRequestError
from protos.model_files import resolve_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BOS, EOS = "<|bos|>", "<|eos|>"
MESSAGES = [
    {"role": "system", "content": "Be brief.  \n"},
    {"role": "user", "content": "Wie heißt <du> & 'ich'? 日本 🦩"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Danke"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": 'Sagt das Wetter <heute> & "morgen" für 東京',
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
        },
    }
]

LLAMA_3_LIKE = """\
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|header|>' + message['role'] + '<|/header|>\n\n' + message['content'] | trim + '<|turn|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\n\n' }}
{%- endif %}
"""
QWEN_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last=-1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if message.role != 'user' %}{% continue %}{% endif %}
    {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- break %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' + (call.function | tojson(indent=2)) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}{%- endgeneration %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + ('*' if loop.index0 == ns.last else '') + '\n' }}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL_LIKE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: user, assistant, ...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST]' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- endif %}
    {% else %}
        {{- ' ' + message['content'] + eos_token }}
    {% endif %}
{% endfor %}
"""
CALLS = [
    {"role": "user", "content": "Wetter?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "wetter", "arguments": {"ort": "東京 <1>"}}}],
    },
    {"role": "tool", "content": "21 °C"},
]


def render(
    template: str, messages: Sequence[Mapping[str, Any]] = MESSAGES, add_generation_prompt: bool = True, **kwargs: Any
) -> str:
    return render_chat(
        template,
        messages,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=kwargs,
        bos_token=BOS,
        eos_token=EOS,
    )


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = byte_tokenizer()._backend
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "kwargs"),
    [
        pytest.param(LLAMA_3_LIKE, MESSAGES, {}, id="llama 3 like"),
        pytest.param(QWEN_LIKE, MESSAGES, {}, id="qwen like"),
        pytest.param(QWEN_LIKE, MESSAGES, {"tools": TOOLS, "enable_thinking": False}, id="qwen like with tools"),
        pytest.param(QWEN_LIKE, CALLS, {"tools": TOOLS}, id="qwen like with calls"),
        pytest.param(MISTRAL_LIKE, MESSAGES, {}, id="mistral like"),
        pytest.param(MISTRAL_LIKE, MESSAGES[1:], {}, id="mistral like without system"),
    ],
)
def test_templates_render_as_in_transformers(
    transformers_tokenizer: Any,
    template: str,
    messages: list[dict[str, Any]],
    kwargs: dict[str, Any],
    add_generation_prompt: bool,
) -> None:
    expected = transformers_tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
    )
    assert render(template, messages, add_generation_prompt, **kwargs) == expected
    assert "Danke" in expected or "東京 <1>" in expected


@pytest.mark.embedded
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:]])
def test_embedded_template_renders_as_in_transformers(
    transformers_tokenizer: Any, messages: list[dict[str, Any]]
) -> None:
    template = load_tokenizer(resolve_model("")).chat_template
    assert template is not None
    expected = transformers_tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert render(template, messages) == expected
    assert expected.endswith("<|im_start|>assistant\n")


def test_json_keeps_markup_and_unicode() -> None:
    assert render("{{ x | tojson }}", x={"a": "<&'日本>"}) == json.dumps({"a": "<&'日本>"}, ensure_ascii=False)


def test_tools_and_documents_are_none_unless_given() -> None:
    assert render("{{ tools is none }} {{ documents is none }} {{ other is defined }}") == "True True False"
    assert render("{{ tools }}", tools=[1]) == "[1]"


def test_token_a_model_does_not_have_is_undefined() -> None:
    template = "{{ bos_token is defined }}{{ eos_token is defined }}"
    rendered = render_chat(template, [], add_generation_prompt=False, template_kwargs={}, bos_token="", eos_token=EOS)
    assert rendered == "FalseTrue"


def test_variables_cannot_replace_the_conversation() -> None:
    assert (
        render_chat(
            "{{ messages | length }}{{ add_generation_prompt }}",
            MESSAGES,
            add_generation_prompt=False,
            template_kwargs={"messages": [], "add_generation_prompt": True},
            bos_token="",
            eos_token="",
        )
        == "4False"
    )


def test_today_is_available_to_templates() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2025-01-31")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_reach_nothing_outside_the_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError):
        render(template, messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ raise_exception('x' * 5000) }}", "xxx"),
    ],
)
def test_failures_are_one_line_for_the_caller(template: str, part: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template failed") as caught:
        render(template)
    assert caught.value.field == "chat"
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_output_is_limited_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 1000)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="longer than 1000 characters"):
        render(endless)
    with pytest.raises(InvalidRequestError, match="longer than 1000 characters"):
        render("{{ 'x' * 1001 }}")
    assert len(render("{{ 'x' * 1000 }}")) == 1000


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = [
    "{{ ('x' * 9999999999) | length }}",
    "{{ ([0] * 9999999999) | length }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ (1 == 1) * 10 ** 70 * 10 ** 70 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.rjust(width=999999999) if false else 'x'.zfill(999999999) }}",
    "{{ 'x' | indent(999999999, true) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ lipsum(n=999999) }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{{ n.x }}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x.replace('x', 'xx') %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x | replace('x', 'xx') %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
]


@pytest.mark.parametrize("template", LARGE)
def test_no_operation_makes_much_of_little(template: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match="the chat template failed"):
        render(template)
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{% macro m() %}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{{ m() }}{% endfor %}"
        "{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    ],
)
def test_time_is_limited_where_nothing_is_put_out(template: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.05 s"):
        render_chat(
            template,
            [],
            add_generation_prompt=False,
            template_kwargs={},
            bos_token=BOS,
            eos_token=EOS,
            max_seconds=0.05,
        )
    assert time.thread_time() - start < 1.0


def test_a_template_that_takes_its_time_leaves_the_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.3)
    threads = []

    def told(message: str) -> str:
        threads.append(threading.current_thread())
        return message

    monkeypatch.setitem(chat._environment().globals, "told", told)
    common = {"add_generation_prompt": False, "template_kwargs": {}, "bos_token": "", "eos_token": ""}

    async def main() -> None:
        assert await chat.render_chat_async("{{ told('quick') }}", [], **common) == "quick"
        slow = "{{ told('slow') }}{% for i in range(20000) %}{% endfor %}"
        assert await chat.render_chat_async(slow, [], **common) == "slow"
        with pytest.raises(InvalidRequestError, match="takes longer than"):
            await chat.render_chat_async("{{ told('') }}" + ENDLESS, [], **common)

    asyncio.run(main())
    ours = threading.main_thread()
    assert [thread is ours for thread in threads] == [True, True, False, True, False]


def test_template_is_compiled_once() -> None:
    assert chat._compiled(LLAMA_3_LIKE) is chat._compiled(LLAMA_3_LIKE)
