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
CHECKPOINTS = {"checkpoint": {"every": MIDDLE, "keep_last": 5}}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adapter": CHECKPOINTS,
    "packed": {
        # A prime, so that neither pairs nor blocks of any kind divide a row.
        "data": {"packing": True, "max_length": 83},
        "train": {"micro_batch_size": 2},
    },
    "whole": {"adapter": None},
    "dropout": {"adapter": {"r": 4, "dropout": 0.2}, **CHECKPOINTS},
    "spread": {},
}
"""What is trained: sections of the run file. ``spread`` is ``adapter`` with any strategy, which may
have no checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run beside another, whose last steps it has.

    Attributes:
        most: the largest relative difference, by `LOSS`, `NORM` and `EVALUATION`.
        step: of training from 1, of the first number that is further away than is allowed or is
            not a number; 0 if there is none, or if it was evaluated before the first step.
        wrong: that number in words; empty if there is none.
    """

    most: Mapping[str, float]
    step: int = 0
    wrong: str = ""


def compared(
    found: Trained, wanted: Trained, allowed: Mapping[str, float], where: str = "on the host"
) -> Comparison:
    """Every loss, norm and evaluation of a run beside another's, in the order of training.

    Args:
        allowed: relative, by `LOSS`, `NORM` and `EVALUATION`.
        where: the other was made, in words.
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
            after = "the loss of the evaluation after"
            place = f"{after if what == EVALUATION else f'the {what} of'} step {at}"
            step, wrong = (
                at,
                (
                    f"{place} is {number:.9g}, {where} {due:.9g}: {away:.1e} away, "
                    f"{allowed[what]:.1e} is allowed"
                ),
            )
    return Comparison(most=most, step=step, wrong=wrong)


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
    stated: Mapping[str, float]
    made: dict[str, Trained] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        kind: str,
        dtype: str,
        *,
        strategy: str | None = None,
        ranks: int = 1,
        host: bool = False,
        resume: Path | None = None,
    ) -> Trained:
        """Train, unless it was done before.

        Args:
            kind: one of `KINDS`.
            strategy: None for the reference.
            resume: a checkpoint.

        Raises:
            RunFailed: with what the run printed.
        """
        strategy = strategy or reference().name
        place = "host" if host else "device"
        name = f"{place}-{kind}-{strategy}{ranks}-{dtype}{'-resumed' if resume else ''}"
        if name not in self.made:
            self.made[name] = train(
                self.subject,
                self.folder,
                name,
                strategy=strategy,
                ranks=ranks,
                dtype=dtype,
                host=host,
                arguments=() if resume is None else ("--resume", str(resume)),
                changes=KINDS[kind],
            )
        return self.made[name]

    def allowed(
        self, dtype: str, *, spread: bool = False, tolerance: float = 0.0
    ) -> dict[str, float]:
        """Largest relative differences from the host's run; of norms ten times the most of all.

        Args:
            spread: over ranks, whose sums are in another order: what is stated does not lower what
                is usual.
            tolerance: of the strategy.
        """
        stated = self.stated.get(dtype)
        most = max(NOISE[dtype], stated or 0.0, tolerance)
        loss = most if spread or stated is None else stated
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
            spec: the strategy; None for the reference.
            resumed: from the middle of one process's run on the device.
        """
        resume = self.run("adapter", dtype).checkpoints[0] if resumed else None
        host = self.run("adapter" if kind == "spread" else kind, dtype, host=True)
        strategy, tolerance = (spec.name, spec.tolerance) if spec else (None, 0.0)
        allowed = self.allowed(dtype, spread=spec is not None, tolerance=tolerance)
        try:
            found = self.run(kind, dtype, strategy=strategy, ranks=ranks, resume=resume)
        except RunFailed as error:
            if error.folder is None or not (error.folder / "run.json").exists():
                raise
            folder, step, wrong = error.folder, STEPS, str(error)
        else:
            result = compared(found, host, allowed)
            folder, step, wrong = found.folder, max(1, result.step), result.wrong
            what = f"{spec.name} on {ranks}" if spec else f"{kind}, {dtype}"
            for title, names in (("losses", (LOSS, EVALUATION)), ("gradients' norms", (NORM,))):
                most = max(result.most[name] for name in names)
                self.figures[f"{title}, {'resumed with ' if resume else ''}{what}"] = (
                    f"{most:.1e} from the host's at most; {allowed[names[0]]:.1e} allowed"
                )
        if not wrong:
            return ""
        cause = cause_of(self.subject, self.folder, folder, step, ranks=ranks)
        return f"{wrong}; {cause}"

    def spread(self, specs: Sequence[StrategySpec], ranks: int) -> str:
        """What is wrong with each strategy, in words; empty if nothing is. The figures have those
        that say nothing of a device."""
        wrong = []
        for spec in specs:
            try:
                why = self.trial("spread", spec=spec, ranks=ranks_of(spec, ranks))
            except RunFailed as error:
                why = str(error)
            if is_beside(spec):
                figure = f"beside the verdict: strategy {spec.name} on {ranks}"
                self.figures[figure] = why or "as one process"
            elif why:
                wrong.append(f"{spec.name}: {why}")
        return "; ".join(wrong)

    def resumed(self) -> str:
        """Why a run that drops out does not go on from its middle as it was, to the last digit
        unless sums vary; empty if it does."""
        whole = self.run("dropout", "float32")
        rest = self.run("dropout", "float32", resume=whole.checkpoints[0])
        if self.run("adapter", "float32").losses == whole.losses:
            return "with adapter.dropout 0.2 the losses are those without it: nothing is dropped"
        if len(rest.losses) == len(whole.losses):
            return f"it trained {len(rest.losses)} steps from the middle of as many"
        usual = self.allowed("float32")
        # It may say that its sums vary; then a resumed run differs no more than they do.
        if not self.subject.create().sums_vary:
            usual = {LOSS: 0.0, NORM: math.inf, EVALUATION: math.inf}
        wrong = compared(rest, whole, usual, "in the undisturbed run").wrong
        return wrong and (
            f"after a resume from step {MIDDLE} {wrong}: a state, a generator or the place in the "
            "data is not restored"
        )


def ranks_of(spec: StrategySpec, ranks: int) -> int:
    """The number of ranks that a strategy is tried on, of so many."""
    if not spec.world_sizes or ranks in spec.world_sizes:
        return ranks
    return max((size for size in spec.world_sizes if size <= ranks), default=spec.world_sizes[0])


def reference() -> StrategySpec:
    """What other strategies are compared with: whole models on one rank."""
    return next(p.spec for p in Registry.load().strategies if p.spec.reference)


def refusal(subject: Subject, spec: StrategySpec) -> str:
    """Why a strategy cannot run on the backend, or here; empty where it can."""
    backend = subject.create()
    lacking = [str(s) for s in (backend.support(n.capability) for n in spec.needs) if not s]
    whys = (*lacking, backend.unsupported_engines.get(spec.engine), missing_of(spec))
    return next(filter(None, whys), "")


def strategies(subject: Subject) -> tuple[list[StrategySpec], dict[str, str]]:
    """(Installed strategies whose needs the device meets, `sharding` first; why not the rest)."""
    specs = [plugin.spec for plugin in Registry.load().strategies]
    specs = [spec for spec in specs if not spec.reference and spec.name != AUTO]
    specs.sort(key=lambda spec: spec.name != sharding().name)
    refused = {spec.name: why for spec in specs if (why := refusal(subject, spec))}
    return [spec for spec in specs if spec.name not in refused], refused


def is_beside(spec: StrategySpec) -> bool:
    """Whether a strategy says nothing of a device: one of another distribution than anygauge's, or
    one that is approximate by design. Its own kit is ``--anygauge-strategy``."""
    plugin = Registry.load().find_strategy(spec.name)
    return spec.tolerance > 0 or plugin.distribution != "anygauge"
