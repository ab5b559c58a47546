"""A conversation is the text that `transformers` makes of it, whatever words of its Jinja a template uses."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE
from transformers.utils.chat_template_utils import render_jinja_template

from moesaic.errors import UserError
from moesaic.model.chat_template import compiled, read_template
from moesaic.model.tokenizer import Tokenizer

MESSAGES = [
    {"role": "user", "content": "Grüße, what is 2 + 3?"},
    {"role": "assistant", "content": "5", "calls": {"b": [1, 2], "a": "ü"}},
]
TEMPLATES = {
    "what the assistant says is marked": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}\n"
    "    {% generation %}\n{{ m.content }}<end>{% endgeneration %}\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    "what is set there is forgotten": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "a date": "{{ strftime_now('%Y') }}|{% if strftime_now is defined %}dated{% endif %}",
    "JSON in few characters": "{{ messages[1].calls | tojson(separators=(',', ':')) }}",
    "JSON in order": "{{ messages[1].calls | tojson(sort_keys=true, indent=2) }}",
    "JSON in ASCII": "{{ messages[1].calls | tojson(ensure_ascii=true) }}{{ messages[1].calls | tojson }}",
    "tools that are none": "{% if tools is not none %}Tools: {{ tools }}{% endif %}{{ documents is none }}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_text_is_that_of_transformers(case):
    template = TEMPLATES[case]
    theirs = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=False)[0][0]
    ours = Tokenizer(tokenizers.Tokenizer(BPE()), {"chat_template.jinja": template.encode()}, Path("model"))
    assert ours.chat(MESSAGES, reply=False) == theirs


def test_a_mark_that_does_not_end_is_an_error_of_its_line():
    with pytest.raises(Exception, match="Unexpected end of template") as raised:
        compiled("\n{% generation %}x")
    assert raised.value.lineno == 2


CONTINUED = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</end>{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>{% endfor %}",
    "with tools": "{{ tools | tojson }}{% for m in messages %}{{ m.content }}|{% endfor %}",
}


@pytest.mark.parametrize("content", ["5 and", "5 and ", "5", "a 5 a 5"])
@pytest.mark.parametrize("case", CONTINUED)
def test_a_message_that_is_continued_ends_as_in_transformers(case, content):
    template = CONTINUED[case]
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    tools = [{"type": "function", "function": {"name": "now", "description": "ü", "parameters": {}}}]
    options = {"chat_template": template, "tools": tools, "continue_final_message": True}
    theirs = render_jinja_template([messages], add_generation_prompt=False, **options)[0][0]
    assert tokenizer_with(template).render(messages, {"tools": tools}, reply=False, continued=True) == theirs


def test_a_message_that_a_template_hides_cannot_be_continued():
    with pytest.raises(UserError, match="cannot be continued"):
        tokenizer_with("{{ messages[0].content }}").render(MESSAGES, {}, continued=True)


def tokenizer_with(template, **settings):
    files = {"chat_template.jinja": template.encode()} if template else {}
    files |= {"tokenizer_config.json": json.dumps(settings).encode()}
    return Tokenizer(tokenizers.Tokenizer(BPE()), files, Path("model"))


def test_a_template_of_its_own_for_tools():
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    ours = tokenizer_with("", chat_template=named)
    assert ours.chat(MESSAGES) == "plain"
    assert ours.chat(MESSAGES, tools=[{"name": "now"}]) == "now"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", True),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}", True),
        ("{% if tools %}Tools may be called.{% endif %}", False),
        ("{{ messages[0].content }}", False),
        ("{{ raise_exception('never') }}", True),  # it says itself what is wrong
        ("{% for t in xml_tools or [] %}{{ t.function.name }}{% endfor %}", True),
    ],
)
def test_whether_a_template_takes_tools(template, takes):
    assert tokenizer_with(template).takes_tools is takes


@pytest.mark.parametrize(
    ("form", "as_text"),
    [("arguments | tojson", False), ("arguments", True), ("arguments + ''", True), ("arguments.items() | list", False)],
)
def test_whether_arguments_must_be_text(form, as_text):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function." + form + " }}{% endfor %}{% endfor %}"
    )
    assert tokenizer_with(template).wants_arguments_as_text is as_text


def test_a_template_from_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}!")
    plain = tokenizer_with("plain")
    assert plain.with_template(read_template(file)).chat(MESSAGES) == MESSAGES[0]["content"] + "!"
    assert plain.chat(MESSAGES) == "plain"
    file.write_text("\n{% if %}")
    with pytest.raises(UserError, match="line 2 is not Jinja"):
        read_template(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_template(tmp_path / "none.jinja")
