"""`BackendContract`: what every backend must hold, as a class of tests.

    from anygauge.testing import BackendContract

    class TestMine(BackendContract):
        backend = "mine"

Checks run in processes of their own; a test reads the answer of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anygauge.interface import StrategySpec, Support
from anygauge.registry import Registry
from anygauge.testing import basic as _basic  # noqa: F401  (for its checks, as the next ones)
from anygauge.testing import device as _device  # noqa: F401
from anygauge.testing import ends as _ends  # noqa: F401
from anygauge.testing import figures as _figures  # noqa: F401
from anygauge.testing import paper_ends as _paper_ends  # noqa: F401
from anygauge.testing import paper_rules as _paper_rules  # noqa: F401
from anygauge.testing import paper_spec as _paper_spec  # noqa: F401
from anygauge.testing import ranks as _ranks  # noqa: F401
from anygauge.testing.check import CHECKS, CHOSEN, DECLARED, NOT_ASKED, ConformanceCheck, verdict
from anygauge.testing.loop import (
    RunFailed,
    Trained,
    largest_difference,
    losses_when_overruled,
    prepare,
    train,
)
from anygauge.testing.process import PartAnswers, Subject, ask

BEST_FIRST = ("passed", "skipped", "declared", "failed")
SPREAD_NOISE = 1e-4
"""Largest relative difference of losses that sums in another order explain, over the kit's run."""


def _of(part: str) -> Any:
    chosen = [check for check in CHECKS.values() if check.part == part]
    return pytest.mark.parametrize("check", chosen, ids=lambda check: check.name)


class BackendContract:
    """Subclass it and name the backend.

    Attributes:
        backend: as users write it after ``--backend``.
        options: the run file's ``backend_options``.
        environment: variables for every process.
        rank_counts: numbers of ranks that collectives are tried on, and ZeRO if they are 2 or 4;
            at most the devices of the machine. What they leave out counts as not tried.
        loss_noise: largest relative difference of a step's loss from the host's that the device's
            arithmetic explains, by compute type; it is printed in the report.
    """

    backend: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    rank_counts: ClassVar[Sequence[int]] = (2, 3, 4)
    loss_noise: ClassVar[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 2e-2}

    def __init_subclass__(cls) -> None:
        """Raises: ValueError: `rank_counts` are not numbers of ranks."""
        counts: Any = cls.rank_counts
        fit = isinstance(counts, Sequence) and len(counts) > 0
        if not fit or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(
                f"{cls.__name__}.rank_counts = {counts!r}: give one or more numbers of ranks, each "
                "at least 1, such as (2, 4). A backend without collectives declares them so in "
                "its capabilities, and leaves rank_counts alone"
            )

    # -- what tests share ---------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Subject:
        """The backend under test."""
        return Subject(name=cls.backend, options=cls.options, environment=cls.environment)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """For answers, logs and runs."""
        return tmp_path_factory.mktemp(f"conformance-{cls.backend}")

    @pytest.fixture(scope="class")
    @classmethod
    def on_paper(cls, subject: Subject, folder: Path) -> PartAnswers:
        """Answers that need no device."""
        return ask("basic", subject, folder)

    @pytest.fixture(scope="class")
    @classmethod
    def devices(cls, subject: Subject) -> int:
        """Devices of this machine; skips where there is none."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in subject.environment.items():
                patch.setenv(name, value)
            probe = Registry.load().probe(subject.name)
        if not probe.available:
            pytest.skip(f"no device to try: {probe.reason}")
        return 10**6 if probe.device_count is None else probe.device_count

    @pytest.fixture(scope="class")
    @classmethod
    def on_device(cls, subject: Subject, folder: Path, devices: int) -> PartAnswers:
        """Answers of one opened device."""
        return ask("device", subject, folder)

    @pytest.fixture(scope="class")
    @classmethod
    def on_ranks(cls, subject: Subject, folder: Path, devices: int) -> dict[int, PartAnswers]:
        """Answers of several ranks, as far as there are devices."""
        return {
            ranks: ask("ranks", subject, folder, ranks=ranks)
            for ranks in cls.rank_counts
            if ranks <= devices
        }

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, folder: Path, devices: int) -> dict[str, Trained]:
        """Runs that were made already, by name."""
        prepare(folder)
        return {}

    @pytest.fixture(scope="class")
    @classmethod
    def refusals(cls) -> dict[int, str]:
        """What is wrong with the refusal of ZeRO, by ranks; empty where nothing is."""
        return {}

    # -- without hardware -----------------------------------------------------------------------

    @_of("basic")
    def test_on_paper(self, check: ConformanceCheck, on_paper: PartAnswers) -> None:
        """What the backend says of itself before anything is opened."""
        _judge(check, on_paper)

    # -- with a device --------------------------------------------------------------------------

    @_of("device")
    def test_on_device(self, check: ConformanceCheck, on_device: PartAnswers) -> None:
        """Placement, memory, random numbers, arithmetic, graphs."""
        _judge(check, on_device)

    @_of("ranks")
    def test_on_ranks(
        self, check: ConformanceCheck, subject: Subject, on_ranks: dict[int, PartAnswers]
    ) -> None:
        """Collectives."""
        if not on_ranks:
            declared = _declared(subject, check.capability or "collectives")
            if not declared:
                pytest.skip(f"{DECLARED}{declared}")
            pytest.skip(f"fewer devices than the {min(self.rank_counts)} ranks that it takes")
        _judge(check, *on_ranks.values())
        if max(on_ranks) < 2:
            pytest.skip("asked of one rank alone, which has nobody to talk to")

    # -- the loop -------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_trains_as_the_host_does(
        self,
        dtype: str,
        subject: Subject,
        folder: Path,
        runs: dict[str, Trained],
        on_device: PartAnswers,
    ) -> None:
        """One process: the losses of every step are the host's, within the stated noise."""
        # As the opened device declares it: some know only then.
        asked = on_device.of(CHECKS[f"{dtype}_arithmetic"])
        if not asked.supported:
            pytest.skip(f"{DECLARED}{asked.declared}")
        here = _run(runs, subject, folder, _reference().name, 1, dtype, host=True)
        there = _run(runs, subject, folder, _reference().name, 1, dtype)
        self._close(there, here, dtype)
        assert there.losses[-1] < there.losses[0], "the loss did not fall"

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_zero_trains_as_one_process_does(
        self,
        ranks: int,
        subject: Subject,
        folder: Path,
        runs: dict[str, Trained],
        refusals: dict[int, str],
        devices: int,
    ) -> None:
        """ZeRO-3 + LoRA on several ranks: the same losses as one process on the host."""
        declared = _refused_engine(subject)
        if declared:
            most = min(ranks, devices, max(self.rank_counts))
            tried = max(count for count in (1, 2, 4) if count <= most)  # they divide the batch
            if tried not in refusals:
                refusals[tried] = self._wrong_refusal(subject, folder, runs, tried)
            if refusals[tried]:
                pytest.fail(refusals[tried], pytrace=False)
            pytest.skip(f"{DECLARED}{declared}")
        if ranks not in self.rank_counts:
            pytest.skip(f"rank_counts asks for {', '.join(map(str, self.rank_counts))} alone")
        if ranks > devices:
            pytest.skip(f"{ranks} ranks need as many devices; there are {devices}")
        there = _run(runs, subject, folder, _default().name, ranks, "float32")
        difference = self._from_the_host(there.losses, subject, folder, runs)
        assert difference <= self._spread, (
            f"losses differ from those of one process on the host by {difference:.1e}; "
            f"{self._spread:.0e} is allowed"
        )

    def test_a_resumed_run_goes_on_where_it_was(
        self, subject: Subject, folder: Path, runs: dict[str, Trained]
    ) -> None:
        """From a checkpoint in the middle: the losses of the undisturbed run, to the last digit;
        within the stated noise where the backend says that sums vary."""
        whole = train(
            subject,
            folder,
            "whole",
            strategy=_reference().name,
            ranks=1,
            dtype="float32",
            changes={"checkpoint": {"every": 3, "keep_last": 5}},
        )
        middle = sorted((whole.folder / "checkpoints").iterdir())[0]
        rest = train(
            subject,
            folder,
            "rest",
            strategy=_reference().name,
            ranks=1,
            dtype="float32",
            arguments=("--resume", str(middle)),
        )
        assert 0 < len(rest.losses) < len(whole.losses)
        wanted = list(whole.losses)[-len(rest.losses) :]
        if not Registry.load().create_backend(subject.name, subject.options).sums_vary:
            assert list(rest.losses) == wanted
            return
        difference = largest_difference(rest.losses, wanted)
        assert difference <= self._spread, (
            f"losses differ from those of the undisturbed run by {difference:.1e}; "
            f"{self._spread:.0e} is allowed where sums vary"
        )

    def _wrong_refusal(
        self, subject: Subject, folder: Path, runs: dict[str, Trained], ranks: int
    ) -> str:
        """Why ZeRO must not be refused as it is; empty if it may."""
        declared = _refused_engine(subject)
        try:
            refused = _run(runs, subject, folder, _default().name, ranks, "float32")
        except RunFailed as error:
            if declared not in str(error):
                return f"a refusal must give the declared reason; it says: {error}"
        else:
            return f"refused ({declared}), but the run was not: {refused.folder}"
        # ZeRO stands on collectives; whether those are missing is a question of its own.
        if not _declared(subject, "collectives"):
            return ""
        losses = losses_when_overruled(subject, folder, _default().name, ranks)
        if losses is None or self._from_the_host(losses, subject, folder, runs) > self._spread:
            return ""
        return (
            f"refused ({declared}), but it works: a run on {ranks} ranks that was not refused has "
            "the losses of one process on the host"
        )

    @property
    def _spread(self) -> float:
        return max(SPREAD_NOISE, self.loss_noise["float32"])

    def _from_the_host(
        self, losses: Sequence[float], subject: Subject, folder: Path, runs: dict[str, Trained]
    ) -> float:
        here = _run(runs, subject, folder, _reference().name, 1, "float32", host=True)
        return largest_difference(losses, here.losses)

    def _close(self, found: Trained, wanted: Trained, dtype: str) -> None:
        difference = largest_difference(found.losses, wanted.losses)
        assert difference <= self.loss_noise[dtype], (
            f"losses differ from the host's by {difference:.1e}; {self.loss_noise[dtype]:.0e} is "
            f"stated as the device's noise in {dtype}"
        )


def _judge(check: ConformanceCheck, *given: PartAnswers) -> None:
    """The worst of the verdicts, if it was asked on several numbers of ranks."""
    found = [verdict(answers.of(check)) for answers in given]
    result, why = max(found, key=lambda each: BEST_FIRST.index(each[0]))
    if result == "failed":
        pytest.fail(f"{why}. {check.means}" if check.means else why, pytrace=False)
    if result == "skipped":
        pytest.skip(f"{NOT_ASKED}{why}")
    if result == "declared":
        pytest.skip(f"{DECLARED}{why}")


def _declared(subject: Subject, capability: str) -> Support:
    return Registry.load().create_backend(subject.name, subject.options).support(capability)


def _reference() -> StrategySpec:
    """What the default strategy is compared with: whole models on one rank."""
    return next(p.spec for p in Registry.load().strategies if p.spec.reference)


def _default() -> StrategySpec:
    return Registry.load().default_strategy().spec


def _refused_engine(subject: Subject) -> str:
    """Why ZeRO cannot run on it, in the backend's words; empty where it can."""
    backend = Registry.load().create_backend(subject.name, subject.options)
    collectives = backend.support("collectives")
    missing = "" if collectives else collectives.reason
    return backend.unsupported_engines.get(_default().engine, missing)


def _name(strategy: str, ranks: int, dtype: str, *, host: bool = False) -> str:
    return f"{'host' if host else 'device'}-{strategy}{ranks}-{dtype}"


def _run(
    runs: dict[str, Trained],
    subject: Subject,
    folder: Path,
    strategy: str,
    ranks: int,
    dtype: str,
    *,
    host: bool = False,
) -> Trained:
    name = _name(strategy, ranks, dtype, host=host)
    if name not in runs:
        runs[name] = train(
            subject, folder, name, strategy=strategy, ranks=ranks, dtype=dtype, host=host
        )
    return runs[name]


if CHOSEN in os.environ:  # set by ``pytest --anygauge-backend``, which collects this file

    class TestBackend(BackendContract):
        """The backend that the command line names."""

        backend = os.environ[CHOSEN]
