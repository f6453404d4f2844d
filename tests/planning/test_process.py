"""The process of a rehearsal is there before it is asked, and gone when nobody has it any more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from anygauge.planning import planner as planner_module
from anygauge.planning.planner import Planner
from anygauge.planning.process import FEW_BITS, Rehearser
from tests.helpers.processes import alive
from tests.planning.standins import memory, run


def test_it_ends_with_what_started_it() -> None:
    kept, dropped = Rehearser(), Rehearser()
    pids = [one._process.pid for one in (kept, dropped)]
    assert all(map(alive, pids))
    kept.end()
    del dropped
    assert not any(map(alive, pids))


class RecordedRehearser(Rehearser):
    made: list[RecordedRehearser] = []

    def __init__(
        self, environment: Mapping[str, str] | None = None, hidden: Sequence[str] = (FEW_BITS,)
    ) -> None:
        self.hidden, self.asked = tuple(hidden), 0
        self.made.append(self)
        self.end = lambda: None  # type: ignore[assignment]

    def ask(self, line: bytes) -> None:
        self.asked += 1

    def answer(self, limit_s: float) -> dict[str, Any]:
        return {"event": "rehearsed", "found": memory(0).record()}


@pytest.mark.parametrize(
    ("few_bits", "asked"),
    [(False, [(("bitsandbytes",), 2)]), (True, [(("bitsandbytes",), 0), ((), 2)])],
)
def test_the_first_process_is_the_one_that_was_started_ahead(
    few_bits: bool, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedRehearser, "made", [])
    monkeypatch.setattr(planner_module, "Rehearser", RecordedRehearser)
    optimizer = {"name": "adamw_8bit" if few_bits else "adamw"}
    with Planner(8, first=RecordedRehearser()) as planner:
        for _ in range(2):
            planner.rehearse(run(train={"optimizer": optimizer}), "cpu")
    assert [(one.hidden, one.asked) for one in RecordedRehearser.made] == asked


def test_it_is_started_before_anything_heavy_is_imported() -> None:
    heavy = ("pydantic", "numpy", "torch", "anygauge.registry")
    script = (
        "import sys, anygauge.planning.process; "
        f"assert not {{*{heavy}}} & {{*sys.modules}}, sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
