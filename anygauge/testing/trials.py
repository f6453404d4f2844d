"""What the loop is tried with, how its runs are judged, and what is said when one fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anygauge.interface import StrategySpec
from anygauge.registry import Registry, missing_of
from anygauge.testing.bisect import cause_of
from anygauge.testing.check import sharding
from anygauge.testing.loop import (
    EVALUATION,
    LOSS,
    MIDDLE,
    NORM,
    STEPS,
    RunFailed,
    Trained,
    train,
)
from anygauge.testing.process import Subject
from anygauge.training.auto import AUTO

NOISE = {"float32": 2e-6, "bfloat16": 5e-3}
"""Largest relative difference of a loss from the host's, by compute type, where no author states
another: ten times what sound devices differ by, and more than twice what one does whose roundings
all go the other way. Of a gradient's norm ten times as much."""
WORDS = {
    LOSS: "the loss of",
    NORM: "the gradient's norm of",
    EVALUATION: "the loss of the evaluation after",
}
CHECKPOINTS = {"every": MIDDLE, "keep_last": 5}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"checkpoint": CHECKPOINTS},
    "packed": {
        # A prime, so that neither pairs nor blocks of any kind divide a row.
        "data": {"packing": True, "max_length": 83},
        "train": {"micro_batch_size": 2},
    },
    "whole": {"adapter": None},
    "dropout": {"adapter": {"r": 4, "dropout": 0.2}, "checkpoint": CHECKPOINTS},
    "spread": {},
}
"""What is trained: sections of the run file. ``spread`` is ``adapter`` with any strategy, which may
have no checkpoints."""


def compared(
    found: Trained, wanted: Trained, allowed: Mapping[str, float], where: str = "on the host"
) -> tuple[Mapping[str, float], int, str]:
    """Every loss, norm and evaluation of a run beside another's, in the order of training.

    Args:
        wanted: the other, whose last steps it has.
        allowed: relative, by `LOSS`, `NORM` and `EVALUATION`.
        where: the other was made, in words.

    Returns:
        The largest relative difference, by the same; the step from 1 of the first number that is
        further away than is allowed or is not a number, 0 if there is none, or if it was evaluated
        before the first step; and that number in words, empty if there is none.
    """
    mine, others = ([step for what, step in run.numbers if what == LOSS] for run in (found, wanted))
    assert mine and mine == others[len(others) - len(mine) :], (
        f"it trained steps {mine}, not {others}"
    )
    most: dict[str, float] = {}
    step, wrong = 0, ""
    for (what, at), number in found.numbers.items():
        due = wanted.numbers[what, at]
        away = abs(number - due) / abs(due)
        most[what] = max(most.get(what, 0.0), away)
        if not away <= allowed[what] and not wrong:
            step = at
            wrong = (
                f"{WORDS[what]} step {at} is {number:.9g}, {where} {due:.9g}: {away:.1e} away, "
                f"{allowed[what]:.1e} is allowed"
            )
    return most, step, wrong


@dataclass(slots=True)
class LoopTrials:
    """The runs of one backend; each is made once.

    Attributes:
        stated: the author's largest relative difference from the host, by compute type; `NOISE`
            stands for the rest.
        made: runs, by name.
        figures: for the report: what was compared -> the largest difference, and what is allowed.
    """

    subject: Subject
    folder: Path
    stated: Mapping[str, float] = field(default_factory=dict)
    made: dict[str, Trained] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        kind: str,
        dtype: str = "float32",
        *,
        spec: StrategySpec | None = None,
        ranks: int = 1,
        host: bool = False,
        resume: Path | None = None,
    ) -> Trained:
        """Train, unless it was done before.

        Args:
            kind: one of `KINDS`.
            spec: the strategy; None for whole models on one rank.
            resume: a checkpoint.

        Raises:
            RunFailed: with what the run printed.
        """
        strategy = spec or next(p.spec for p in Registry.load().strategies if p.spec.reference)
        place = "host" if host else "device"
        name = f"{place}-{kind}-{strategy.name}{ranks}-{dtype}{'-resumed' if resume else ''}"
        if name not in self.made:
            changes = dict(KINDS[kind])
            if resume is not None:
                changes["checkpoint"] = {**CHECKPOINTS, "resume": str(resume)}
            self.made[name] = train(
                self.subject,
                self.folder,
                name,
                strategy=strategy.name,
                ranks=ranks,
                dtype=dtype,
                host=host,
                changes=changes,
            )
        return self.made[name]

    def allowed(self, dtype: str, tolerance: float | None = None) -> dict[str, float]:
        """Largest relative differences from the host's run; of norms ten times the most of all.

        Args:
            tolerance: of a strategy, or 0, where sums are in another order: what is stated does
                not lower what is usual; None where they are not.
        """
        stated = self.stated.get(dtype)
        most = max(NOISE[dtype], stated or 0.0, tolerance or 0.0)
        loss = most if stated is None or tolerance is not None else stated
        return {LOSS: loss, EVALUATION: loss, NORM: 10 * most}

    def trial(
        self,
        kind: str,
        dtype: str = "float32",
        *,
        spec: StrategySpec | None = None,
        ranks: int = 1,
        resumed: bool = False,
    ) -> str:
        """Why a run is not that of one process on the host, within what is allowed, and the cause;
        empty if it is.

        Args:
            resumed: from the middle of one process's run on the device.

        Raises:
            RunFailed: of a run that it is compared with, or resumed from.
        """
        resume = self.run("adapter", dtype).checkpoints[0] if resumed else None
        host = self.run("adapter" if kind == "spread" else kind, dtype, host=True)
        allowed = self.allowed(dtype, spec.tolerance if spec else None)
        try:
            found = self.run(kind, dtype, spec=spec, ranks=ranks, resume=resume)
        except RunFailed as error:
            folder, step, wrong = error.folder, STEPS, str(error)
            if not (folder / "run.json").exists():
                return wrong  # it came to no step
        else:
            most, step, wrong = compared(found, host, allowed)
            folder, step = found.folder, max(1, step)
            what = f"{spec.name} on {ranks}" if spec else f"{kind}, {dtype}"
            for title, names in (("losses", (LOSS, EVALUATION)), ("gradients' norms", (NORM,))):
                self.figures[f"{title}, {'resumed with ' if resume else ''}{what}"] = (
                    f"{max(most[name] for name in names):.1e} from the host's at most; "
                    f"{allowed[names[0]]:.1e} allowed"
                )
        if not wrong:
            return ""
        cause = cause_of(self.subject, self.folder, folder, step, ranks=ranks, checkpoint=resume)
        return f"{wrong}; {cause}"

    def spread(self, specs: Sequence[StrategySpec], ranks: int) -> str:
        """What is wrong with each strategy, in words; empty if nothing is. The figures have those
        that say nothing of a device."""
        wrong = []
        for spec in specs:
            why = self.trial("spread", spec=spec, ranks=ranks_of(spec, ranks))
            if is_beside(spec):
                figure = f"beside the verdict: strategy {spec.name} on {ranks}"
                self.figures[figure] = why or "as one process"
            elif why:
                wrong.append(f"{spec.name}: {why}")
        return "; ".join(wrong)

    def resumed(self) -> str:
        """Why a run that drops out does not go on from its middle as it was, to the last digit
        unless sums vary; empty if it does."""
        whole = self.run("dropout")
        rest = self.run("dropout", resume=whole.checkpoints[0])
        if self.run("adapter").losses == whole.losses:
            return "with adapter.dropout 0.2 the losses are those without it: nothing is dropped"
        if len(rest.losses) == len(whole.losses):
            return f"it trained {len(rest.losses)} steps from the middle of as many"
        usual = self.allowed("float32")
        # It may say that its sums vary; then a resumed run differs no more than they do.
        if not self.subject.create().sums_vary:
            usual = {LOSS: 0.0, NORM: math.inf, EVALUATION: math.inf}
        *_, wrong = compared(rest, whole, usual, "in the undisturbed run")
        return wrong and (
            f"after a resume from step {MIDDLE} {wrong}: a state, a generator or the place in the "
            "data is not restored"
        )


def ranks_of(spec: StrategySpec, ranks: int) -> int:
    """The number of ranks that a strategy is tried on, of so many."""
    if not spec.world_sizes or ranks in spec.world_sizes:
        return ranks
    return max((size for size in spec.world_sizes if size <= ranks), default=spec.world_sizes[0])


def strategies(subject: Subject) -> tuple[list[StrategySpec], dict[str, str]]:
    """(Installed strategies whose needs the device meets, `sharding` first; why not the rest)."""
    backend, refused = subject.create(), {}
    specs = [plugin.spec for plugin in Registry.load().strategies]
    specs = [spec for spec in specs if not spec.reference and spec.name != AUTO]
    specs.sort(key=lambda spec: spec.name != sharding().name)
    for spec in specs:
        lacking = [str(s) for s in (backend.support(n.capability) for n in spec.needs) if not s]
        whys = (*lacking, backend.unsupported_engines.get(spec.engine), missing_of(spec))
        if why := next(filter(None, whys), ""):
            refused[spec.name] = why
    return [spec for spec in specs if spec.name not in refused], refused


def is_beside(spec: StrategySpec) -> bool:
    """Whether a strategy says nothing of a device: one of another distribution than anygauge's, or
    one that is approximate by design. Its own kit is ``--anygauge-strategy``."""
    plugin = Registry.load().find_strategy(spec.name)
    return spec.tolerance > 0 or plugin.distribution != "anygauge"
