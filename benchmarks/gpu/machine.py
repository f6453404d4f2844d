"""The machine that is measured: is there a card, which one, and what is installed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.plan import BenchmarkError
from benchmarks.session import version

PACKAGES = (
    "anygauge", "torch", "triton", "transformers", "peft", "accelerate", "deepspeed", "trl",
    "liger-kernel", "pytest",
)  # fmt: skip
OLDEST_TORCH = (2, 11)
LOOK = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "cards": []}
if torch.version.cuda is not None and torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found["cards"].append([card.name, card.total_memory, [card.major, card.minor]])
print(json.dumps(found))
"""


REMEDY = (
    "`make gpu DEVICE=cpu` tries the parts on this machine's processor; "
    "`make gpu PREDICT=h100:1` shows what is predicted for a card"
)


def look() -> dict[str, Any]:
    """What torch sees, in a process of its own: the parts' memory is theirs alone.

    Raises:
        BenchmarkError: torch is missing or cannot be imported.
    """
    argv = [sys.executable, "-c", LOOK]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"torch cannot be used:\n{done.stderr.strip()[-1000:]}\n{REMEDY}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def described(device: str, gpus: int) -> dict[str, Any]:
    """The page's first table.

    Raises:
        BenchmarkError: there is no card, or not as many as asked for, or torch is too old.
    """
    found = look()
    card: dict[str, Any] = {"card": "This machine's processor"}
    if device != "cpu":
        _check(found, gpus)
        name, memory, capability = found["cards"][0]
        card = {
            "card": name,
            "cards": gpus,
            "memory, GiB": memory / 2**30,
            "compute capability": ".".join(map(str, capability)),
            "CUDA of torch": found["cuda"],
        }
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**card, **system, "command": _command(), **{name: version(name) for name in PACKAGES}}


def _check(found: Mapping[str, Any], gpus: int) -> None:
    torch, cards = found["torch"], len(found["cards"])
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        raise BenchmarkError(
            f"torch {torch} is installed, and 2.11 or newer is needed: `rm -rf .venv` and "
            "`make gpu`, or `make gpu WHEELS=folder PYTHON=interpreter` beside a newer torch. "
            f"{REMEDY}"
        )
    if not cards:
        why = "is built without CUDA" if found["cuda"] is None else "sees no usable card"
        raise BenchmarkError(
            f"there is no NVIDIA card to measure: torch {torch} {why}. `anygauge doctor "
            f"--backend cuda` shows what is missing. {REMEDY}"
        )
    if gpus > cards:
        raise BenchmarkError(f"GPUS={gpus}, but torch sees {cards}. {REMEDY}")


def foreseen(machine: str) -> dict[str, Any]:
    """The first table of a page of predictions."""
    versions = {name: version(name) for name in ("anygauge", "torch")}
    return {"card": f"Predictions for {machine}", "command": _command(), **versions}


def _command() -> str:
    return " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
