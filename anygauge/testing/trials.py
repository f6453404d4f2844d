"""What the loop is tried with, how its runs are judged, and what is said when one fails."""

from __future__ import annotations

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
    ODD_LENGTH,
    RANK_OF_ADAPTER,
    STEPS,
    Difference,
    RunFailed,
    Trained,
    differences,
    first_beyond,
    train,
)
from anygauge.testing.process import Subject
from anygauge.training.auto import AUTO

NOISE = {"float32": 2e-6, "bfloat16": 2e-2}
"""Largest relative difference of a loss from the host's, by compute type, where no author states
another: about six times what the roundings of the model's 54 operations in series, in two runs and
in six updates of AdamW, come to. Of a gradient's norm ten times as much."""
CHECKPOINTS = {"checkpoint": {"every": MIDDLE, "keep_last": 5}}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adapter": CHECKPOINTS,
    "packed": {
        "data": {"packing": True, "max_length": ODD_LENGTH},
        "train": {"micro_batch_size": 2},
    },
    "whole": {"adapter": None},
    "dropout": {"adapter": {"r": RANK_OF_ADAPTER, "dropout": 0.2}, **CHECKPOINTS},
    "spread": {},
}
"""What is trained: sections of the run file. ``spread`` is ``adapter`` with any strategy, which may
have no checkpoints."""


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
        strategy = spec.name if spec else None
        try:
            found = self.run(kind, dtype, strategy=strategy, ranks=ranks, resume=resume)
        except RunFailed as error:
            if error.folder is None or not (error.folder / "run.json").exists():
                raise
            return f"{error}; {self._cause(error.folder, STEPS, ranks, resume)}"
        tolerance = spec.tolerance if spec else 0.0
        allowed = self.allowed(dtype, spread=spec is not None, tolerance=tolerance)
        pairs = differences(found, host, allowed)
        what = f"{spec.name} on {ranks}" if spec else f"{kind}, {dtype}"
        self._note(f"{'resumed with ' if resume else ''}{what}", pairs)
        wrong = first_beyond(pairs)
        if wrong is None:
            return ""
        alone = self.trial("adapter", dtype) if spec else None
        if alone:
            return f"{wrong}; one process on the device is wrong, too: {alone}"
        cause = self._cause(found.folder, wrong.step, ranks, resume)
        as_one = "" if alone is None else "one process on the device is as on the host; "
        return f"{wrong}; {as_one}{cause}"

    def _cause(self, found: Path, step: int, ranks: int, checkpoint: Path | None) -> str:
        at = (self.subject, self.folder, found, max(1, step))
        return cause_of(*at, ranks=ranks, checkpoint=checkpoint)

    def _note(self, what: str, pairs: Sequence[Difference]) -> None:
        """The largest difference, for the report."""
        for title, kinds in (("losses", (LOSS, EVALUATION)), ("gradients' norms", (NORM,))):
            most = max((each for each in pairs if each.what in kinds), key=lambda e: e.relative)
            self.figures[f"{title}, {what}"] = (
                f"{most.relative:.1e} from the host's at most; {most.allowed:.1e} allowed"
            )

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
        pairs = differences(rest, whole, self.allowed("float32"))
        losses = [each for each in pairs if each.what == LOSS]
        if len(losses) == len(whole.losses):
            return f"it trained {len(losses)} steps from the middle of as many"
        wrong = next((each for each in losses if each.found != each.wanted), None)
        # It may say that its sums vary; then a resumed run differs no more than they do.
        if wrong is None or (first_beyond(pairs) is None and self.subject.create().sums_vary):
            return ""
        return (
            f"the loss of step {wrong.step} is {wrong.found!r} after a resume from step {MIDDLE}, "
            f"and {wrong.wanted!r} in the undisturbed run: a state, a generator or the place in "
            "the data is not restored"
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
