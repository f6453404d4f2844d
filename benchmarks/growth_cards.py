"""How the cost of a step grows with the simulated cards that take part in it.

    python -m benchmarks.growth_cards --cards 1,2,4,8 --strategies ddp,fsdp,zero

Needs the device of `examples/plugins/anygauge-sim` (`make plugins`). All ranks share this machine's
processors, so nothing here is a speed: per rank and step it reports processor seconds, calls and
bytes of collectives, and a card's peak memory. What starting costs is taken off by a shorter run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anygauge.util.files import write_text
from benchmarks.errors import BenchmarkError
from benchmarks.growth import growth_table
from benchmarks.launching import rows_and_tokenizer

CONFIG = (
    "{model_type: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 8, "
    "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 512, "
    "max_position_embeddings: 256}"
)
RUN = """name: {name}
output: {folder}/out
backend: sim
model: {{config: {config}, tokenizer: {tokenizer}}}
adapter: {{r: 8}}
data: {{train: {{path: {rows}}}, max_length: 64, cache: {folder}/cache}}
train: {{steps: {steps}, global_batch_size: {batch}, micro_batch_size: 2}}
strategy: {{name: {strategy}}}
launch: {{devices: {cards}}}
"""
COLLECTIVE = re.compile(r"^\d+ simccl::\w+ (\d+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CardGrowth:
    """One strategy on one number of cards; all figures but `peak` per rank and step.

    Attributes:
        cpu_s: processor seconds, of all processes of the run.
        calls, sent: calls of collectives, and the bytes handed to them.
        peak: most bytes of a card's memory.
    """

    strategy: str
    cards: int
    cpu_s: float
    calls: float
    sent: float
    peak: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """What a whole run took: processor seconds of all its processes, and what rank 0 exchanged."""

    cpu_s: float
    calls: int
    sent: int
    peak: int


def trained(folder: Path, strategy: str, cards: int, steps: int, given: tuple[Path, Path]) -> Total:
    """Run ``anygauge train``, and count.

    Raises:
        BenchmarkError: it failed.
    """
    name = f"{strategy}-{cards}-{steps}"
    rows, tokenizer = given
    path = folder / f"{name}.yaml"
    path.write_text(
        RUN.format(
            name=name, folder=folder, config=CONFIG, tokenizer=tokenizer, rows=rows, steps=steps,
            batch=2 * cards, strategy=strategy, cards=cards,
        )
    )  # fmt: skip
    # Into the log of each rank: lines of several processes in one file would be torn.
    variables = {"ANYGAUGE_SIM_TRACE": "/proc/self/fd/2", "ANYGAUGE_SIM_CARDS": str(cards)}
    variables["ANYGAUGE_SIM_LOCKS"] = str(folder)
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "anygauge.cli", "train", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    if done.returncode:
        raise BenchmarkError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    calls, sent = exchanged(folder / "out" / name / "logs" / "rank0.log")
    records = (folder / "out" / name / "metrics.jsonl").read_text().splitlines()
    peak = max(int(each.get("peak_memory") or 0) for each in map(json.loads, records))
    return Total(cpu_s=cpu, calls=calls, sent=sent, peak=peak)


def exchanged(log: Path) -> tuple[int, int]:
    """Calls and bytes of the collectives that a rank's device wrote into its log."""
    found = [int(size) for size in COLLECTIVE.findall(log.read_text(errors="replace"))]
    return len(found), sum(found)


def measured(
    folder: Path, strategy: str, cards: int, steps: int, given: tuple[Path, Path]
) -> CardGrowth:
    """The difference of two runs, one of them with three times the steps."""
    short, long = (trained(folder, strategy, cards, n, given) for n in (steps, 3 * steps))
    more = 2 * steps
    return CardGrowth(
        strategy=strategy,
        cards=cards,
        cpu_s=(long.cpu_s - short.cpu_s) / more / cards,
        calls=(long.calls - short.calls) / more,
        sent=(long.sent - short.sent) / more,
        peak=long.peak,
    )


COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "strategy": ("strategy", 1, ""),
    "cards": ("cards", 1, ".0f"),
    "cpu_s": ("CPU s per rank and step", 1, ".3f"),
    "calls": ("collectives per rank and step", 1, ".1f"),
    "sent": ("KiB of them per rank and step", 2**-10, ",.1f"),
    "peak": ("peak memory of a card, MiB", 2**-20, ".2f"),
}


def main(
    cards: Annotated[str, typer.Option(help="Numbers.")] = "1,2,4,8",
    strategies: Annotated[str, typer.Option(help="Names.")] = "ddp,fsdp,zero",
    steps: Annotated[int, typer.Option(min=2, help="Of the shorter run.")] = 5,
    output: Annotated[Path, typer.Option(help="A JSON file.")] = Path("runs/growth_cards.json"),
) -> None:
    """Measure each strategy on each number of cards."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        given = rows_and_tokenizer(folder)
        rows = [
            asdict(measured(folder, strategy, int(count), steps, given))
            for strategy in strategies.split(",")
            for count in cards.split(",")
        ]
    Console(highlight=False, soft_wrap=True).print(growth_table(COLUMNS, rows), markup=False)
    write_text(output, json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
