"""Chat templates that would go on for ever, or make texts beyond all memory."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import template_bounds
from anygauge.data.encode import RowEncoder
from anygauge.data.records import Record
from anygauge.data.template import ChatTemplate, TemplateRefusal, check_syntax
from anygauge.interface import DataError, RunFileError

TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}]
PLAIN = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
MANY = "it takes more than 200,000 rounds of loops, calls and filters for one chat"
LONG = "it makes a text of more than 16,777,216 characters"
SIZE = "it uses the number 1000000000 as a size; at most 100,000"
WIDTH = "it writes with a width that may be too large"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", MANY),
        (
            "{% for a in range(999) recursive %}{% if loop.depth < 3 %}"
            "{{ loop(range(999)) }}{% endif %}{% endfor %}",
            MANY,
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            MANY,
        ),
        (
            "{% set s = 'a' * 9**7 %}{% for i in range(9999) %}{% if 'b' in s %}{% endif %}"
            "{% endfor %}",
            MANY,
        ),
        ("{% set s = 'a' * 9**7 %}{% for i in range(9999) %}{% set x = s[1:] %}{% endfor %}", MANY),
        (
            "{% set s = 'a' * 9**7 %}{% for i in range(9999) %}{% set x = s|trim %}{% endfor %}",
            MANY,
        ),
        ("{{ 'a' * 10**9 }}", LONG),
        ("{% set s = 'a' * 9**7 %}{% for i in range(99) %}{{ s }}{% endfor %}", LONG),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
            "{% endfor %}",
            LONG,
        ),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
            "{% endfor %}",
            LONG,
        ),
        ("{% set s = 'a' * 9999 %}{{ s|replace('a', s) }}", LONG),
        ("{% set s = 'a' * 9999 %}{{ s.replace('a', s) }}", LONG),
        ("{% set s = 'a' * 9**7 %}{{ [s, s, s, s]|join }}{{ ''.join([s, s, s, s]) }}", LONG),
        ("{{ [1] * 10**9 }}", "it makes a list of more than 1,048,576 items"),
        ("{{ 9 ** (9 ** 9) }}", "it computes a number of more than 4096 bits"),
        ("{{ 'a'|center(10**9) }}", SIZE),
        ("{{ 'a'.ljust(10**9) }}", SIZE),
        ("{{ [1]|tojson(indent=10**9) }}", SIZE),
        ("{{ lipsum(n=10**9) }}", "it uses the number 1000000000 as a size; at most 100"),
        ("{{ '%1000000000d' % 1 }}", WIDTH),
        ("{{ '{:1000000000}'.format(1) }}", WIDTH),
    ],
)
def test_a_template_out_of_bounds_is_refused(
    tokenizer: Any, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "MOST_STEPS", 200_000)  # the same, sooner
    with pytest.raises(TemplateRefusal) as caught:
        ChatTemplate(tokenizer, template + PLAIN).render(TURNS, None)
    assert str(caught.value).startswith(f"data.chat_template is out of bounds: {said}")


def test_what_is_refused_names_the_row(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MOST_STEPS", 200_000)
    template = (
        "{% for a in messages[0].content %}{% for b in range(20000) %}{% endfor %}{% endfor %}"
    )
    data = DataSection(
        train=SourceSection(path="x.jsonl", format="messages"),
        chat_template=template + PLAIN,
        cache="off",
    )
    encoder = RowEncoder(data.train_sources[0], data, tokenizer, field="data.train")
    rows = [
        Record({"messages": [{"role": "user", "content": text}, TURNS[1]]}, f"x.jsonl:{line}")
        for line, text in enumerate(["short", "longer than ten letters"], start=1)
    ]
    encoder.encode(rows[:1])
    with pytest.raises(DataError, match=r"^x\.jsonl:2: the chat template refuses this row: data\."):
        encoder.encode(rows)


def test_bounds_change_nothing_of_a_template_that_keeps_them(tokenizer: Any) -> None:
    template = (
        "{%- set ns = namespace(n=0) -%}"
        "{%- macro shown(m, mark='*') -%}{{ mark ~ m.role ~ 1 ~ none }}{%- endmacro -%}"
        "{%- for m in messages if m.content -%}"
        "{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}"
        "{{ '-' if loop.first else loop.previtem.role }}"
        "{{ shown(m) }}{{ m.content|trim|replace('e', 'E') }}{% set ns.n = ns.n + 1 %}"
        "{{ m.content[1:][::-1] }}{{ '%s' % m.role }}{{ '{:>4}'.format(ns.n) }}"
        "{{ [1, 2]|join('-') }}"
        "{% if m.role in ['user'] and 'q' in m.content and m.content.startswith('q') %}U{% endif %}"
        "{{ {'a': none}|tojson }}{{ m.content }}{{ eos_token }}"
        "{%- else -%}none{%- endfor -%}"
        "{%- for group in [[1, [2]], [3]] recursive -%}"
        "{{ loop(group) if group is iterable else group }}{%- endfor -%}"
    )
    assert ChatTemplate(tokenizer, template).render(TURNS, None) == (
        '1/2-*user1NonequEstionnoitseuuser   11-2U{"a": null}question</s>'
        '2/2!user*assistant1NonerEplyylpeassistant   21-2{"a": null}reply</s>123'
    )


def test_a_template_nested_beyond_python_is_not_valid(tokenizer: Any) -> None:
    with pytest.raises(
        RunFileError, match=r"data\.chat_template: not a valid Jinja template: nested"
    ):
        check_syntax("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "data.chat_template")
