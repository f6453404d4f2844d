"""Which tokens are loss tokens: those of a chat's answers, for templates of several families; where
a stretch begins inside a token; and tokenizers that move spaces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from anygauge.data.loss_masks import Aligner
from anygauge.data.readers import Record
from anygauge.data.template import read_template
from anygauge.interface import DataError
from tests.helpers.chats import assistant, system, template, user
from tests.helpers.masks import encode, encoder, shown, stretches, text_of
from tests.helpers.tiny_tokenizer import FIXTURES, make_tokenizer

MARKED, CHATML, INST = map(template, ("headers_marked", "chatml", "inst"))
LLAMA = read_template("llama3")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
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


@pytest.mark.parametrize("text", [LLAMA, MARKED, CHATML, INST])
def test_loss_on_all_learns_every_token_but_the_first(chats, text):
    row = {"messages": list(CHAT)}
    [sequence], counts = encode(chats, "messages", row, chat_template=text, loss_on="all")
    assert sequence.loss_mask.tolist() == [False] + [True] * (len(sequence.ids) - 1)
    assert counts.num_loss_tokens == counts.tokens - 1


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
            r"the chat template refuses this row: roles must alternate user and assistant "
            r"\(turns here: user, user, assistant\)",
        ),
        (
            "{% for m in messages %}{{ m.content + m.name }}{{ eos_token }}{% endfor %}",
            TWO,
            "the chat template refuses this row: UndefinedError",
        ),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
            TWO,
            r".* ends a turn of the assistant with '\\n', not with a special token of this",
        ),
        (
            FORGETFUL,
            TWO,
            r"turn 2 \(assistant\): anygauge cannot tell which text to train on.*"
            r"{% endgeneration %} in a data\.chat_template; or set data\.loss_on: last_",
        ),
        (EARLY, TWO, ".*generation marks enclose ends with 'b', without the token"),
    ],
    ids=["alternate", "fails", "no end token", "leaves out", "marks"],
)
def test_chats_and_templates_that_are_refused(chats, text, turns, said):
    with pytest.raises(DataError, match=rf"^c\.jsonl:1: {said}"):
        shown(chats, text, *turns)


def test_the_last_turn_of_a_template_that_leaves_answers_out(chats):
    assert shown(chats, FORGETFUL, *TWO, loss_on="last_turn") == (
        "[INST]user\nq</s>[INST]user\nr</s>[INST]assistant\n⟦b</s>⟧"
    )


contents = st.text(max_size=12) | st.sampled_from(["\n", " a", "b ", "🙂", "a\u2028b", "\n\nx\n"])
roles = st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=5)


@st.composite
def conversations(draw: st.DrawFn, *, asked: bool) -> list[dict[str, Any]]:
    """Of which the last turn answers a question, or not if they need not be `asked`."""
    names = ["user", *draw(roles), "assistant"]
    if not asked:
        names = [*draw(roles), "assistant", *draw(st.sampled_from([["user"], []]))]
    turns = [{"role": name, "content": draw(contents)} for name in names]
    return [*([system(draw(contents))] if draw(st.booleans()) else []), *turns]


@given(
    data=st.data(),
    text=st.sampled_from([LLAMA, MARKED, CHATML]),
    loss_on=st.sampled_from(["answer", "last_turn"]),
)
@settings(max_examples=100)
def test_learned_tokens_are_the_answers_whatever_is_said(chats, data, text, loss_on):
    turns = data.draw(conversations(asked=text is CHATML))
    # Nothing tells where an empty answer begins that stands first: it is refused.
    assume(turns[0]["role"] != "assistant" or turns[0]["content"].strip())
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    said = said[-1:] if loss_on == "last_turn" else said
    sequences, counts = encode(
        chats, "messages", {"messages": turns}, chat_template=text, loss_on=loss_on
    )
    if not any(words.strip() for words in said):
        assert counts.dropped_empty == 1
        return
    if text is CHATML:
        said[-1] = f"<think>\n\n</think>\n\n{said[-1]}"
        expected = [f"{words}<|im_end|>" for words in said]
    else:
        expected = [f"{words.strip()}<|eot_id|>" for words in said]
    loss_mask = [part for is_learned, part in stretches(chats, sequences[0]) if is_learned]
    assert loss_mask == expected
    whole = chats.apply_chat_template(turns, chat_template=text, tokenize=False)
    assert text_of(chats, sequences[0].ids.tolist()) == whole


WORDS = (FIXTURES / "text.txt").read_text(encoding="utf-8")


def aligned(tokenizer, text, *spans):
    """The texts of loss tokens and of other tokens, in their order."""
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [spans])
    edges = [0, *(n for n in range(1, len(ids)) if loss_mask[n] != loss_mask[n - 1]), len(ids)]
    return [(bool(loss_mask[a]), text_of(tokenizer, ids[a:b].tolist())) for a, b in pairwise(edges)]


def spaced(prepend_scheme):
    """A tokenizer in the manner of SentencePiece: a space before every text, then `▁` for each."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    alphabet = sorted(set(WORDS) | set(map(chr, range(32, 127))) | {"\n"})
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@given(
    text=st.text("aehrt 東é🙂\n", min_size=1, max_size=9) | st.just("of the rails and the tracks"),
    data=st.data(),
)
def test_every_border_is_kept_and_a_token_across_it_is_cut_there(tokenizer, text, data):
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6, unique=True)))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    edges = [0, *(border for span in spans for border in span), len(text)]
    pieces = [(n % 2 == 1, text[a:b]) for n, (a, b) in enumerate(pairwise(edges)) if a < b]
    assert aligned(tokenizer, text, *spans) == pieces
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if not any(a < edge < b for edge in edges for a, b in whole["offset_mapping"]):
        [(ids, _)] = Aligner(tokenizer).align([text], [spans])
        assert ids.tolist() == whole["input_ids"]


def test_nothing_to_align(tokenizer):
    [(ids, loss_mask)] = Aligner(tokenizer).align([""], [[]])
    assert len(ids) == len(loss_mask) == 0
    assert Aligner(tokenizer).align([], []) == []


def test_offsets_without_leading_spaces_hide_no_border(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    text = "say: the"
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert (5, 8) in offsets["offset_mapping"], "the space before the word is not in its offsets"
    assert aligned(tokenizer, text, (5, 8)) == [(False, "say: "), (True, "the")]
    assert aligned(tokenizer, text, (4, 8)) == [(False, "say:"), (True, " the")]


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_pieces_get_no_space_of_their_own(scheme):
    tokenizer = spaced(scheme)
    text = "The rails of the tracks"
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(7, len(text) - 3)]])
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    assert "".join(names) == "▁The▁rails▁of▁the▁tracks"
    has_loss = [name for name, counts in zip(names, loss_mask, strict=True) if counts]
    assert "".join(has_loss) == "ls▁of▁the▁tra"


def test_a_tokenizer_that_lists_no_added_tokens_is_given_pieces(tokenizer):
    """One of a model's own code may be little more than a function."""
    [(ids, loss_mask)] = Aligner(lambda text, **options: tokenizer(text, **options)).align(
        ["say the word"], [[(3, 7)]]
    )
    assert text_of(tokenizer, ids[loss_mask].tolist()) == " the"
    assert text_of(tokenizer, ids.tolist()) == "say the word"


@pytest.mark.parametrize(
    ("side", "text", "start", "learned"),
    [
        ("rstrip", "<ask>\nq<ask>\n\nanswer<end>\n<ask>\nq", "\nanswer", "answer<end>"),
        ("lstrip", "ask\n<end>well <end>\nask", "<end>", "<end>well<end>"),
    ],
)
def test_a_token_that_swallows_white_space_belongs_to_where_its_text_stands(
    tmp_path, side, text, start, learned
):
    tokenizer = make_tokenizer(tmp_path)
    added = [AddedToken(name, special=True, **{side: True}) for name in ("<end>", "<ask>")]
    tokenizer.add_tokens(added, special_tokens=True)
    first, last = text.index(start), text.rindex("<end>") + len("<end>")
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(first, last)]])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids[loss_mask].tolist()) == learned
    inside = text.index("<end>")
    assert aligned(tokenizer, text, (inside, inside + 2))[1] == (True, "<e"), "cut in the token"


def test_an_unknown_token_has_its_loss_where_white_space_is_dropped():
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "say": 1, "it": 2}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    for answer in ("7 8 it", "it 7"):
        [(ids, mask)] = Aligner(tokenizer).align([f"say\n{answer}"], [[(4, 4 + len(answer))]])
        assert (len(ids), mask.tolist()) == (len(mask), [False] + [True] * len(answer.split()))


def prefixed(joins):
    """Byte-level, with a space before every text; `joins` that space and a line break."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "Ċ")] if joins else []
    vocabulary = {name: number for number, name in enumerate([*names, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=names[0])


@pytest.mark.parametrize(
    "tokenizer",
    [spaced("always"), spaced("first"), prefixed(False), prefixed(True)],
    ids=["always", "first", "prefixed", "joined"],
)
@pytest.mark.parametrize("has_offsets", [True, False])
def test_an_answer_gets_no_space_that_its_row_lacks(tokenizer, has_offsets):
    rows = encoder(tokenizer, "prompt_completion", {"template": "{prompt}"})
    rows._aligner._has_offsets = has_offsets
    for prompt, answer in [("Say it.\n", "river"), ("Say it", "self"), ("Say it.", " Well.\n")]:
        record = Record({"prompt": prompt, "completion": answer}, "c.jsonl:1")
        [sequence] = rows.encode([record])
        whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
        ids = sequence.ids.tolist()
        assert text_of(tokenizer, ids[:-1]) == text_of(tokenizer, whole)
        assert ids[:-1] == whole or not has_offsets or prompt == "Say it"
        names = tokenizer.convert_ids_to_tokens(sequence.ids[sequence.loss_mask].tolist()[:-1])
        assert "".join(names).replace("Ċ", "\n").replace("Ġ", "▁") == answer.replace(" ", "▁")
