"""Installing the stand-in for Gaudi's software where a run finds it, and reading its record."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

STANDIN = Path(__file__).parents[1] / "standins/gaudi"


def standin_site(folder: Path, version: str = "1.20.0") -> Path:
    """A folder for ``PYTHONPATH`` that holds the stand-in as two installed distributions."""
    site = folder / f"standin-{version}"
    shutil.copytree(STANDIN, site, ignore=shutil.ignore_patterns("__pycache__"))
    for name, number, group, point in (
        (
            "habana-torch-plugin",
            version,
            "torch.backends",
            "device_backend = habana_frameworks.autoload:__autoload",
        ),
        ("gaudi-standin", "1.0", "anygauge", "hpu-standin = anygauge_hpu_standin"),
    ):
        info = site / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n", encoding="utf-8")
    return site


def standin_environment(site: Path, record: Path) -> dict[str, str]:
    """Variables of a process that is to find the stand-in, and write its calls to `record`.RANK."""
    return {
        # What the tests themselves were found on stays: a checkout that is not the installed one.
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        # The shipped announcement of the same backend, whose probe finds no card here.
        "ANYGAUGE_BLOCK_PLUGINS": "hpu",
        "ANYGAUGE_SIM_LOCKS": "",
        "HABANA_STANDIN_RECORD": str(record),
    }


def calls(record: Path, rank: int) -> list[list[Any]]:
    """What a rank called, in order: name and values."""
    text = Path(f"{record}.{rank}").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
