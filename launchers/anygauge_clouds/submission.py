"""Handing a job to a service whose machines do not see this machine's files."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, JsonValue, StringConstraints

from anygauge.interface import (
    REPOSITORY_VARIABLE,
    Job,
    LauncherOptions,
    LaunchProfile,
    RunFileError,
)

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""

_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")


def _folder(path: str) -> str:
    plain = path.rstrip("/")
    if not re.fullmatch(r"/[A-Za-z0-9._/-]*[A-Za-z0-9._-]", plain) or ".." in plain.split("/"):
        raise ValueError("an absolute folder is needed, of letters, digits and ._/- alone")
    if plain.split("/")[1] in _SYSTEM:
        raise ValueError(f"/{plain.split('/')[1]} is the image's own; choose another folder")
    return plain


Folder = Annotated[str, AfterValidator(_folder)]
"""An absolute path on the machines of the job."""

Image = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?$")
]
"""A container image."""


class CloudOptions(LauncherOptions):
    """Options that the clouds' launchers share.

    Attributes:
        image: container image with anygauge in it; the backend's own by default.
        in_image: folders of the image that the run file may name.
        python: the interpreter in the image.
        extra: further fields of what is submitted, under the service's names; they win.
    """

    image: Image | None = None
    in_image: list[Folder] = Field(default_factory=list)
    python: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./+-]+$")] = "python3"
    extra: dict[str, JsonValue] = Field(default_factory=dict)

    def image_for(self, job: Job, profile: LaunchProfile) -> str:
        """The image to run.

        Raises:
            RunFileError: the options name none, and the backend has none.
        """
        found = self.image or profile.image
        if found is None:
            raise RunFileError(
                f"launch.options.image: the {job.backend} backend names no image of its own: name "
                "one that has anygauge in it"
            )
        return found

    def notes_for(self, profile: LaunchProfile) -> tuple[str, ...]:
        """What the user should know before: the machines may not have the image."""
        image = profile.image
        if self.image is not None or image is None or "/" in image:
            return ()
        return (
            f"launch.options.image: {image} is not on a registry, and the job fails on machines "
            "that do not have it. Build it, push it, and name its repository in "
            f"{REPOSITORY_VARIABLE}, or the whole image here (docs/images.md)",
        )


def read_template(name: str) -> Any:
    """A file beside this one: what is submitted, with ``$name`` where values go."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """A template with its values; fields whose value is None are left out."""
    if isinstance(template, dict):
        made = {key: fill(part, values) for key, part in template.items()}
        return {key: part for key, part in made.items() if part is not None}
    if isinstance(template, list):
        return [fill(part, values) for part in template]
    if isinstance(template, str) and template.startswith("$"):
        # A copy: YAML would write what stands at two places as a reference.
        return copy.deepcopy(values[template[1:]])
    return template


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Both, section by section; where both have a value, that of `extra`. None removes one."""
    made = dict(base)
    for key, value in extra.items():
        old = made.get(key)
        sections = isinstance(old, dict) and isinstance(value, dict)
        made[key] = merge(dict(old or {}), value) if sections else value
    return {key: value for key, value in made.items() if value is not None}


def relocate(job: Job, run_directory: str) -> Job:
    """The job as its machines see it, with this run directory on their storage."""
    moved = replace(
        job,
        run_directory=run_directory,
        run_file=f"{run_directory}/{Path(job.run_file).name}",
        # On a disk of the machine's own: network storage may lack the locks that this takes.
        rendezvous=f"file:///tmp/anygauge-{submission_id(job) or 'rendezvous'}",
        working_directory="",
        resume=True,
    )
    # What another job has left stays until the ranks accept (`anygauge.launch.startup`).
    return moved.as_attempt() if job.takes_over else moved


def service_name(job: Job, limit: int) -> str:
    """The run's name as services accept it: at most `limit` of lower case, digits and dashes.

    It ends with the submission's id, so that a run can be submitted again.
    """
    end = f"-{submission_id(job)}" if submission_id(job) else ""
    text = re.sub(r"[^a-z0-9]+", "-", Path(job.run_directory).name.lower()).strip("-")
    if not text[:1].isalpha():
        text = f"run-{text}"
    return text[: limit - len(end)].rstrip("-") + end


def submission_id(job: Job) -> str:
    """Differs from submission to submission; empty for a plan that is only written."""
    return hashlib.sha256(job.token.encode()).hexdigest()[:8] if job.token else ""
