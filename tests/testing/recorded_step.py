"""Which operators of aten a LoRA step calls: ``python -m tests.testing.recorded_step NAME``.

It prints them as JSON. A process for each backend: one that has run a backward knows no other
devices any more.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.runs import run_file, trained_here


class OperatorRecorder(TorchDispatchMode):
    """Notes the name of each operator that is called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def recorded(backend: str, folder: Path) -> set[str]:
    """Of two steps with dropout, clipping and an evaluation, in each type and kind of attention."""
    recorder = OperatorRecorder()
    for dtype in ("float32", "bfloat16"):
        for attention in ("eager", "sdpa"):
            path = run_file(
                folder,
                name=f"{dtype}-{attention}",
                backend=backend,
                precision={"param_dtype": dtype},
                adapter={"r": 4, "dropout": 0.1},
                train={"steps": 2, "eval_every": 1},
            )
            fields = yaml.safe_load(path.read_text())
            fields["model"]["attention"] = attention
            fields["data"]["packing"] = attention == "sdpa"
            path.write_text(yaml.safe_dump(fields))
            with recorder:
                assert trained_here(path).status == 0
    return recorder.names


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = recorded(sys.argv[1], Path(made))
    print(json.dumps(sorted(found)))
