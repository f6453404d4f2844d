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
    EVALUATION,
    LOSS,
    MIDDLE,
    MODEL,
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
    ) -> noise.Bounds:
        """Largest relative differences from the host's run.

        Args:
            spread: over ranks, whose sums are in another order: what is stated does not lower what
                is derived.
            tolerance: of the strategy, which is never lower than it.
        """
        trained = _elements() if kind == "whole" else _adapter_elements()
        derived = noise.bounds(dtype, host.metrics, trained).at_least(tolerance)
        if dtype not in self.stated:
            return derived
        stated = self.stated[dtype]
        return derived.at_least(stated) if spread else derived.stating(stated)

    def as_the_host(self, kind: str, dtype: str) -> None:
        """One process: every loss is the host's, within what is allowed.

        Raises:
            AssertionError: says the first that is not, and the cause.
        """
        self.run(kind, dtype, host=True)
        try:
            found = self.run(kind, dtype)
        except RunFailed as error:
            if error.folder is None or not (error.folder / "run.json").exists():
                raise
            raise AssertionError(f"{error}; {self._cause(error.folder, STEPS)}") from error
        wrong = self.compared(kind, dtype, found, f"{kind}, {dtype}")
        if wrong:
            raise AssertionError(f"{wrong}; {self._cause(found.folder, wrong.step)}")

    def _cause(self, found: Path, step: int, ranks: int = 1, checkpoint: Path | None = None) -> str:
        step = max(1, step)
        return cause_of(self.subject, self.folder, found, step, ranks=ranks, checkpoint=checkpoint)

    def compared(
        self,
        kind: str,
        dtype: str,
        found: Trained,
        what: str,
        *,
        spread: bool = False,
        tolerance: float = 0.0,
    ) -> Difference | None:
        """The first loss that is too far from that of one process on the host.

        Args:
            what: for the report.
        """
        host = self.run("adapter" if kind == "spread" else kind, dtype, host=True)
        bounds = self.allowed(kind, dtype, host, spread=spread, tolerance=tolerance)
        pairs = differences(found, host, bounds)
        how = "stated" if dtype in self.stated and not spread else "derived"
        for kinds, title in (((LOSS, EVALUATION), "losses"), ((NORM,), "gradients' norms")):
            these = [each for each in pairs if each.what in kinds]
            most = max(each.relative for each in these)
            allowed = max(each.allowed for each in these)
            self.figures[f"{title}, {what}"] = (
                f"{most:.1e} from the host's at most; {allowed:.1e} allowed "
                f"({how if title == 'losses' else 'derived'})"
            )
        return first_beyond(pairs)

    def spread(self, spec: StrategySpec, ranks: int) -> str:
        """Why a strategy's losses are not those of one process on the host; empty if they are."""
        try:
            found = self.run("spread", "float32", strategy=spec.name, ranks=ranks)
        except RunFailed as error:
            if error.folder is None or not (error.folder / "run.json").exists():
                raise
            return f"{error}; {self._cause(error.folder, STEPS, ranks)}"
        return self._cause_of_ranks(spec, ranks, found, f"{spec.name} on {ranks}")

    def resumed_on(self, spec: StrategySpec, ranks: int) -> str:
        """Likewise, of a run that one process began."""
        middle = self.run("adapter", "float32").checkpoints[0]
        found = self.run("adapter", "float32", strategy=spec.name, ranks=ranks, resume=middle)
        what = f"resumed with {spec.name} on {ranks}"
        return self._cause_of_ranks(spec, ranks, found, what, middle)

    def _cause_of_ranks(
        self,
        spec: StrategySpec,
        ranks: int,
        found: Trained,
        what: str,
        checkpoint: Path | None = None,
    ) -> str:
        tolerance = spec.tolerance
        wrong = self.compared("spread", "float32", found, what, spread=True, tolerance=tolerance)
        if wrong is None:
            return ""
        alone = self.run("adapter", "float32")
        of_one = self.compared("adapter", "float32", alone, "adapter, float32", spread=True)
        if of_one is not None:
            cause = self._cause(alone.folder, of_one.step)
            return f"{wrong}; one process on the device is wrong, too: {cause}"
        cause = self._cause(found.folder, wrong.step, ranks, checkpoint)
        return f"{wrong}; one process on the device is as on the host; {cause}"

    def resumed(self) -> None:
        """A run that drops out, from its middle: to the last digit, unless sums vary.

        Raises:
            AssertionError: says the first loss that differs, and the cause.
        """
        whole = self.run("dropout", "float32")
        middle = whole.checkpoints[0]
        rest = self.run("dropout", "float32", resume=middle)
        assert 0 < len(rest.losses) < len(whole.losses), f"it trained {len(rest.losses)} steps"
        plain = self.run("adapter", "float32")
        assert list(plain.losses) != list(whole.losses), (
            "with adapter.dropout 0.2 each loss is that of a run without it: nothing is dropped"
        )
        wanted = list(whole.losses)[-len(rest.losses) :]
        if list(rest.losses) == wanted:
            return
        pairs = differences(rest, whole, self.allowed("dropout", "float32", whole))
        backend = Registry.load().create_backend(self.subject.name, self.subject.options)
        if first_beyond(pairs) is None and backend.sums_vary:
            return  # it says so, and the resumed run differs no more
        sides = list(zip(rest.losses, wanted, strict=True))
        at, (found, due) = next((at, pair) for at, pair in enumerate(sides) if pair[0] != pair[1])
        step = len(whole.losses) - len(wanted) + at + 1
        raise AssertionError(
            f"the loss of step {step} is {found!r} after a resume from step {MIDDLE}, and {due!r} "
            "in the undisturbed run: a state, a generator or the place in the data is not restored"
        )


def ranks_of(spec: StrategySpec, ranks: int) -> int:
    """The number of ranks that a strategy is tried on, of so many."""
    if not spec.world_sizes or ranks in spec.world_sizes:
        return ranks
    return max((size for size in spec.world_sizes if size <= ranks), default=spec.world_sizes[0])


def reference() -> StrategySpec:
    """What other strategies are compared with: whole models on one rank."""
    return next(p.spec for p in Registry.load().strategies if p.spec.reference)


def others(subject: Subject) -> tuple[list[StrategySpec], dict[str, str]]:
    """(Installed strategies but those two whose needs the device meets, why not the rest)."""
    backend = Registry.load().create_backend(subject.name, subject.options)
    found, refused = [], {}
    for plugin in Registry.load().strategies:
        spec = plugin.spec
        if spec.reference or spec.name in (sharding().name, AUTO):
            continue
        lacking = [str(s) for s in (backend.support(n.capability) for n in spec.needs) if not s]
        lacking += filter(None, [backend.unsupported_engines.get(spec.engine), missing_of(spec)])
        if lacking:
            refused[spec.name] = lacking[0]
        else:
            found.append(spec)
    return found, refused


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


def _elements() -> int:
    width, inner, layers = (
        MODEL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    return int(2 * MODEL["vocab_size"] * width + layers * (3 * width**2 + 3 * width * inner))


def _adapter_elements() -> int:
    width, inner, layers = (
        MODEL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    return int(RANK_OF_ADAPTER * layers * (4 * 2 * width + 3 * (width + inner)))
