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
from unittest import mock

import pytest

from anygauge.interface import StrategySpec
from anygauge.registry import Registry
from anygauge.registry.specs import guarded_probe
from anygauge.testing.check import (
    BACKEND_VARIABLE,
    CHECKS,
    DECLARED,
    FAILED,
    PASSED,
    ConformanceCheck,
    worst_verdict,
)
from anygauge.testing.loop_checks import EVALUATION, LoopTrials, strategies
from anygauge.testing.process import PARTS, PartVerdicts, Subject, ask, import_checks

for _part in PARTS:
    import_checks(_part)
Ask = Callable[..., PartVerdicts]
"""Of a part, and a number of ranks if there are several."""
ONE_RANK_RUNS = ("adapter-float32", "adapter-bfloat16", "packed-float32", "whole-bfloat16")
"""What one process trains, by `anygauge.testing.loop_checks.KINDS`, and its type."""


def _checks_of(part: str) -> Any:
    chosen = [check for check in CHECKS.values() if check.part == part]
    return pytest.mark.parametrize("check", chosen, ids=lambda check: check.name)


class BackendContract:
    """Subclass it and name the backend.

    Attributes:
        backend: as users write it after ``--backend``.
        options: the run file's ``backend_options``.
        environment: variables for every process.
        rank_counts: numbers of ranks that collectives are tried on, and strategies if they are 2
            or 4; at most the devices of the machine. What they leave out counts as not tried.
        loss_noise: largest relative difference of a loss from the host's that the device's
            arithmetic explains, by compute type, where that is known better than
            `anygauge.testing.loop_checks.NOISE` is. The report says what was allowed, and what it
            was.
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
        """Return the folder for answers, logs and runs."""
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
        with mock.patch.dict(os.environ, subject.environment):
            probe = guarded_probe(Registry.load().find_backend(subject.name))
        if not probe.available:
            pytest.skip(f"no device to try: {probe.reason}")
        return 10**6 if probe.device_count is None else probe.device_count

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, subject: Subject, folder: Path, devices: int) -> LoopTrials:
        """Runs, each made once."""
        return LoopTrials(subject=subject, folder=folder, stated=cls.loss_noise)

    # -- with a device --------------------------------------------------------------------------

    @_checks_of("device")
    def test_on_device(self, check: ConformanceCheck, answers: Ask, devices: int) -> None:
        """Placement, memory, random numbers, arithmetic, graphs."""
        _judge(check, answers("device"))

    @_checks_of("ranks")
    def test_on_ranks(
        self, check: ConformanceCheck, subject: Subject, answers: Ask, devices: int
    ) -> None:
        """Collectives, on as many ranks as there are devices."""
        counts = [ranks for ranks in self.rank_counts if ranks <= devices]
        if not counts:
            declared = subject.create().support(check.capability or "collectives")
            if not declared:
                pytest.skip(f"{DECLARED}: {declared}")
            pytest.skip(f"fewer devices than the {min(self.rank_counts)} ranks that it takes")
        _judge(check, *(answers("ranks", ranks) for ranks in counts))
        if max(counts) < 2:
            pytest.skip("asked of one rank alone, which has nobody to talk to")

    @_checks_of("operators")
    def test_operators(self, check: ConformanceCheck, answers: Ask, devices: int) -> None:
        """Operators that a LoRA step calls, by torch's own samples."""
        _judge(check, answers("operators"))

    # -- the loop -------------------------------------------------------------------------------

    @pytest.mark.parametrize("what", ONE_RANK_RUNS)
    def test_trains_as_the_host_does(self, what: str, runs: LoopTrials, answers: Ask) -> None:
        """One process: the losses of every step and evaluation are the host's, within the noise."""
        kind, dtype = what.split("-")
        # As the opened device declares it: some know only then.
        result, why = answers("device").of(CHECKS[f"{dtype}_arithmetic"])
        if result == DECLARED:
            pytest.skip(f"{DECLARED}: {why}")
        _fail_if(runs.trial(kind, dtype))
        losses = runs.run(kind, dtype).losses
        assert kind != "adapter" or losses[-1] < losses[0], "the loss did not fall"

    def test_documents_of_a_pack_are_apart(self, runs: LoopTrials) -> None:
        """Packed rows of an odd length: each document has the loss that it has alone."""
        # Before the first step both are the base model; of an evaluation no row is cut.
        packed, alone = (runs.run(kind) for kind in ("packed", "adapter"))
        found, wanted = (run.numbers[EVALUATION, 0] for run in (packed, alone))
        allowed = runs.tolerances("float32", tolerance=0.0)[EVALUATION]
        assert abs(found - wanted) <= allowed * abs(wanted), (
            f"documents see each other: evaluated in packed rows their loss is {found:.9g}, each "
            f"in a row of its own {wanted:.9g}"
        )

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_every_strategy_trains_as_one_process_does(
        self, ranks: int, subject: Subject, runs: LoopTrials, devices: int
    ) -> None:
        """Each strategy whose needs the device meets has the losses of one process.

        Those of other plugins are reported beside the verdict; on 4 ranks, what is tried most.
        """
        specs = self._on_ranks(ranks, subject, devices)[: 1 if ranks > 2 else None]
        _fail_if(runs.try_strategies(specs, ranks))

    def test_a_resumed_run_goes_on_where_it_was(self, runs: LoopTrials) -> None:
        """From a checkpoint in the middle, with dropout: the undisturbed run, to the last digit."""
        _fail_if(runs.try_resume())

    def test_a_run_is_resumed_on_other_ranks(
        self, subject: Subject, runs: LoopTrials, devices: int
    ) -> None:
        """From a checkpoint of one rank, on two with another strategy: the same losses."""
        specs = self._on_ranks(2, subject, devices)
        spec = next((spec for spec in specs if not spec.single_process), None)
        if spec is None:
            pytest.skip(f"{DECLARED}: no strategy for two ranks")
        _fail_if(runs.trial("adapter", spec=spec, ranks=2, resumed=True))

    def _on_ranks(self, ranks: int, subject: Subject, devices: int) -> list[StrategySpec]:
        """The strategies that can be tried; skips where none can, or not on so many ranks."""
        specs, refused = strategies(subject)
        if not specs:
            pytest.skip(f"{DECLARED}: {'; '.join(map(': '.join, refused.items()))}")
        if ranks not in self.rank_counts:
            pytest.skip(f"rank_counts asks for {', '.join(map(str, self.rank_counts))} alone")
        if ranks > devices:
            pytest.skip(f"{ranks} ranks need as many devices; there are {devices}")
        return specs

    # -- without hardware -----------------------------------------------------------------------

    @_checks_of("basic")
    def test_on_paper(self, check: ConformanceCheck, answers: Ask) -> None:
        """What the backend says of itself before anything is opened."""
        _judge(check, answers("basic"))


def _fail_if(why: str) -> None:
    if why:
        pytest.fail(why, pytrace=False)


def _judge(check: ConformanceCheck, *given: PartVerdicts) -> None:
    """Report the worst of a check's verdicts on several numbers of ranks."""
    result, why = worst_verdict(verdicts.of(check) for verdicts in given)
    if result == FAILED:
        pytest.fail(f"{why}. {check.means}" if check.means else why, pytrace=False)
    if result != PASSED:
        pytest.skip(f"{result}: {why}")


if BACKEND_VARIABLE in os.environ:  # set by ``pytest --anygauge-backend``, which collects this file

    class TestBackend(BackendContract):
        """The backend that the command line names."""

        backend = os.environ[BACKEND_VARIABLE]
