"""Time of a step: each part by its own rate, and what is missing is named (``time.yaml``)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import Card, Rates
from anygauge.planning import time as times
from anygauge.planning.forecast import Traffic, Work
from anygauge.planning.machines import Machine
from anygauge.planning.time import Duration, UnknownRateError, step_duration

TABLES = yaml.safe_load((Path(__file__).parent / "time.yaml").read_text(encoding="utf-8"))
FLOPS = {"bfloat16": 100e12, "float32": 10e12}
RATES = {"bandwidth": 1e12, "link": 100e9, "host_link": 10e9}
CARD = Card(name="square", origin="a file", flops=FLOPS, **RATES)
MACHINE = Machine(name="four", card="square", cards=4, link=100e9, network=50e9)
WORK = Work(flops={"bfloat16": 72e12}, other_bytes=0.8e12)
MEASURED = replace(CARD, matmul={"bfloat16": 40e12}, copy=0.4e12, exchange=10e9, issue=1.0)
HOST = replace(MEASURED, shared_memory=True, issue=1e-6)
CARDS = {"CARD": CARD, "MEASURED": MEASURED, "HOST": HOST}
MULTIPLYING, MOVING = 72 / (100 * times.MATMUL_SHARE), 0.8 / times.COPY_SHARE
ALONE = MULTIPLYING + MOVING
NAMES = {**vars(times), "MULTIPLYING": MULTIPLYING, "MOVING": MOVING, "ALONE": ALONE}


def took(case: dict[str, Any]) -> Duration:
    """Of a case of the tables."""
    work, ranks = dict(case.get("work", {})), case.get("ranks", 1)
    if "traffic" in case:
        usual = {"group": (0, 1), "waited": False, "times": 0, "bytes": 0}
        work["traffic"] = (Traffic(operation="all_gather", **{**usual, **case["traffic"]}),)
    machine = case.get("machine")
    return step_duration(
        replace(WORK, **work),
        replace(CARDS[case.get("card", "CARD")], **case.get("over", {})),
        ranks,
        min(ranks, 4),
        pipeline=(case.get("stages", 1), case.get("rounds", 1)),
        machine=None if machine is None else replace(MACHINE, **machine),
    )


@pytest.mark.parametrize("case", TABLES["parts"].values(), ids=TABLES["parts"])
def test_each_part_by_its_rate(case: dict[str, Any]) -> None:
    found = took(case)
    parts = {**asdict(found), **found.sending}
    for name, value in case["is"].items():
        expected = pytest.approx(eval(value, NAMES), rel=case.get("within", 1e-6))
        assert parts[name] == expected, name


@pytest.mark.parametrize("case", TABLES["missing"].values(), ids=TABLES["missing"])
def test_what_is_missing_is_named(case: dict[str, Any]) -> None:
    with pytest.raises(UnknownRateError) as caught:
        took({"ranks": 8, **case})
    assert case["says"] in str(caught.value)


def test_ranks_whose_device_is_the_host_share_it() -> None:
    slow = Rates(matmul={"bfloat16": 1e9}, copy=1e9, issue=1e-6)
    host = replace(HOST, ranks={1: replace(slow, copy=8e9), 4: slow})
    assert host.of_ranks(1).copy == 8e9, "what was measured of so many is taken for them"
    assert host.of_ranks(3).copy == host.of_ranks(4).copy == 1e9
    more = host.of_ranks(8)
    assert (more.copy, more.matmul, more.issue) == (0.5e9, {"bfloat16": 0.5e9}, 1e-6)
