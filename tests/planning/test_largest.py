"""The largest batch and the longest rows: the exact number, by few rehearsals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anygauge.config.schema import RunFile
from anygauge.interface import ModelError
from anygauge.planning.changes import MOST_PROBES, largest_batch, largest_sequence
from anygauge.planning.fit import GIB
from tests.planning.standins import TARGET, Tried, run

MIB = 2**20


def linear(run: RunFile) -> int:
    return 5 * GIB + 3 * MIB * run.train.micro_batch_size * run.data.max_length // 8


def bent(run: RunFile) -> int:
    """Another phase is the largest from some size on."""
    size = run.train.micro_batch_size * run.data.max_length
    return max(5 * GIB + MIB * size // 40, 3 * MIB * size // 8)


def squared(run: RunFile) -> int:
    return 5 * GIB + 200 * run.train.micro_batch_size**2 * run.data.max_length**2


@pytest.mark.parametrize("needed", [linear, bent, squared])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_largest_batch_is_exact(needed: Callable[[RunFile], int], first: int) -> None:
    tried = Tried(needed)
    given = run(train={"micro_batch_size": first, "global_batch_size": 16 * first})
    found = largest_batch(given, TARGET, tried, 8)
    assert found.change is not None and found.beyond is not None and found.trial is not None
    size = found.change.lines["train.micro_batch_size"]
    assert found.change.lines["train.global_batch_size"] == 16 * size, "as many forwards"
    assert found.trial.fits and found.trial.run.train.micro_batch_size == size
    assert found.beyond.lines["train.micro_batch_size"] == size + 1, "one more does not fit"
    assert len(tried.runs) <= MOST_PROBES


def test_a_line_takes_five_rehearsals() -> None:
    tried = Tried(linear)
    largest_batch(run(), TARGET, tried, 8)
    assert len(tried.runs) <= 5


def test_the_longest_rows_end_where_the_model_ends() -> None:
    def needed(run: RunFile) -> int:
        if run.data.max_length > 4096:
            raise ModelError("the model was made for 4096 positions")
        return GIB + run.data.max_length * 1000

    found = largest_sequence(run(), TARGET, Tried(needed))
    assert found.change is not None and found.change.lines == {"data.max_length": 4096}
    assert found.refused == "the model was made for 4096 positions"


def test_not_even_the_smallest_fits() -> None:
    found = largest_batch(run(), TARGET, Tried(lambda run: 100 * GIB), 8)
    assert found.change is None and found.trial is None
