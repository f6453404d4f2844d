"""What launchers share whose machines do not see this one's files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from anygauge.interface import (
    REPOSITORY_VARIABLE,
    AnygaugeError,
    Job,
    Plan,
    PlannedFile,
    RunFileError,
)
from anygauge.util.files import write_text
from anygauge.util.start import START
from anygauge_launchers.clients import NoAnswerError, ask
from anygauge_launchers.options import Options

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""


_OF_THE_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")


def _folder(path: str) -> str:
    plain = path.rstrip("/")
    if not re.fullmatch(r"/[A-Za-z0-9._/-]*[A-Za-z0-9._-]", plain) or ".." in plain.split("/"):
        raise ValueError("an absolute folder is needed, of letters, digits and ._/- alone")
    if plain.split("/")[1] in _OF_THE_SYSTEM:
        raise ValueError(f"/{plain.split('/')[1]} is the image's own; choose another folder")
    return plain


Folder = Annotated[str, AfterValidator(_folder)]
"""An absolute path on the machines of the job."""

Image = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?$")
]
"""A container image."""


class ApartOptions(Options):
    """Options of launchers that bring a job to machines of another storage.

    Attributes:
        image: container image with anygauge in it; the backend's own by default.
        in_image: folders of the image that the run file may name.
        python: the interpreter there.
    """

    image: Image | None = None
    in_image: list[Folder] = Field(default_factory=list)
    python: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./+-]+$")] = "python3"

    def image_for(self, job: Job) -> str:
        """The image to run.

        Raises:
            RunFileError: none is given, and the backend has none.
        """
        found = self.image or job.profile.image
        if found is None:
            raise RunFileError(
                f"launch.options.image: the {job.backend} backend names no image of its own: name "
                "one that has anygauge in it"
            )
        return found

    def notes_for(self, job: Job) -> tuple[str, ...]:
        """What the user should know before: an image that the machines may not have."""
        image = job.profile.image
        if self.image is not None or image is None or "/" in image:
            return ()
        return (
            f"launch.options.image: {image} is not on a registry, and the job fails on machines "
            "that do not have it. Build it, push it, and name its repository in "
            f"{REPOSITORY_VARIABLE}, or the whole image here (docs/images.md)",
        )


def moved(job: Job, folder: str) -> Job:
    """The job as its machines see it, with this run directory."""
    run = Path(job.run_file).name
    return replace(
        job,
        run_directory=folder,
        # What another job has left stays until the ranks accept (`anygauge.agent.startup`).
        run_file=f"{folder}/{START}/{run}" if job.takes_over else f"{folder}/{run}",
        # On a disk of the machine's own: network storage may lack the locks that this takes.
        rendezvous=f"file:///tmp/anygauge-{mark_of(job) or 'rendezvous'}",
        working_directory="",
        resume=True,
    )


def short_name(job: Job, limit: int, *, marked: bool = False) -> str:
    """The run's name as clusters accept names: lower case, digits and dashes.

    Args:
        limit: most characters.
        marked: with an end that differs from submission to submission.
    """
    mark = f"-{mark_of(job)}" if marked and mark_of(job) else ""
    text = re.sub(r"[^a-z0-9]+", "-", Path(job.run_directory).name.lower()).strip("-")
    if not text[:1].isalpha():
        text = f"run-{text}"
    return text[: limit - len(mark)].rstrip("-") + mark


def filled_in(plan: Plan) -> None:
    """Write the plan's files; the variables that go along get their values now.

    Raises:
        AnygaugeError: a file cannot be written.
    """
    passed = {n: os.environ[n] for n in plan.pass_environment if n in os.environ}
    for file in plan.files:
        text = json.dumps(passed) if Path(file.path).name == VARIABLES else file.text
        try:
            write_text(file.path, text, file.mode)
        except OSError as error:
            raise AnygaugeError(f"{file.path} cannot be written: {error}") from error


def submitted(argv: Sequence[str], name: str) -> subprocess.CompletedProcess[str]:
    """Run the command that hands a job over.

    Raises:
        AnygaugeError: the client is missing.
        NoAnswerError: it did not answer, and the service may have the job all the same.
    """
    try:
        return ask(argv)
    except NoAnswerError as error:
        raise NoAnswerError(
            f"{error}. The service may have accepted the job all the same, as {name}"
        ) from error


def variables_file(folder: Path) -> PlannedFile:
    """The file of variables, still without any."""
    return PlannedFile(path=str(folder / VARIABLES), text="{}", mode=0o600)


VARIABLES = "variables.json"


def mark_of(job: Job) -> str:
    """What tells this submission from others; empty for a plan that is only written."""
    return hashlib.sha256(job.token.encode()).hexdigest()[:8] if job.token else ""
