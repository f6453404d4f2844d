"""Where a stretch of loss tokens begins inside a token, and tokenizers that move spaces."""

from __future__ import annotations

from itertools import pairwise

import pytest
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

from anygauge.data import Record
from anygauge.data.spans import Aligner
from tests.helpers.masks import encoder, text_of
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
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_a_token_across_a_border_is_cut_there(tokenizer):
    text = "of the rails and the tracks"
    start, end = len("of t"), len("of the rails and th")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for border in (start, end):
        assert any(first < border < last for first, last in offsets["offset_mapping"])
    parts = [(False, "of t"), (True, "he rails and th"), (False, "e tracks")]
    assert aligned(tokenizer, text, (start, end)) == parts


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
    has_loss = [name for name, counts in zip(names, loss_mask, strict=True) if counts]
    assert "".join(has_loss) == "ls▁of▁the▁tra"


def test_a_tokenizer_that_lists_no_added_tokens_is_given_pieces(tokenizer):
    """One of a model's own code may be little more than a function."""
    [(ids, loss_mask)] = Aligner(lambda text, **options: tokenizer(text, **options)).align(
        ["say the word"], [[(3, 7)]]
    )
    assert text_of(tokenizer, ids[loss_mask].tolist()) == " the"
    assert text_of(tokenizer, ids.tolist()) == "say the word"


def test_a_token_that_swallows_white_space_belongs_to_where_it_begins(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    names = ("<end>", "<ask>")
    tokenizer.add_tokens([AddedToken(name, rstrip=True) for name in names], special_tokens=True)
    text = "<ask>\nq<ask>\n\nanswer<end>\n<ask>\nq"
    start, end = text.index("\nanswer"), text.index("<end>") + len("<end>")
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(start, end)]])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids[loss_mask].tolist()) == "answer<end>"


def test_a_token_that_swallows_white_space_before_it_belongs_to_where_its_text_stands(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_tokens([AddedToken("<end>", lstrip=True, special=True)], special_tokens=True)
    text = "ask\n<end>well <end>\nask"
    first, last = text.index("<end>"), text.rindex("<end>")
    [(ids, loss_mask)] = Aligner(tokenizer).align([text], [[(first, last + len("<end>"))]])
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids[loss_mask].tolist()) == "<end>well<end>"
    assert aligned(tokenizer, text, (first, first + 2))[1] == (True, "<e"), "cut in the token"


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
