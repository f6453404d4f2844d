"""A run held against a card and its machine: what comes on top of tensors, and what is shared."""

from __future__ import annotations

import pytest

from anygauge.interface import Card
from anygauge.planning.fit import CONNECTED, GIB, PROCESS, RESERVED, SLACK, fit, on_disk
from tests.planning.standins import CARD, machine, memory, run

STEP = 20 * GIB


def test_slack_context_and_collectives_come_on_top() -> None:
    found = fit(memory(STEP), CARD, 8, 8)
    assert found is not None
    assert (found.phase, found.tensors) == ("backward", STEP)
    assert found.needed == STEP + round(SLACK * STEP) + GIB + CONNECTED
    assert found.left == CARD.memory - found.needed  # type: ignore[operator]
    assert found.fits and found.phases["backward"] == found.needed
    assert found.phases["load"] == STEP // 4 + round(SLACK * STEP / 4) + GIB + CONNECTED


def test_a_card_that_does_not_say_what_its_context_takes() -> None:
    found = fit(memory(STEP), Card(name="square", memory=40 * GIB), 1, 1)
    assert found is not None and (found.context, found.collectives) == (RESERVED, 0)


def test_what_is_missing_is_said() -> None:
    found = fit(memory(80 * GIB), CARD, 1, 1)
    assert found is not None and not found.fits
    assert found.lacking == {"memory": found.needed - 40 * GIB} and found.margin == found.left


def test_ranks_share_the_host() -> None:
    held = memory(STEP, host=10 * GIB)
    needed = 8 * (PROCESS + round(1.05 * 10 * GIB))
    small = fit(held, CARD, 8, 8, machine(host_memory=needed - 1))
    assert small is not None and small.left > 0
    assert small.lacking == {"host memory": 1} and not small.fits and small.margin == -1
    enough = fit(held, CARD, 8, 8, machine(host_memory=needed))
    assert enough is not None and enough.fits
    unknown = fit(held, CARD, 8, 8, machine())
    assert unknown is not None and unknown.fits, "what is not known refuses nothing"
    assert unknown.shared == {"host memory": (needed, None)}


def test_ranks_share_a_card_whose_memory_is_the_hosts() -> None:
    shared = Card(name="square", memory=80 * GIB, shared_memory=True)
    found = fit(memory(STEP), shared, 4, 4)
    assert found is not None and (found.memory, found.collectives) == (20 * GIB, 0)


def test_an_optimizer_on_a_disk() -> None:
    nvme = {"name": "zero", "offload": "optimizer", "nvme": "/disk"}
    assert on_disk(run(), memory(STEP), 8) == 0
    each = on_disk(run(strategy=nvme), memory(STEP), 8)
    assert each == 100 * (4 + 4 + 8) / 8, "masters, gradients and two moments of a part"
    found = fit(memory(STEP), CARD, 8, 8, machine(disk=8 * each - 1), disk=each)
    assert found is not None and found.lacking == {"disk": 1}
    moved = fit(memory(STEP, host=10 * GIB), CARD, 1, 1, machine(), disk=10 * GIB)
    assert moved is not None
    assert moved.shared == {"host memory": (PROCESS, None), "disk": (10 * GIB, None)}


def test_a_card_without_memory_gets_no_verdict() -> None:
    assert fit(memory(STEP), Card(name="square"), 1, 1) is None


@pytest.mark.parametrize("name", ["needed", "left", "fits"])
def test_its_record_has_the_sums(name: str) -> None:
    found = fit(memory(STEP, host=GIB), CARD, 8, 8, machine(host_memory=100 * GIB))
    assert found is not None and found.record()[name] == getattr(found, name)
    assert found.record()["shared"]["host memory"]["has"] == 100 * GIB
