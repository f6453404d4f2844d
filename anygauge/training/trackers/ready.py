"""What a tracker needs of its user, told before ranks start instead of asked for on a terminal."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WANDB_SERVER = "https://api.wandb.ai"


def wandb_login(options: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Why Weights & Biases would ask for a login, or None: a key is there, or nothing is sent."""
    mode = options.get("mode") or environ.get("WANDB_MODE") or "online"
    if mode != "online":
        return None
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    server = urlsplit(environ.get("WANDB_BASE_URL") or WANDB_SERVER).hostname
    if any(host == server or "wandb" in host for host in _netrc_hosts(environ)):
        return None
    return (
        f"not logged in to {server}: run `wandb login`, set WANDB_API_KEY, or set "
        "tracker_options.wandb.mode: offline and send the run later with `wandb sync`"
    )


def mlflow_store(options: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Why MLflow would not know where to write, or None."""
    if options.get("tracking_uri") or environ.get("MLFLOW_TRACKING_URI"):
        return None
    return (
        "it was not told where to write: set tracker_options.mlflow.tracking_uri or "
        "MLFLOW_TRACKING_URI, such as http://host:5000"
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
