"""``python -m anygauge_clouds.azureml_node``: becomes the agent of one machine of a job.

Azure says which machine this is in ``NODE_RANK`` and ``MASTER_ADDR``; the job's files are in the
folder that the command starts in.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from anygauge.interface import AnygaugeError, Job


def ended(text: str, node_rank: str) -> str:
    """The event that reports a job that cannot begin, as an agent would print it."""
    record = {"event": "ended", "time": time.time(), "state": "failed", "exit_status": 1}
    rank = int(node_rank) if node_rank.isdecimal() else -1
    return json.dumps({**record, "cause": text, "node_rank": rank})


def link(text: str) -> None:
    """Make a path lead to where Azure has mounted data or a folder for output.

    Args:
        text: ``PATH=TARGET``.

    Raises:
        AnygaugeError: the path is taken, or there is no target.
    """
    name, _, target = text.partition("=")
    path = Path(name)
    if not target or not Path(target).exists():
        raise AnygaugeError(
            f"{name}: Azure did not mount this folder: what it gave, {target!r}, does not exist"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    except OSError as error:
        if path.is_symlink() and path.readlink() == Path(target):
            return  # of an earlier start
        raise AnygaugeError(
            f"cannot make {name} a link to {target}: {error.strerror}. Choose another folder for "
            "it (its field at)"
        ) from error


def fetch_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """Values of secrets in Key Vaults, by the job's identity.

    Raises:
        AnygaugeError: Azure's packages are missing, or the vault refuses one.
    """
    if not secrets:
        return {}
    try:
        from azure.core.exceptions import AzureError
        from azure.identity import DefaultAzureCredential
        from azure.keyvault.secrets import SecretClient
    except ImportError as error:
        raise AnygaugeError(
            "launch.options.secrets needs azure-identity and azure-keyvault-secrets in the image"
        ) from error
    values = {}
    for variable, address in secrets.items():
        parts = urlsplit(address)
        name = parts.path.strip("/").split("/")[1]
        try:
            client = SecretClient(f"{parts.scheme}://{parts.netloc}", DefaultAzureCredential())
            values[variable] = str(client.get_secret(name).value)
        except AzureError as error:
            raise AnygaugeError(
                f"the secret for {variable} cannot be read from {address}: {error}"
            ) from error
    return values


def agent_command(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The agent's command line, and variables for it.

    Raises:
        AnygaugeError: Azure's variables or mounts are not what they should be.
    """
    parser = argparse.ArgumentParser(prog="python -m anygauge_clouds.azureml_node")
    parser.add_argument("--link", action="append", default=[], metavar="PATH=TARGET")
    parser.add_argument("--grace", required=True)
    arguments = parser.parse_args(argv)
    for text in arguments.link:
        link(text)
    job = Job.load("job.json")
    try:
        secrets = json.loads(Path("secrets.json").read_text())["secrets"]
    except (OSError, ValueError, KeyError) as error:
        raise AnygaugeError(f"secrets.json: {error}") from error
    rank, coordinator = os.environ.get("NODE_RANK"), os.environ.get("MASTER_ADDR")
    if job.launch.nodes == 1:
        rank, coordinator = rank or "0", coordinator or "localhost"
    if rank is None or coordinator is None:
        raise AnygaugeError("NODE_RANK and MASTER_ADDR are not set: Azure did not start this")
    command = [
        *(sys.executable, "-m", "anygauge.launch.agent", "--job", str(Path("job.json").absolute())),
        *("--node-rank", rank, "--coordinator", f"{coordinator}:{job.launch.port}"),
        *("--grace", arguments.grace),
        *("--variables", str(Path("variables.json").absolute())),
    ]
    return command, fetch_secrets(secrets)


def main() -> int:
    """Become the agent."""
    try:
        command, variables = agent_command(sys.argv[1:])
    except AnygaugeError as error:
        print(ended(str(error), os.environ.get("NODE_RANK", "0")), flush=True)
        return 1
    os.environ.update(variables)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
