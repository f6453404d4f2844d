"""What the trackers that come with anygauge take from a run file, and what they need before ranks
start: what one would otherwise ask for on a terminal. No torch.
"""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from anygauge.interface import Options

_WANDB_SERVER = "https://api.wandb.ai"

Text = Annotated[str, Field(min_length=1)]


class JsonLinesOptions(Options):
    """Options of the tracker jsonl."""

    path: Text = Field(description="File to append to; a relative path is in the run directory.")


class WandbOptions(Options):
    """Options of the tracker wandb."""

    project: Text | None = Field(None, description="Left out: WANDB_PROJECT, or anygauge.")
    entity: Text | None = Field(None, description="User or team.")
    name: Text | None = Field(None, description="Left out: the run's name.")
    group: Text | None = Field(None, description="Group of runs.")
    notes: Text | None = Field(None, description="Longer description.")
    tags: list[str] | None = Field(None, description="Labels.")
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="online, or offline to send the run later with `wandb sync`. Left out: "
        "WANDB_MODE, or online.",
    )


class MLflowOptions(Options):
    """Options of the tracker mlflow."""

    tracking_uri: Text | None = Field(
        None, description="Server or store. Left out: MLFLOW_TRACKING_URI."
    )
    experiment: Text | None = Field(
        None,
        description="Created if missing. Left out: MLFLOW_EXPERIMENT_NAME, or anygauge.",
    )
    name: Text | None = Field(None, description="Left out: the run's name.")


class ServiceOptions(Options, extra="allow"):
    """Options of the other services: what accelerate's tracker of that name takes, such as the
    arguments of ``trackio.init``, which refuses what it does not know.
    """


def wandb_login(options: WandbOptions, environ: Mapping[str, str]) -> str | None:
    """Why Weights & Biases would ask for a login; None with a key, or where nothing is sent."""
    mode = options.mode or environ.get("WANDB_MODE") or "online"
    if mode != "online":
        return None
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    server = urlsplit(environ.get("WANDB_BASE_URL") or _WANDB_SERVER).hostname
    if any(host == server or "wandb" in host for host in _netrc_hosts(environ)):
        return None
    return (
        f"not logged in to {server}: run `wandb login`, set WANDB_API_KEY, or set "
        "tracker_options.wandb.mode: offline and send the run later with `wandb sync`"
    )


def _netrc_hosts(environ: Mapping[str, str]) -> set[str]:
    home = Path(environ.get("HOME") or Path.home())
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            return set(netrc.netrc(str(path)).hosts)
        except (OSError, netrc.NetrcParseError):
            continue
    return set()


def mlflow_store(options: MLflowOptions, environ: Mapping[str, str]) -> str | None:
    """Why MLflow would not know where to write; None where it would."""
    if options.tracking_uri or environ.get("MLFLOW_TRACKING_URI"):
        return None
    return (
        "no server or store is set: set tracker_options.mlflow.tracking_uri or "
        "MLFLOW_TRACKING_URI, such as http://host:5000"
    )
