"""The process that plans runs: ``python -m anygauge.planning``; see `anygauge.planning.process`.

It reads one question per line of standard input (JSON) and answers each with one event on standard
output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from anygauge.util.processes import die_with_parent

if TYPE_CHECKING:
    from anygauge.util.events import EventWriter

LIMIT = 8 * 2**30
"""Memory of this process, in bytes: a plan that needs more has met something that it should not."""


def main() -> int:
    """Answer until the questions end; returns the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process itself
    from anygauge.models.quiet import quiet_libraries
    from anygauge.training.preflight import bound_memory
    from anygauge.util.events import EventWriter

    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not stand among the events
    bound_memory(LIMIT)
    quiet_libraries()
    _answer(EventWriter(answers))
    return 0


def _answer(events: EventWriter) -> None:
    # All of it takes longer than a question needs to be made.
    import peft  # noqa: F401
    import transformers.masking_utils
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401

    from anygauge.config.resolved import parse_run
    from anygauge.planning.plan import plan_run
    from anygauge.registry import Registry
    from anygauge.util.errors import AnygaugeError

    registry = Registry.load()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            run = parse_run(question["run"])
            backend = registry.create_backend(question["backend"], run.backend_options)
            found = plan_run(run, registry, backend, question["world_size"])
        except AnygaugeError as error:
            events.send("refused", error=type(error).__name__, message=str(error))
        except Exception as error:
            traceback.print_exc()
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            message = f"the run cannot be planned: {type(error).__name__}: {reason}"
            events.send("refused", error="AnygaugeError", message=message)
        else:
            events.send("planned", found=found.record())


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here
