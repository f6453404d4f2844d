"""Rows to sequences: tokens, masks, what is cut, dropped and counted, and the cache's key."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import prompt_ids
from anygauge.data.encode import (
    CUT,
    EMPTY,
    LONG,
    WHOLE,
    Counts,
    RowEncoder,
    encode_texts,
    start_ids,
)
from anygauge.data.readers import Record
from anygauge.interface import DataError, ModelError
from tests.helpers.chats import assistant, template, user
from tests.helpers.masks import encode, encoder, marked
from tests.helpers.tiny_tokenizer import make_tokenizer


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pairs(tokenizer, *rows, **data):
    values = [{"prompt": prompt, "completion": answer} for prompt, answer in rows]
    return encode(tokenizer, "prompt_completion", *values, source={"template": "{prompt}"}, **data)


def loss_mask(sequence):
    return sequence.ids[sequence.loss_mask].tolist()


@pytest.mark.parametrize("loss_on", ["answer", "last_turn"])
def test_start_prompt_answer_end_with_the_answer_learned(tokenizer, loss_on):
    row = ("Größe?\n", "東京 🙂\r\n")
    [sequence], counts = pairs(tokenizer, row, loss_on=loss_on)
    answer = [*ids(tokenizer, "東京 🙂\r\n"), tokenizer.eos_token_id]
    assert sequence.ids.tolist() == [*prompt_ids(tokenizer, "Größe?\n"), *answer]
    assert loss_mask(sequence) == answer
    assert marked(tokenizer, sequence) == "<s>Größe?\n⟦東京 🙂\r\n</s>⟧"
    assert (sequence.record, sequence.part) == (0, 0)
    assert (counts.rows, counts.used, counts.num_loss_tokens) == (1, 1, len(answer))
    [every], _ = pairs(tokenizer, row, loss_on="all")
    assert loss_mask(every) == every.ids[1:].tolist() == sequence.ids[1:].tolist()


def test_a_tokenizer_that_adds_no_start_token(tmp_path):
    tokenizer = make_tokenizer(tmp_path, adds_bos=False)
    assert start_ids(tokenizer) == []
    sequences, counts = pairs(tokenizer, ("a", "b"), ("", "bc"))
    assert sequences[0].ids.tolist() == [*ids(tokenizer, "a"), *ids(tokenizer, "b"), 1]
    # Nothing stands before the first token of row 2, so it cannot be a loss token.
    assert [one.loss_mask.tolist()[:2] for one in sequences] == [[False, True]] * 2
    assert counts.num_loss_tokens == 2 + len(ids(tokenizer, "bc"))


def test_a_prompt_is_the_start_token_and_its_text(tokenizer):
    class AddsBoth:
        bos_token_id, eos_token_id = 0, 1

        def __call__(self, texts, add_special_tokens=True, verbose=True):
            plain = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return {"input_ids": [0, *plain, 1] if add_special_tokens else plain}

    bare = ids(tokenizer, "Größe?\n")
    assert prompt_ids(tokenizer, "Größe?\n") == [tokenizer.bos_token_id, *bare]
    assert prompt_ids(tokenizer, "") == start_ids(tokenizer) == [tokenizer.bos_token_id]
    assert prompt_ids(AddsBoth(), "Größe?\n") == [0, *bare], "no end token"
    assert encode_texts(tokenizer, ["Größe?\n", ""]) == [bare, []]
    assert encode_texts(tokenizer, []) == []


CUTS = [("a\n", "b"), ("a\n", "b " * 10), ("a " * 12 + "\n", "b"), ("a\n", " \n")]


def test_answers_are_cut_and_prompts_are_not(tokenizer):
    sequences, counts = pairs(tokenizer, *CUTS, max_length=8)
    assert (counts.rows, counts.used, counts.truncated) == (4, 2, 1)
    assert (counts.dropped_long, counts.dropped_empty) == (1, 1)
    assert [one.record for one in sequences] == [0, 1]
    assert len(sequences[1].ids) == len(sequences[1].loss_mask) == 8
    assert tokenizer.eos_token_id not in sequences[1].ids
    assert counts.tokens == sum(len(one.ids) for one in sequences)
    assert counts.num_loss_tokens == sum(len(loss_mask(one)) for one in sequences)
    assert str(counts) == (
        f"2 of 4 rows; {counts.tokens} tokens, {counts.num_loss_tokens} loss tokens; "
        "1 dropped with nothing to learn; 1 dropped as too long; 1 truncated"
    )
    sequences, counts = pairs(tokenizer, *CUTS, max_length=8, too_long="drop")
    assert [one.record for one in sequences] == [0]
    assert (counts.dropped_long, counts.truncated) == (2, 0)
    sequences, _ = pairs(tokenizer, *CUTS, max_length=8, loss_on="all")
    assert [one.record for one in sequences] == [0, 1, 2]


def test_a_prompt_that_fills_the_sequence_exactly_is_dropped(tokenizer):
    length = len(prompt_ids(tokenizer, "abc"))
    for max_length, kept in ((length, [1]), (length + 1, [0, 1])):
        sequences, _ = pairs(tokenizer, ("abc", "d"), ("", "d"), max_length=max_length)
        assert [one.record for one in sequences] == kept
    assert len(loss_mask(sequences[0])) == 1, "the answer, without its end"


@pytest.mark.parametrize("max_length", [2, 3, 7, 64])
@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_every_token_of_a_text_but_the_first_is_learned_once(tokenizer, max_length, too_long):
    text = "A track gauge is the distance between two rails. 東京\n\n🙂"
    parts, counts = encode(
        tokenizer, "text", {"text": text}, max_length=max_length, too_long=too_long
    )
    whole = [tokenizer.bos_token_id, *ids(tokenizer, text), tokenizer.eos_token_id]
    assert [token for one in parts for token in loss_mask(one)] == whole[1:]
    assert max(len(one.ids) for one in parts) <= max_length
    assert all(one.loss_mask.tolist() == [False] + [True] * (len(one.ids) - 1) for one in parts)
    assert (counts.used, counts.truncated, counts.sequences) == (1, 0, len(parts))
    assert [one.part for one in parts] == (list(range(1, len(parts) + 1)) if parts[1:] else [0])
    for one, following in pairwise(parts):
        assert following.ids[0] == one.ids[-1]


def test_chats_are_cut_at_their_end_and_dropped_without_an_answer(chats):
    answer = assistant("one two three four five six seven")
    turns = [[user("a"), answer], [user("q " * 50), answer], [user("a"), assistant(" ")]]
    rows = [{"messages": each} for each in turns]
    fields = {"chat_template": template("inst"), "max_length": 12}
    sequences, counts = encode(chats, "messages", *rows, **fields)
    assert [one.record for one in sequences] == [0]
    assert len(sequences[0].ids) == 12
    assert loss_mask(sequences[0]) == sequences[0].ids[4:].tolist()
    assert (counts.used, counts.truncated) == (1, 1)
    assert (counts.dropped_long, counts.dropped_empty) == (1, 1)
    _, counts = encode(chats, "messages", *rows, too_long="drop", **fields)
    assert (counts.used, counts.dropped_long, counts.truncated) == (0, 2, 0)


def of_tokens(tokenizer: Any, row: dict[str, Any], **data: Any) -> Any:
    [one] = encoder(tokenizer, "tokens", **data).encode([Record(row, "t.jsonl:7")])
    return one


@pytest.mark.parametrize(
    ("more", "mask"),
    [
        ({"labels": [-100, -100, 6, 7]}, [False, False, True, True]),
        ({"loss_mask": [True, 0, False, 1]}, [False, False, False, True]),
        ({"attention_mask": [1, 1, 1, 1]}, [False, True, True, True]),
        ({}, [False, True, True, True]),
    ],
)
def test_ids_as_they_are_and_their_mask(tokenizer, more, mask):
    one = of_tokens(tokenizer, {"input_ids": [0, 5, 6, 7], **more})
    assert one.ids.tolist() == [0, 5, 6, 7]  # nothing is put before or behind
    assert one.loss_mask.tolist() == mask
    every = of_tokens(tokenizer, {"input_ids": [0, 5, 6, 7], **more}, loss_on="all")
    assert every.loss_mask.tolist() == [False, True, True, True]


@given(
    ids=st.lists(st.integers(0, 399), max_size=12),
    length=st.integers(2, 14),
    too_long=st.sampled_from(["truncate", "drop"]),
    data=st.data(),
)
def test_labels_and_mask_say_the_same_and_long_rows_are_cut_or_dropped(
    tokenizer, ids, length, too_long, data
):
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    labels = [token if has_loss else -100 for token, has_loss in zip(ids, mask, strict=True)]
    if not any(mask[1:]):
        fate = EMPTY
    elif len(ids) <= length:
        fate = WHOLE
    else:
        fate = LONG if too_long == "drop" or not any(mask[1:length]) else CUT
    kept = length if fate in (WHOLE, CUT) else 0
    for more in ({"labels": labels}, {"loss_mask": mask}):
        one = of_tokens(tokenizer, {"input_ids": ids, **more}, max_length=length, too_long=too_long)
        assert one.fate == fate
        assert one.ids.tolist() == ids[:kept]
        assert one.loss_mask.tolist() == [False, *mask[1:]][:kept]


@pytest.mark.parametrize("beyond", [400, 10**30])
def test_tokens_beyond_the_vocabulary(tokenizer, beyond):
    said = (
        rf"^t\.jsonl:7: input_ids\[1\] is {beyond}, but this tokenizer has 400 tokens "
        r"\(0 to 399\); use the tokenizer that the rows were made with$"
    )
    with pytest.raises(DataError, match=said):
        of_tokens(tokenizer, {"input_ids": [1, beyond]})


def test_rows_and_chats_of_one_batch_keep_their_order(chats):
    chat = {"prompt": [user("q")], "completion": [assistant("a")]}
    rows = [chat, {"prompt": "p", "completion": "c"}, chat]
    sequences, counts = encode(chats, "prompt_completion", *rows, chat_template=template("inst"))
    assert [one.record for one in sequences] == [0, 1, 2]
    found = [marked(chats, one) for one in sequences[:2]]
    assert found == ["<s>[INST] q[/INST]⟦a</s>⟧", "<s>p\n⟦c</s>⟧"]
    assert counts.sequences == 3


def test_counts_are_added():
    names = [field.name for field in dataclasses.fields(Counts) if field.name != "beyond"]
    one, twice = (
        Counts(**{name: n * times for n, name in enumerate(names)}, beyond=Counter({64: times}))
        for times in (1, 2)
    )
    assert sum([one, Counts(), one], Counts()) == twice


def test_the_key_is_that_of_all_that_decides(tokenizer, chats, tmp_path):
    def key(tokenizer=tokenizer, form="prompt_completion", source=None, **data):
        return encoder(tokenizer, form, source, **data).key()

    before = key()
    tokenizer(["a b c", "d"], padding=True, truncation=True, max_length=2)
    assert key() == before, "though the tokenizer was used"
    other = SourceSection(path="d.jsonl", format="prompt_completion", limit=3, weight=2)
    data = DataSection(train=other, max_length=4096)
    assert RowEncoder(other, data, tokenizer, field="data.eval").key() == key()
    fields = [{}, {"form": "text"}, {"source": {"prompt": "q"}}, {"max_length": 100}]
    fields += [{"source": {"template": "{prompt}"}}, {"too_long": "drop"}, {"loss_on": "all"}]
    fields += [{"loss_on": "last_turn"}, {"tokenizer": chats}, {"chat_template": template("inst")}]
    fields += [{"tokenizer": make_tokenizer(tmp_path, adds_bos=False)}, {"chat_template": "qwen3"}]
    for thinks in (False, True):
        kwargs = {"enable_thinking": thinks}
        fields.append({"chat_template": "qwen3", "chat_template_kwargs": kwargs})
    assert len({key(**each) for each in fields}) == len(fields)


def test_a_tokenizer_without_a_token_that_ends_a_text(tmp_path):
    endless = make_tokenizer(tmp_path)
    endless.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        encoder(endless, "text")
