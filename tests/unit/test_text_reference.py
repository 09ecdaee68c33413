"""Against transformers: ids of the real GGUF files, and prompts of chat templates in the families' formats."""

from __future__ import annotations

import pytest

from headrace.engine.text.chat import ChatRenderer
from headrace.engine.text.fast import FastTokenizer
from headrace.engine.text.load import load_tokenizer
from headrace.engine.weights.source import ModelFiles

# No digits here: transformers' converter does not know that SmolLM cuts them one by one.
TEXTS = [
    *("", " ", "Hello world", "a  b   c", "trail  ", "\t\ttabs\t x", "nl\n\n\n\nx\r\n y"),
    *(
        "日本語のテキスト、中文。한국어",
        "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
        "مرحبا بالعالم שלום",
        "नमस्ते",
        "e\u0301 é ß İ",
    ),
    *(
        "def f(x):\n    return x ** y  # c\n\n\tpass",
        "\x00\x01\x1f\x7f",
        "\u200b\u200d\ufeff\ufffd",
    ),
    *(
        "<b>bold</b> <table>",
        "don't we'll I'M",
        "<|im_start|>user\nhi<|im_end|>",
        "x<end_of_turn>\ny",
    ),
]


def gguf(path) -> FastTokenizer:
    files = ModelFiles(
        name=path.name,
        kind="gguf",
        root=str(path.parent),
        weights=(str(path),),
        tokenizer_root=str(path),
    )
    return load_tokenizer(files)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3_gguf"])
def test_ids_of_real_files_equal_transformers(name, request):
    transformers = pytest.importorskip("transformers")
    path = request.getfixturevalue(name)
    ours = gguf(path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_smollm2(smollm2_gguf):
    tokenizer = gguf(smollm2_gguf)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids[0] == 2  # <|im_end|>
    digits = tokenizer.encode("2024", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in digits] == list("2024")
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt)
    assert ids.count(1) == 3 and ids[0] == 1  # the template's marks, no BOS on top


@pytest.mark.model
def test_gemma3(gemma3_gguf):
    tokenizer = gguf(gemma3_gguf)
    assert tokenizer.vocab_size == 262144 and tokenizer.chat_template is None
    assert set(tokenizer.eos_token_ids) == {1, 106}  # <eos> and <end_of_turn>
    # ids of the original tokenizer.json
    expected = [9259, 138, 12392, 108, 236770, 236778, 236800]
    assert tokenizer.encode("Hello  world\n\n123") == [2, *expected]
    assert tokenizer.encode("<bos>Hello  world\n\n123") == [2, *expected]
    assert tokenizer.encode(" " * 50 + "x", add_special_tokens=False) == [167, 155, 236781]
    assert tokenizer.encode("<end_of_turn>", add_special_tokens=False) == [106]


# Small templates in the formats that the families document.
TEMPLATES = {
    "chatml with tools": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "llama 3": """{% for message in messages %}
{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{% set content = head + message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system = message['content'] + '\\n\\n' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (ns.system if loop.last else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}""",
    "gemma": """{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- else %}{% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}{% endif %}
    {{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "phi": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}",
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": "<'&\">"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": ["é", None]}}}
CHATS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be <b>good</b>\n é "},
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ],
    [
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": '{"t": 20}'},
    ],
]
OPTIONS = [{}, {"tools": TOOLS}, {"enable_thinking": False}, {"add_generation_prompt": False}]


@pytest.mark.parametrize("family", TEMPLATES)
def test_prompts_equal_transformers(family):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = ChatRenderer({"default": TEMPLATES[family]}, names)
    for chat in CHATS:
        for options in OPTIONS:
            given = {"add_generation_prompt": True, **options, **names}
            rendered, _ = reference.render_jinja_template(
                [chat], chat_template=TEMPLATES[family], **given
            )
            assert renderer.render(chat, **options) == rendered[0]


@pytest.mark.parametrize("family", TEMPLATES)
def test_continued_prompts_equal_transformers(family):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = ChatRenderer({"default": TEMPLATES[family]}, names)
    for ending in ("Sure", "Sure, ", "Sure:\n"):
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ending}]
        rendered, _ = reference.render_jinja_template(
            [chat], chat_template=TEMPLATES[family], continue_final_message=True, **names
        )
        ours = renderer.render(chat, add_generation_prompt=False, continue_final_message=True)
        assert ours == rendered[0]
