"""Chat messages and templates (cases 74, 85, 87, 91), and their limits."""

from __future__ import annotations

import json

import pytest

from headrace.engine.text.chat import ChatRenderer, check_template_kwargs, normalize_messages
from headrace.engine.text.template import ChatTemplate
from headrace.engine.text.tokenizer import TemplateError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a family without a system role, which says so
ALTERNATING = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
[{{ m['role'] }}]{{ m['content'] | trim }}
{%- endfor %}"""
PARTS_ONLY = (
    "{% for m in messages %}{% for p in m.content %}{{ p['text'] }}|{% endfor %}{% endfor %}"
)
USER_ONLY = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }};{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def render(template, messages, **options):
    return ChatRenderer({"default": template}, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a"], "a"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_forms(content, text):
    assert render(CHATML, [user(content)]) == render(CHATML, [user(text)])


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            user([{"type": "image_url", "image_url": {"url": "x"}}]),
            r"\[1\].content\[0\].*image_url",
        ),
        (user([{"type": "input_audio"}]), "input_audio"),
        (user([{"type": "text"}]), r"content\[0\] is no text part"),
        (user([5]), r"content\[0\] is no text part"),
        (user(5), "content is neither"),
        (user({"a": 1}), "content is neither"),
        ({"content": "x"}, r"messages\[1\].role"),
        ({"role": 5, "content": "x"}, r"messages\[1\].role"),
        ("text", r"messages\[1\] is no object"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls"),
    ],
)
def test_bad_messages_are_named(message, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        normalize_messages([user("ok"), message])
    assert not isinstance(caught.value, TemplateError)


def test_no_messages():
    with pytest.raises(ValueError, match="empty"):
        render(CHATML, [])


def test_the_callers_messages_are_not_changed():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "developer", "content": None, "tool_calls": [call]}, user("x")]
    before = json.dumps(messages)
    render(CHATML, messages)
    normalize_messages(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("absent", ["null", "absent", "empty"])
def test_tool_calls_with_any_empty_content(absent):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<{{ c.function.name }}({{ c.function.arguments | tojson }})>{% endfor %};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"q": "é<"}'}}
    message = {"role": "assistant", "tool_calls": [call]}
    if absent != "absent":
        message["content"] = None if absent == "null" else ""
    text = render(template, [user("x"), message, {"role": "tool", "content": "42"}])
    assert text == 'user:x;assistant:<f({"q": "é<"})>;tool:42;'


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        ("{a:1}", "{a:1}"),
        ("[1]", "[1]"),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_are_objects_where_they_can_be(arguments, seen):
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
    found = normalize_messages([message])[0]["tool_calls"][0]["function"]["arguments"]
    assert found == seen


def test_reasoning_has_every_name():
    found = normalize_messages([{"role": "assistant", "content": "a", "reasoning": "r"}])[0]
    assert found["reasoning_content"] == found["thinking"] == "r"


# --- system and developer ---


def test_developer_is_system_unless_the_template_knows_it():
    chat = [{"role": "developer", "content": "D"}, user("u")]
    assert "<|im_start|>system\nD" in render(CHATML, chat)
    knowing = CHATML + "{# developer #}"
    assert "<|im_start|>developer\nD" in render(knowing, chat)


def test_system_is_folded_where_the_template_refuses_it():
    text = render(ALTERNATING, [system("S"), user("u")])
    assert text == "<s>[user]S\n\nu"
    assert render(ALTERNATING, [{"role": "developer", "content": "D"}, user("u")]).endswith(
        "D\n\nu"
    )
    assert render(ALTERNATING, [system("S")]) == "<s>[user]S"


def test_system_is_folded_where_the_template_drops_it_silently():
    assert render(USER_ONLY, [system("S"), user("u"), user("v")]) == "S\n\nu;v;"


def test_a_late_system_message_is_folded_where_only_the_first_may_be_one():
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be first') }}{% endif %}{{ m.role }}={{ m.content }};"
        "{% endfor %}"
    )
    chat = [system("A"), user("u"), system("B"), user("v")]
    assert render(template, chat) == "system=A;user=u;user=B\n\nv;"


def test_the_templates_own_words_come_through():
    chat = [system("S"), user("u"), user("v")]
    with pytest.raises(TemplateError) as caught:
        render(ALTERNATING, chat)
    assert str(caught.value) == "Roles must alternate"


def test_a_template_that_reads_parts_gets_parts():
    assert render(PARTS_ONLY, [user("hi"), user([{"type": "text", "text": "x"}])]) == "hi|x|"


# --- templates ---


def test_no_template_says_the_way_out():
    with pytest.raises(TemplateError, match=r"/v1/completions.*--chat-template"):
        ChatRenderer({}, {}).render([user("x")])
    with pytest.raises(TemplateError, match="rag"):
        ChatRenderer({"rag": "x"}, {}).render([user("x")])


def test_named_templates():
    renderer = ChatRenderer({"default": "plain", "tool_use": "tools", "rag": "docs"}, {})
    assert renderer.render([user("x")]) == "plain"
    assert renderer.render([user("x")], tools=[{"type": "function"}]) == "tools"
    assert renderer.render([user("x")], template="rag") == "docs"
    assert renderer.render([user("x")], template="given {{ messages[0].content }}") == "given x"


def test_what_templates_may_use():
    source = """{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}
  {%- if loop.last %}{% break %}{% endif -%}
  {%- set ns.n = ns.n + 1 -%}
{%- endfor -%}
{%- generation -%}n={{ ns.n }}{%- endgeneration %}
{{ {"a": "<é>", "b": 1} | tojson }} {{ tools | tojson(indent=1) }} {{ strftime_now("%Y") | length }}
{{ enable_thinking }} {{ bos_token }}{{ eos_token }}{{ documents is none }} {{ "x".startswith("x") }}"""
    text = render(source, [user("a"), user("b")], tools=[{"f": 1}], enable_thinking=False)
    assert text == 'n=1{"a": "<é>", "b": 1} [\n {\n  "f": 1\n }\n] 4\nFalse <s>True True'


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "template"])
def test_arguments_may_not_replace_the_messages(name):
    with pytest.raises(ValueError, match=f"may not set {name}"):
        check_template_kwargs({"enable_thinking": True, name: []})
    check_template_kwargs({"enable_thinking": True, "documents": []})


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
        "{% for x in range(10000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set s = 'x' * 100000 %}{% for x in range(99999) %}{{ s }}{% endfor %}",
        "{% for a in 'x' * 999 %}{% for b in 'x' * 999 %}{% for c in 'x' * 999 %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        "{% for a in messages | map('upper') %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_and_huge_templates_are_ended(source):
    with pytest.raises(TemplateError, match="template"):
        ChatTemplate(source).render({"messages": [user("x")]})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ 'a' + 1 }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_the_sandbox_and_errors_inside(source):
    with pytest.raises(TemplateError, match=r"^the chat template failed: "):
        ChatTemplate(source).render({"messages": [user("x")]})


def test_loops_keep_what_they_know():
    source = (
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}"
        "{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% else %}none{% endfor %}"
    )
    assert render(source, [user("a"), user("b")]) == "1/2,2/2."
    assert render(source, [{"role": "tool", "content": ""}]) == "none"
    assert render("{% for k, v in messages[0].items() %}{{ k }}{% endfor %}", [user("a")]) == (
        "rolecontent"
    )


def test_a_broken_template_is_named():
    with pytest.raises(TemplateError, match="no valid Jinja"):
        render("{% for %}", [user("x")])


# --- continuing the final message ---


def test_continue_final_message():
    chat = [user("hi"), {"role": "assistant", "content": "Sure, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, chat, **options).endswith("<|im_start|>assistant\nSure, ")
    assert render(ALTERNATING, chat, **options).endswith("[assistant]Sure,")  # it trims
    with pytest.raises(TemplateError, match="leaves the final message out"):
        render("{{ messages[0].content }}", chat, **options)
    with pytest.raises(ValueError, match="add_generation_prompt"):
        render(CHATML, chat, continue_final_message=True)
