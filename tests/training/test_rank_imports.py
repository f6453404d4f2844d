"""What a rank imports, in a process of its own: no package that the run does not use."""

from __future__ import annotations

import json
import sys
from importlib import util
from typing import Any

import pytest

from anygauge.training.worker import unused_hidden
from tests.helpers.child_processes import printed

COMPILER = "torch._inductor.compile_fx"


SCRIPT = """
import json, sys
from importlib import util
from anygauge.training.worker import unused_hidden

with unused_hidden(few_bits=False, trackers=[]):
    import peft, transformers.modeling_utils
print(json.dumps(list(sys.modules)))
if util.find_spec("bitsandbytes"):
    import bitsandbytes
print(json.dumps(list(sys.modules)))
"""


def test_libraries_do_not_import_what_a_run_does_not_use_and_it_can_be_imported_later() -> None:
    hidden, later = (set(json.loads(line)) for line in printed(SCRIPT)[-2:])
    assert "peft.tuners.lora.model" in hidden
    assert not {"bitsandbytes", "peft.tuners.lora.bnb", COMPILER} & hidden
    assert not util.find_spec("bitsandbytes") or "bitsandbytes.functional" in later


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
