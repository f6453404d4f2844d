"""A workload's tokenizer and rows, written once and read by every contender.

Torch-free. Rows are as many as the run reads, so that each is read exactly once where nothing is
packed; packing takes more of them, up to all there are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.plan import BenchmarkError, ContenderPlan
from benchmarks.texts import Text, texts

END, PAD = "</s>", "<pad>"
SPECIAL = (END, PAD)
TOKENIZER_TEXTS = 1000
"""Texts that the tokenizer is trained on, at most."""
POOL_MARGIN = 1.1
"""Rows for packing as a multiple of those that fill the packs: packs are never quite full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRows:
    """What was written.

    Attributes:
        exact: file of steps * global_batch rows.
        pool: file of more rows for packing, those of `exact` first.
        vocabulary: tokens that the tokenizer has.
        tokens: tokens of `exact`, end tokens included.
        about: in words, the lengths of `exact`, and how many rows were too long.
    """

    exact: Path
    pool: Path
    vocabulary: int
    tokens: int
    about: str


def write_rows(workload: str, folder: Path, plan: ContenderPlan) -> WrittenRows:
    """Train the tokenizer into `folder`/model and write the rows beside it."""
    found = texts(workload, Path(plan.data) if plan.data else None, plan.seed)
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    random.Random(plan.seed).shuffle(found)
    tokenizer = train_tokenizer(found[:TOKENIZER_TEXTS], model, plan.vocabulary)
    count, length, dropped = plan.steps * plan.global_batch, plan.max_length, 0
    if workload == "full":
        length = plan.length
        sized = full_rows(found, tokenizer, length, count)
    else:
        sized, dropped = ragged_rows(found, tokenizer, length, count)
    if len(sized) < count:
        raise BenchmarkError(
            f"workload {workload} has {len(sized)} rows of at most {length} tokens, but the run "
            f"reads {count}: lower --steps, --micro-batch or --accumulation"
        )
    exact = sized[:count]
    sizes = [size for _, size in exact]
    result = WrittenRows(
        exact=folder / "rows.jsonl",
        pool=folder / "pool.jsonl",
        vocabulary=tokenizer.get_vocab_size(),
        tokens=sum(sizes),
        about=f"{min(sizes)} to {max(sizes)} tokens a row, mean {fmean(sizes):.0f}; {dropped} "
        "longer rows left out",
    )
    for path, part in ((result.exact, exact), (result.pool, sized)):
        path.write_text("".join(_line(text) for text, _ in part), encoding="utf-8")
    return result


def _line(text: Text) -> str:
    whole = {"text": text.completion}
    row = {"prompt": text.prompt, "completion": text.completion} if text.prompt else whole
    return json.dumps(row, ensure_ascii=False) + "\n"


def full_rows(
    found: Sequence[Text], tokenizer: Any, length: int, count: int
) -> list[tuple[Text, int]]:
    """Up to `count` pieces of text of exactly `length` tokens with the end token.

    A piece counts only if its text, tokenised anew, has as many tokens as were cut: cutting may
    split a word or a character in another way.
    """
    rows: list[tuple[Text, int]] = []
    ids: list[int] = []
    texts_left = iter(found)
    while len(rows) < count:
        while len(ids) < length - 1:
            text = next(texts_left, None)
            if text is None:
                return rows
            ids += tokenizer.encode(text.completion + "\n").ids
        piece = tokenizer.decode(ids[: length - 1])
        fits = bool(piece.strip()) and len(tokenizer.encode(piece).ids) == length - 1
        if fits:
            rows.append((Text("", piece), length))
        del ids[: length - 1 if fits else 1]
    return rows


def ragged_rows(
    found: Sequence[Text], tokenizer: Any, length: int, count: int
) -> tuple[list[tuple[Text, int]], int]:
    """(rows of at most `length` tokens with their sizes, how many longer ones were met).

    As many as fill `count` sequences when they are packed, or all there are.
    """
    kept: list[tuple[Text, int]] = []
    total = dropped = 0
    whole = tokenizer.encode_batch([text.prompt + text.completion for text in found])
    for text, encoding in zip(found, whole, strict=True):
        size = len(encoding.ids) + 1
        if size > length:
            dropped += 1
            continue
        kept.append((text, size))
        total += size
        if len(kept) >= count and total >= POOL_MARGIN * count * length:
            break
    return kept, dropped


def train_tokenizer(found: Sequence[Text], folder: Path, vocabulary: int) -> Any:
    """A byte-level byte-pair tokenizer without a start token, saved as transformers reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.prompt + text.completion for text in found), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer
