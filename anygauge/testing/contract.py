"""`BackendContract`: what every backend must hold, as a class of tests.

    from anygauge.testing import BackendContract

    class TestMine(BackendContract):
        backend = "mine"

Checks run in processes of their own; a test reads the answer of one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anygauge.registry import Registry
from anygauge.testing.check import (
    CHECKS,
    CHOSEN,
    DECLARED,
    NOT_ASKED,
    ConformanceCheck,
    sharding,
    verdict,
)
from anygauge.testing.loop import prepare
from anygauge.testing.noise import EVALUATION
from anygauge.testing.process import PARTS, PartAnswers, Subject, ask, import_checks
from anygauge.testing.trials import LoopTrials, every, is_beside, others, ranks_of, refusal

for _part in PARTS:
    import_checks(_part)
Ask = Callable[..., PartAnswers]
"""Of a part, and a number of ranks if there are several."""
BEST_FIRST = ("passed", "skipped", "declared", "failed")


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
        loss_noise: largest relative difference of a loss from the host's that the device's
            arithmetic explains, by compute type, where that is known better than
            `anygauge.testing.noise` derives it. The report says what was allowed, and what it was.
    """

    backend: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    rank_counts: ClassVar[Sequence[int]] = (2, 3, 4)
    loss_noise: ClassVar[Mapping[str, float]] = {}

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
    def answers(cls, subject: Subject, folder: Path) -> Ask:
        """Asks the processes of a part, on so many ranks; each once."""
        return functools.cache(lambda part, ranks=1: ask(part, subject, folder, ranks=ranks))

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
    def runs(cls, subject: Subject, folder: Path, devices: int) -> LoopTrials:
        """Runs, each made once."""
        prepare(folder)
        return LoopTrials(subject=subject, folder=folder, stated=cls.loss_noise)

    # -- with a device --------------------------------------------------------------------------

    @_of("device")
    def test_on_device(self, check: ConformanceCheck, answers: Ask, devices: int) -> None:
        """Placement, memory, random numbers, arithmetic, graphs."""
        _judge(check, answers("device"))

    @_of("ranks")
    def test_on_ranks(
        self, check: ConformanceCheck, subject: Subject, answers: Ask, devices: int
    ) -> None:
        """Collectives, on as many ranks as there are devices."""
        counts = [ranks for ranks in self.rank_counts if ranks <= devices]
        if not counts:
            declared = subject.create().support(check.capability or "collectives")
            if not declared:
                pytest.skip(f"{DECLARED}{declared}")
            pytest.skip(f"fewer devices than the {min(self.rank_counts)} ranks that it takes")
        _judge(check, *(answers("ranks", ranks) for ranks in counts))
        if max(counts) < 2:
            pytest.skip("asked of one rank alone, which has nobody to talk to")

    @_of("operators")
    def test_operators(self, check: ConformanceCheck, answers: Ask, devices: int) -> None:
        """Operators that a LoRA step calls, by torch's own samples."""
        _judge(check, answers("operators"))

    # -- the loop -------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_trains_as_the_host_does(self, dtype: str, runs: LoopTrials, answers: Ask) -> None:
        """One process: the losses of every step and evaluation are the host's, within the noise."""
        _ask_type(dtype, answers)
        _hold(runs.trial("adapter", dtype))
        losses = runs.run("adapter", dtype).losses
        assert losses[-1] < losses[0], "the loss did not fall"

    def test_trains_packed_rows_as_the_host_does(self, runs: LoopTrials) -> None:
        """Packed rows of an odd length: the host's losses, and those of each document alone."""
        _hold(runs.trial("packed", "float32"))
        packed, alone = runs.run("packed", "float32"), runs.run("adapter", "float32")
        # Before the first step both are the base model; of an evaluation no row is cut.
        first = (EVALUATION, 0)
        found, wanted = packed.numbers[first], alone.numbers[first]
        allowed = runs.allowed("packed", "float32", packed, spread=True)[first]
        assert abs(found - wanted) <= allowed * abs(wanted), (
            f"documents see each other: evaluated in packed rows their loss is {found:.9g}, each "
            f"in a row of its own {wanted:.9g}"
        )

    def test_trains_all_weights_as_the_host_does(self, runs: LoopTrials, answers: Ask) -> None:
        """All weights in bfloat16, without an adapter: the losses are the host's."""
        _ask_type("bfloat16", answers)
        _hold(runs.trial("whole", "bfloat16"))

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_zero_trains_as_one_process_does(
        self, ranks: int, subject: Subject, runs: LoopTrials, devices: int
    ) -> None:
        """ZeRO-3 + LoRA on several ranks: the same losses as one process on the host."""
        declared = refusal(subject, sharding())
        if declared:
            pytest.skip(f"{DECLARED}{declared}")
        if ranks not in self.rank_counts:
            pytest.skip(f"rank_counts asks for {', '.join(map(str, self.rank_counts))} alone")
        if ranks > devices:
            pytest.skip(f"{ranks} ranks need as many devices; there are {devices}")
        _hold(runs.spread(sharding(), ranks))

    def test_every_strategy_trains_as_one_process_does(
        self, subject: Subject, runs: LoopTrials, devices: int
    ) -> None:
        """Each other strategy of anygauge whose needs the device meets: the losses of one process.
        Those of other plugins are reported beside the verdict."""
        specs, refused = others(subject)
        ranks = self._ranks(devices)
        if not specs and refused:
            pytest.skip(DECLARED + "; ".join(f"{name}: {why}" for name, why in refused.items()))
        for spec in filter(is_beside, specs):
            why = every([spec], lambda each: runs.spread(each, ranks_of(each, ranks)))
            runs.figures[f"beside the verdict: strategy {spec.name}"] = why or "as one process"
        own = [spec for spec in specs if not is_beside(spec)]
        _hold(every(own, lambda spec: runs.spread(spec, ranks_of(spec, ranks))))
        if ranks < 2:
            pytest.skip("tried on one rank alone: there is one device, or rank_counts asks for it")

    def test_a_resumed_run_goes_on_where_it_was(self, runs: LoopTrials) -> None:
        """From a checkpoint in the middle, with dropout: the undisturbed run, to the last digit."""
        _hold(runs.resumed())

    def test_a_run_is_resumed_on_other_ranks(
        self, subject: Subject, runs: LoopTrials, devices: int
    ) -> None:
        """From a checkpoint of one rank, on two with another strategy: the same losses."""
        specs, _ = others(subject)
        refused = refusal(subject, sharding())
        if not refused:
            specs = [sharding(), *specs]
        several = [spec for spec in specs if ranks_of(spec, 2) == 2]
        if not several:
            pytest.skip(DECLARED + (refused or "no strategy for two ranks"))
        if self._ranks(devices) < 2:
            pytest.skip("two ranks need as many devices, and rank_counts must ask for them")
        _hold(runs.resumed_on(several[0], 2))

    # -- without hardware -----------------------------------------------------------------------

    @_of("basic")
    def test_on_paper(self, check: ConformanceCheck, answers: Ask) -> None:
        """What the backend says of itself before anything is opened."""
        _judge(check, answers("basic"))

    def _ranks(self, devices: int) -> int:
        """How many ranks a strategy is tried on."""
        return min((n for n in (2, 4) if n in self.rank_counts and n <= devices), default=1)


def _hold(why: str) -> None:
    if why:
        pytest.fail(why, pytrace=False)


def _ask_type(dtype: str, answers: Ask) -> None:
    # As the opened device declares it: some know only then.
    asked = answers("device").of(CHECKS[f"{dtype}_arithmetic"])
    if not asked.supported:
        pytest.skip(f"{DECLARED}{asked.declared}")


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


if CHOSEN in os.environ:  # set by ``pytest --anygauge-backend``, which collects this file

    class TestBackend(BackendContract):
        """The backend that the command line names."""

        backend = os.environ[CHOSEN]
