"""From nothing to a fine-tuned model on two CPU processes, in a few minutes and without a download.

    python examples/demo/demo.py
    python examples/demo/demo.py --backend sim --devices 4

Every step is a command that is printed before it runs, so that you can run it yourself. All files
go to ``runs/demo``, which is removed and made anew at each start.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_FOLDER = ROOT / "runs" / "demo"
MARKER = ".anygauge-demo"
CLEARLY_BELOW = 0.95
"""The adapter's held-out loss must be at most this share of the base's, or the demo fails."""

GLOBAL_BATCH = 4
"""``train.global_batch_size`` of both run files."""

QUICK_DATA = ("--files", "40")
QUICK_PRETRAIN = ("--set=train.steps=80",)
QUICK_FINETUNE = ("--set=train.steps=40",)


class DemoError(Exception):
    """Something went wrong that one sentence explains."""


@dataclass(kw_only=True, slots=True)
class Demo:
    """One walk through the demo.

    Attributes:
        folder: where everything goes, absolute.
        quick: a far smaller variant that shows the way, not the quality.
        backend: of all three commands that need a device.
        devices: ranks; None leaves the number to the run files.
        console: a rich console.
        seconds: stage -> how long it took.
    """

    folder: Path
    quick: bool
    backend: str
    devices: int | None
    console: Any
    seconds: dict[str, float] = field(default_factory=dict)

    # -- the stages ----------------------------------------------------------------------------

    def run(self) -> None:
        """All stages in order.

        Raises:
            DemoError: a command failed, or the adapter did not lower the loss.
        """
        make_anew(self.folder)
        self.log(
            f"Everything goes to {shown(self.folder)}, which each start of the demo makes anew. "
            f"The commands below are typed in {ROOT}."
        )
        with self.stage("data", "read this Python's own docstrings"):
            self.python("docstrings.py", shown(self.data), *(QUICK_DATA if self.quick else ()))
        with self.stage("tokenizer", "train a byte-pair tokenizer on the training text"):
            files = [shown(self.data / name) for name in ("pretrain.jsonl", "train.jsonl")]
            self.python("train_tokenizer.py", *files, "--folder", shown(self.tokenizer))
        with self.stage("pre-train", "a small Llama from random weights, all weights"):
            self.train("pretrain.yaml", *self.pretrain_settings())
        with self.stage("fine-tune", "LoRA on frozen weights, ZeRO-3"):
            self.log("Step 0 measures the held-out rows with the base, the last step with adapter.")
            self.train("finetune.yaml", *self.finetune_settings())
        base, tuned, tokens = held_out_losses(self.finetuned / "metrics.jsonl")
        with self.stage("generate", "one held-out question, asked of the base and of the adapter"):
            question, written = a_question(self.data / "heldout.jsonl")
            self.log("The base has read texts and no questions: it may answer nothing.")
            before = self.generate(question, "--no-adapter")
            after = self.generate(question)
        self.show_answers(question, written, before, after)
        self.show_losses(base, tuned, tokens)
        self.show_seconds()
        self.show_places()
        check_loss_fell(base, tuned, self.finetuned / "metrics.jsonl")
        self.show_next()

    @property
    def data(self) -> Path:
        """Folder of the three row files."""
        return self.folder / "data"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.folder / "tokenizer"

    @property
    def pretrained(self) -> Path:
        """Run directory of the pre-training."""
        return self.folder / "pretrain"

    @property
    def finetuned(self) -> Path:
        """Run directory of the fine-tuning."""
        return self.folder / "finetune"

    def pretrain_settings(self) -> list[str]:
        """What differs from ``pretrain.yaml``; nothing in the usual folder."""
        places = {
            "model.tokenizer": self.tokenizer,
            "data.train.path": self.data / "pretrain.jsonl",
        }
        return [*self._elsewhere(places), *(QUICK_PRETRAIN if self.quick else ())]

    def finetune_settings(self) -> list[str]:
        """What differs from ``finetune.yaml``; nothing in the usual folder."""
        places = {
            "model.name": self.pretrained / "model",
            "data.train.path": self.data / "train.jsonl",
            "data.eval.path": self.data / "heldout.jsonl",
        }
        return [*self._elsewhere(places), *(QUICK_FINETUNE if self.quick else ())]

    def _elsewhere(self, places: dict[str, Path]) -> list[str]:
        if self.folder == DEFAULT_FOLDER:
            return []
        settings = [f"--set={name}={shown(path)}" for name, path in places.items()]
        return ["--output", shown(self.folder), *settings]

    # -- commands ------------------------------------------------------------------------------

    def python(self, script: str, *arguments: str) -> None:
        """Run one of the demo's own scripts."""
        file = HERE / script
        self.start(["python", shown(file), *arguments], [sys.executable, str(file), *arguments])

    def train(self, run_file: str, *arguments: str) -> None:
        """``anygauge train`` on a backend by name: the demo is to be the same wherever it runs."""
        spread: list[str] = []
        if self.devices is not None:
            # The run files' four sequences a step, on so many ranks.
            micro_batch = max(1, GLOBAL_BATCH // max(2, self.devices))
            spread = ["--devices", str(self.devices), f"--set=train.micro_batch_size={micro_batch}"]
        run = shown(HERE / run_file)
        self.anygauge("train", run, "--backend", self.backend, *spread, *arguments)

    def generate(self, question: str, *arguments: str) -> str:
        """``anygauge generate`` with the fine-tuned model; returns the answer."""
        tail = ["--prompt", question, "--max-new-tokens", "60", "--backend", self.backend]
        return self.anygauge("generate", shown(self.finetuned), *tail, *arguments, capture=True)

    def anygauge(self, *arguments: str, capture: bool = False) -> str:
        """The command line of this installation; returns what it wrote, if captured."""
        # -P: what lies in the current folder must not stand in for an installed package.
        real = [sys.executable, "-P", "-m", "anygauge.cli", *arguments]
        return self.start([tool(), *arguments], real, capture=capture)

    def start(self, printed: Sequence[str], real: Sequence[str], *, capture: bool = False) -> str:
        """Print a command, run it to its end, and hand it the signals that end the demo.

        Raises:
            DemoError: it failed; it has said why itself.
            KeyboardInterrupt: the demo was asked to end, and the command has ended.
        """
        self.log(f"$ {shlex.join(printed)}", style="bold")
        process = subprocess.Popen(
            list(real),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            text=True,
            # Out of reach of the terminal's Ctrl-C, which would otherwise arrive twice.
            start_new_session=True,
        )
        try:
            written, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        if process.returncode:
            raise DemoError(
                f"`{shlex.join(printed[:3])}` ended with status {process.returncode}; what it "
                "wrote above says why"
            )
        return (written or "").strip()

    # -- what is printed -----------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """A headline, and the time that the stage takes."""
        self.log("")
        self.log(f"[{len(self.seconds) + 1}/5] {name}: {what}", style="bold cyan")
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def log(self, text: str, style: str = "") -> None:
        """A line, its text left as it is."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def show_answers(self, question: str, written: str, before: str, after: str) -> None:
        """One question, the documentation's answer and both models'."""
        self.log("")
        self.log(f"What does {question} do?", style="bold")
        for who, answer in (
            ("Python's documentation", written),
            ("base", before),
            ("base + adapter", after),
        ):
            self.log(f"  {who + ':':<24} {' '.join(answer.split()) or '(nothing)'}")
        self.log(
            "  A million weights, trained for minutes: expect the form of an answer, no wisdom."
        )

    def show_losses(self, base: float, tuned: float, tokens: int) -> None:
        """The comparison."""
        from rich.table import Table

        table = Table(title=f"Held-out rows: {tokens:,} tokens of answers never trained on")
        for column in ("model", "loss (nats per token)", "perplexity"):
            table.add_column(column, justify="left" if column == "model" else "right")
        table.add_row("base", f"{base:.4f}", f"{math.exp(base):.1f}")
        table.add_row("base + adapter", f"{tuned:.4f}", f"{math.exp(tuned):.1f}")
        self.console.print()
        self.console.print(table)
        self.log(f"The adapter's loss is {1 - tuned / base:.0%} below the base's.")

    def show_seconds(self) -> None:
        """Where the time went."""
        parts = ", ".join(f"{name} {value:.0f}" for name, value in self.seconds.items())
        self.log(f"Seconds: {parts}; in all {sum(self.seconds.values()):.0f}.")

    def show_places(self) -> None:
        """Where everything lies."""
        self.log("")
        self.log("Where everything lies", style="bold")
        for path, what in (
            (self.data, "rows: pretrain.jsonl, train.jsonl, heldout.jsonl"),
            (self.tokenizer, "tokenizer, in the layout of transformers"),
            (self.pretrained / "model", "base model, in the layout of transformers"),
            (self.finetuned / "adapter", "LoRA adapter, in the layout of peft"),
            (self.finetuned / "metrics.jsonl", "loss, rate, tokens per second of every step"),
            (self.finetuned / "run.yaml", "the run as it was, every field filled in"),
        ):
            self.log(f"  {shown(path):<40} {what}")

    def show_next(self) -> None:
        """What a newcomer does now."""
        run_file, run = shown(HERE / "finetune.yaml"), shown(self.finetuned)
        model = shown(self.folder / "merged")
        self.log("")
        self.log("What next", style="bold")
        for what, command in (
            (
                f"Your own model and rows: copy {run_file} to my.yaml, change the lines "
                "marked with <- (model, rows, learning rate ...), then",
                f"{tool()} train my.yaml",
            ),
            ("What this machine can train on, and why not on the rest:", f"{tool()} backends"),
            ("The same file on a GPU:", f"{tool()} train {run_file} --backend cuda --devices 1"),
            (
                "One model without an adapter beside it, for any tool that reads transformers' "
                "folders:",
                f"{tool()} merge {run} --output {model}",
            ),
        ):
            self.log(f"  {what}")
            self.log(f"      {command}", style="bold")


def held_out_losses(metrics: Path) -> tuple[float, float, int]:
    """(loss before the first step, loss after the last, tokens) of a run's evaluations.

    Losses are in nats per token. LoRA's second factor begins at zero: before the first step the
    adapter adds nothing, and what is measured is the base.

    Raises:
        DemoError: the file lacks one of the two, or a loss is not a number.
    """
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = {r["step"]: r for r in records if r.get("name") == "eval" and r.get("eval_loss")}
    steps = [r["step"] for r in records if "loss" in r]
    if 0 not in losses or not steps or steps[-1] not in losses:
        raise DemoError(
            f"{shown(metrics)} has held-out losses at steps {sorted(losses) or 'none'}; step 0 and "
            "the last step were expected. Are train.eval_at_start and data.eval in the run file?"
        )
    last = losses[steps[-1]]
    return losses[0]["eval_loss"], last["eval_loss"], last["eval_tokens"]


def check_loss_fell(base: float, tuned: float, metrics: Path) -> None:
    """Return if the adapter's held-out loss is clearly below the base's.

    Raises:
        DemoError: it is not, or it is not a number.
    """
    if not tuned <= CLEARLY_BELOW * base:
        raise DemoError(
            f"the adapter's held-out loss ({tuned:.4f}) is not clearly below the base's "
            f"({base:.4f}): at least {1 - CLEARLY_BELOW:.0%} lower was expected. Something in "
            f"training is broken; look at {shown(metrics)}"
        )


def a_question(held_out: Path) -> tuple[str, str]:
    """Prompt and answer of the first held-out row whose name has no part that begins with ``_``."""
    rows = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    public = (row for row in rows if "._" not in row["prompt"] and row["prompt"][0] != "_")
    row = next(public, rows[0])
    return row["prompt"], row["completion"]


def make_anew(folder: Path) -> None:
    """Remove a folder that an earlier demo made, and make it.

    Raises:
        DemoError: there is something of that name that the demo did not make.
    """
    if folder.is_symlink() or folder.exists():
        theirs = folder.is_symlink() or not folder.is_dir()
        if theirs or (any(folder.iterdir()) and not (folder / MARKER).is_file()):
            raise DemoError(
                f"{folder} is there already and no earlier demo made it, so it is left alone; "
                "remove it yourself, or name another with --folder"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("made by examples/demo/demo.py, which may remove it\n")


def shown(path: Path) -> str:
    """A path as it is typed in the root of the repository."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def tool() -> str:
    """The command line as it is typed here: by name only where the shell would find this one."""
    own = Path(sys.executable).parent / "anygauge"
    found = shutil.which("anygauge")
    return "anygauge" if found and Path(found).resolve() == own.resolve() else shown(own)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=DEFAULT_FOLDER, help="where everything goes (made anew)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a far smaller variant: shows the way, not the quality"
    )
    parser.add_argument("--backend", default="cpu", help="as `anygauge backends` names it")
    parser.add_argument(
        "--devices", type=int, choices=(1, 2, 4), help="ranks; as in the run files (2) if left out"
    )
    arguments = parser.parse_args()
    if importlib.util.find_spec("anygauge") is None:
        print(
            f"error: {sys.executable} has no anygauge; install it first: "
            f"{sys.executable} -m pip install -e {ROOT}",
            file=sys.stderr,
        )
        return 1
    from rich.console import Console

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, signal.default_int_handler)
    folder = arguments.folder.absolute()
    try:
        Demo(
            folder=folder,
            quick=arguments.quick,
            backend=arguments.backend,
            devices=arguments.devices,
            console=Console(),
        ).run()
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nended on request; what was made so far is in the folder", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
