"""The process that rehearses runs: ``python -m anygauge.planning [HIDDEN...]``; see `Planner`.

It reads one question per line of standard input (JSON) and answers each with one event on standard
output. All of a process are of one rank and one number of ranks, as its process group is.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback

from anygauge.config.resolved import parse_run
from anygauge.interface import AnygaugeError
from anygauge.models.quiet import quiet_libraries
from anygauge.registry import Registry
from anygauge.training.preflight import GIB, bound_memory
from anygauge.util.events import EventWriter
from anygauge.util.imports import hidden
from anygauge.util.processes import die_with_parent

NOT_HERE = ("kernels", "mlflow", "triton")
"""Packages that no rehearsal uses. transformers, DeepSpeed's tuner and torch's counter of
operations import them where they are installed."""
USUAL = (
    "anygauge.planning.run",
    "peft",
    "torch.distributed.tensor",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""What every rehearsal imports; the command begins this process before it has a question."""

LIMIT = 8 * GIB
"""Memory of this process: a rehearsal that needs more has met something that it should not."""


def main() -> int:
    """Answer until the questions end; returns the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process itself
    answers = os.dup(1)
    events = EventWriter(answers)
    os.dup2(2, 1)  # what libraries print must not stand among the events
    bound_memory(LIMIT)
    with hidden([*NOT_HERE, *sys.argv[1:]]):
        quiet_libraries()
        for name in USUAL:
            importlib.import_module(name)
        _answer(events)
    return 0


def _answer(events: EventWriter) -> None:
    from anygauge.planning.run import rehearse_run

    registry = Registry.load()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            run = parse_run(question["run"])
            backend = registry.create_backend(question["backend"], run.backend_options)
            found = rehearse_run(run, registry, backend, question["world_size"], question["rank"])
        except AnygaugeError as error:
            events.send("refused", error=type(error).__name__, message=str(error))
        except Exception as error:
            traceback.print_exc()
            said = (str(error).strip() or "no reason given").splitlines()[0]
            message = f"the rehearsal ended with {type(error).__name__}: {said}"
            events.send("refused", error="AnygaugeError", message=message)
        else:
            events.send("rehearsed", found=found.record())


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here
