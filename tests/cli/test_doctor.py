"""`anygauge doctor`: lines, exit status, and a collective round trip of real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.helpers.runs import anygauge


def test_a_machine_that_can_train_on_its_processors(tmp_path: Path) -> None:
    line = ["doctor", "--backend", "cpu", "--json", "--collectives", "2", "--output", tmp_path]
    done = anygauge(line)
    report = json.loads(done.stdout)
    assert report["backend"] == "cpu"
    checks = {check["name"]: check for check in report["checks"]}
    assert {"torch", "packages", "shared memory", "output folder", "locked memory"} <= set(checks)
    assert done.returncode == int(report["outcome"] == "fail")
    for check in report["checks"]:
        assert check["seen"]
        assert check["remedy"] or check["outcome"] == "pass", check
    trip = checks["collective round trip"]
    assert trip["outcome"] == "pass", trip
    assert trip["seen"].startswith("2 ranks, gloo: 1 KiB in ") and "64 MiB in " in trip["seen"]


def test_a_missing_device_fails_and_says_what_to_do(tmp_path: Path) -> None:
    done = anygauge(["doctor", "--backend", "hpu", "--collectives", "2", "--output", tmp_path])
    assert done.returncode == 1
    assert "0x1da3" in done.stdout and "fail" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    trip = done.stdout.partition("collective round trip")[2]
    assert "habana_frameworks is not installed" in trip, "ranks that cannot meet are a line"
    # What Gaudi's software would be asked is neither passed nor failed where there is none.
    last = done.stdout.splitlines()[-1]
    counts = re.fullmatch(r"(\d+) passed, (\d+) with a warning, (\d+) failed, (\d+) skipped", last)
    assert counts is not None, last
    lines = [line.split(maxsplit=1)[0] for line in done.stdout.splitlines() if line[:1].isalpha()]
    words = ("pass", "warn", "fail", "skip")
    assert [int(count) for count in counts.groups()] == [lines.count(word) for word in words]
    assert int(counts[4]) == 4
