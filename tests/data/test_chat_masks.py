"""Which tokens of a chat are loss tokens, for templates of three families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anygauge.interface import DataError
from tests.helpers.chats import make_chat_tokenizer, template
from tests.helpers.masks import encode, marked, stretches, text_of

HEADERS, MARKED, CHATML, INST = map(template, ("headers", "headers_marked", "chatml", "inst"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOLS = [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def shown(tokenizer: Any, chat_template: str, *turns: dict[str, Any], **fields: Any) -> str:
    """The one sequence of a chat, with marks; its tokens are those of the rendered text."""
    row = {"messages": list(turns), "tools": fields.pop("tools", None)}
    [sequence], _ = encode(tokenizer, "messages", row, chat_template=chat_template, **fields)
    assert not sequence.loss_mask[0]
    return marked(tokenizer, sequence)


def refusal(tokenizer: Any, chat_template: str, *turns: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        shown(tokenizer, chat_template, *turns, **fields)
    return str(caught.value)


CHAT = (system("Be brief."), user("Hi"), assistant("Hello 🙂"), user("And?"), assistant(" Größe "))


# -- the three families ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [HEADERS, MARKED])
def test_headers(tokenizer, text):
    assert shown(tokenizer, text, *CHAT) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello 🙂<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Größe<|eot_id|>⟧"
    )


def test_turns_between_tokens_with_white_space_behind_the_end(tokenizer):
    assert shown(tokenizer, CHATML, *CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello 🙂<|im_end|>⟧\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n Größe <|im_end|>⟧\n"
    )


def test_a_system_turn_that_moves_to_the_last_question(tokenizer):
    assert shown(tokenizer, INST, *CHAT) == (
        "<s>[INST] Hi[/INST]⟦Hello 🙂</s>⟧[INST] Be brief.\n\nAnd?[/INST]⟦ Größe </s>⟧"
    )


@pytest.mark.parametrize("text", [HEADERS, MARKED, CHATML, INST])
def test_loss_on_all_learns_every_token_but_the_first(tokenizer, text):
    row = {"messages": list(CHAT)}
    [sequence], counts = encode(tokenizer, "messages", row, chat_template=text, loss_on="all")
    assert sequence.loss_mask.tolist() == [False] + [True] * (len(sequence.ids) - 1)
    assert counts.num_loss_tokens == counts.tokens - 1


# -- history that templates rewrite ---------------------------------------------------------------


@pytest.mark.parametrize(
    "thinking",
    [
        lambda thought, said: assistant(f"<think>\n{thought}\n</think>\n\n{said}"),
        lambda thought, said: assistant(said, reasoning_content=thought),
    ],
)
def test_earlier_reasoning_that_the_template_drops(tokenizer, thinking):
    turns = (user("q"), thinking("hm", "one"), user("r"), thinking("so", "two"))
    assert shown(tokenizer, CHATML, *turns) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
        "<|im_start|>user\nr<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nso\n</think>\n\ntwo<|im_end|>⟧\n"
    )


def test_a_generation_prompt_that_opens_reasoning(tokenizer):
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content }}{% else %}"
        "{{ '[/INST]' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[/INST]<think>\n' }}{% endif %}"
    )
    turns = (user("q"), assistant("<think>hm</think>one"), user("r"), assistant("two"))
    assert shown(tokenizer, text, *turns) == ("[INST]q[/INST]⟦one</s>⟧[INST]r[/INST]⟦two</s>⟧")


def test_a_conversation_that_closes_with_a_token_of_its_own(tokenizer):
    text = (
        "{% for m in messages %}{{ '[INST]' + m.role + '\n' + m.content + '[/INST]\n' }}"
        "{% endfor %}{{ '[INST]assistant\n' if add_generation_prompt else eos_token }}"
    )
    turns = (user("q"), assistant("one"), user("r"), assistant("two"))
    assert shown(tokenizer, text, *turns) == (
        "[INST]user\nq[/INST]\n[INST]assistant\n⟦one[/INST]⟧\n"
        "[INST]user\nr[/INST]\n[INST]assistant\n⟦two[/INST]\n</s>⟧"
    )


# -- tools ----------------------------------------------------------------------------------------

CALLED = (
    user("2?"), assistant(None, tool_calls=[CALL, CALL]), tool("3"), tool("4"),
    assistant("7"), user("Thanks"), assistant("Sure"),
)  # fmt: skip


def test_calls_are_learned_and_results_are_not(tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
    assert shown(tokenizer, CHATML, system("S"), *CALLED, tools=TOOLS) == (
        "<|im_start|>system\nS\n\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "Adds.", '
        '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\n2?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦{call}\n{call}<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n⟦7<|im_end|>⟧\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nSure<|im_end|>⟧\n"
    )


def test_a_call_at_the_end_and_one_beside_words(tokenizer):
    sequence = shown(
        tokenizer, CHATML, user("q"), assistant("Well.", tool_calls=[CALL]), user("r"),
        assistant(None, tool_calls=[CALL]),
    )  # fmt: skip
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call><|im_end|>'
    assert sequence == (
        f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦Well.\n{call}⟧\n"
        "<|im_start|>user\nr<|im_end|>\n"
        f"<|im_start|>assistant\n⟦<think>\n\n</think>\n\n{call}⟧\n"
    )


def test_sharegpt_gives_the_same_sequence(tokenizer):
    call = json.dumps(CALL["function"])
    names = ("human", "function_call", "observation", "gpt")
    turns = [
        {"from": name, "value": value}
        for name, value in zip(names, ("q", call, "3", "7"), strict=True)
    ]
    row = {"conversations": turns, "tools": json.dumps(TOOLS), "system": "S"}
    [sequence], _ = encode(tokenizer, "sharegpt", row, chat_template=CHATML)
    other = shown(
        tokenizer, CHATML, system("S"), user("q"), assistant(None, tool_calls=[CALL]), tool("3"),
        assistant("7"), tools=TOOLS,
    )  # fmt: skip
    assert marked(tokenizer, sequence) == other


def test_templates_that_would_leave_out_calls_or_tools(tokenizer):
    message = refusal(tokenizer, HEADERS, *CALLED)
    assert "c.jsonl:1: the assistant calls tools" in message
    assert "does not write tool_calls" in message
    assert "does not write them" in refusal(tokenizer, INST, user("q"), assistant("a"), tools=TOOLS)


# -- unusual chats --------------------------------------------------------------------------------


def test_a_mark_that_stands_in_the_data_is_data(tokenizer):
    turns = (system("S"), user("\ue0a7\ue0a8"), assistant("\ue0a7"), user("r"), assistant("b"))
    assert shown(tokenizer, INST, *turns) == (
        "<s>[INST] \ue0a7\ue0a8[/INST]⟦\ue0a7</s>⟧[INST] S\n\nr[/INST]⟦b</s>⟧"
    )


def test_very_long_turns(tokenizer):
    text = "東京 is far. 🙂\n\n" * 2000
    [sequence], _ = encode(
        tokenizer, "messages", {"messages": [user(text), assistant(text)]},
        chat_template=INST, max_length=10**6,
    )  # fmt: skip
    assert stretches(tokenizer, sequence) == [
        (False, f"<s>[INST] {text}[/INST]"), (True, f"{text}</s>")
    ]  # fmt: skip


# -- refusals -------------------------------------------------------------------------------------


def test_the_words_of_a_template_that_refuses_are_quoted(tokenizer):
    message = refusal(tokenizer, INST, user("q"), user("r"), assistant("a"))
    assert message.startswith(
        "c.jsonl:1: the chat template refuses this row: roles must alternate user and assistant "
        "(turns here: user, user, assistant)"
    )


def test_a_template_that_fails_names_the_row_too(tokenizer):
    text = "{% for m in messages %}{{ m.content + m.name }}{{ eos_token }}{% endfor %}"
    message = refusal(tokenizer, text, user("q"), assistant("a"))
    assert "c.jsonl:1: the chat template refuses this row: UndefinedError" in message


def test_a_template_without_an_end_token(tokenizer):
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    message = refusal(tokenizer, text, user("q"), assistant("a"), user("r"), assistant("b"))
    assert "ends a turn of the assistant with '\\n', not with a special token of this" in message


FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}"
    "{{ '[INST]' + m.role + '\n' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[INST]assistant\n' }}{% endif %}"
)


def test_a_template_that_leaves_answers_out(tokenizer):
    turns = (user("q"), assistant("a"), user("r"), assistant("b"))
    message = refusal(tokenizer, FORGETFUL, *turns)
    assert "c.jsonl:1: turn 2 (assistant): anygauge cannot tell which text to train on" in message
    assert message.endswith(
        "{% endgeneration %} in a data.chat_template; or set data.loss_on: last_turn"
    )
    assert shown(tokenizer, FORGETFUL, *turns, loss_on="last_turn") == (
        "[INST]user\nq</s>[INST]user\nr</s>[INST]assistant\n⟦b</s>⟧"
    )


def test_generation_marks_without_the_end_token(tokenizer):
    text = MARKED.replace(
        "| trim + '<|eot_id|>' }}\n        {%- endgen", "| trim }}\n        {%- endgen"
    )
    assert text != MARKED
    message = refusal(tokenizer, text, user("q"), assistant("a"))
    assert "generation marks enclose ends with 'a', without the token" in message


# -- any conversation -----------------------------------------------------------------------------

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
def test_learned_tokens_are_the_answers_whatever_is_said(tokenizer, turns, text, loss_on):
    # Nothing tells where an empty answer begins that stands first: it is refused.
    assume(turns[0]["role"] != "assistant" or turns[0]["content"].strip())
    said = [turn["content"].strip() for turn in turns if turn["role"] == "assistant"]
    said = said[-1:] if loss_on == "last_turn" else said
    sequences, counts = encode(
        tokenizer, "messages", {"messages": turns}, chat_template=text, loss_on=loss_on
    )
    if not any(said):
        assert counts.dropped_empty == 1
        return
    loss_mask = [part for is_learned, part in stretches(tokenizer, sequences[0]) if is_learned]
    assert loss_mask == [f"{words}<|eot_id|>" for words in said]
    whole = tokenizer.apply_chat_template(turns, chat_template=text, tokenize=False)
    assert text_of(tokenizer, sequences[0].ids.tolist()) == whole


@given(turns=conversations())
@settings(max_examples=40)
def test_rewritten_history_whatever_is_said(tokenizer, turns):
    sequences, counts = encode(tokenizer, "messages", {"messages": turns}, chat_template=CHATML)
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if not any(words.strip() for words in said):
        assert counts.dropped_empty == 1
        return
    loss_mask = [part for is_learned, part in stretches(tokenizer, sequences[0]) if is_learned]
    said[-1] = f"<think>\n\n</think>\n\n{said[-1]}"
    assert loss_mask == [f"{words}<|im_end|>" for words in said]
