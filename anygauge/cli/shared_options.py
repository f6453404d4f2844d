"""The options that several commands have, each written once, and what ``--backend`` chooses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from anygauge.cli.typed_so_far import backend_names, field_settings, launcher_names, run_files
from anygauge.util.errors import UsageError
from anygauge.util.text import shorten

if TYPE_CHECKING:
    from anygauge.interface import Backend
    from anygauge.registry import Registry, Selection

RUN_FILE = typer.Argument(help="The run file (YAML).", metavar="RUN.yaml", autocompletion=run_files)
RunFileArgument = Annotated[Path, RUN_FILE]
ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A run directory, a folder of a model or an adapter, or a hub name.", metavar="MODEL"
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="A backend's name, or auto; `anygauge backends` lists them.",
        autocompletion=backend_names,
    ),
]
DevicesOption = Annotated[
    int | None, typer.Option("--devices", min=1, help="Ranks per machine, one per device.")
]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Machines.")]
LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", help="How ranks are started.", autocompletion=launcher_names),
]
OutputOption = Annotated[str | None, typer.Option("--output", help="Folder for run directories.")]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        help="auto: resume from this run's newest sound checkpoint, or start if there is none; "
        "or the folder of a checkpoint.",
        metavar="auto|FOLDER",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a field: a.b=value; repeatable. `anygauge fields` shows them.",
        metavar="A.B=VALUE",
        autocompletion=field_settings,
    ),
]
PlanOption = Annotated[
    bool | None,
    typer.Option(
        "--plan/--no-plan",
        help="Always (--plan) or never (--no-plan) plan first how much memory the run needs; "
        "default: only if memory may be short.",
        show_default=False,
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Start the run even if it cannot fit the devices' memory.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print warnings and failures only.")]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder, hub name or tokenizer.json.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Record these steps, from 1: a timeline and what memory held, in the run directory.",
        metavar="FROM:TO",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def read_steps(text: str | None) -> tuple[int, int]:
    """What ``--profile`` names: the first step, from 0, and the one behind the last.

    Raises:
        UsageError: it is not two numbers of steps.
    """
    if text is None:
        return 0, 0
    parts = re.fullmatch(r"([1-9][0-9]{0,9}):([1-9][0-9]{0,9})", text)
    if parts is None or int(parts[1]) > int(parts[2]):
        raise UsageError(
            f"--profile {shorten(text)}: this is not FROM:TO, the first and the last step to "
            "record, from 1, such as 5:8; a single step is 5:5"
        )
    return int(parts[1]) - 1, int(parts[2])


class UsageCommand(TyperCommand):
    """A command whose usage is written as it is typed; typer's releases differ in it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """``RUN.yaml [OPTIONS]``; what goes to another command comes last."""
        given = [param for param in self.params if param.param_type_name == "argument"]
        words = [one.metavar or "" if one.required else f"[{one.metavar}]" for one in given]
        return sorted([*words, "[OPTIONS]"], key=lambda word: word.startswith("[--"))


def choose_backend(
    name: str | None, *, need_device: bool = True
) -> tuple[Registry, Selection, Backend]:
    """The plugins of this machine, and the backend of a name; None: what ``auto`` would choose.

    Args:
        need_device: it must be able to run here.
    """
    from anygauge.registry import AUTO, Registry, select_backend

    registry = Registry.load()
    selection = select_backend(registry, name or AUTO, need_device=need_device)
    return registry, selection, registry.create_backend(selection.spec.name)
