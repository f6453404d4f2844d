from __future__ import annotations

from anygauge.data import prompt_ids
from anygauge.data.encode import encode_texts, start_ids
from tests.helpers.tokenizer import make_tokenizer


def test_a_prompt_is_the_start_token_and_its_text(tokenizer):
    bare = tokenizer("Größe?\n", add_special_tokens=False)["input_ids"]
    assert prompt_ids(tokenizer, "Größe?\n") == [tokenizer.bos_token_id, *bare]
    assert prompt_ids(tokenizer, "") == start_ids(tokenizer) == [tokenizer.bos_token_id]
    assert encode_texts(tokenizer, ["Größe?\n", ""]) == [bare, []]
    assert encode_texts(tokenizer, []) == []


def test_a_tokenizer_that_adds_no_start_token(tmp_path):
    assert start_ids(make_tokenizer(tmp_path, adds_bos=False)) == []


def test_an_end_token_that_the_tokenizer_adds_is_not_part_of_a_prompt(tokenizer):
    class AddsBoth:
        bos_token_id, eos_token_id = 0, 1

        def __call__(self, texts, add_special_tokens=True, verbose=True):
            plain = tokenizer(texts, add_special_tokens=False)["input_ids"]
            if not add_special_tokens:
                return {"input_ids": plain}
            return {"input_ids": [0, *plain, 1]}

    assert prompt_ids(AddsBoth(), "Hi") == [0, *encode_texts(tokenizer, ["Hi"])[0]]
