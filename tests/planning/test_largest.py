"""The largest micro-batch and the longest rows: by two plans, and a third that agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anygauge.config.schema import RunFile
from anygauge.interface import ModelError
from anygauge.planning.changes import MOST_SEQUENCES, Largest, largest_batch, longest_rows
from anygauge.planning.fit import GIB
from anygauge.registry import Registry
from tests.planning.standins import TARGET, Tried, machine, run

MIB = 2**20
REGISTRY = Registry.load()


def linear(run: RunFile) -> int:
    return 5 * GIB + 3 * MIB * run.train.micro_batch_size * run.data.max_length // 8


def bent(run: RunFile) -> int:
    """Another phase is the largest from some size on."""
    size = run.train.micro_batch_size * run.data.max_length
    return max(5 * GIB + MIB * size // 40, 3 * MIB * size // 8)


def squared(run: RunFile) -> int:
    return 5 * GIB + 200 * run.train.micro_batch_size**2 * run.data.max_length**2


def batch(given: RunFile, tried: Tried) -> Largest:
    return largest_batch(tried(given, TARGET), TARGET, tried, REGISTRY)


def rows(given: RunFile, tried: Tried) -> Largest:
    return longest_rows(tried(given, TARGET), TARGET, tried)


@pytest.mark.parametrize("needed", [linear, bent, squared])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_largest_batch_is_exact(needed: Callable[[RunFile], int], first: int) -> None:
    tried = Tried(needed)
    given = run(train={"micro_batch_size": first, "global_batch_size": 16 * first})
    found = batch(given, tried)
    assert found.change is not None and found.trial is not None and found.trial.fits
    assert found.change.lines == {
        "train.micro_batch_size": found.number,
        "train.global_batch_size": 16 * found.number,  # a step has as many forwards
    }
    beyond = run(train={"micro_batch_size": found.number + 1, "global_batch_size": 16})
    assert not tried(beyond, TARGET).fits, "one more does not fit"


@pytest.mark.parametrize("first", [1, 8])
def test_a_line_takes_two_plans_more(first: int) -> None:
    tried = Tried(linear)
    batch(run(train={"micro_batch_size": first}), tried)
    assert len(tried.runs) == 3


@pytest.mark.parametrize("length", [100, 1024, 4096])
def test_the_longest_rows_are_a_multiple(length: int) -> None:
    tried = Tried(linear)
    found = rows(run(data={"max_length": length}), tried)
    assert found.trial is not None and found.trial.fits and found.number % 64 == 0
    assert not tried(run(data={"max_length": found.number + 64}), TARGET).fits


def test_the_longest_rows_end_where_the_model_ends() -> None:
    tried = Tried(lambda run: GIB + run.data.max_length * 1000, positions=4095)
    found = rows(run(), tried)
    assert (found.number, found.ended_by) == (4095, "the model was made for no more positions")


def test_what_is_refused_ends_it() -> None:
    def needed(run: RunFile) -> int:
        if run.data.max_length > 2048:
            raise ModelError("no more than 2048 today")
        return GIB

    found = rows(run(), Tried(needed))
    assert found.number == 2048
    assert found.ended_by == "1,048,576 is refused: no more than 2048 today"


def test_it_looks_for_no_end() -> None:
    found = batch(run(), Tried(lambda run: GIB))
    assert (found.number, found.ended_by) == (MOST_SEQUENCES, "no more than 1,024 are tried")


def test_the_host_of_a_machine_may_be_what_ends_it() -> None:
    tried = Tried(lambda run: GIB, host=lambda run: run.train.micro_batch_size * GIB)
    target = replace(TARGET, machine=machine(host_memory=200 * GIB))
    found = largest_batch(tried(run(), target), target, tried, REGISTRY)
    assert found.number == 21, "8 ranks of 2 GiB and as many of 1.05 GiB for each sequence"


def test_not_even_the_smallest_fits() -> None:
    found = batch(run(), Tried(lambda run: 100 * GIB))
    assert found == Largest(number=0, change=None, trial=None)
    assert found.record()["lines"] is None
