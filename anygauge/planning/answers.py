"""What a run takes elsewhere, on more machines, with other strategies; and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError
from anygauge.planning.changes import layouts, section_in_words
from anygauge.planning.machines import Machine
from anygauge.planning.trials import Target, Trial, Try, changed
from anygauge.registry import Registry

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One of several ways: on another machine, on more of them, or with another strategy.

    Attributes:
        trial: None where the run is refused.
        refused: why.
    """

    name: str
    card: str
    ranks: int
    trial: Trial | None
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """What JSON can hold."""
        trial = self.trial
        phase, peak = (None, None) if trial is None else trial.memory.worst
        fit, time = (None, None) if trial is None else (trial.fit, trial.time)
        return {
            "name": self.name,
            "card": self.card or None,
            "ranks": self.ranks,
            "tensors": None if peak is None else peak.total,
            "phase": phase,
            "fit": None if fit is None else fit.record(),
            "time": None if time is None else time.record(),
            "refused": self.refused or None,
        }


def ranks_of(run: RunFile) -> int:
    """All of its ranks."""
    return run.launch.nodes * run.launch.devices


def row(
    run: RunFile, target: Target, tried: Try, name: str = "", lines: Mapping[str, Any] | None = None
) -> PlanRow:
    """A run somewhere; a refusal is an answer.

    Args:
        name: empty: that of the machine.
        lines: what is changed of it.
    """
    name = name or ("this machine" if target.machine is None else target.machine.name)
    card = "" if target.card is None else target.card.name
    trial, refused = None, ""
    try:
        trial = tried(changed(run, lines) if lines else run, target)
    except AnygaugeError as error:
        refused = str(error)
    return PlanRow(name=name, card=card, ranks=ranks_of(run), trial=trial, refused=refused)


def try_strategies(
    run: RunFile, target: Target, tried: Try, registry: Registry
) -> Sequence[PlanRow]:
    """Every layout that a number of ranks can have: those that fit first, the fastest first."""
    sections = layouts(registry, ranks_of(run), run.launch.devices)
    rows = [row(run, target, tried, section_in_words(s), {"strategy": s}) for s in sections]
    return sorted(rows, key=_order)


def _order(row: PlanRow) -> tuple[bool, bool, float]:
    """Without a time, by what is needed."""
    trial = row.trial
    if trial is None:
        return True, True, 0
    needed = trial.memory.worst[1].total if trial.fit is None else trial.fit.needed
    slow = needed if trial.time is None else trial.time.step
    return False, trial.fit is not None and not trial.fit.fits, slow


def total_times(trial: Trial, machine: Machine | None, rows: int | None) -> list[dict[str, Any]]:
    """What is known of an epoch and of the run: ``of``, ``steps``, ``seconds``, and ``money`` in the
    currency of the machine's price; None where it has none.

    Args:
        rows: of the training data; None: not known.
    """
    train, steps = trial.run.train, dict[str, int]()
    if trial.time is None:
        return []
    if rows is not None:
        steps["epoch"] = math.ceil(rows / train.global_batch_size)
        if train.epochs is not None:
            steps["run"] = math.ceil(rows * train.epochs / train.global_batch_size)
    if train.steps is not None:
        steps["run"] = train.steps
    price = None if machine is None else machine.price
    hourly = None if price is None else price * trial.run.launch.nodes
    found = []
    for of, count in steps.items():
        seconds = count * trial.time.step
        money = None if hourly is None else hourly * seconds / HOUR
        found.append({"of": of, "steps": count, "seconds": seconds, "money": money})
    return found


def sent(trial: Trial) -> list[Mapping[str, Any]]:
    """What a rank sends in a step, by collective and by the links it goes over, most first."""
    per_machine = trial.run.launch.devices
    found = [
        {
            "operation": one.operation,
            "ranks": len(one.group),
            "link": "machines" if one.spans(per_machine) else "cards",
            "times": round(one.times),
            "bytes": round(one.bytes),
            "sent": round(one.wire),
        }
        for one in trial.memory.work.traffic
    ]
    return sorted(found, key=lambda one: -int(one["sent"]))
