"""What a rank imports, in processes of their own: no package that the run does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from typing import Any

import pytest

from anygauge.training.worker import unused_hidden

COMPILER = "torch._inductor.compile_fx"


HIDING = (
    "with unused_hidden(few_bits=False, trackers=[]): import peft, transformers.modeling_utils\n"
)


def modules(script: str) -> set[str]:
    """Of a new process that ran a script."""
    script = f"from anygauge.training.worker import unused_hidden\n{script}"
    script += "import json, sys; print(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_libraries_do_not_import_what_a_run_does_not_use() -> None:
    found = modules(HIDING)
    assert "peft.tuners.lora.model" in found
    assert not {"bitsandbytes", "peft.tuners.lora.bnb", COMPILER} & found


@pytest.mark.skipif(not util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
def test_what_was_hidden_can_be_imported_afterwards() -> None:
    assert "bitsandbytes.functional" in modules(f"{HIDING}import bitsandbytes\n")


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"few_bits": True, "trackers": ["mlflow"]}, []),
        ({"few_bits": True, "trackers": []}, ["mlflow"]),
        ({"few_bits": False, "trackers": ["mine"]}, ["bitsandbytes"]),
        ({"few_bits": False, "trackers": []}, ["bitsandbytes", "mlflow"]),
    ],
)
def test_what_a_run_uses_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], names: list[str]
) -> None:
    both = ("bitsandbytes", "mlflow")
    for name in both:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with unused_hidden(**asked):
        assert [name for name in both if name in sys.modules] == names
        for name in names:
            with pytest.raises(ImportError):
                __import__(name)
    assert not set(names) & set(sys.modules)
