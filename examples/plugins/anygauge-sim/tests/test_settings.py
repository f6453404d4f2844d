"""Settings are read strictly; what is wrong with one is said when a card is opened, and before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anygauge_sim import settings
from anygauge_sim.probe import probe
from children import run

WRONG = [
    ("CARDS", "many", "'many' is not a positive whole number up to 64"),
    ("CARDS", "65", "'65' is not a positive whole number up to 64"),
    ("CARDS", "", "'' is not a positive whole number"),
    ("CAPACITY", "-1", "'-1' is not a positive whole number"),
    ("CAPACITY", "0", "'0' is not a positive whole number"),
    ("CAPACITY", " 5", "' 5' is not a positive whole number"),
    ("CAPACITY", str(2**63), f"up to {2**63 - 1}"),
    ("VISIBLE_CARDS", "0,9", "'9' is not a card of 0 to 1"),
    ("VISIBLE_CARDS", "0,", "'' is not a card of 0 to 1"),
    ("VISIBLE_CARDS", "0,0", "'0,0' names card 0 twice"),
    ("FAULTS", "often", "'often' is none of oom@N"),
    ("FAULTS", "oom@0", "'oom@0' is none of oom@N"),
    ("FAULTS", "oom@2x", "'oom@2x' is none of oom@N"),
    ("FAULTS", "oom:0@2", "'oom:0@2' is none of oom@N"),
    ("FAULTS", "oom@1,", "'' is none of oom@N"),
    ("FAULTS", "fail:allreduce@1", "COLLECTIVE one of any, broadcast, all_reduce, "),
    ("FAULTS", "fail@1", "'fail@1' is none of"),
    ("FAULTS", "hang:all_reduce@0", "N counts from 1"),
    ("FAULTS", "fail:any@1,hang:any@1", "'hang:any@1' comes second for the same call"),
    ("FAULTS", "slow:2@3", "CARD one of 0 to 1"),
    ("FAULTS", "slow:0@1", "FACTOR is more than 1"),
    ("FAULTS", "slow:0@nan", "FACTOR is more than 1"),
    ("FAULTS", "slow:1@2,slow:1@3", "'slow:1@3' comes second"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_wrong_settings_are_named(name: str, value: str, said: str) -> None:
    variable = f"ANYGAUGE_SIM_{name}"
    with pytest.raises(ValueError) as raised:
        settings.read({"ANYGAUGE_SIM_CARDS": "2", variable: value})
    assert str(raised.value).startswith(f"{variable}: ") and said in str(raised.value)


def test_what_is_not_set_has_its_default() -> None:
    found = settings.read({"TMPDIR": "/somewhere"})
    assert found.cards == tuple(range(8)) and found.capacity == 2**35
    assert found.locks.startswith("/somewhere/anygauge-sim-") and found.trace == ""
    assert not any((found.faults.allocations, found.faults.failing, found.faults.hanging))


def test_all_that_can_be_set() -> None:
    found = settings.read(
        {
            "ANYGAUGE_SIM_CARDS": "4",
            "ANYGAUGE_SIM_VISIBLE_CARDS": "3,1",
            "ANYGAUGE_SIM_LOCKS": "",
            "ANYGAUGE_SIM_FAULTS": "oom@2,oom@5,fail:any@1,hang:send@1,hang:send@3,slow:2@1.5",
        }
    )
    assert (found.cards, found.locks) == ((3, 1), "")
    assert found.faults == settings.Faults(
        allocations=frozenset({2, 5}),
        failing={"any": frozenset({1})},
        hanging={"send": frozenset({1, 3})},
        slow={2: 1.5},
    )


def test_opening_a_card_says_what_is_wrong_and_may_be_tried_again(tmp_path: Path) -> None:
    """None of these waits for the first allocation, and none leaves the device half made."""
    wrong = {
        "ANYGAUGE_SIM_CAPACITY": "-1",
        "ANYGAUGE_SIM_VISIBLE_CARDS": "0,0",
        "ANYGAUGE_SIM_FAULTS": "fail:allreduce@1",
        "ANYGAUGE_SIM_LOCKS": str(tmp_path / "no" / "such"),
        "ANYGAUGE_SIM_TRACE": str(tmp_path / "no" / "trace"),
    }
    status, out = run(
        "import os\n"
        "from anygauge.interface import NotAvailableError\n"
        "from anygauge_sim.backend import SimBackend\n"
        f"for name, value in {wrong!r}.items():\n"
        "    before = os.environ.get(name); os.environ[name] = value\n"
        "    backend = SimBackend()\n"
        "    try: backend.open()\n"
        "    except NotAvailableError as error: print(error)\n"
        "    assert not backend.placement.is_open\n"
        "    backend.close()\n"
        "    del os.environ[name]\n"
        "    if before is not None: os.environ[name] = before\n"
        "print('opened', SimBackend().open())\n"
    )
    assert status == 0, out
    said = out.splitlines()
    assert [line.split(": ")[:2] for line in said[:-1]] == [["simulated cards", n] for n in wrong]
    assert said[-1] == "opened sim:0"


@pytest.mark.parametrize(
    ("name", "value", "available", "count", "said"),
    [
        ("CARDS", "4", True, 4, "4 simulated cards"),
        ("VISIBLE_CARDS", "1", True, 1, "1 simulated card"),
        ("VISIBLE_CARDS", "", False, 0, "ANYGAUGE_SIM_VISIBLE_CARDS is empty"),
        ("CARDS", "many", False, None, "ANYGAUGE_SIM_CARDS: 'many' is not a positive whole number"),
        ("FAULTS", "often", False, None, "ANYGAUGE_SIM_FAULTS: 'often' is none of oom@N"),
    ],
)
def test_the_probe_tells_what_open_would_find(
    name: str, value: str, available: bool, count: int | None, said: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv(f"ANYGAUGE_SIM_{name}", value)
    found = probe()
    assert (found.available, found.device_count) == (available, count)
    assert said in found.reason
