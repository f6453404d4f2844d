"""Processes of their own: settings are read once per process."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anygauge
from anygauge.testing.process import Subject

HERE = Path(__file__).parent
PACKAGE = Path(inspect.getfile(anygauge)).parent
SIM = Subject(
    name="sim",
    environment={
        "ANYGAUGE_SIM_LOCKS": tempfile.mkdtemp(),
        "ANYGAUGE_SIM_CARDS": "8",
        "ANYGAUGE_SIM_CAPACITY": str(2**33),
    },
)
"""The cards that runs train on."""
LOAD = "import torch; from anygauge_sim.device import load; sim = load(); "


def start(code: str, **environment: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )


def run(code: str, **environment: object) -> tuple[int, str]:
    process = start(code, **environment)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def ranks(size: int, folder: Path) -> list[tuple[int, str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "collective_rank.py"), f"file://{folder}/meet"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "ANYGAUGE_SIM_CARDS": str(size),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(size)
    ]
    return [
        (p.returncode, out) for p, (out, _) in ((p, p.communicate(timeout=300)) for p in processes)
    ]


def patched(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the package with one change; it is to come first on the path."""
    site = folder / "site"
    shutil.copytree(PACKAGE, site / "anygauge", ignore=shutil.ignore_patterns("__pycache__"))
    path = site / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file}: {old!r} stands there {text.count(old)} times"
    path.write_text(text.replace(old, new))
    return site
