"""SageMaker: a training job with one agent on each machine, through the aws client.

The request is the plain API's. The job travels in its hyperparameters, in pieces: no bucket is
needed for code, and no shell reads it.

``python -m anygauge_clouds.sagemaker aws logs filter-log-events ...`` follows a log of CloudWatch.
The aws client of version 2 can do so itself, that of version 1 cannot; this repeats the command of
either, prints each message once, and ends with its parent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import (
    AnygaugeError,
    Job,
    Plan,
    PlannedFile,
    PlannedProcess,
    UnsupportedError,
)
from anygauge.util.clients import last_line, printed, run_client
from anygauge.util.files import write_text
from anygauge.util.processes import tie_to_parent
from anygauge_clouds.sagemaker_node import CHANNELS, PIECE, RUNS, packed
from anygauge_clouds.sagemaker_request import SagemakerOptions, request_of
from anygauge_clouds.service_job import Service, ServiceJob, ServiceState
from anygauge_clouds.submission import relocate, service_name, submit_by_client

REQUEST = "request.json"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
LOG_POLL_S = 5.0
"""Seconds between two reads of the log."""
_OVERLAP_MS = 60_000
"""Each read begins this long before the newest event: events may arrive out of order."""
_VARIABLE_LIMIT, _VARIABLES_LIMIT, _PIECES_LIMIT = 512, 100, 100
_NAME_LIMIT = 63


class Sagemaker:
    """Hands a job to SageMaker."""

    def render(self, job: Job, options: SagemakerOptions) -> Plan:
        """The request, and the commands that take it.

        Raises:
            RunFileError: an option is wrong.
            UnsupportedError: the run file is too large for a request.
        """
        options.check(job)
        here = Path(job.run_directory)
        there = relocate(job, RUNS)
        name = service_name(job, _NAME_LIMIT)
        carried = packed(there, options.secrets)
        if len(carried) > _PIECES_LIMIT:
            raise UnsupportedError(
                f"the run file is too long: it takes {len(carried)} pieces of {PIECE} characters, "
                f"and a request to SageMaker may have at most {_PIECES_LIMIT}"
            )
        request = request_of(there, options, name, here.name, carried)
        service = SagemakerService(name=name, region=options.region, profile=options.profile)
        path = str(here / REQUEST)
        command = service.aws(
            *("sagemaker", "create-training-job", "--cli-input-json", f"file://{path}")
        )
        return Plan(
            # The token that the agents know each other by is in it.
            files=(PlannedFile(path=path, text=json.dumps(request, indent=2) + "\n", mode=0o600),),
            processes=(PlannedProcess(node_rank=0, host=service.shown, argv=command),),
            pass_environment=tuple(job.launch.pass_environment),
            operations={
                "submit": command,
                "status": service.aws(*service.describe),
                "logs": service.aws(
                    *("logs", "tail", LOG_GROUP, "--follow"),
                    *("--log-stream-name-prefix", f"{name}/"),
                ),
                "cancel": service.aws(*service.end),
            },
            folders=(
                RUNS,
                *(f"{CHANNELS}/{channel}" for channel in options.channels),
                *options.in_image,
            ),
        )

    def submit(self, plan: Plan) -> ServiceJob:
        """Send the request.

        Raises:
            AnygaugeError: the aws client is missing or refuses, or a file cannot be written.
        """
        (file,) = plan.files
        request = json.loads(file.text)
        passed = {n: os.environ[n] for n in plan.pass_environment if n in os.environ}
        long = next((n for n, value in passed.items() if len(value) > _VARIABLE_LIMIT), None)
        if long is not None or len(passed) > _VARIABLES_LIMIT:
            found = f"{len(passed)} variables" if long is None else f"a longer value of {long}"
            raise AnygaugeError(
                f"launch.pass_environment: got {found}, but SageMaker takes at most "
                f"{_VARIABLES_LIMIT} variables of up to {_VARIABLE_LIMIT} characters; put them "
                "into the run file's environment, or into the image"
            )
        if passed:
            request["Environment"] = passed
        try:
            write_text(file.path, json.dumps(request, indent=2) + "\n", file.mode)
        except OSError as error:
            raise AnygaugeError(f"cannot write {file.path}: {error}") from error
        done = submit_by_client(plan.processes[0].argv, request["TrainingJobName"])
        if done.returncode:
            raise AnygaugeError(f"SageMaker refused the job: {printed(done)}")
        argv = plan.processes[0].argv
        service = SagemakerService(
            name=request["TrainingJobName"],
            region=_after("--region", argv),
            profile=_after("--profile", argv),
        )
        return ServiceJob(service, Path(file.path).parent)

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> ServiceJob:
        """A job that was submitted before.

        Raises:
            UnsupportedError: the record is not one of this launcher.
        """
        try:
            service = SagemakerService(**record)
        except TypeError as error:
            raise UnsupportedError(f"{dict(record)} is not a record of a SageMaker job") from error
        return ServiceJob(service, run_directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class SagemakerService(Service):
    """One training job."""

    name: str
    region: str | None = None
    profile: str | None = None
    log_delay_s = 30.0

    @property
    def shown(self) -> str:
        """For humans."""
        return f"SageMaker training job {self.name}"

    @property
    def describe(self) -> tuple[str, ...]:
        """Words that ask for its state."""
        return ("sagemaker", "describe-training-job", "--training-job-name", self.name)

    @property
    def end(self) -> tuple[str, ...]:
        """Words that ask for its end."""
        return ("sagemaker", "stop-training-job", "--training-job-name", self.name)

    def aws(self, *words: str) -> tuple[str, ...]:
        """A command of the aws client."""
        return (
            "aws",
            *words,
            *(() if self.region is None else ("--region", self.region)),
            *(() if self.profile is None else ("--profile", self.profile)),
        )

    def state(self) -> ServiceState:
        """See `Service.state`."""
        done = run_client(self.aws(*self.describe, "--output", "json"))
        if done.returncode:
            if re.search(r"ValidationException.*(not found|Could not find)", done.stderr, re.S):
                return ServiceState(phase="gone", text=f"{self.shown} is gone")
            return ServiceState(
                phase="silent", text=f"AWS does not answer: {last_line(done.stderr)}"
            )
        try:
            found = json.loads(done.stdout)
            status, second = found["TrainingJobStatus"], found.get("SecondaryStatus", "")
        except (ValueError, KeyError, TypeError):
            return ServiceState(phase="silent", text="the aws client printed no training job")
        if status == "Failed":
            reason = found.get("FailureReason", "no reason is given")
            return ServiceState(phase="failed", text=f"{self.shown} failed: {reason}")
        if status == "Completed":
            return ServiceState(phase="done", text=f"{self.shown} is complete")
        if status == "Stopped":
            return ServiceState(phase="stopped", text=f"{self.shown} was stopped ({second})")
        running = second == "Training"
        return ServiceState(
            phase="running" if running else "waiting", text=f"{self.shown}: {second or status}"
        )

    def log_command(self) -> tuple[str, ...] | None:
        """See `Service.log_command`; the aws client of version 1 cannot follow by itself."""
        # Without the dash, algo-1 would be algo-10 as well.
        command = self.aws(
            *("logs", "filter-log-events", "--log-group-name", LOG_GROUP),
            *("--log-stream-name-prefix", f"{self.name}/algo-1-", "--output", "json"),
        )
        return (sys.executable, "-m", "anygauge_clouds.sagemaker", *command)

    def stop(self, *, force: bool) -> None:
        """See `Service.stop`: SageMaker sends SIGTERM, and SIGKILL 120 s later, in any case."""
        done = run_client(self.aws(*self.end))
        # One that has just ended cannot be stopped, and need not.
        if done.returncode and "in status" not in done.stderr:
            raise AnygaugeError(f"SageMaker cannot end {self.shown}: {last_line(done.stderr)}")


def _after(flag: str, argv: tuple[str, ...]) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def follow_log(argv: list[str]) -> int:
    """Print the log's messages until this process is ended.

    Returns:
        The exit status of the client, if that fails.
    """
    tie_to_parent(signal.SIGTERM)
    known: set[str] = set()
    since = 0
    while True:
        done = subprocess.run(
            [*argv, "--start-time", str(max(0, since - _OVERLAP_MS))],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode and "ResourceNotFound" not in done.stderr:
            print(done.stderr.strip(), file=sys.stderr, flush=True)
            return done.returncode
        for event in json.loads(done.stdout)["events"] if done.returncode == 0 else ():
            if event["eventId"] not in known:
                known.add(event["eventId"])
                since = max(since, int(event["timestamp"]))
                print(event["message"].rstrip("\n"), flush=True)
        time.sleep(LOG_POLL_S)


if __name__ == "__main__":
    sys.exit(follow_log(sys.argv[1:]))
