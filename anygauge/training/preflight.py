"""The process that checks a run before its ranks start: ``python -m anygauge.training.preflight``.

It reads a question from standard input (JSON) and answers with events on standard output;
`anygauge.cli.preflight` starts it, for a run and for a dry run; also to tokenise rows and to render
a prompt, since chat templates are run nowhere else. No device is opened.

torch alone takes longer to import than all else does here, and the model library imports much of it
for a configuration. So it is hidden from that library, unless the model itself must be built.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

from anygauge.config.resolved import parse_run
from anygauge.config.schema import ModelSection
from anygauge.data.rows import share_of_memory
from anygauge.interface import AnygaugeError
from anygauge.models.quiet import quiet_libraries
from anygauge.models.tokenizer import load_tokenizer
from anygauge.training.checks import FINDINGS, QUESTION, check_run, nothing
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent
from anygauge.util.text import describe

GIB = 2**30
MODEL_LIMIT = 4 * GIB
"""Memory for building a model without its weights, in bytes."""
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


def bound_memory(limit: int) -> int:
    """Let this process have so many bytes, or all that it may have if that is less; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    return limit


class PreflightEvents:
    """What the process tells of its work, and the limits of that.

    Args:
        with_torch: hide nothing.

    Attributes:
        limit: bytes that this process may have.
    """

    def __init__(self, events: EventWriter, *, with_torch: bool) -> None:
        self.hide = nothing if with_torch else hide_torch
        self.log = events.message
        self.limit = MODEL_LIMIT
        self._events = events

    def enter(self, part: str) -> None:
        """Begin with ``model`` or ``data``."""
        share = MODEL_LIMIT if part == "model" else share_of_memory(1)
        self.limit = bound_memory(share)
        self._events.send("part", name=part)

    def rendering(self, template: str, row: str) -> None:
        """See `anygauge.data.template.Rendering`."""
        self._events.send("rendering", template=template, row=row)


def check(asked: Mapping[str, Any], reports: PreflightEvents) -> dict[str, Any]:
    """Check a run; `asked` has the fields of a `Question`."""
    question = QUESTION.validate_python(asked)
    found = check_run(
        question,
        parse_run(question.run),
        reports.log,
        reports.enter,
        reports.hide,
        reports.rendering,
    )
    return {"found": FINDINGS.dump_python(found, mode="json")}


def tokenise(asked: Mapping[str, Any], reports: PreflightEvents) -> dict[str, Any]:
    """Put a run's rows in the cache; `asked`: ``run``, and ``id`` and ``first`` of `prepare`.

    Of streamed rows, the answer has the ``steps`` of the run.
    """
    from anygauge.data import Layout, prepare, training_batches

    run = parse_run(asked["run"])
    reports.enter("model")
    reports.hide()
    quiet_libraries()
    tokenizer = load_tokenizer(run.model)
    reports.enter("data")
    prepare(
        run.data,
        tokenizer,
        run.train.seed,
        log=reports.log,
        run=asked["id"],
        first=asked["first"],
        rendering=reports.rendering,
    )
    if not run.data.streaming:
        return {}
    streamed = prepare(
        run.data, tokenizer, run.train.seed, log=reports.log, rendering=reports.rendering
    ).train
    layout = Layout(micro_batch=1, max_length=run.data.max_length, pad_id=0)
    batches = training_batches(streamed, run.data, run.train, layout)
    return {"steps": batches.steps}


def render(asked: Mapping[str, Any], reports: PreflightEvents) -> dict[str, Any]:
    """The tokens of a prompt in its chat template, and those that end an answer.

    `asked`: ``model`` (the section), ``chat_template`` and ``chat_template_kwargs`` (of the data
    section) and ``prompt``; where that is None, a tokenizer without a template has no tokens that
    end an answer.
    """
    from anygauge.data.template import ChatTemplate, end_of_turn_ids, read_template

    reports.enter("model")
    reports.hide()
    quiet_libraries()
    tokenizer = load_tokenizer(ModelSection(**asked["model"]))
    given, kwargs = read_template(asked["chat_template"]), asked["chat_template_kwargs"]
    if asked["prompt"] is None:
        ends = end_of_turn_ids(tokenizer, given, reports.rendering, kwargs=kwargs)
        return {"ids": [], "stop_ids": ends}
    template = ChatTemplate(tokenizer, given, reports.rendering, kwargs=kwargs)
    template.row = "the prompt"
    return {"ids": template.question_ids(asked["prompt"]), "stop_ids": template.stop_ids()}


TASKS: Mapping[str, Callable[[Mapping[str, Any], PreflightEvents], dict[str, Any]]] = {
    "check": check,
    "tokenise": tokenise,
    "render": render,
}


def main() -> int:
    """Answer one question; returns the exit status, which is 0 if an answer was given."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process itself
    text = sys.stdin.read()
    asked = json.loads(text)
    # What libraries print must not stand among the events.
    answers = os.dup(1)
    events = EventWriter(answers)
    os.dup2(2, 1)
    reports = PreflightEvents(events, with_torch=WITH_TORCH in sys.argv[1:])
    try:
        answer = TASKS[asked["task"]](asked["fields"], reports)
    except MemoryError:
        events.send("out_of_memory", limit=reports.limit)
    except Exception as error:
        if sys.modules.get("torch", error) is None and misses_torch(error):
            begin_again_with_torch(text, answers)
        events.send(**failed(error))
    else:
        events.send("answered", **answer)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here
