"""``python -m anygauge_clouds.container SERVICE``: becomes the agent of one machine of a job.

Azure says which machine this is in ``NODE_RANK`` and ``MASTER_ADDR``; the job's files are in the
folder that the command starts in. SageMaker says it in ``resourceconfig.json``; the hyperparameters
hold the job, in pieces. Whatever is not as it should be is an `AnygaugeError`, reported as an agent
would.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from anygauge.interface import AnygaugeError, Job
from anygauge.util.files import write_text

CONFIG, FAILURE = "/opt/ml/input/config", "/opt/ml/output/failure"
CHANNELS, CHECKPOINTS = "/opt/ml/input/data", "/opt/ml/checkpoints"
"""Where SageMaker puts data, and what it copies to S3 and back."""

JOB_FILE = "/tmp/anygauge/job.json"
"""Where the pieces of SageMaker's job are put together; no other container sees it."""

PIECE = 2400
"""Characters of one hyperparameter; SageMaker takes 2,500."""

_CAUSE_SIZE = 1000
"""Characters of a cause that are left for SageMaker, which keeps the first 1,024."""

_Agent = tuple[list[str], dict[str, str]]
"""An agent's command line, and variables for it."""


def pack_job(job: Job, secrets: Mapping[str, str]) -> dict[str, str]:
    """Hyperparameters that hold a job and its secrets (variable -> ARN): ASCII without line breaks,
    as the service demands."""
    text = json.dumps({"job": json.loads(job.dump()), "secrets": dict(secrets)})
    pieces = [text[k : k + PIECE] for k in range(0, len(text), PIECE)]
    return {f"anygauge.{number:03}": piece for number, piece in enumerate(pieces)}


def unpack_job(found: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The job file's text, and variable -> ARN of a secret."""
    pieces = [found[name] for name in sorted(found) if name.startswith("anygauge.")]
    try:
        record: dict[str, Any] = json.loads("".join(pieces))
        return json.dumps(record["job"]), dict(record["secrets"])
    except (ValueError, KeyError) as error:
        raise AnygaugeError(f"the hyperparameters hold no job of anygauge: {error}") from error


def link(text: str) -> None:
    """``PATH=TARGET``: make a path lead to where Azure has mounted data or a folder for output."""
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


def vault_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """Values of secrets in Key Vaults (variable -> address), by the identity of the job."""
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

    def read(address: str) -> Any:
        parts = urlsplit(address)
        client = SecretClient(f"{parts.scheme}://{parts.netloc}", DefaultAzureCredential())
        return client.get_secret(parts.path.strip("/").split("/")[1]).value

    return _read_secrets(secrets, read, AzureError)


def manager_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """Values of secrets in Secrets Manager (variable -> ARN), by the role of the job."""
    if not secrets:
        return {}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise AnygaugeError("launch.options.secrets needs boto3 in the image") from error

    def read(arn: str) -> Any:
        client = boto3.client("secretsmanager", region_name=arn.split(":")[3])
        return client.get_secret_value(SecretId=arn)["SecretString"]

    return _read_secrets(secrets, read, BotoCoreError, ClientError, KeyError)


def _read_secrets(
    secrets: Mapping[str, str], read: Callable[[str], Any], *refusals: type[Exception]
) -> dict[str, str]:
    values = {}
    for variable, place in secrets.items():
        try:
            values[variable] = str(read(place))
        except refusals as error:
            raise AnygaugeError(
                f"the secret for {variable} cannot be read from {place}: {error}"
            ) from error
    return values


def azureml_agent(arguments: list[str]) -> _Agent:
    """The agent of a machine of Azure's."""
    parser = argparse.ArgumentParser(prog="python -m anygauge_clouds.container azureml")
    parser.add_argument("--link", action="append", default=[], metavar="PATH=TARGET")
    parser.add_argument("--grace", required=True)
    given = parser.parse_args(arguments)
    for text in given.link:
        link(text)
    job_file = Path("job.json").absolute()
    job = Job.load(job_file)
    try:
        secrets = json.loads(Path("secrets.json").read_text())["secrets"]
    except (OSError, ValueError, KeyError) as error:
        raise AnygaugeError(f"secrets.json: {error}") from error
    rank, coordinator = os.environ.get("NODE_RANK"), os.environ.get("MASTER_ADDR")
    if job.launch.nodes == 1:
        rank, coordinator = rank or "0", coordinator or "localhost"
    if rank is None or coordinator is None:
        raise AnygaugeError("NODE_RANK and MASTER_ADDR are not set: Azure did not start this")
    variables = ("--variables", str(job_file.with_name("variables.json")))
    command = _agent(job_file, rank, f"{coordinator}:{job.launch.port}")
    return [*command, "--grace", given.grace, *variables], vault_secrets(secrets)


def sagemaker_agent(arguments: list[str]) -> _Agent:
    """The agent of a machine of SageMaker's."""
    try:
        where = json.loads(Path(CONFIG, "resourceconfig.json").read_text())
        given = json.loads(Path(CONFIG, "hyperparameters.json").read_text())
        hosts: list[str] = where["hosts"]
        rank = hosts.index(where["current_host"])
    except (OSError, ValueError, KeyError) as error:
        raise AnygaugeError(f"{CONFIG} does not say which machine this is: {error!r}") from error
    text, secrets = unpack_job(given)
    job_file = Path(JOB_FILE)
    write_text(job_file, text, 0o600)
    job = Job.load(job_file)
    if len(hosts) != job.launch.nodes:
        raise AnygaugeError(
            f"SageMaker started {len(hosts)} machines, and the job has {job.launch.nodes}"
        )
    command = _agent(job_file, str(rank), f"{hosts[0]}:{job.launch.port}")
    return [*command, "--cause-file", FAILURE, *arguments], manager_secrets(secrets)


def _agent(job_file: Path, rank: str, coordinator: str) -> list[str]:
    return [
        *(sys.executable, "-m", "anygauge.launch.agent", "--job", str(job_file)),
        *("--node-rank", rank, "--coordinator", coordinator),
    ]


def main(service: str, *arguments: str) -> int:
    """Become the agent."""
    agents = {"azureml": azureml_agent, "sagemaker": sagemaker_agent}
    try:
        command, variables = agents[service]([*arguments])
    except (AnygaugeError, OSError) as error:
        # As an agent would print it.
        rank = os.environ.get("NODE_RANK", "0")
        node_rank = int(rank) if rank.isdecimal() else -1
        record = {"event": "ended", "time": time.time(), "state": "failed", "exit_status": 1}
        print(json.dumps({**record, "cause": str(error), "node_rank": node_rank}), flush=True)
        if service == "sagemaker":
            write_text(FAILURE, str(error)[:_CAUSE_SIZE])
        return 1
    os.environ.update(variables)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
