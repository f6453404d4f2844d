"""Where a stretch of loss tokens begins inside a token, and tokenizers that move spaces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from anygauge.data.spans import Aligner
from tests.helpers.masks import text_of
from tests.helpers.tokenizer import FIXTURES, make_tokenizer

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
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_a_token_across_a_border_is_cut_there(tokenizer):
    text = "of the rails and the tracks"
    start, end = len("of t"), len("of the rails and th")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for border in (start, end):
        assert any(first < border < last for first, last in offsets["offset_mapping"])
    assert aligned(tokenizer, text, (start, end)) == [
        (False, "of t"), (True, "he rails and th"), (False, "e tracks")
    ]  # fmt: skip


@pytest.mark.parametrize("border", range(1, 12))
def test_every_border_is_kept(tokenizer, border):
    text = "Größe 東京🙂 the end"
    assert "".join(part for _, part in aligned(tokenizer, text, (border, len(text)))) == text
    assert aligned(tokenizer, text, (border, len(text)))[-1] == (True, text[border:])
    assert aligned(tokenizer, text, (0, border))[0] == (True, text[:border])


def test_borders_that_no_token_crosses_leave_the_tokens_alone(tokenizer):
    text = "one two three"
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(len("one"), len("one two"))]])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids[loss_mask].tolist()) == " two"


def test_nothing_and_everything(tokenizer):
    assert aligned(tokenizer, "abc") == [(False, "abc")]
    assert aligned(tokenizer, "abc", (0, 3)) == [(True, "abc")]
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
    start, end = len("The rai"), len("The rails of the tra")
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(start, end)]])
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    assert "".join(names) == "▁The▁rails▁of▁the▁tracks"
    assert "".join(name for name, counts in zip(names, loss_mask, strict=True) if counts) == (
        "ls▁of▁the▁tra"
    )


def test_a_token_that_swallows_white_space_belongs_to_where_it_begins(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_tokens(
        [AddedToken("<end>", rstrip=True, special=True), AddedToken("<ask>", rstrip=True)],
        special_tokens=True,
    )
    text = "<ask>\nq<ask>\n\nanswer<end>\n<ask>\nq"
    start, end = text.index("\nanswer"), text.index("<end>") + len("<end>")
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(start, end)]])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids[loss_mask].tolist()) == "answer<end>"
