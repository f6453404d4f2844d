"""Two machines with one rank each against one machine with two: speed, and bytes on the cable.

    python benchmarks/two_machines.py --rounds 3        # as root: the machines are emulated

The machines share this one's processors, and their network is memory: what is measured is what the
way over a network costs in calls and copies, not a real cable. Bytes are counted where the cable of
each machine enters the switch; those of starting and joining are taken off by a shorter run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from anygauge.util.files import write_text
from benchmarks.launching import rows_and_tokenizer
from benchmarks.ratios import paired, rotated
from tests.launchers.emulated import LOGIN, machines_with_ssh, quiet_environment, why_not

CONFIG = (
    "{model_type: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, "
    "num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 512, "
    "max_position_embeddings: 256}"
)
RUN = """name: {name}
output: {folder}/out
backend: cpu
model: {{config: {config}, tokenizer: {tokenizer}}}
adapter: {{r: 16}}
data: {{train: {{path: {rows}}}, max_length: 64, cache: {folder}/cache}}
train: {{steps: {steps}, global_batch_size: 8, micro_batch_size: 4}}
strategy: {{name: zero}}
launch: {launch}
"""
NODES = ("node1", "node2")


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=4)] = 30,
    output: Annotated[Path, typer.Option(help="A JSON file.")] = Path("runs/two_machines.json"),
) -> None:
    """Compare the same run on two emulated machines and on one."""
    why = why_not("ssh", "sshd", "ssh-keygen")
    if why is not None:
        raise typer.BadParameter(why)
    speeds: dict[str, list[float]] = {"1 machine x 2 ranks": [], "2 machines x 1 rank": []}
    sent: dict[str, list[float]] = {node: [] for node in NODES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows, tokenizer = rows_and_tokenizer(folder)
        with machines_with_ssh(folder) as (machines, ssh):
            remote = json.dumps(
                {
                    "launcher": "ssh", "nodes": 2, "devices": 1,
                    "pass_environment": ["OMP_NUM_THREADS", "PATH"],
                    "options": {"hosts": list(NODES), "config": str(ssh.config)},
                }
            )  # fmt: skip

            def run(name: str, launch: str, count: int) -> tuple[dict[str, Any], list[int]]:
                path = folder / f"{name}.yaml"
                path.write_text(
                    RUN.format(
                        name=name, folder=folder, config=CONFIG, tokenizer=tokenizer, rows=rows,
                        steps=count, launch=launch,
                    )
                )  # fmt: skip
                before = [machines.bytes_sent(node) for node in NODES]
                done = subprocess.run(
                    machines.command(LOGIN, [sys.executable, "-m", "anygauge.cli", "train", path]),
                    env=quiet_environment(),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(done.stderr)
                after = [machines.bytes_sent(node) for node in NODES]
                report = json.loads((folder / "out" / name / "report.json").read_text())
                return report, [b - a for a, b in zip(before, after, strict=True)]

            _, short = run("short", remote, steps // 2)
            for index in range(rounds):
                for name in rotated(list(speeds), index):
                    two = name.startswith("2")
                    label = f"{'two' if two else 'one'}{index}"
                    report, moved = run(label, remote if two else "{devices: 2}", steps)
                    speeds[name].append(float(report["tokens_per_s"]))
                    if two:
                        for node, count, less in zip(NODES, moved, short, strict=True):
                            sent[node].append((count - less) / (steps - steps // 2))
    console = Console(highlight=False)
    for name, values in speeds.items():
        console.print(f"{name:<20} {median(values):,.0f} tokens/s")
    one, two_ = speeds.values()
    ratio = paired(two_, one)
    spread = "" if ratio.low is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"
    console.print(f"two machines / one: {ratio.median:.3f}{spread}, {ratio.rounds} rounds")
    for node, counts in sent.items():
        console.print(f"{node} sends {median(counts) / 2**20:.2f} MiB a step")
    write_text(output, json.dumps({"tokens_per_s": speeds, "bytes_a_step": sent}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
