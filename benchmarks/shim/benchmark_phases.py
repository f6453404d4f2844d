"""Peak resident memory of a rank in each phase of its run: load, training, evaluation, save.

Loaded by `sitecustomize` in every rank, whoever wrote its loop. A phase lasts until the next one
begins, so that nothing lies between two; an evaluation within training goes back to training. The
kernel starts a new peak (``VmHWM`` in ``/proc/self/status``) when 5 is written to
``/proc/self/clear_refs`` (proc(5)). ``phases-rank{r}.json`` has phase -> bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOAD, TRAINING, EVALUATION, SAVE = "load", "training", "evaluation", "save"
PHASES = (LOAD, TRAINING, EVALUATION, SAVE)


def peak() -> int | None:
    """Most bytes that were resident since the last `reset`; None where the kernel does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


def reset() -> None:
    """Begin a new peak with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Phases:
    """Which phase this process is in, and the peaks so far.

    Args:
        peak, reset: of the memory that is looked at.
    """

    def __init__(
        self, peak: Callable[[], int | None] = peak, reset: Callable[[], None] = reset
    ) -> None:
        self._peak, self._reset = peak, reset
        self._current = LOAD
        self._peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """A phase begins, the one before has ended."""
        self._see()
        self._reset()
        self._current = phase

    def taken(self) -> dict[str, int]:
        """Phase -> its peak in bytes, the current one's included."""
        self._see()
        return dict(self._peaks)

    def _see(self) -> None:
        self._peaks[self._current] = max(self._peak() or 0, self._peaks.get(self._current, 0))

    def at(self, owner: Any, name: str, phase: str) -> None:
        """Have a phase begin with each call of a function."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def beginning(*args: Any, **kwargs: Any) -> Any:
            before = self._current
            self.begin(phase)
            result = call(*args, **kwargs)
            if phase == EVALUATION and before == TRAINING:
                self.begin(before)
            return result

        setattr(owner, name, beginning)

    def hooks(self) -> dict[str, Callable[[Any], None]]:
        """Module -> what to do after its import: anygauge's own, and those of the trainers."""

        def of_trainer(module: Any) -> None:
            self.at(module.Trainer, "evaluate", EVALUATION)
            self.at(module.Trainer, "save_model", SAVE)

        def of_loop(module: Any) -> None:
            self.at(module.Loop, "run", TRAINING)
            self.at(module.Loop, "evaluate", EVALUATION)

        return {
            "anygauge.training.loop": of_loop,
            "anygauge.training.save": lambda module: self.at(module, "save", SAVE),
            # A trainer builds its engine in `train`, and then tells its callbacks.
            "transformers.trainer_callback": lambda module: self.at(
                module.CallbackHandler, "on_train_begin", TRAINING
            ),
            "transformers.trainer": of_trainer,
        }
