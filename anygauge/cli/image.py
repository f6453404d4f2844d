"""``anygauge image``: the container image of a backend, what is in it, and how to run it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from anygauge.cli.options import BackendOption, JsonOption, choose_backend
from anygauge.interface import (
    REPOSITORY_VARIABLE,
    AnygaugeError,
    Backend,
    ImageRelease,
    LaunchProfile,
    UnsupportedError,
    tagged,
)
from anygauge.util.console import Console

ENGINES = ("docker", "podman")
INSIDE = "/work"
_BAKE = "docker/docker-bake.hcl"


def image(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "The anygauge command to run inside, such as `-- train run.yaml`; default: doctor."
            ),
            metavar="-- COMMAND ...",
            show_default=False,
        ),
    ] = None,
    backend: BackendOption = None,
    release: Annotated[
        str | None,
        typer.Option("--release", help="Another row of the backend's table of versions."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="docker or podman; default: the one that is installed."),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            help="Another folder for the container, HERE:THERE[:ro]; repeatable.",
            metavar="HERE:THERE[:ro]",
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the image, with this folder as its working folder.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Show a backend's container image, what is in it, and the command that runs it."""
    if engine is not None and engine not in ENGINES:
        raise typer.BadParameter(
            f"{engine} is not one of {', '.join(ENGINES)}", param_hint="--engine"
        )
    _, selection, chosen = choose_backend(backend, need_device=False)
    row = _release(chosen, release)
    name = chosen.launch.image if row is None or release is None else tagged(chosen.name, row)
    if name is None:
        raise UnsupportedError(
            f"the {chosen.name} backend names no container image; a backend names one in its "
            "launch profile (docs/images.md)"
        )
    command = run_command(
        engine or (_answering() if run else next(_installed(), ENGINES[0])),
        chosen.launch,
        name,
        arguments or ["doctor", "--backend", chosen.name, "--output", INSIDE],
        volumes=volume or (),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
    )
    if run:
        _run(command, name)
    found = describe(chosen, selection.reason, name, row, command)
    if json_:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(found)


def run_command(
    engine: str,
    profile: LaunchProfile,
    name: str,
    arguments: Sequence[str],
    *,
    volumes: Sequence[str] = (),
    terminal: bool = False,
) -> list[str]:
    """What starts a container for one machine's devices.

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


def describe(
    backend: Backend, reason: str, name: str, row: ImageRelease | None, command: Sequence[str]
) -> dict[str, Any]:
    """All that the command tells, in plain values."""
    found: dict[str, Any] = {
        "backend": backend.name,
        "reason": reason,
        "image": name,
        "run": list(command),
        "releases": {one.name: one.built for one in backend.launch.releases},
    }
    if row is not None:
        found["release"] = {
            "name": row.name,
            "base": row.base,
            "versions": dict(row.versions),
            "goes_with": dict(row.goes_with),
            "source": row.source,
            "note": row.note,
        }
    if row is not None and row.image is None:
        table = f"backends/anygauge_{backend.name}/releases.json"
        target = f"{backend.name}-{row.name.replace('.', '-')}"
        found["build"] = ["docker", "buildx", "bake", "-f", _BAKE, "-f", table, target]
    return found


def show(found: dict[str, Any]) -> None:
    """The same for people."""
    console = Console()
    console.print(Text(f"Backend {found['backend']}: {found['reason']}", style="bold"))
    lines = {"image": found["image"]}
    row = found.get("release")
    if row is not None:
        lines["base"] = row["base"]
        lines["has"] = ", ".join(f"{key} {value}" for key, value in row["versions"].items())
        lines["source"] = row["source"]
        lines["note"] = row["note"]
    if "build" in found:
        lines["build"] = shlex.join(found["build"])
    lines["run"] = shlex.join(found["run"])
    lines["others"] = ", ".join(
        name if built else f"{name} (no image)"
        for name, built in found["releases"].items()
        if row is None or name != row["name"]
    )
    if lines["others"]:
        lines["others"] += "; choose one with --release"
    for title, text in lines.items():
        if text:
            console.print(Text(f"  {title:<8} {text}"), soft_wrap=title in ("build", "run"))


def _release(backend: Backend, asked: str | None) -> ImageRelease | None:
    """The row of the table that was asked for, or the newest with an image.

    Raises:
        BadParameter: there is none of that name, or no image of it.
    """
    rows = backend.launch.releases
    built = [one for one in rows if one.built]
    if asked is None:
        return built[-1] if built else None
    row = next((one for one in rows if one.name == asked), None)
    valid = ", ".join(one.name for one in built) or "none: its image is not built here"
    if row is None:
        raise typer.BadParameter(
            f"the {backend.name} backend has no release {asked}; releases with an image: {valid}",
            param_hint="--release",
        )
    if not row.built:
        raise typer.BadParameter(
            f"there is no image of {asked} ({row.note}); releases with an image: {valid}",
            param_hint="--release",
        )
    return row


def _installed() -> Iterator[str]:
    return (one for one in ENGINES if shutil.which(one))


def _answering() -> str:
    """The first engine that is ready to run something; the first of all if none is installed.

    Raises:
        AnygaugeError: none of those that are installed answers.
    """
    complaints = []
    for one in _installed():
        asked = subprocess.run([one, "info"], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return one
        complaints.append(f"{one} does not answer: {_last_line(asked)}")
    if complaints:
        raise AnygaugeError("; ".join(complaints))
    return ENGINES[0]


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _run(command: list[str], name: str) -> None:
    """Become the container's client, so that its signals and exit status are ours.

    Raises:
        AnygaugeError: it is not installed, or the image is not here and on no registry.
    """
    try:
        if "/" not in name:
            look = [command[0], "image", "inspect", name]
            seen = subprocess.run(look, capture_output=True, text=True, check=False)
            if seen.returncode:
                raise AnygaugeError(
                    f"{command[0]} has no image {name} ({_last_line(seen)}). Build it (`anygauge "
                    "image` shows how), or name the repository that has it in "
                    f"{REPOSITORY_VARIABLE}"
                )
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        raise AnygaugeError(
            f"{command[0]} is not installed here. The command would be: {shlex.join(command)}"
        ) from error
