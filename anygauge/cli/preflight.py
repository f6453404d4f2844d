"""The checks before a run's ranks start, for a run and its dry run alike; nothing is written yet.

Settings are checked here. Model and rows are checked in a process of its own: it is bounded in time
and memory, asks no network, and what it imports is gone with it.
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

from anygauge.interface import AnygaugeError
from anygauge.util import errors
from anygauge.util.processes import describe_exit, parent_environment

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.config.schema import ModelSection
    from anygauge.training.checks import Findings, Question

LIMITS_S = {"model": 120.0, "data": 1800.0}
"""Silence after which a part counts as hung. Tokenising reports from time to time; a digest of a
large file, or the wait for another run that tokenises the same rows, does not."""

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
    found = None
    with tempfile.TemporaryFile() as output, _started(environ, output) as process:
        assert process.stdin is not None and process.stdout is not None
        events = _Events(process.stdout.fileno())
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(asdict(question)).encode())
            for event in events:
                if event["event"] == "message" and not quiet:
                    typer.echo(event["text"], err=True)
                elif event["event"] == "refused":
                    raise getattr(errors, event["error"], AnygaugeError)(event["message"])
                elif event["event"] in ("checked", "unchecked"):
                    found = _findings(event)
        except TimeoutError:
            raise AnygaugeError(
                f"the checks before the run have hung: no progress for {LIMITS_S[events.part]:.0f} "
                f"s on the run file's '{events.part}' section. Look at that section, at regular "
                "expressions for names of layers or weights, and at the disks that hold the paths "
                "in it"
            ) from None
        except BrokenPipeError:
            pass  # it ended before it had read the question
        if found is None:
            raise _broken(events.part, _ended(process), output)
    return found


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
    """What the process reports, until it closes its end.

    Attributes:
        part: what it is at.
    """

    def __init__(self, descriptor: int) -> None:
        self.part = "model"
        self._descriptor = descriptor

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each event.

        Raises:
            TimeoutError: nothing came for longer than the limit of its part.
        """
        text = b""
        while select.select([self._descriptor], [], [], LIMITS_S[self.part])[0]:
            new = os.read(self._descriptor, 2**16)
            if not new:
                return
            *lines, text = (text + new).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] == "part":
                    self.part = event["name"]
                yield event
        raise TimeoutError


def _findings(event: Mapping[str, Any]) -> Findings:
    from anygauge.training.checks import FINDINGS, Findings

    if event["event"] == "unchecked":
        return Findings(notes=[f"only the ranks will check model and rows: {event['message']}"])
    return FINDINGS.validate_python(event["found"])


def _broken(part: str, code: int, output: IO[bytes]) -> AnygaugeError:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - _TAIL))
    lines = output.read().decode(errors="replace").strip().splitlines()
    last = f": {lines[-1].strip()}" if lines else ""
    return AnygaugeError(
        f"the process that checks the run file's '{part}' section before the run ended with "
        f"{describe_exit(code)}{last}. There may be too little memory; the run would fail in the "
        "same way"
    )
