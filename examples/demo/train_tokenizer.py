"""Trains a byte-level byte-pair tokenizer on the demo's own training text: no download.

The folder that it writes is what every tool of the transformers library reads: ``tokenizer.json``
and ``tokenizer_config.json``. Held-out rows are not read, so that not even the vocabulary knows
them; being byte-level, it spells what it has never seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 2048
"""Tokens in all; ``model.config.vocab_size`` of the run file that trains from nothing is this."""

BEGIN, END, PAD = "<s>", "</s>", "<pad>"


def train(files: list[Path], folder: Path, *, vocabulary: int = VOCABULARY) -> int:
    """Train on all texts of JSON Lines files and save to `folder`; returns the number of tokens.

    The result depends on the texts alone. ``<s>`` stands before every text, as with Llama.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(files), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD
    )
    fast.save_pretrained(folder)
    return len(fast)


def texts(files: list[Path]) -> Iterator[str]:
    """Every column of every row."""
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield from json.loads(line).values()


def main() -> None:
    """Command line: train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="JSON Lines files to train on")
    parser.add_argument("--folder", type=Path, required=True, help="where it is saved")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens in all")
    arguments = parser.parse_args()
    count = train(arguments.files, arguments.folder, vocabulary=arguments.vocabulary)
    print(f"{arguments.folder}: {count:,} tokens")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
