"""The checks before a run's ranks start, for a run and its dry run alike; nothing is written yet.

Settings are checked here. Model and rows are checked in a process of its own: it is bounded in time
and memory, asks no network, and what it imports is gone with it. The same process runs the chat
templates for `anygauge data`, `generate` and `merge`: a template comes with a model, and may go on
for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import IO, TYPE_CHECKING, Any

import typer

from anygauge.interface import AnygaugeError, DataError
from anygauge.launch.event_format import size
from anygauge.util import errors
from anygauge.util.processes import describe_exit, parent_environment

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.config.schema import DataSection, ModelSection, RunFile
    from anygauge.training.checks import Findings, Question

LIMITS_S = {"model": 120.0, "data": 1800.0}
"""Silence after which a part counts as hung. Tokenising reports from time to time; a digest of a
large file, or the wait for another run that tokenises the same rows, does not."""
RENDERING_LIMIT_S = 60.0
"""For one rendering of a chat template, which takes milliseconds; a second for a thousand turns."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Copies of the hub's files alone are looked at, and no threads are made for work that is not
there."""

_TAIL = 2000
_END_S = 10.0


def preflight(intent: Intent, *, engine: bool = False, quiet: bool = False) -> Findings:
    """Check a run as far as this machine can without a device.

    Args:
        engine: also have the engine's settings, for a dry run.
        quiet: show warnings alone.

    Raises:
        AnygaugeError: what ranks would refuse.
    """
    from anygauge.config.resolved import run_json
    from anygauge.training.checks import Question, check_settings

    run, job = intent.run, intent.job
    spec = intent.registry.find_launcher(run.launch.launcher).spec
    backend = intent.registry.create_backend(intent.selection.spec.name, run.backend_options)
    check_settings(
        run,
        backend,
        intent.registry,
        ranks_run_here=intent.selection.probe.available and not spec.remote,
    )
    question = Question(
        run=run_json(run.model_copy(update={"environment": {}})),
        backend=job.backend,
        world_size=job.world_size,
        id=job.id,
        has_files=spec.shared_filesystem,
        engine=engine,
    )
    # As ranks have it: what the user has set wins over the run file.
    environ = {**run.environment, **os.environ}
    # Where ranks run on other machines, the agents there fetch.
    notes = [] if spec.remote else fetch_model(run.model, environ, engine=engine, quiet=quiet)
    devices, cores = job.launch.devices, len(os.sched_getaffinity(0))
    if devices > cores and not spec.remote:
        notes.append(
            f"--devices {devices}: these ranks share {cores} processor cores and wait for each "
            f"other; {cores} or fewer are usually faster"
        )
    found = ask(question, {**environ, **ENVIRONMENT}, quiet=quiet)
    return replace(found, notes=[*notes, *found.notes])


def fetch_model(
    section: ModelSection, environ: Mapping[str, str], *, engine: bool, quiet: bool
) -> list[str]:
    """Fetch what the run needs of the hub; for a dry run, what tells of the model without weights.

    Returns:
        What a dry run notes of what it did not fetch.

    Raises:
        ModelError: the hub has no such model, or does not give it.
    """
    from anygauge.cli.fetch import fetched
    from anygauge.models.hub import readable_size, wanted
    from anygauge.models.hub_errors import HubUnreachableError

    try:
        left = fetched(wanted(section, weights=not engine), environ, quiet=quiet)
    except HubUnreachableError as error:
        if not engine:
            raise
        return [f"the run would be refused: {error}"]
    if not left:
        return []
    return [f"the weights were not checked: a run would first fetch them, {readable_size(left)}"]


def ask(question: Question, environ: Mapping[str, str], *, quiet: bool = False) -> Findings:
    """Have a process of its own check model and rows.

    Raises:
        AnygaugeError: what ranks would refuse; or the process hung or was killed.
    """
    from anygauge.training.checks import FINDINGS, Findings

    event = _answer("check", asdict(question), environ, quiet=quiet)
    if event["event"] == "unchecked":
        return Findings(notes=[f"only the ranks will check model and rows: {event['message']}"])
    return FINDINGS.validate_python(event["found"])


def tokenise(run: RunFile, start: str, *, first: int | None) -> int | None:
    """Put a run's rows in the cache; without one, see that they can be tokenised.

    Returns:
        Steps of the run, where its rows are streamed.

    Args:
        start: what tells this command from others; see `anygauge.data.prepare`.
        first: so many rows of each source alone; None: all.

    Raises:
        AnygaugeError: the rows cannot be used; or the process hung or was killed.
    """
    from anygauge.config.paths import is_remote
    from anygauge.config.resolved import run_json

    sources = (*run.data.train_sources, *run.data.eval_sources)
    offline = {} if any(is_remote(source.path) for source in sources) else ENVIRONMENT
    fields = {"run": run_json(run), "id": start, "first": first}
    return _answered("tokenise", fields, {**os.environ, **offline}).get("steps")


def render(
    section: ModelSection, data: DataSection | None, prompt: str | None
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt in its chat template, and those that end an answer.

    Args:
        data: of the run, with its chat template; None: the tokenizer's.
        prompt: None asks for the second alone, of which there are none without a template.

    Raises:
        AnygaugeError: there is no template, or it does not take the prompt; or it was ended.
    """
    fields = {
        "model": section.model_dump(mode="json"),
        "chat_template": None if data is None else data.chat_template,
        "chat_template_kwargs": {} if data is None else data.chat_template_kwargs,
        "prompt": prompt,
    }
    event = _answered("render", fields, {**os.environ, **ENVIRONMENT})
    return event["ids"], event["stop_ids"]


def _answered(task: str, fields: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    event = _answer(task, fields, environ)
    if event["event"] == "unchecked":
        raise AnygaugeError(f"{event['message']}, and this tokenizer needs it")
    return event


def _answer(
    task: str, fields: Mapping[str, Any], environ: Mapping[str, str], *, quiet: bool = False
) -> dict[str, Any]:
    """The last event of a process that has one task; see `anygauge.training.preflight`.

    Raises:
        AnygaugeError: what the process refuses; or it hung or was killed.
    """
    with tempfile.TemporaryFile() as output, _started(environ, output) as process:
        assert process.stdin is not None and process.stdout is not None
        events = _Events(process.stdout.fileno(), task)
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps({"task": task, "fields": fields}).encode())
            for event in events:
                match event["event"]:
                    case "message" if not quiet:
                        typer.echo(event["text"], err=True)
                    case "refused":
                        raise getattr(errors, event["error"], AnygaugeError)(event["message"])
                    case "out_of_memory":
                        raise events.out_of_memory(event["limit"])
                    case "answered" | "unchecked":
                        return event
        except TimeoutError:
            raise events.hung() from None
        except BrokenPipeError:
            pass  # it ended before it had read the question
        raise events.broken(_ended(process), output)


@contextlib.contextmanager
def _started(environ: Mapping[str, str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which is gone afterwards, whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "anygauge.training.preflight"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        env={**environ, **parent_environment()},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _ended(process: subprocess.Popen[bytes]) -> int:
    """How a process ended that has nothing more to say; one that does not end is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_END_S)
    process.kill()
    return process.wait()


class _Events:
    """What the process reports, until it closes its end; and what to say of one that was ended.

    Attributes:
        part: what it is at.
    """

    def __init__(self, descriptor: int, task: str) -> None:
        self.part = "model"
        self._has_run_file = task != "render"
        self._template = self._row = ""  # what is being rendered
        self._descriptor = descriptor

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each event.

        Raises:
            TimeoutError: nothing came for longer than the limit of its part.
        """
        text = b""
        while select.select([self._descriptor], [], [], self._limit_s)[0]:
            new = os.read(self._descriptor, 2**16)
            if not new:
                return
            *lines, text = (text + new).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] == "part":
                    self.part = event["name"]
                elif event["event"] == "rendering":
                    self._template, self._row = event["template"], event["row"]
                yield event
        raise TimeoutError

    def hung(self) -> AnygaugeError:
        """Nothing came for longer than it may."""
        if self._row:
            return self._ended_rendering(
                f"has not rendered {self._row} within {self._limit_s:.0f} s, and may loop for ever"
            )
        if not self._has_run_file:
            return AnygaugeError(
                f"the tokenizer has not been loaded within {self._limit_s:.0f} s. Look at the disk "
                "that holds it"
            )
        return AnygaugeError(
            f"the checks before the run have hung: no progress for {self._limit_s:.0f} "
            f"s on the run file's '{self.part}' section. Look at that section, at regular "
            "expressions for names of layers or weights, and at the disks that hold the paths "
            "in it"
        )

    def out_of_memory(self, limit: int) -> AnygaugeError:
        """It needed more than so many bytes."""
        if self._row:
            return self._ended_rendering(f"took more than {size(limit)} to render {self._row}")
        return AnygaugeError(f"out of memory: the process may have {size(limit)}")

    def broken(self, code: int, output: IO[bytes]) -> AnygaugeError:
        """It ended without an answer; `output` is what it printed."""
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - _TAIL))
        lines = output.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        if self._row:
            return self._ended_rendering(
                f"was to render {self._row}, and its process ended with {describe_exit(code)}"
                f"{last}. There may be too little memory"
            )
        if not self._has_run_file:
            return AnygaugeError(
                f"the process that loads the tokenizer ended with {describe_exit(code)}{last}. "
                "There may be too little memory"
            )
        return AnygaugeError(
            f"the process that checks the run file's '{self.part}' section before the run ended "
            f"with {describe_exit(code)}{last}. There may be too little memory; the run would fail "
            "in the same way"
        )

    @property
    def _limit_s(self) -> float:
        return RENDERING_LIMIT_S if self._row else LIMITS_S[self.part]

    def _ended_rendering(self, what: str) -> DataError:
        way_out = "or the row, or give another data.chat_template"
        if not self._has_run_file:
            way_out = "or give another --tokenizer (`generate --raw` asks without a template)"
        return DataError(f"{self._template} {what}. Correct the template {way_out}")
