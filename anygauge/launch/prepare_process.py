"""The process that prepares a run before its ranks start:
``python -m anygauge.launch.prepare_process``.

It reads a `PrepareRequest` from standard input and answers with events on standard output;
`anygauge.launch.prepare_call` starts it and says what it died of. Its stages are fetch (a model of
the hub), check (model and rows; these are then in the cache), plan (memory), and for commands
without a run rows and render: chat templates are run nowhere else. No device is opened.

The stage fetch alone has the network, and rows of other machines. What asks no network must know
it before the hub's library is imported, so after a fetch the process executes itself again.

torch alone takes longer to import than all else does here, and the model library imports much of it
for a configuration. So it is hidden from that library, unless the model itself must be built or a
plan is made; where only that explains an error, the process executes itself again with torch.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from importlib.util import find_spec
from typing import Any, NoReturn

from anygauge.interface import AnygaugeError
from anygauge.launch.prepare_request import PrepareRequest
from anygauge.launch.prepare_stages import Stages
from anygauge.models.hub import HubUnreachableError
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent
from anygauge.util.text import describe


def misses_torch(error: BaseException) -> bool:
    """Whether an error may be one only because torch is hidden."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ImportError) or "torch" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def failure_event(error: Exception, stage: str) -> dict[str, Any]:
    """The event that an error comes to: a refusal, unless torch is not installed."""
    if isinstance(error, AnygaugeError):
        # The other end knows the kinds that all packages share, with their exit status.
        is_hub = isinstance(error, HubUnreachableError)
        kind = HubUnreachableError.__name__ if is_hub else error.kind
        return {"event": "refused", "error": kind, "message": str(error)}
    if find_spec("torch") is None and misses_torch(error):
        return {"event": "found", "fields": {"unchecked": "torch is not installed here"}}
    traceback.print_exc()
    kind, what = ("AnygaugeError", "the checks before the run failed")
    if stage == "fetch":
        kind, what = "ModelError", "fetching the model failed"
    return {"event": "refused", "error": kind, "message": f"{what}: {describe(error)}"}


def begin_again(request: PrepareRequest, answers: int) -> NoReturn:
    """Replace this process by one that has another request.

    Args:
        answers: descriptor that events go to.
    """
    with tempfile.TemporaryFile() as file:
        file.write(request.model_dump_json().encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.dup2(answers, 1)
        os.execv(sys.executable, [sys.executable, "-m", "anygauge.launch.prepare_process"])


def main() -> int:
    """Answer one request; returns the exit status, which is 0 if an answer was given."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    request = PrepareRequest.model_validate_json(sys.stdin.buffer.read())
    # What libraries print must not stand among the events.
    answers = os.dup(1)
    events = EventWriter(answers)
    os.dup2(2, 1)
    if not request.has_network:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    stages = Stages(request, events)
    try:
        if request.needs_fetch:
            stages.fetch()
            if request.stages:
                begin_again(request.model_copy(update={"fetched": True}), answers)
        stages.run()
    except MemoryError:
        events.send("out_of_memory", limit=stages.limit)
    except Exception as error:
        if sys.modules.get("torch", error) is None and misses_torch(error):
            begin_again(request.model_copy(update={"with_torch": True}), answers)
        events.send(**failure_event(error, stages.stage))
    events.send("done")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here, nor a download that still runs
