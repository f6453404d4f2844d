"""A job that was brought to machines of another storage: what it needs is put where it belongs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from anygauge.interface import AnygaugeError, Job
from anygauge.util.files import write_text
from anygauge.util.start import START, settled

RECORD = "run.yaml"
"""The run for people, and for the commands that use what it made."""
OWNER = "job.sha256"
"""In a run directory: whose it is; a record of the last job that asked for it."""


def claim(job: Job, node_rank: int) -> None:
    """Look whether the run directory is this job's, before anything is written there.

    The coordinator makes it so, and puts the run file there: into `START`, if it takes over another
    job's run, whose files stay until the ranks accept. A cluster may start the same job again, with
    all its containers: that is another attempt, which finds its own claim and resumes from the
    newest checkpoint.

    Raises:
        AnygaugeError: the run directory holds the run of another job, or cannot be written.
    """
    folder = Path(job.run_directory)
    own = hashlib.sha256((job.token + job.run_text).encode()).hexdigest()
    with _written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / OWNER
        if not job.takes_over and _is_taken(mark, own, coordinator=node_rank == 0):
            raise AnygaugeError(
                f"{folder} holds another job's run: give this one another 'name', or resume that "
                "one with --resume auto"
            )
        path = Path(job.run_file)
        if path.parent.name == START and _is_anothers(mark, own):
            path.parent.mkdir(exist_ok=True)  # every machine's logs of this start go there
        if node_rank != 0:
            return
        if path.parent.is_dir() and path.parent.name == START:
            _write_run(path, job)
            write_text(mark, own + "\n")
        else:
            write_text(mark, own + "\n")  # first: a run without it is of another job
            _write_run(settled(path), job)


def _write_run(path: Path, job: Job) -> None:
    from anygauge.config import dump_run, parse_run  # no other agent waits for the schema

    write_text(path, job.run_text, 0o600)
    write_text(path.with_name(RECORD), dump_run(parse_run(job.run_text)), 0o600)


def bring_run_file(job: Job) -> None:
    """Put the run file where this machine's ranks look for it, once the nodes have met.

    Raises:
        AnygaugeError: it cannot be written.
    """
    path = settled(Path(job.run_file))
    with _written(path.parent):
        if not path.exists() or path.read_text() != job.run_text:
            write_text(path, job.run_text, 0o600)


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AnygaugeError(
            f"{folder} cannot be written: {error}. It must be on the storage that the job mounts"
        ) from error


def _is_anothers(mark: Path, own: str) -> bool:
    """Whether a run is there that this job would go on with, and is none of its own attempts."""
    # In this order: the coordinator may be marking an empty folder now.
    there = (mark.parent / RECORD).exists()
    return mark.read_text().strip() != own if mark.exists() else there


def _is_taken(mark: Path, own: str, *, coordinator: bool) -> bool:
    if mark.exists():
        return mark.read_text().strip() != own
    # The first of several machines marks it; what is there without a mark was there before.
    left = ("metrics.jsonl", "checkpoints")
    return coordinator and any((mark.parent / name).exists() for name in left)


def read_secrets(folder: str) -> dict[str, str]:
    """Variables from a folder that holds one file for each, named like it.

    Raises:
        AnygaugeError: it cannot be read.
    """
    try:
        return {
            file.name: file.read_text()
            for file in sorted(Path(folder).iterdir())
            # A mounted volume keeps its versions in folders beside.
            if file.is_file() and not file.name.startswith(".")
        }
    except (OSError, UnicodeDecodeError) as error:
        raise AnygaugeError(f"{folder} is not a folder of secrets: {error}") from error
