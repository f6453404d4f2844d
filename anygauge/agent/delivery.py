"""A job that was brought to machines of another storage: what it needs is put where it belongs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from anygauge.interface import AnygaugeError, Job
from anygauge.interface.files import write_text

OWNER = "job.sha256"
"""In a run directory: whose it is."""


def put_in_place(job: Job, node_rank: int) -> None:
    """Write the run file that the job carries; the head claims the run directory first.

    A cluster may start the same job again, with all its containers: that is another attempt, which
    finds its own claim and goes on from the newest checkpoint.

    Raises:
        AnygaugeError: the run directory holds the run of another job, or cannot be written.
    """
    folder = Path(job.run_directory)
    own = hashlib.sha256((job.token + job.run_text).encode()).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / OWNER
        if node_rank == 0:
            if not job.takes_over and _is_taken(folder, mark, own):
                raise AnygaugeError(
                    f"{folder} holds another job's run: give this one another 'name', or go on "
                    "there with --resume auto"
                )
            write_text(mark, own + "\n")
        write_text(job.run_file, job.run_text)
    except OSError as error:
        raise AnygaugeError(
            f"{folder} cannot be written: {error}. It must be on the storage that the job mounts"
        ) from error


def _is_taken(folder: Path, mark: Path, own: str) -> bool:
    if mark.exists():
        return mark.read_text().strip() != own
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()


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
        raise AnygaugeError(f"{folder}: no folder of secrets: {error}") from error
