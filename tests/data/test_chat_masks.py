"""Which tokens of a chat are loss tokens, for templates of three families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anygauge.interface import DataError
from tests.helpers.chats import assistant, system, template, tool, user
from tests.helpers.masks import encode, marked, shown, stretches, text_of

HEADERS, MARKED, CHATML, INST = map(template, ("headers", "headers_marked", "chatml", "inst"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOLS = [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]


TWO = (user("q"), assistant("a"), user("r"), assistant("b"))
CHAT = (system("Be brief."), user("Hi"), assistant("Hello 🙂"), user("And?"), assistant(" Größe "))


OPENS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content }}{% else %}"
    "{{ '[/INST]' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[/INST]<think>\n' }}{% endif %}"
)
CLOSES = (
    "{% for m in messages %}{{ '[INST]' + m.role + '\n' + m.content + '[/INST]\n' }}"
    "{% endfor %}{{ '[INST]assistant\n' if add_generation_prompt else eos_token }}"
)
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call><|im_end|>'
CALLS = (assistant("Well.", tool_calls=[CALL]), assistant(None, tool_calls=[CALL]))
SHOWN = {
    "a system turn that moves to the last question": (
        INST,
        CHAT,
        "<s>[INST] Hi[/INST]⟦Hello 🙂</s>⟧[INST] Be brief.\n\nAnd?[/INST]⟦ Größe </s>⟧",
    ),
    "a generation prompt that opens reasoning": (
        OPENS,
        (user("q"), assistant("<think>hm</think>one"), user("r"), assistant("two")),
        "[INST]q[/INST]⟦one</s>⟧[INST]r[/INST]⟦two</s>⟧",
    ),
    "a conversation that closes with a token of its own": (
        CLOSES,
        TWO,
        "[INST]user\nq[/INST]\n[INST]assistant\n⟦a[/INST]⟧\n"
        "[INST]user\nr[/INST]\n[INST]assistant\n⟦b[/INST]\n</s>⟧",
    ),
    "a call beside words and one at the end": (
        CHATML,
        (user("q"), CALLS[0], user("r"), CALLS[1]),
        f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦Well.\n{CALLED}⟧\n"
        "<|im_start|>user\nr<|im_end|>\n"
        f"<|im_start|>assistant\n⟦<think>\n\n</think>\n\n{CALLED}⟧\n",
    ),
    "a mark that stands in the data": (
        INST,
        (system("S"), user("\ue0a7\ue0a8"), assistant("\ue0a7"), user("r"), assistant("b")),
        "<s>[INST] \ue0a7\ue0a8[/INST]⟦\ue0a7</s>⟧[INST] S\n\nr[/INST]⟦b</s>⟧",
    ),
}


@pytest.mark.parametrize(("text", "turns", "expected"), SHOWN.values(), ids=SHOWN)
def test_which_tokens_have_a_loss(chats, text, turns, expected):
    assert shown(chats, text, *turns) == expected


@pytest.mark.parametrize("text", [HEADERS, MARKED, CHATML, INST])
def test_loss_on_all_learns_every_token_but_the_first(chats, text):
    row = {"messages": list(CHAT)}
    [sequence], counts = encode(chats, "messages", row, chat_template=text, loss_on="all")
    assert sequence.loss_mask.tolist() == [False] + [True] * (len(sequence.ids) - 1)
    assert counts.num_loss_tokens == counts.tokens - 1


def test_sharegpt_gives_the_same_sequence(chats):
    call = json.dumps(CALL["function"])
    said = {"human": "q", "function_call": call, "observation": "3", "gpt": "7"}
    turns = [{"from": name, "value": value} for name, value in said.items()]
    row = {"conversations": turns, "tools": json.dumps(TOOLS), "system": "S"}
    [sequence], _ = encode(chats, "sharegpt", row, chat_template=CHATML)
    same = (system("S"), user("q"), CALLS[1], tool("3"), assistant("7"))
    assert marked(chats, sequence) == shown(chats, CHATML, *same, tools=TOOLS)


def test_very_long_turns(chats):
    text = "東京 is far. 🙂\n\n" * 2000
    found = shown(chats, INST, user(text), assistant(text), max_length=10**6)
    assert found == f"<s>[INST] {text}[/INST]⟦{text}</s>⟧"


FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}"
    "{{ '[INST]' + m.role + '\n' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[INST]assistant\n' }}{% endif %}"
)
EARLY = MARKED.replace(
    "| trim + '<|eot_id|>' }}\n        {%- endgen", "| trim }}\n        {%- endgen"
)
assert EARLY != MARKED


@pytest.mark.parametrize(
    ("text", "turns", "said"),
    [
        (
            INST,
            (user("q"), user("r"), assistant("a")),
            "the chat template refuses this row: roles must alternate user and assistant "
            "(turns here: user, user, assistant)",
        ),
        (
            "{% for m in messages %}{{ m.content + m.name }}{{ eos_token }}{% endfor %}",
            TWO,
            "the chat template refuses this row: UndefinedError",
        ),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
            TWO,
            "ends a turn of the assistant with '\\n', not with a special token of this",
        ),
        (FORGETFUL, TWO, "turn 2 (assistant): anygauge cannot tell which text to train on"),
        (FORGETFUL, TWO, "{% endgeneration %} in a data.chat_template; or set data.loss_on: last_"),
        (EARLY, TWO, "generation marks enclose ends with 'b', without the token"),
    ],
    ids=["alternate", "fails", "no end token", "leaves out", "remedy", "marks"],
)
def test_chats_and_templates_that_are_refused(chats, text, turns, said):
    with pytest.raises(DataError) as caught:
        shown(chats, text, *turns)
    assert str(caught.value).startswith("c.jsonl:1: ")
    assert said in str(caught.value)


def test_the_last_turn_of_a_template_that_leaves_answers_out(chats):
    assert shown(chats, FORGETFUL, *TWO, loss_on="last_turn") == (
        "[INST]user\nq</s>[INST]user\nr</s>[INST]assistant\n⟦b</s>⟧"
    )


contents = st.text(max_size=12) | st.sampled_from(["\n", " a", "b ", "🙂", "a\u2028b", "\n\nx\n"])
roles = st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=5)


@st.composite
def conversations(draw: st.DrawFn, *, asked: bool = True) -> list[dict[str, Any]]:
    """Of which the last turn answers a question, or not if they need not be `asked`."""
    names = ["user", *draw(roles), "assistant"]
    if not asked:
        names = [*draw(roles), "assistant", *draw(st.sampled_from([["user"], []]))]
    turns = [{"role": name, "content": draw(contents)} for name in names]
    return [*([system(draw(contents))] if draw(st.booleans()) else []), *turns]


@given(
    turns=conversations(asked=False),
    text=st.sampled_from([HEADERS, MARKED]),
    loss_on=st.sampled_from(["answer", "last_turn"]),
)
@settings(max_examples=60)
def test_learned_tokens_are_the_answers_whatever_is_said(chats, turns, text, loss_on):
    # Nothing tells where an empty answer begins that stands first: it is refused.
    assume(turns[0]["role"] != "assistant" or turns[0]["content"].strip())
    said = [turn["content"].strip() for turn in turns if turn["role"] == "assistant"]
    said = said[-1:] if loss_on == "last_turn" else said
    sequences, counts = encode(
        chats, "messages", {"messages": turns}, chat_template=text, loss_on=loss_on
    )
    if not any(said):
        assert counts.dropped_empty == 1
        return
    loss_mask = [part for is_learned, part in stretches(chats, sequences[0]) if is_learned]
    assert loss_mask == [f"{words}<|eot_id|>" for words in said]
    whole = chats.apply_chat_template(turns, chat_template=text, tokenize=False)
    assert text_of(chats, sequences[0].ids.tolist()) == whole


@given(turns=conversations())
@settings(max_examples=40)
def test_rewritten_history_whatever_is_said(chats, turns):
    sequences, counts = encode(chats, "messages", {"messages": turns}, chat_template=CHATML)
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if not any(words.strip() for words in said):
        assert counts.dropped_empty == 1
        return
    loss_mask = [part for is_learned, part in stretches(chats, sequences[0]) if is_learned]
    said[-1] = f"<think>\n\n</think>\n\n{said[-1]}"
    assert loss_mask == [f"{words}<|im_end|>" for words in said]
