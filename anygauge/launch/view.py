"""What the one who waits for a run sees: its events as lines of text, and on a terminal a bar."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anygauge.launch.run_directory import LAUNCHED, logs_of
from anygauge.util.console import Console
from anygauge.util.text import format_bytes, format_time

Event = Mapping[str, Any]

GLANCE_S = 0.1
"""How soon a Ctrl-C is answered while nothing else comes."""
ROOM, METRIC = 33, 14
"""Columns for the step, a bar and the remaining time, which a narrow terminal has too; and for a
metric."""

_KILL_HINT = "(Ctrl-C again to kill)"
_ENDING = f"ending: finishing the current step and writing a checkpoint {_KILL_HINT}"
_NOTHING_YET = f"ending: no step has been taken, so there is nothing to save {_KILL_HINT}"
_NO_CHECKPOINT = f"ending: this run cannot write checkpoints; nothing is saved {_KILL_HINT}"


class View:
    """Turns events into lines, and on a terminal into a bar below them.

    Attributes:
        began: ranks train, or have trained.
        stops: asked to end, they would finish a step and write a checkpoint.
    """

    def __init__(self, console: Console, quiet: bool) -> None:
        self.began = self.stops = False
        self._console = console
        self._quiet = quiet
        self._summary: Any = None
        self._drawn = console.can_redraw and not quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, metrics="", visible=False)

    @property
    def request_effect(self) -> str:
        """What a request to end comes to now."""
        if not self.began:
            return _NOTHING_YET
        return _ENDING if self.stops else _NO_CHECKPOINT

    def drawn_bar(self) -> AbstractContextManager[Any]:
        """Draw the bar for as long as the run lasts."""
        return self._bar if self._drawn else nullcontext()

    def line(self, text: str, level: str = "info") -> None:
        """Print one line of text above the bar; ``info`` is what quiet leaves out."""
        if level == "info" and self._quiet:
            return
        if level == "warning":
            text = f"warning: {text}"
        self._console.print(text, style="" if level == "info" else "yellow")

    def ask(self, question: str, signals: list[int]) -> str:
        """A letter from the terminal. A signal answers too, and does not count further: Ctrl-C is
        c, SIGTERM is d, as is the end of input."""
        before = len(signals)
        if self._drawn:
            self._bar.stop()
        try:
            print(question, end="", flush=True)
            while len(signals) == before:
                if select.select([sys.stdin], [], [], GLANCE_S)[0]:
                    line = sys.stdin.readline()
                    return line.strip().lower()[:1] if line else "d"
            return "c" if signals.pop() == signal.SIGINT else "d"
        finally:
            if self._drawn:
                self._bar.start()

    def show(self, event: Event) -> None:
        """Show one event; rank 0 speaks for all but in messages."""
        kind, rank = event["event"], event.get("rank") or 0
        if kind in ("started", "step") and not self.began:
            self.began, self.stops = True, bool(event.get("stops", True))
        if kind == "message":
            prefix = f"rank {rank}: " if rank else ""
            self.line(prefix + str(event.get("text", "")), str(event.get("level", "info")))
        elif rank:
            return
        elif kind == "started":
            if lines := event.get("lines"):
                self.line("\n".join(map(str, lines)))
            self._advance(int(event.get("done", 0)), event.get("steps"), "")
        elif kind == "step":
            if not self._drawn:
                self.line(step_line(event))
            else:
                # As many in each step, however long a figure is: the bar keeps its width.
                count = max(1, (self._console.width - ROOM) // METRIC)
                metrics = step_metrics(event)[:count]
                self._advance(int(event.get("step", 0)), event.get("steps"), "  ".join(metrics))
        elif kind == "evaluation":
            self.line(evaluation_line(event))
        elif kind == "finished":
            self._summary = event.get("summary")

    def summary(self) -> None:
        """Show rank 0's summary of the whole run."""
        if lines := summary_lines(self._summary):
            self.line("\n".join(lines))  # one output of a notebook's cell

    def _advance(self, step: int, steps: int | None, metrics: str) -> None:
        name = _step_of(step, steps)
        self._bar.update(
            self._task, total=steps, completed=step, description=name, metrics=metrics, visible=True
        )


def explain(errors: Console, text: str) -> None:
    """Show why a run failed."""
    errors.print(f"error: {text}", style="red")


def show_stopped(errors: Console, how: str) -> None:
    """Show where a run stopped at request, and how to resume it."""
    errors.print(how, style="yellow")
    errors.print("to resume: the same command with --resume auto")


def where_logs_are(run_directory: str | Path) -> str:
    """The folder of a run's logs, or what would show them."""
    home = Path(run_directory)
    folder = logs_of(home)
    remote = (home / LAUNCHED).exists() and not any(folder.glob("rank*.log"))
    return f"anygauge job logs {run_directory}" if remote else str(folder)


# -- events as lines -------------------------------------------------------------------------------

_FOR_REPORT = ("timed_steps", "warmup_s", "warmup_extra_s", "stopped_by", "planned_steps")
_STEP = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.1e}",
    "grad_norm": "grad {:.2f}",
    "tokens_per_s": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
}
_COUNTER = {"allocator": " of tensors", "process": " of the process"}
"""By what counted it; see `anygauge.interface.MemoryStats`."""
_EVALUATION = {"eval_loss": "loss {:.4f}", "perplexity": "perplexity {:.2f}"}


def step_line(event: Event) -> str:
    """``step 10/200  loss 2.3456  lr 1.9e-04  grad 0.98  5,120 tok/s  peak 1.2 GiB``."""
    return "  ".join([_step_of(event.get("step", "?"), event.get("steps")), *step_metrics(event)])


def step_metrics(event: Event) -> list[str]:
    """The metrics of a step that are there, each with its unit; mfu is a fraction of 1."""
    found = _metric_texts(event, _STEP)
    peak = event.get("peak_memory")
    if isinstance(peak, int | float):
        found.append(f"peak {format_bytes(peak)}{_COUNTER.get(event.get('memory_kind', ''), '')}")
    return found


def evaluation_line(event: Event) -> str:
    """``eval at step 200  loss 2.1234  perplexity 8.36``."""
    title = str(event.get("name") or "eval")
    if event.get("step") is not None:
        title += f" at step {event['step']}"
    return "  ".join([title, *_metric_texts(event, _EVALUATION)])


def _step_of(step: object, steps: int | None) -> str:
    return f"step {step}" + (f"/{steps}" if steps is not None else "")


def _metric_texts(event: Event, shown: Mapping[str, str]) -> list[str]:
    found = ((event.get(name), text) for name, text in shown.items())
    return [text.format(value) for value, text in found if isinstance(value, int | float)]


def summary_lines(summary: Any) -> list[str]:
    """Rank 0's summary of the run: a line for each single value.

    Lists within it, such as the evaluations, were shown as they came. Of memory, what was planned
    stands beside what was measured. How the speed was measured is for the report alone.
    """
    if not isinstance(summary, Mapping):
        return []
    shown = {}
    for name, value in summary.items():
        if name in _FOR_REPORT:
            continue
        if name == "seconds" or (name.endswith("_s") and not name.endswith("_per_s")):
            value = format_time(value) if isinstance(value, float) else value
            name = "time" if name == "seconds" else name.removesuffix("_s")
        if isinstance(value, str | int | float):
            shown[name.replace("_per_s", "/s").replace("_", " ")] = _format_value(value)
    memory = summary.get("memory") or {}
    if "predicted" in memory:
        shown["memory"] = _memory_line(memory)
    step = summary.get("step_s") or {}
    if step.get("predicted") and step.get("measured"):
        shown["step"] = f"predicted {step['predicted']:.3g} s, measured {step['measured']:.3g} s"
    if "saved" in shown:
        shown["to publish"] = (
            f"upload {shown['saved']} alone, never the run's whole folder: job.json holds a secret"
        )
    width = max(map(len, shown), default=0)
    return [f"{name:<{width}}  {value}" for name, value in shown.items()]


def _memory_line(found: Mapping[str, Any]) -> str:
    """Compare what was planned with what was measured."""
    predicted, measured = (
        format_bytes(max(found[name].values(), default=0)) for name in ("predicted", "measured")
    )
    if found["counted"] == "allocator":
        return f"predicted {predicted}, measured {measured} (peak of rank 0)"
    return (
        f"predicted {predicted} of tensors; measured {measured}, which is all of rank 0's "
        f"{found['counted']}"
    )


def _format_value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, str) and value.startswith("/") and Path(value).is_relative_to(Path.cwd()):
        return str(Path(value).relative_to(Path.cwd()))  # as it would be typed here
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
