"""What Gaudi would compile, copy to the host and leave to the host in each step, on the stand-in.

    python -m tests.gaudi_census                    # all runs, in lazy and in compile mode
    python -m tests.gaudi_census 70b single --mode lazy
    python -m tests.gaudi_census 8b-packed --where  # also which lines copy or fall back

Runs train with real widths and few layers. Nothing is computed: operations make tensors of the
right shape whose memory nobody writes (`tests/standins/gaudi/habana_shapes.py`), so that losses
mean nothing and a run of minutes needs two gigabytes for each rank.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.helpers.gaudi import calls, standin_environment, standin_site
from tests.helpers.runs import merged, train
from tests.helpers.sizes import LLAMA_8B, LLAMA_70B
from tests.helpers.tiny_tokenizer import make_tokenizer

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples/llama2-70b-lora-gaudi2.yaml"
STEPS = 4
MORE_STEPS = 8
"""Of each run, and of one whose steps have several widths; the last has too few rows for all
ranks."""

LORA: dict[str, Any] = {
    "adapter": {"r": 16},
    "data": {"max_length": 2048, "eval_fraction": 0.05},
    "train": {"micro_batch_size": 4, "gradient_checkpointing": True},
    "precision": {"param_dtype": "bfloat16"},
}
PACKED = {"data": {"packing": True}}
ZERO = {"strategy": {"name": "zero", "stage": 3, "reentrant": True}}
"""Lazy mode takes the reentrant form of recomputation alone."""

SCENARIOS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "70b": (LLAMA_70B, {}),
    "8b": (LLAMA_8B, merged(LORA, ZERO)),
    "8b-narrow": (LLAMA_8B, merged(merged(LORA, ZERO), {"train": {"micro_batch_size": 1}})),
    "8b-packed": (LLAMA_8B, merged(merged(LORA, ZERO), PACKED)),
    "single": (LLAMA_8B, merged(merged(LORA, PACKED), {"strategy": {"name": "single"}})),
}
"""Name -> sizes of the model, and what stands in the run file; the 70B run's is the example. Rows
of `8b` stand in fours, so that most steps are wide; those of `8b-narrow` alone."""


@dataclass
class CensusPart:
    """A step or an evaluation of one rank."""

    name: str
    widths: set[int] = field(default_factory=set)
    new: int = 0
    reused: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    unproven: int = 0
    where: Counter[str] = field(default_factory=Counter)

    def add(self, call: Sequence[Any]) -> None:
        """Count one line of the stand-in's record."""
        kind = call[0]
        if kind == "rows":
            self.widths.add(call[2])
        elif kind == "graph":
            self.new += call[2] == "new"
            self.reused += call[2] == "reused"
        elif kind == "host_copy":
            self.copies[call[1]] += 1
            self.where[f"copy to the host, {call[2]}: {call[3] or call[1]}"] += 1
        elif kind == "fallback":
            self.fallbacks += 1
            self.where[f"fallback {call[1]} ({', '.join(call[2])}): {call[4] or call[3]}"] += 1
        elif kind == "unproven":
            self.unproven += 1
            self.where[f"unproven {call[1]}: {call[3] or call[2]}"] += 1

    def cells(self) -> list[str]:
        """As a row of the table."""
        return [
            self.name,
            ", ".join(map(str, sorted(self.widths))),
            *map(str, (self.new, self.reused, self.copies["anygauge"])),
            *map(str, (self.copies["deepspeed"], self.fallbacks, self.unproven)),
        ]


HEAD = ("part", "width", "new", "reused", "copies: ours", "DeepSpeed's", "fallbacks", "unproven")


def parts(record: Sequence[Sequence[Any]]) -> list[CensusPart]:
    """A rank's record, cut into steps and evaluations.

    What leads to the first forward pass is part of step 1, and what is between two parts, of the
    second.
    """
    found: list[CensusPart] = []
    begun = step = evaluation = 0
    for at, call in enumerate(record):
        if call[:2] == ["phase", "update"]:
            step += 1
            title = f"step {step}"
        elif call == ["evaluation", "ends"]:
            evaluation += 1
            title = f"evaluation {evaluation}"
        else:
            continue
        found.append(_part(title, record[begun:at]))
        begun = at
    found.append(_part("end", record[begun:]))
    return found


def _part(name: str, record: Sequence[Sequence[Any]]) -> CensusPart:
    part = CensusPart(name)
    for call in record:
        part.add(call)
    return part


def rows(folder: Path, count: int, least: int, most: int, seed: int = 0) -> Path:
    """Instructions of `least` to `most` tokens, in a file; a fixed seed."""
    draw = random.Random(seed)
    tokenizer = make_tokenizer(folder / "tokenizer")
    words = [" number", " ocean", " small", " the", " add", " of", " name", " correct", " is"]
    lengths = [len(tokenizer.encode(word, add_special_tokens=False)) for word in words]

    def text(tokens: int) -> str:
        made, length = "", 0
        while length < tokens:
            at = draw.randrange(len(words))
            made, length = made + words[at], length + lengths[at]
        return made

    made = [
        {"instruction": text(10), "input": "", "output": text(draw.randint(least, most) - 150)}
        for _ in range(count)
    ]
    path = folder / "rows.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


def run_file(
    folder: Path,
    name: str,
    mode: str,
    *,
    layers: int,
    devices: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """The run of one table. Args: more: options of the backend."""
    model, fields = SCENARIOS[name]
    if not fields:
        fields = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    ranks = 1 if fields.get("strategy", {}).get("name") == "single" else devices
    micro = fields["train"]["micro_batch_size"]
    # The last step has a row for the first rank alone; of long rows two fill a sequence.
    packed = fields["data"].get("packing")
    sequences = ((STEPS if packed else MORE_STEPS) - 1) * ranks * micro + 1
    held_out = 3
    if packed:
        texts = rows(folder, 2 * (sequences + held_out), 750, 950)
        held_out *= 2
    else:
        texts = rows(folder, sequences + held_out, 200, 1900)
    options = dict(fields.get("backend_options", {})) if mode == "lazy" else {}
    changes = {
        "name": f"{name}-{mode}",
        "output": str(folder / "out"),
        "backend": "hpu",
        "backend_options": {**options, **more, "mode": mode},
        "model": {
            "config": {**model, "num_hidden_layers": layers},
            "tokenizer": str(folder / "tokenizer"),
        },
        "data": {
            "train": {"path": str(texts), "format": "alpaca"},
            "eval_fraction": held_out / (sequences + held_out) / (held_out // 3),
            "cache": str(folder / "cache"),
        },
        "train": {"epochs": 1, "eval_every": 2, "global_batch_size": ranks * micro},
        "launch": {"devices": ranks},
        # Values mean nothing: the saved adapter gives others than the trained one.
        "adapter": {"verify": False},
    }
    fields = {**fields, "backend_options": {}}
    path = folder / f"{name}-{mode}.yaml"
    path.write_text(yaml.safe_dump(merged(fields, changes)), encoding="utf-8")
    return path


def counted(
    folder: Path,
    name: str,
    mode: str,
    *,
    layers: int = 4,
    devices: int = 2,
    shapes: bool = True,
    **options: Any,
) -> list[list[CensusPart]]:
    """Run, with options of the backend, and count: of each rank its parts.

    Raises:
        RuntimeError: the run failed; says what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "record"
    site = standin_site(folder)
    path = run_file(folder, name, mode, layers=layers, devices=devices, more=options)
    environment = {
        **standin_environment(site, record),
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
        "HABANA_STANDIN_SHAPES": "1" if shapes else "0",
        "ANYGAUGE_SIM_CAPACITY": str(94 * 2**30),
    }
    run = train(path, timeout_s=3600, environment=environment)
    if run.status != 0:
        raise RuntimeError(f"{name}, {mode}: {run.out}\n{run.err}")
    ranks = sorted(int(each.suffix[1:]) for each in folder.glob("record.*"))
    return [parts(calls(record, rank)) for rank in ranks]


def table(ranks: Sequence[Sequence[CensusPart]]) -> Iterator[str]:
    """Lines of a table: of each part, the rank that compiles most."""
    yield f"| {' | '.join(HEAD)} |"
    yield "|" + "---|" * len(HEAD)
    for same in zip(*ranks, strict=True):
        worst = max(same, key=lambda part: (part.new, sum(part.copies.values()), part.fallbacks))
        yield f"| {' | '.join(worst.cells())} |"


def main(arguments: Sequence[str]) -> None:
    """Run what is asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", choices=[*SCENARIOS, []], metavar="RUN")
    parser.add_argument("--mode", choices=("lazy", "compile"), action="append")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--where", action="store_true", help="the lines that copy or fall back")
    parser.add_argument("--folder", type=Path, help="keep run files, records and logs here")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.runs or SCENARIOS:
            for mode in given.mode or ("lazy", "compile"):
                folder = (given.folder or Path(temporary)) / f"{name}-{mode}"
                found = counted(folder, name, mode, layers=given.layers, devices=given.devices)
                print(f"\n### {name}, {mode}\n")
                print(*table(found), sep="\n", flush=True)
                if given.where:
                    for line, count in sum(
                        (part.where for part in found[0]), Counter()
                    ).most_common():
                        print(f"    {count} x {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
