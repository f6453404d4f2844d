"""What the loop is tried with, how its runs are judged, and what is said when one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anygauge.interface import StrategySpec
from anygauge.registry import Registry, missing_of
from anygauge.testing import noise
from anygauge.testing.bisect import cause_of
from anygauge.testing.check import sharding
from anygauge.testing.loop import (
    MIDDLE,
    MODEL,
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
from anygauge.testing.noise import EVALUATION, LOSS, NORM, Key
from anygauge.testing.process import Subject
from anygauge.training.auto import AUTO

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
        stated: the author's largest relative difference from the host, by compute type; what is
            derived stands for the rest.
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
        self, kind: str, dtype: str, host: Trained, *, spread: bool = False, tolerance: float = 0.0
    ) -> dict[Key, float]:
        """Largest relative differences from the host's run; ten times as much for norms.

        Args:
            spread: over ranks, whose sums are in another order: what is stated does not lower what
                is derived.
            tolerance: of the strategy, which is never lower than it.
        """
        found = noise.bounds(dtype, host.metrics, _trained(kind))
        stated = self.stated.get(dtype)
        for (what, step), derived in found.items():
            scale = 10 if what == NORM else 1
            bound = max(derived, scale * tolerance)
            if stated is not None:
                raises = spread or what == NORM
                bound = max(bound, scale * stated) if raises else stated
            found[what, step] = bound
        return found

    def trial(
        self,
        kind: str,
        dtype: str = "float32",
        *,
        spec: StrategySpec | None = None,
        ranks: int = 1,
        resume: Path | None = None,
    ) -> str:
        """Why a run is not that of one process on the host, within what is allowed, and the cause;
        empty if it is.

        Args:
            spec: the strategy; None for the reference.
            resume: a checkpoint.
        """
        host = self.run("adapter" if kind == "spread" else kind, dtype, host=True)
        strategy = spec.name if spec else None
        try:
            found = self.run(kind, dtype, strategy=strategy, ranks=ranks, resume=resume)
        except RunFailed as error:
            if error.folder is None or not (error.folder / "run.json").exists():
                raise
            return f"{error}; {self._cause(error.folder, STEPS, ranks, resume)}"
        tolerance = spec.tolerance if spec else 0.0
        bounds = self.allowed(kind, dtype, host, spread=spec is not None, tolerance=tolerance)
        pairs = differences(found, host, bounds)
        what = f"{spec.name} on {ranks}" if spec else f"{kind}, {dtype}"
        stated = spec is None and dtype in self.stated
        self._note(f"{'resumed with ' if resume else ''}{what}", pairs, stated)
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
        step = max(1, step)
        return cause_of(self.subject, self.folder, found, step, ranks=ranks, checkpoint=checkpoint)

    def _note(self, what: str, pairs: Sequence[Difference], stated: bool) -> None:
        """The largest difference, for the report."""
        for title, kinds in (("losses", (LOSS, EVALUATION)), ("gradients' norms", (NORM,))):
            these = [each for each in pairs if each.what in kinds]
            most = max(each.relative for each in these)
            allowed = max(each.allowed for each in these)
            how = "stated" if stated and title == "losses" else "derived"
            self.figures[f"{title}, {what}"] = (
                f"{most:.1e} from the host's at most; {allowed:.1e} allowed ({how})"
            )

    def spread(self, spec: StrategySpec, ranks: int) -> str:
        """Why a strategy's losses are not those of one process on the host; empty if they are."""
        return self.trial("spread", spec=spec, ranks=ranks)

    def resumed_on(self, spec: StrategySpec, ranks: int) -> str:
        """Likewise, of a run that one process began."""
        middle = self.run("adapter", "float32").checkpoints[0]
        return self.trial("adapter", spec=spec, ranks=ranks, resume=middle)

    def resumed(self) -> str:
        """Why a run that drops out does not go on from its middle as it was, to the last digit
        unless sums vary; empty if it does."""
        whole = self.run("dropout", "float32")
        rest = self.run("dropout", "float32", resume=whole.checkpoints[0])
        if list(self.run("adapter", "float32").losses) == list(whole.losses):
            return (
                "with adapter.dropout 0.2 each loss is that of a run without it: nothing is dropped"
            )
        pairs = differences(rest, whole, self.allowed("dropout", "float32", whole))
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


def others(subject: Subject) -> tuple[list[StrategySpec], dict[str, str]]:
    """(Installed strategies but those two whose needs the device meets, why not the rest)."""
    specs = [plugin.spec for plugin in Registry.load().strategies]
    specs = [s for s in specs if not s.reference and s.name not in (sharding().name, AUTO)]
    refused = {spec.name: why for spec in specs if (why := refusal(subject, spec))}
    return [spec for spec in specs if spec.name not in refused], refused


def is_beside(spec: StrategySpec) -> bool:
    """Whether a strategy says nothing of a device: one of another distribution than anygauge's, or
    one that is approximate by design. Its own kit is ``--anygauge-strategy``."""
    plugin = Registry.load().find_strategy(spec.name)
    return spec.tolerance > 0 or plugin.distribution != "anygauge"


def every(specs: Sequence[StrategySpec], trial: Callable[[StrategySpec], str]) -> str:
    """What is wrong with each strategy, in words; empty if nothing is."""
    found = []
    for spec in specs:
        try:
            why = trial(spec)
        except RunFailed as error:
            why = str(error)
        if why:
            found.append(f"{spec.name}: {why}")
    return "; ".join(found)


def _trained(kind: str) -> int:
    """Elements that a run trains."""
    width, inner, layers, rows = (
        MODEL[name]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    )
    if kind == "whole":
        return int(2 * rows * width + layers * (3 * width**2 + 3 * width * inner))
    return int(RANK_OF_ADAPTER * layers * (4 * 2 * width + 3 * (width + inner)))
