"""``python -m anygauge_clouds.sagemaker_node``: becomes the agent of one machine of a job.

The service says which machine this is in ``resourceconfig.json``; the hyperparameters hold the job,
in pieces.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Job
from anygauge.util.files import write_text

CONFIG, FAILURE = "/opt/ml/input/config", "/opt/ml/output/failure"
CHANNELS, RUNS = "/opt/ml/input/data", "/opt/ml/checkpoints"
"""Where data is, and what SageMaker copies to S3 and back."""

JOB_FILE = "/tmp/anygauge/job.json"
"""Where the pieces of the job are put together; no other container sees it."""

PIECE = 2400
"""Characters of one hyperparameter; SageMaker takes 2,500."""

_CAUSE_SIZE = 1000
"""Characters of a cause that are left for SageMaker, which keeps the first 1,024."""


def packed(job: Job, secrets: Mapping[str, str]) -> dict[str, str]:
    """Hyperparameters that hold a job: ASCII without line breaks, as the service demands.

    Args:
        secrets: variable -> ARN.
    """
    text = json.dumps({"job": json.loads(job.dump()), "secrets": dict(secrets)})
    pieces = [text[k : k + PIECE] for k in range(0, len(text), PIECE)]
    return {f"anygauge.{number:03}": piece for number, piece in enumerate(pieces)}


def unpacked(found: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The job file's text, and variable -> ARN of a secret.

    Raises:
        AnygaugeError: there is no job, or a piece is missing.
    """
    pieces = [found[name] for name in sorted(found) if name.startswith("anygauge.")]
    try:
        record: dict[str, Any] = json.loads("".join(pieces))
        return json.dumps(record["job"]), dict(record["secrets"])
    except (ValueError, KeyError) as error:
        raise AnygaugeError(f"the hyperparameters hold no job of anygauge: {error}") from error


def fetch_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """Values of secrets, by the role of the job.

    Raises:
        AnygaugeError: boto3 is missing, or the service refuses one.
    """
    if not secrets:
        return {}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise AnygaugeError("launch.options.secrets needs boto3 in the image") from error
    values = {}
    for variable, arn in secrets.items():
        try:
            client = boto3.client("secretsmanager", region_name=arn.split(":")[3])
            values[variable] = client.get_secret_value(SecretId=arn)["SecretString"]
        except (BotoCoreError, ClientError, KeyError) as error:
            raise AnygaugeError(
                f"the secret for {variable} cannot be read from {arn}: {error}"
            ) from error
    return values


def agent_command(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The agent's command line, and variables for it.

    Raises:
        AnygaugeError: the service's files are not what they should be.
    """
    try:
        where = json.loads(Path(CONFIG, "resourceconfig.json").read_text())
        given = json.loads(Path(CONFIG, "hyperparameters.json").read_text())
        hosts: list[str] = where["hosts"]
        rank = hosts.index(where["current_host"])
    except (OSError, ValueError, KeyError) as error:
        raise AnygaugeError(f"{CONFIG} does not say which machine this is: {error!r}") from error
    text, secrets = unpacked(given)
    job_file = Path(JOB_FILE)
    write_text(job_file, text, 0o600)
    job = Job.load(job_file)
    if len(hosts) != job.launch.nodes:
        raise AnygaugeError(
            f"SageMaker started {len(hosts)} machines, and the job has {job.launch.nodes}"
        )
    command = [
        *(sys.executable, "-m", "anygauge.launch.agent", "--job", str(job_file)),
        *("--node-rank", str(rank), "--coordinator", f"{hosts[0]}:{job.launch.port}"),
        *("--cause-file", FAILURE, *arguments),
    ]
    return command, fetch_secrets(secrets)


def main() -> int:
    """Become the agent."""
    try:
        command, variables = agent_command(sys.argv[1:])
    except (AnygaugeError, OSError) as error:
        record = {"event": "ended", "time": time.time(), "state": "failed", "exit_status": 1}
        print(json.dumps({**record, "cause": str(error)}), flush=True)
        write_text(FAILURE, str(error)[:_CAUSE_SIZE])
        return 1
    os.environ.update(variables)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
