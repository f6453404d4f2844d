"""What ``anygauge plan`` says of time: of a step, an epoch, more machines, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.cli.lines import HOUR, seconds
from anygauge.planning.machines import Machine
from anygauge.planning.time import Duration
from anygauge.planning.trials import Target, Trial

GB = 1e9
LEAST = 10**7
"""Bytes: what is sent of less is left to JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TotalTime:
    """A whole epoch, or a whole run.

    Attributes:
        of: ``epoch`` or ``run``.
        money: in the currency of the machine's price; None where it has none.
    """

    of: str
    steps: int
    seconds: float
    money: float | None


def total_times(trial: Trial, machine: Machine | None, rows: int | None) -> list[TotalTime]:
    """What is known of an epoch and of the run.

    Args:
        rows: of the training data; None: not known.
    """
    if trial.time is None:
        return []
    train = trial.run.train
    found: dict[str, int] = {}
    if rows is not None:
        found["epoch"] = math.ceil(rows / train.global_batch_size)
    if train.steps is not None:
        found["run"] = train.steps
    elif rows is not None and train.epochs is not None:
        found["run"] = math.ceil(rows * train.epochs / train.global_batch_size)
    price = None if machine is None else machine.price
    return [
        TotalTime(
            of=of,
            steps=steps,
            seconds=steps * trial.time.step,
            money=None
            if price is None
            else price * trial.run.launch.nodes * steps * trial.time.step / HOUR,
        )
        for of, steps in found.items()
    ]


def lines(trial: Trial, target: Target, rows: int | None) -> Iterator[str]:
    """What is printed below the memory of a run."""
    time, ranks = trial.time, trial.run.launch.nodes * trial.run.launch.devices
    if time is None:
        if target.card is not None:
            yield f"Time: not known: {trial.untimed}"
        return
    mfu = "" if time.mfu is None else f"; MFU {time.mfu:.0%}"
    each = f" ({time.tokens_per_s / ranks:,.0f} each)" if ranks > 1 else ""
    yield f"Time: a step {seconds(time.step)}; {time.tokens_per_s:,.0f} tokens/s{each}{mfu}"
    yield f"  {', '.join(_parts(time))}"
    if target.card is not None and target.card.shared_memory:
        yield "  a rough estimate: a processor reaches other rates than those of large products"
    for one in sent(trial):
        if one["sent"] >= LEAST:
            where = "between machines" if one["link"] == "machines" else "in a machine"
            yield (
                f"  each rank sends {one['sent'] / GB:,.2f} GB {where}: {one['operation']} of "
                f"{one['ranks']} ranks, {one['times']:,} times"
            )
    for total in total_times(trial, target.machine, rows):
        money = "" if total.money is None else f", cost {total.money:,.2f}"
        yield f"  the {total.of}: {total.steps:,} steps, {seconds(total.seconds)}{money}"


def _parts(time: Duration) -> Iterator[str]:
    yield f"matrix products {seconds(time.multiplying)}"
    yield f"other operations {seconds(time.moving)}"
    yield f"host {seconds(time.issuing)}"
    names = {"cards": "sends in a machine", "machines": "sends between machines"}
    yield from (f"{names[k]} {seconds(took)}" for k, took in time.sending.items() if took)
    if time.copying:
        yield f"copies to the host and back {seconds(time.copying)}"
    if time.on_host:
        yield f"operations there {seconds(time.on_host)}"
    if time.hidden:
        yield f"of which {seconds(time.hidden)} overlapped"
    if time.idle:
        yield f"stages wait {seconds(time.idle)}"


def sent(trial: Trial) -> list[dict[str, Any]]:
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


def machines_up_to(most: int) -> Sequence[int]:
    """Numbers of machines that scaling is shown for: powers of two, and the last."""
    found = [1]
    while 2 * found[-1] < most:
        found.append(2 * found[-1])
    return [*found, most] if most > 1 else found
