"""What launching costs: seconds from the command to the first training step, beside bare torchrun.

    python benchmarks/launching.py --rounds 5

Both start the same worker on the same rows, with two ranks on this machine; torchrun is handed the
job file that the command line would have written. Each round runs both, beginning with the other
one than the round before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from anygauge.util.files import write_text
from benchmarks.ratios import paired, rotated

RUN = """name: {name}
output: {output}
backend: cpu
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 512, max_position_embeddings: 256}}
  tokenizer: {tokenizer}
adapter: {{r: 4}}
data: {{train: {{path: {rows}}}, max_length: 96, cache: {cache}}}
train: {{steps: 3, global_batch_size: 4, micro_batch_size: 2}}
strategy: {{name: {strategy}}}
launch: {{devices: {ranks}}}
"""


def rows_and_tokenizer(folder: Path) -> tuple[Path, Path]:
    """Some rows, and a tokenizer that was trained on them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [f"Question {n}: what is {n} plus {n}? It is {2 * n}." for n in range(64)]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    tokenizer.save_pretrained(folder / "tokenizer")
    return rows, folder / "tokenizer"


def first_step(argv: Sequence[str], run: Path) -> float:
    """Seconds until a run has recorded a step; waits for its end.

    Raises:
        RuntimeError: it failed.
    """
    metrics, log = run / "metrics.jsonl", run.parent / f"{run.name}.log"
    log.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    found: float | None = None
    with log.open("w") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        while process.poll() is None:
            if found is None and metrics.exists() and metrics.stat().st_size:
                found = time.monotonic() - began
            time.sleep(0.01)
    if process.returncode or found is None:
        raise RuntimeError(
            f"{argv[:4]} ended with {process.returncode}:\n{log.read_text()[-2000:]}"
        )
    return found


def by_command(run_file: Path, run: Path, ranks: int) -> float:
    """``anygauge train``."""
    del ranks
    return first_step([sys.executable, "-m", "anygauge.cli", "train", str(run_file)], run)


def by_torchrun(run_file: Path, run: Path, ranks: int) -> float:
    """Bare torchrun around the same worker."""
    from anygauge.cli.intent import read_intent
    from anygauge.cli.run_folder import write_run

    intent = read_intent(run_file, [], {}, need_device=True)
    write_run(Path(intent.job.run_file), intent.run)
    write_text(run / "job.json", intent.job.dump(), 0o600)
    return first_step(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("-m", "anygauge.training.worker", "--job", str(run / "job.json")),
        ],
        run,
    )


CONTENDERS: dict[str, Callable[[Path, Path, int], float]] = {
    "anygauge train": by_command,
    "torchrun": by_torchrun,
}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    strategy: Annotated[str, typer.Option(help="zero or single.")] = "zero",
    output: Annotated[Path, typer.Option(help="A JSON file.")] = Path("runs/launching.json"),
) -> None:
    """Measure the seconds from a command to the first step."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows, tokenizer = rows_and_tokenizer(folder)
        for index in range(-1, rounds):  # one round to fill the caches of data and files
            for name in rotated(list(CONTENDERS), max(index, 0)):
                label = f"{name.split()[0]}{index}"
                run_file = folder / f"{label}.yaml"
                run_file.write_text(
                    RUN.format(
                        name=label, output=folder / "out", tokenizer=tokenizer, rows=rows,
                        cache=folder / "cache", strategy=strategy, ranks=ranks,
                    )
                )  # fmt: skip
                found = CONTENDERS[name](run_file, folder / "out" / label, ranks)
                if index >= 0:
                    seconds[name].append(found)
    console = Console(highlight=False)
    ours, theirs = (seconds[name] for name in CONTENDERS)
    for name, values in seconds.items():
        console.print(f"{name:<16} {median(values):.2f} s to the first step")
    ratio = paired(ours, theirs)
    spread = "" if ratio.low is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    console.print(f"anygauge train / torchrun: {ratio.median:.3f}{spread}, {ratio.rounds} rounds")
    write_text(output, json.dumps({"ranks": ranks, "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
