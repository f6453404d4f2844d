"""The process of one part: ``python -m benchmarks.gpu.run_part NAME CONTEXT.json``."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Context
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.result import Report, SkipPartError

SKIP_STATUS = 77
"""Exit status of a part that does not suit this machine; its last line says why."""


def main(name: str, path: str) -> int:
    """Run one part; what it finds is in ``report.json`` of its folder."""
    context = Context.load(Path(path))
    module, _, function = PARTS[name].run.partition(":")
    try:
        getattr(importlib.import_module(module), function)(
            context, Report(context.path / "report.json")
        )
    except SkipPartError as reason:
        print(reason, flush=True)
        return SKIP_STATUS
    return 0


def _terminated(signum: int, _: Any) -> None:
    # As an exception, so that what the part has started is ended.
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main(sys.argv[1], sys.argv[2]))
