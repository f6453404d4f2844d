"""What a rank reports of where it is, and how often."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator

import pytest

from anygauge.interface import Collectives
from anygauge.training.progress import Progress
from anygauge.util.events import EventWriter


class Reports:
    """A progress, and what it has sent."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.progress = Progress(EventWriter(self._writer, rank=0))

    def read(self) -> list[str]:
        try:
            lines = os.read(self._reader, 65536).splitlines()
        except BlockingIOError:
            return []
        assert {json.loads(line)["event"] for line in lines} == {"progress"}
        return [json.loads(line)["doing"] for line in lines]

    def wait(self) -> str:
        """The next report, once there is one."""
        assert select.select([self._reader], [], [], 60)[0], "waited in vain for a report"
        return json.loads(os.read(self._reader, 65536).splitlines()[0])["doing"]

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def reports() -> Iterator[Reports]:
    one = Reports()
    yield one
    one.close()


def test_a_place_is_reported_once(reports: Reports) -> None:
    progress = reports.progress
    progress._report()
    progress.enter("step 3, forward and backward")
    progress._report()
    progress._report()
    assert reports.read() == ["step 3, forward and backward"]


def test_each_micro_batch_is_a_movement(reports: Reports) -> None:
    progress = reports.progress
    progress.enter("step 3, forward and backward")
    for _ in range(2):
        progress.next_batch()
        progress._report()
    progress.enter("step 3, update")
    progress._report()
    assert reports.read() == [
        "step 3, forward and backward, micro-batch 1",
        "step 3, forward and backward, micro-batch 2",
        "step 3, update",
    ]


def test_long_work_is_reported_at_once_and_again_while_it_lasts(reports: Reports) -> None:
    progress = reports.progress
    with progress.unlike_others("start-up", Collectives("cpu"), then_limit_s=1.0):
        assert reports.read() == ["start-up"]
        progress._report()
        progress._report()
    assert reports.read() == ["start-up"] * 2
    progress._report()
    assert reports.read() == []


def test_the_thread_reports_by_itself(reports: Reports) -> None:
    with reports.progress.reporting():
        reports.progress.enter("step 1, update")
        assert reports.wait() == "step 1, update"
