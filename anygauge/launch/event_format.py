"""Events of a run as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anygauge.util.text import seconds, size

Event = Mapping[str, Any]
_FOR_REPORT = ("timed_steps", "warmup_s", "warmup_extra_s")


def step_line(event: Event) -> str:
    """``step 10/200  loss 2.3456  lr 1.9e-04  grad 0.98  5,120 tok/s  peak 1.2 GiB``."""
    steps = event.get("steps")
    step = f"step {event.get('step', '?')}" + (f"/{steps}" if steps is not None else "")
    return "  ".join([step, *step_metrics(event)])


def step_metrics(event: Event) -> list[str]:
    """The metrics of a step that are there, each with its unit; mfu is a fraction of 1."""
    found = {
        name: show(event[name])
        for name, show in _STEP.items()
        if isinstance(event.get(name), int | float)
    }
    if "peak_memory" in found:
        found["peak_memory"] += _COUNTED.get(event.get("memory_kind", ""), "")
    return list(found.values())


def evaluation_line(event: Event) -> str:
    """``eval at step 200  loss 2.1234  perplexity 8.36``."""
    name = event.get("name")
    title = "eval" if name in (None, "", "eval") else f"eval {name}"
    if event.get("step") is not None:
        title += f" at step {event['step']}"
    return "  ".join(
        [
            title,
            *(
                show(event[key])
                for key, show in _EVALUATION.items()
                if isinstance(event.get(key), int | float)
            ),
        ]
    )


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
        if name == "seconds" or (str(name).endswith("_s") and not str(name).endswith("_per_s")):
            value = seconds(value) if isinstance(value, float) else value
            name = "time" if name == "seconds" else name.removesuffix("_s")
        if isinstance(value, str | int | float):
            shown[str(name).replace("_per_s", "/s").replace("_", " ")] = _value(value)
    if memory := _memory(summary.get("memory")):
        shown["memory"] = memory
    step = summary.get("step_s")
    if isinstance(step, Mapping) and {"predicted", "measured"} <= {k for k, v in step.items() if v}:
        shown["step"] = f"predicted {step['predicted']:.3g} s, measured {step['measured']:.3g} s"
    if "saved" in shown:
        shown["to publish"] = (
            f"upload {shown['saved']} alone, never the run's whole folder: job.json holds a secret"
        )
    width = max(map(len, shown), default=0)
    return [f"{name:<{width}}  {value}" for name, value in shown.items()]


def _memory(found: Any) -> str:
    """What was planned and what was measured; "" where nothing was planned."""
    try:
        predicted, measured = (max(found[name].values()) for name in ("predicted", "measured"))
        counted = str(found["counted"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""
    if counted == "allocator":
        return f"predicted {size(predicted)}, measured {size(measured)} (peak of rank 0)"
    return (
        f"predicted {size(predicted)} of tensors; measured {size(measured)}, which is all of rank "
        f"0's {counted}"
    )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, str) and value.startswith("/") and Path(value).is_relative_to(Path.cwd()):
        return str(Path(value).relative_to(Path.cwd()))  # as it would be typed here
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


_STEP: Mapping[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "lr": lambda value: f"lr {value:.1e}",
    "grad_norm": lambda value: f"grad {value:.2f}",
    "tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "peak_memory": lambda value: f"peak {size(value)}",
}
_COUNTED = {"allocator": " of tensors", "process": " of the process"}
"""By what counted it; see `anygauge.interface.MemoryStats`."""
_EVALUATION: Mapping[str, Callable[[float], str]] = {
    "eval_loss": lambda value: f"loss {value:.4f}",
    "perplexity": lambda value: f"perplexity {value:.2f}",
}
