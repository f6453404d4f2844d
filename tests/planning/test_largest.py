"""The largest micro-batch and the longest rows: by two plans, and two that check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anygauge.config.schema import RunFile
from anygauge.interface import ModelError
from anygauge.planning.changes import MOST_SEQUENCES, Choice, largest_batch, longest_rows
from anygauge.planning.fit import GIB
from anygauge.planning.trials import Target
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


def batch(given: RunFile, tried: Tried, target: Target = TARGET) -> Choice:
    return largest_batch(tried(given, target), target, tried, REGISTRY)


@pytest.mark.parametrize("needed", [linear, bent, squared])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_largest_batch_is_exact(needed: Callable[[RunFile], int], first: int) -> None:
    tried = Tried(needed)
    found = batch(run(train={"micro_batch_size": first, "global_batch_size": 16 * first}), tried)
    assert needed is not linear or len(tried.runs) <= 4, "three plans more"
    assert found.fits
    number = found.lines["train.micro_batch_size"]
    assert found.lines == {
        "train.micro_batch_size": number,
        "train.global_batch_size": 16 * number,  # a step has as many forwards
    }
    beyond = run(train={"micro_batch_size": number + 1, "global_batch_size": 16})
    assert not tried(beyond, TARGET).fits, "one more does not fit"


@pytest.mark.parametrize("length", [100, 1024, 4096])
def test_the_longest_rows_are_a_multiple(length: int) -> None:
    tried = Tried(linear)
    found = longest_rows(tried(run(data={"max_length": length}), TARGET), TARGET, tried)
    number = found.lines["data.max_length"]
    assert found.fits and number % 64 == 0
    assert not tried(run(data={"max_length": number + 64}), TARGET).fits


def refused(run: RunFile) -> int:
    if run.data.max_length > 2048:
        raise ModelError("no more than 2048 today")
    return GIB


@pytest.mark.parametrize(
    ("tried", "number", "ended_by"),
    [
        (Tried(lambda _: GIB, positions=4095), 4095, "the model was made for no more positions"),
        (Tried(refused), 2048, "1,048,576 is refused: no more than 2048 today"),
    ],
)
def test_what_ends_the_longest_rows(tried: Tried, number: int, ended_by: str) -> None:
    found = longest_rows(tried(run(), TARGET), TARGET, tried)
    assert (found.lines, found.why) == ({"data.max_length": number}, ended_by)


def test_what_ends_the_largest_batch() -> None:
    found = batch(run(), Tried(lambda _: GIB))
    assert found.lines["train.micro_batch_size"] == MOST_SEQUENCES
    assert found.why == "no more than 1,024 are tried"
    hosted = Tried(lambda _: GIB, host=lambda run: run.train.micro_batch_size * GIB)
    target = replace(TARGET, machine=machine(host_memory=200 * GIB))
    # 8 ranks of 2 GiB and as many of 1.05 GiB for each sequence.
    assert batch(run(), hosted, target).lines["train.micro_batch_size"] == 21
    none = batch(run(), Tried(lambda _: 100 * GIB))
    assert none == Choice("batch") and none.record()["fit"] is None
