"""Where the text of a workload comes from: real files, or a generator with a stated distribution.

Torch-free. A `Text` is a prompt with its completion, or plain text where there is no prompt. A
prompt ends with a newline and a completion begins with a visible character, so that tokenising
both together or apart gives the same tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from benchmarks.plan import BenchmarkError

WORKLOADS = ("full", "gsm8k", "alpaca", "generated")
FILES = {"full": "wiki_demo.txt", "gsm8k": "gsm8k_train.jsonl", "alpaca": "alpaca_en_demo.json"}
"""Names below the data folder."""

MEDIAN_WORDS, SPREAD, PROMPT_SHARE = 90, 0.6, 0.3
GENERATED_TEXTS = 4000


@dataclass(frozen=True, slots=True)
class Text:
    """One piece of text; `prompt` is empty for plain text."""

    prompt: str
    completion: str


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
