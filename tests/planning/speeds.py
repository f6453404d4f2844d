"""Runs whose speed others have published, as run files of ours; what is said of each, and where.

Run as a script, it plans all and prints the table of docs/planning.md. With ``--fit`` it prints
the constants of `anygauge.planning.time` that meet `FITTED` best, and nothing of the other half.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from anygauge.config.load import load_run_file
from anygauge.planning import time as times
from anygauge.planning.machines import Hardware
from anygauge.planning.plan import plan_run
from anygauge.planning.trials import Target, timed
from anygauge.registry import Registry
from tests.helpers.sizes import LLAMA_8B, LLAMA_70B
from tests.planning.published import (
    ALL,
    BY_NAME,
    QWEN_7B,
    QWEN_14B,
    QWEN_72B,
    Published,
)

QWEN_1_8B = {
    **QWEN_7B,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
LLAMA_7B = {
    **LLAMA_70B,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One run.

    Attributes:
        of: the run; nothing is said of its memory.
        machine: that it ran on.
        tokens_per_s: of one card.
    """

    of: Published
    machine: str
    tokens_per_s: float

    @property
    def name(self) -> str:
        return self.of.name


QWEN = "Qwen's first README, profiling of memory and speed: 8 rows a step, one at a time"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def qwen(
    name: str,
    config: Mapping[str, Any],
    seconds: tuple[float, ...],
    ranks: int = 1,
    strategy: str = "single",
    adapter: bool = True,
) -> list[TimedRun]:
    """Seconds of a step of 8 rows a card, by length."""
    return [
        TimedRun(
            of=Published(
                name=f"{name}-{length}",
                config=config,
                card="a100-80",
                ranks=ranks,
                where=QWEN,
                length=length,
                adapter={"r": 64, "targets": ALL} if adapter else None,
                strategy={"name": strategy},
                train={"gradient_checkpointing": True, "global_batch_size": 8 * ranks},
            ),
            machine=f"a100-80:{ranks}",
            tokens_per_s=8 * length / took,
        )
        for length, took in zip(LENGTHS, seconds, strict=False)
    ]


def mlperf(name: str, machine: str, card: str, ranks: int, tokens_per_s: float) -> TimedRun:
    """Llama 2 70B with an adapter under ZeRO-3, one row of 8192 a card."""
    return TimedRun(
        of=Published(
            name=name,
            config={**LLAMA_70B, "max_position_embeddings": 8192},
            card=card,
            ranks=ranks,
            where="MLPerf training 4.0, Juniper Networks' logs: DeepSpeed's ZeRO-3, bfloat16",
            length=8192,
            adapter={"r": 16, "targets": ATTENTION},
        ),
        machine=machine,
        tokens_per_s=tokens_per_s,
    )


def torchtitan(ranks: int, tokens_per_s: float) -> TimedRun:
    """Llama 3.1 8B, all weights, FSDP2 without compilation."""
    return TimedRun(
        of=Published(
            name=f"torchtitan-8b-{ranks}",
            config=LLAMA_8B,
            card="h100",
            ranks=ranks,
            where="torchtitan's report: FSDP2, 2 rows of 8192, some operations recomputed",
            length=8192,
            micro_batch=2,
            adapter=None,
            strategy={"name": "fsdp"},
            train={"gradient_checkpointing": {"selective": True}},
        ),
        machine="p5.48xlarge",
        tokens_per_s=tokens_per_s,
    )


RUNS = [
    *qwen("qwen-1.8b", QWEN_1_8B, (1.0, 1.0, 1.1, 1.7, 3.3, 6.8)),
    *qwen("qwen-1.8b-full", QWEN_1_8B, (2.1, 2.2, 2.2, 2.3, 2.8, 5.6), 1, "zero", False),
    *qwen("qwen-7b", QWEN_7B, (1.2, 1.5, 2.8, 5.2, 10.1, 21.3)),
    *qwen("qwen-7b-full", QWEN_7B, (4.0, 4.0, 4.5), 2, "zero", False),
    *qwen("qwen-14b", QWEN_14B, (1.6, 2.4, 4.4, 8.4, 17.0, 36.0)),
    *qwen("qwen-72b", QWEN_72B, (17.6, 20.5, 29.4, 45.7, 83.4, 161.5), 4, "zero"),
    mlperf("mlperf-h100-8", "dgx-h100", "h100", 8, 649),
    mlperf("mlperf-h100-32", "dgx-h100", "h100", 32, 827),
    mlperf("mlperf-a100-64", "dgx-a100", "a100-80", 64, 387),
    TimedRun(
        of=Published(
            name="gaudi2-7b-lora",
            config=LLAMA_7B,
            card="gaudi2",
            ranks=8,
            where="Intel's table of Gaudi 2 models: optimum-habana, 148 rows of 512 a second; how "
            "many make a step is not said, 16 taken",
            length=512,
            micro_batch=16,
            adapter={"r": 8, "targets": ["q_proj", "v_proj"]},
            strategy={"name": "ddp"},
            train={"gradient_checkpointing": False},
        ),
        machine="hls-2",
        tokens_per_s=148 * 512 / 8,
    ),
    TimedRun(of=BY_NAME["gaudi2-70b-lora"], machine="hls-2", tokens_per_s=681),
    TimedRun(of=BY_NAME["torchtune-70b"], machine="a100-80:8", tokens_per_s=3497 / 8),
    torchtitan(8, 5762),
    torchtitan(128, 5605),
]

FITTED, REPORTED = RUNS[::2], RUNS[1::2]
"""The constants were fixed on the first, so that the errors of the second tell what they are worth.
Both have short and long rows, since these take turns."""
CONSTANTS = ("COPIED", "SENT", "ISSUE", "OVERLAP")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run that was planned.

    Attributes:
        seconds: of a step, by the constants as they are now.
    """

    of: TimedRun
    seconds: Callable[[], float]

    @property
    def tokens_per_s(self) -> float:
        """Of one card."""
        batch = self.of.of.run_file()["train"]["global_batch_size"]
        return batch * self.of.of.length / self.seconds() / self.of.of.ranks

    @property
    def error(self) -> float:
        """Planned over published, less one."""
        return self.tokens_per_s / self.of.tokens_per_s - 1


def planned(runs: Sequence[TimedRun], folder: Path, registry: Registry) -> Iterator[Planned]:
    """Plan runs."""
    hardware = Hardware.load(registry)
    for one in runs:
        yield _planned(one, folder, registry, hardware)


def _planned(of: TimedRun, folder: Path, registry: Registry, hardware: Hardware) -> Planned:
    path = folder / f"{of.name}.yaml"
    path.write_text(yaml.safe_dump(of.of.run_file()), encoding="utf-8")
    machine = hardware.machine(of.machine)
    card = hardware.card(machine.card)
    nodes = max(1, of.of.ranks // machine.cards)
    flags = {"backend": card.backend, "launch.devices": of.of.ranks // nodes, "launch.nodes": nodes}
    run = load_run_file(path, [], flags).run
    found = plan_run(run, registry, registry.create_backend(card.backend), of.of.ranks)
    target = Target(backend=card.backend, card=card, machine=machine)

    def seconds() -> float:
        time, why = timed(run, found, target, registry)
        assert time is not None, why
        return time.step

    return Planned(of=of, seconds=seconds)


def fit(found: Sequence[Planned]) -> dict[str, float]:
    """The constants whose errors are least in sum; what a rate reaches is at most all.

    Not their squares: runs that no model of time explains would decide.
    """

    def loss() -> float:
        return sum(abs(math.log1p(one.error)) for one in found)

    best, step = loss(), 1.3
    while step > 1.002:
        moved = False
        for name in CONSTANTS:
            for factor in (step, 1 / step):
                before = getattr(times, name)
                if name != "ISSUE" and before * factor > 1:
                    continue
                setattr(times, name, before * factor)
                if loss() < best - 1e-9:
                    best, moved = loss(), True
                else:
                    setattr(times, name, before)
        step = step if moved else math.sqrt(step)
    return {name: getattr(times, name) for name in CONSTANTS}


def main(*names: str) -> None:
    """Print a row for each run, or the constants."""
    fitting = names == ("--fit",)
    runs = [
        one for one in (FITTED if fitting else RUNS) if fitting or not names or one.name in names
    ]
    with TemporaryDirectory() as folder:
        found = planned(runs, Path(folder), Registry.load())
        if fitting:
            print(fit(list(found)))
            return
        print("| run | said, tokens/s of a card | planned | error | half |")
        print("|---|---:|---:|---:|---|")
        halves: dict[str, list[float]] = {"fitted": [], "reported": []}
        for one in found:
            half = "fitted" if one.of in FITTED else "reported"
            halves[half].append(abs(one.error))
            cells = [one.of.name, f"{one.of.tokens_per_s:,.0f}", f"{one.tokens_per_s:,.0f}"]
            print("| " + " | ".join([*cells, f"{one.error:+.0%}", half]) + " |", flush=True)
        for half, errors in halves.items():
            if errors:
                print(f"{half}: median error {statistics.median(errors):.1%} of {len(errors)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
