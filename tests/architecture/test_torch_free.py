"""A machine without torch can list, plan and render: what needs no torch does not import it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.repository import CORE, ROOT, modules

HEAVY = ("torch", "transformers", "peft", "deepspeed", "accelerate", "datasets", "tensorboard")

# Runs the first argument with the others as its command line; the last line says what is loaded.
WATCH = """
import json, sys
source, sys.argv[1:] = sys.argv[1], sys.argv[2:]
try:
    exec(source)
finally:
    print()
    print(json.dumps(sorted(sys.modules)))
"""

COMMAND = "import sys; from anygauge.cli import run; sys.exit(run(sys.argv[1:]))"


def loaded(source: str, *arguments: str) -> list[str]:
    """Heavy packages that a fresh interpreter has imported after running `source`."""
    result = subprocess.run(
        [sys.executable, "-c", WATCH, source, *arguments], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    present = set(json.loads(result.stdout.splitlines()[-1]))
    return [name for name in HEAVY if name in present]


def test_what_is_imported_is_seen(tmp_path):
    (tmp_path / "torch.py").touch()
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch"
    assert loaded(source) == ["torch"]


@pytest.mark.parametrize(
    "package",
    [
        CORE / "util",
        CORE / "interface",
        CORE / "registry",
        CORE / "config",
        CORE / "data",
        CORE / "launch",
        CORE / "cli",
        *sorted((ROOT / "backends").glob("anygauge_*")),
        *sorted((ROOT / "launchers").glob("anygauge_*")),
    ],
    ids=lambda path: path.name,
)
def test_no_module_imports_torch_when_it_is_imported(package: Path):
    prefix = "anygauge." if package.parent == CORE else ""
    names = [prefix + name for name in modules(package)]
    assert names
    assert loaded("\n".join(f"import {name}" for name in names)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("backends",),
        ("backends", "--json"),
        *(
            ("env", "--backend", path.name.removeprefix("anygauge_"))
            for path in sorted((ROOT / "backends").glob("anygauge_*"))
        ),
        ("env", "--backend", "cpu", "--devices", "2", "--format", "json"),
        ("env", str(ROOT / "examples/demo/finetune.yaml"), "--backend", "cpu"),
        ("train", "--help"),
        ("env", "--help"),
    ],
    ids=" ".join,
)
def test_commands_that_need_no_torch(arguments):
    assert loaded(COMMAND, *arguments) == []
