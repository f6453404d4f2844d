"""The process that checks a run before its ranks start: ``python -m anygauge.training.preflight``.

It reads a `Question` from standard input (JSON) and answers with events on standard output;
`anygauge.cli.preflight` starts it, for a run and for a dry run. No device is opened.

torch alone takes longer to import than all else does here, and the model library imports much of it
for a configuration. So it is hidden from that library, unless the model itself must be built.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from importlib.util import find_spec
from typing import NoReturn

from anygauge.config.resolved import parse_run
from anygauge.interface import AnygaugeError
from anygauge.training.checks import FINDINGS, QUESTION, check_run, nothing
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent
from anygauge.util.text import describe

GIB = 2**30
MODEL_LIMIT = 4 * GIB
"""Memory for building a model without its weights, in bytes."""
SHARE_OF_MEMORY = 0.75
"""Of this machine, for the rows."""
WITH_TORCH = "--with-torch"
"""Argument of the process: hide nothing."""


def hide_torch() -> None:
    """Have this process run as if torch were not installed, by Python's way to forbid an import."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def misses_torch(error: BaseException) -> bool:
    """Whether an error may be one only because torch is hidden."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ImportError) or "torch" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def failed(error: Exception) -> dict[str, str]:
    """The event that an error of the checks comes to: a refusal, unless torch is not installed."""
    if isinstance(error, AnygaugeError):
        return {"event": "refused", "error": type(error).__name__, "message": str(error)}
    if find_spec("torch") is None and misses_torch(error):
        return {"event": "unchecked", "message": "torch is not installed here"}
    message = f"the checks before the run failed: {describe(error)}"
    return {"event": "refused", "error": "AnygaugeError", "message": message}


def begin_again_with_torch(text: str, answers: int) -> NoReturn:
    """Replace this process by one that answers the same question with torch.

    Args:
        text: the question.
        answers: descriptor that events go to.
    """
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.dup2(answers, 1)
        argv = [sys.executable, "-m", "anygauge.training.preflight", WITH_TORCH]
        os.execv(sys.executable, argv)


def bound_memory(limit: int) -> None:
    """Let this process have so many bytes, or all that it may have if that is less."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def main() -> int:
    """Answer one question; returns the exit status, which is 0 if an answer was given."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process itself
    text = sys.stdin.read()
    question = QUESTION.validate_json(text)
    with_torch = WITH_TORCH in sys.argv[1:]
    # What libraries print must not stand among the events.
    answers = os.dup(1)
    events = EventWriter(answers)
    os.dup2(2, 1)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def enter(part: str) -> None:
        bound_memory(MODEL_LIMIT if part == "model" else int(installed * SHARE_OF_MEMORY))
        events.send("part", name=part)

    try:
        run = parse_run(question.run)
        hide = nothing if with_torch else hide_torch
        found = check_run(question, run, events.message, enter, hide)
    except MemoryError:
        events.send("refused", error="AnygaugeError", message="out of memory")
    except Exception as error:
        if sys.modules.get("torch", error) is None and misses_torch(error):
            begin_again_with_torch(text, answers)
        events.send(**failed(error))
    else:
        events.send("checked", found=FINDINGS.dump_python(found, mode="json"))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here
