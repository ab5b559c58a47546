"""A conversation is the text that `transformers` makes of it, whatever words of its Jinja a template uses."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE
from transformers.utils.chat_template_utils import render_jinja_template

from moesaic.model.chat_template import compiled
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
