"""A workload's texts, tokenizer and rows, written once and read by every contender.

Texts are those of real files, or of a generator with a stated distribution. Rows are as many as the
run reads, so that each is read exactly once where nothing is packed; packing takes more of them, up
to all there are. Torch-free.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.contender_plan import BenchmarkError, ContenderPlan

WORKLOADS = ("full", "gsm8k", "alpaca", "generated")
FILES = {"full": "wiki_demo.txt", "gsm8k": "gsm8k_train.jsonl", "alpaca": "alpaca_en_demo.json"}
"""Names below the data folder."""

MEDIAN_WORDS, SPREAD, PROMPT_SHARE = 90, 0.6, 0.3
GENERATED_TEXTS = 4000
SPECIAL = END, PAD = "</s>", "<pad>"
TOKENIZER_TEXTS = 1000
"""Texts that the tokenizer is trained on, at most."""
POOL_MARGIN = 1.1
"""Rows for packing as a multiple of those that fill the packs: packs are never quite full."""


@dataclass(frozen=True, slots=True)
class Text:
    """One piece of text; `prompt` is empty for plain text.

    A prompt ends with a newline and a completion begins with a visible character, so that
    tokenizing both together or apart gives the same tokens.
    """

    prompt: str
    completion: str


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
        rows = [asdict(text) if text.prompt else {"text": text.completion} for text, _ in part]
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
    return result


def full_rows(
    found: Sequence[Text], tokenizer: Any, length: int, count: int
) -> list[tuple[Text, int]]:
    """Up to `count` pieces of text of exactly `length` tokens with the end token.

    A piece counts only if its text, tokenized anew, has as many tokens as were cut: cutting may
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


def source(workload: str, data: bool) -> str:
    """In words, what a workload is made of, with a folder of data or without."""
    if data and workload in FILES:
        return FILES[workload]
    made = "text" if workload == "full" else "rows"
    return (
        f"generated {made} (words per text log-normal, median {MEDIAN_WORDS}, sigma {SPREAD}, "
        f"{PROMPT_SHARE:.0%} of them prompt)"
    )


def texts(workload: str, data: Path | None, seed: int) -> list[Text]:
    """All texts of a workload, in their own order.

    Args:
        data: folder with real files; None generates text for `full` and `generated`.
    """
    if workload == "generated" or (workload == "full" and data is None):
        made = list(_generated(random.Random(seed)))
        if workload == "generated":
            return made
        return [Text("", text.prompt + text.completion) for text in made]
    if data is None:
        raise BenchmarkError(
            f"workload {workload} reads {FILES[workload]} from a data folder: set ANYGAUGE_DATA to "
            "it, or use --workload generated"
        )
    path = data / FILES[workload]
    if not path.is_file():
        raise BenchmarkError(f"workload {workload}: no such file: {path}; check ANYGAUGE_DATA")
    content = path.read_text(encoding="utf-8")
    if workload == "full":
        return [Text("", line) for line in content.splitlines() if line.strip()]
    if workload == "gsm8k":
        rows = [json.loads(line) for line in content.splitlines() if line.strip()]
        pairs = [(row["question"], row["answer"]) for row in rows]
    else:
        pairs = [
            ("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"])
            for row in json.loads(content)
        ]
    return [
        Text(prompt.strip() + "\n", completion.strip())
        for prompt, completion in pairs
        if completion.strip()
    ]


def _generated(dice: random.Random) -> Iterator[Text]:
    onsets = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
    vowels = ("a", "e", "i", "o", "u", "ai", "ou")
    lexicon = [
        "".join(dice.choice(onsets) + dice.choice(vowels) for _ in range(dice.randint(1, 4)))
        for _ in range(3000)
    ]
    # Few words are frequent and many are rare, as in language.
    weights = list(accumulate(1 / (place + 1) for place in range(len(lexicon))))
    for _ in range(GENERATED_TEXTS):
        count = max(8, round(dice.lognormvariate(math.log(MEDIAN_WORDS), SPREAD)))
        words = dice.choices(lexicon, cum_weights=weights, k=count)
        asked = max(2, round(PROMPT_SHARE * count))
        yield Text(" ".join(words[:asked]) + "\n", " ".join(words[asked:]))
