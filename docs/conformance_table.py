"""The page of the repository's own devices, made from the kit's reports of them.

``python -m docs.conformance_table cpu.json sim.json lazy.json`` writes the page anew; the reports
are those of ``pytest --anygauge-backend NAME --anygauge-report NAME.json``. Of several reports of a
device, which were made of some parts each (``-k``), the later one of a check holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anygauge.testing.plugin import RESULTS, Line, table

PAGE = Path(__file__).parent / "conformance/devices.md"
HEAD = """# Devices that were tried

What the [conformance kit](../plugins.md#the-conformance-kit) found of this repository's devices.
`cpu` is the host's processors; `sim` (simulated cards) and `lazy` (PyTorch's lazy tensors) are in
[examples/plugins](../../examples/plugins). A dash is a check that has no meaning for the device.
`python -m docs.conformance_table` makes this page from the kit's reports.

"""


def merged(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A report for each device."""
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        one = found.setdefault(report["backend"], {**report, "checks": {}, "figures": {}})
        one["checks"] |= {line["name"]: line for line in report["checks"]}
        one["figures"] |= report["figures"]
    for one in found.values():
        one["checks"] = list(one["checks"].values())
        results = {line["result"] for line in one["checks"]}
        one["conforms"] = not results & {"failed", "untried"}
    return list(found.values())


def page(reports: Sequence[dict[str, Any]]) -> str:
    """The page of several reports: a column each."""
    names = [f"`{report['backend']}`" for report in reports]
    verdicts = ["conforms" if report["conforms"] else "does NOT conform" for report in reports]
    rows = [["verdict", *verdicts]]
    for kind in ("conditions", "figures"):
        for name in dict.fromkeys(name for report in reports for name in report[kind]):
            rows.append([name, *(report[kind].get(name, "-") for report in reports)])
    text = HEAD + table(["", *names], rows)
    lines = {
        (report["backend"], line["name"]): Line(**line)
        for report in reports
        for line in report["checks"]
    }
    first = [Line(**line) for line in reports[0]["checks"]]
    for part in dict.fromkeys(line.part for line in first):
        rows = []
        for line in first:
            if line.part == part:
                found = [lines[report["backend"], line.name].result for report in reports]
                marks = ["-" if each == "skipped" else RESULTS[each][0] for each in found]
                rows.append([line.title, *marks])
        text += f"\n## {part}\n\n" + table(["check", *names], rows)
    return text


if __name__ == "__main__":
    given = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(merged(given)), encoding="utf-8")
