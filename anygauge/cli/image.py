"""``anygauge image``: the container image of a backend, what is in it, and how to run it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.shared_options import BackendOption, JsonOption, choose_backend
from anygauge.interface import (
    REPOSITORY_VARIABLE,
    AnygaugeError,
    Backend,
    ImageRelease,
    LaunchProfile,
    UnsupportedError,
    UsageError,
    image_tag,
)
from anygauge.util.console import Console

ENGINES = ("docker", "podman")
INSIDE = "/work"
ARGUMENTS = "The anygauge command to run inside, such as `-- train run.yaml`; default: doctor."
RELEASE = "Another row of the backend's table of versions."
ENGINE = "docker or podman; default: the one that is installed."
VOLUME = "Another folder for the container, HERE:THERE[:ro]; repeatable."
RUN = "Run the image, with this folder as its working folder."


def image(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help=ARGUMENTS, metavar="-- COMMAND ...", show_default=False),
    ] = None,
    backend: BackendOption = None,
    release: Annotated[str | None, typer.Option(help=RELEASE)] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None,
    volume: Annotated[
        list[str] | None, typer.Option(help=VOLUME, metavar="HERE:THERE[:ro]")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help=RUN)] = False,
    json_: JsonOption = False,
) -> None:
    """Show a backend's container image, what is in it, and the command that runs it."""
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine: {engine} is not one of {', '.join(ENGINES)}")
    _, selection, chosen = choose_backend(backend, need_device=False)
    row = _find_release(chosen, release)
    name = chosen.launch.image if row is None or release is None else image_tag(chosen.name, row)
    if name is None:
        raise UnsupportedError(
            f"the {chosen.name} backend names no container image; a backend names one in its "
            "launch profile (docs/images.md)"
        )
    command = run_command(
        engine or _find_engine(ready=run),
        chosen.launch,
        name,
        arguments or ["doctor", "--backend", chosen.name, "--output", INSIDE],
        volumes=volume or (),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
    )
    if run:
        _exec_client(command, name)
    found: dict[str, Any] = {
        "backend": chosen.name,
        "reason": selection.reason,
        "image": name,
        "run": command,
        "releases": {one.name: one.built for one in chosen.launch.releases},
    }
    if row is not None:
        found["release"] = {k: v for k, v in asdict(row).items() if k not in ("built", "image")}
        if row.image is None:  # it is built from anygauge's sources
            target = f"{chosen.name}-{row.name.replace('.', '-')}"
            found["build"] = ["python", "docker/buildx.py", target]
    if json_:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show_image(found)


def run_command(
    engine: str,
    profile: LaunchProfile,
    name: str,
    arguments: Sequence[str],
    *,
    volumes: Sequence[str] = (),
    terminal: bool = False,
) -> list[str]:
    """Return the command that starts a container for one machine's devices.

    It runs as the user who starts it, so that what it writes into this folder is that user's.

    Args:
        engine: the program, such as ``docker``.
        terminal: whether it may ask and draw.
    """
    podman = engine == "podman"
    own = profile.podman_flags if podman else None
    return [
        *(engine, "run", "--rm"),
        *(("--interactive", "--tty") if terminal else ()),
        *(profile.container_flags if own is None else own),
        # Without root, podman's users are others inside unless it is set to keep them.
        *(("--userns=keep-id",) if podman and os.getuid() else ()),
        f"--user={os.getuid()}:{os.getgid()}",
        f"--volume={Path.cwd()}:{INSIDE}",
        *(f"--volume={one}" for one in volumes),
        f"--workdir={INSIDE}",
        name,
        *arguments,
    ]


def _show_image(found: dict[str, Any]) -> None:
    console = Console()
    console.print(f"Backend {found['backend']}: {found['reason']}", style="bold")
    row = found.get("release", {})
    others = [
        name if built else f"{name} (no image)"
        for name, built in found["releases"].items()
        if name != row.get("name")
    ]
    lines = {
        "image": found["image"],
        "base": row.get("base"),
        "has": ", ".join(map(" ".join, row.get("versions", {}).items())),
        "source": row.get("source"),
        "note": row.get("note"),
        "build": shlex.join(found.get("build", ())),
        "run": shlex.join(found["run"]),
        "others": others and f"{', '.join(others)}; choose one with --release",
    }
    for title, text in lines.items():
        if text:
            console.print(f"  {title:<8} {text}", soft_wrap=title in ("build", "run"))


def _find_release(backend: Backend, asked: str | None) -> ImageRelease | None:
    """The row of the table that the user names, or the newest with an image.

    Raises:
        UsageError: there is none of that name, or no image of it.
    """
    rows = {one.name: one for one in backend.launch.releases}
    built = [one for one in rows.values() if one.built]
    if asked is None:
        return built[-1] if built else None
    if asked in rows and rows[asked].built:
        return rows[asked]
    wrong = f"the {backend.name} backend has no release {asked}"
    if asked in rows:
        wrong = f"there is no image of {asked} ({rows[asked].note})"
    valid = ", ".join(one.name for one in built) or "none: its image is not built here"
    raise UsageError(f"--release: {wrong}; releases with an image: {valid}")


def _find_engine(*, ready: bool) -> str:
    """The first engine that is installed; the first of all if none is.

    Args:
        ready: take the first that is ready to run something.

    Raises:
        AnygaugeError: none of those that are installed answers.
    """
    installed = [one for one in ENGINES if shutil.which(one)]
    if not installed or not ready:
        return (installed or ENGINES)[0]
    complaints = []
    for one in installed:
        complaint = _last_error([one, "info"])
        if not complaint:
            return one
        complaints.append(f"{one} does not answer: {complaint}")
    raise AnygaugeError("; ".join(complaints))


def _last_error(command: Sequence[str]) -> str:
    """The last line that a command prints if it fails; "" if it does not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return [f"exit status {done.returncode}", *lines][-1] if done.returncode else ""


def _exec_client(command: list[str], name: str) -> None:
    """Become the container's client, so that its signals and exit status are ours.

    Raises:
        AnygaugeError: it is not installed, or the image is not here and on no registry.
    """
    try:
        if "/" not in name and (missing := _last_error([command[0], "image", "inspect", name])):
            raise AnygaugeError(
                f"{command[0]} has no image {name} ({missing}). Build it (`anygauge image` shows "
                f"how), or name the repository that has it in {REPOSITORY_VARIABLE}"
            )
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        raise AnygaugeError(
            f"{command[0]} is not installed here. The command would be: {shlex.join(command)}"
        ) from error
