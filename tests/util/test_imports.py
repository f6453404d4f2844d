"""What a rank imports, in processes of their own: no package that the run does not use."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib import util
from typing import Any

import pytest

from anygauge.util.imports import hidden, unused

COMPILER = "torch._inductor.compile_fx"


def modules(script: str) -> set[str]:
    """Of a new process that ran a script."""
    script = textwrap.dedent(script) + "\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_libraries_do_not_import_what_a_run_does_not_use() -> None:
    found = modules(
        """
        from anygauge.util.imports import hidden, unused
        with hidden(unused(few_bits=False, trackers=[])):
            import peft, transformers.modeling_utils
        """
    )
    assert "peft.tuners.lora.model" in found
    assert not {"bitsandbytes", "peft.tuners.lora.bnb", COMPILER} & found


@pytest.mark.skipif(not util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
def test_what_was_hidden_can_be_imported_afterwards() -> None:
    found = modules(
        """
        from anygauge.util.imports import hidden, unused
        with hidden(unused(few_bits=False, trackers=[])):
            import peft
        import bitsandbytes
        """
    )
    assert "bitsandbytes.functional" in found


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"few_bits": True, "trackers": ["mlflow"]}, []),
        ({"few_bits": True, "trackers": []}, ["mlflow"]),
        ({"few_bits": False, "trackers": ["mine"]}, ["bitsandbytes"]),
        ({"few_bits": False, "trackers": []}, ["bitsandbytes", "mlflow"]),
    ],
)
def test_what_a_run_uses_is_not_hidden(asked: dict[str, Any], names: list[str]) -> None:
    assert unused(**asked) == names


def test_what_is_not_there_leaves_no_trace() -> None:
    with pytest.raises(ImportError), hidden(["no_such_package"]):
        import no_such_package  # noqa: F401
    assert "no_such_package" not in sys.modules
