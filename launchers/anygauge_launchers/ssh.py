"""One agent on each of several machines, each started by an ssh that lives as long as the job.

The command that ssh hands to the remote shell holds nothing but the interpreter's path. Arguments
and variables go through standard input, so no shell reads them; and since standard input ends when
this process does, whatever ended it, no agent stays behind.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated

from pydantic import AfterValidator, Field

from anygauge.interface import Job, LaunchProfile, Plan, PlannedProcess
from anygauge_launchers.hosts import HostsOptions
from anygauge_launchers.remote_job import ForegroundLauncher, job_file, keep_alive


def _check_path(path: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_./+~-]+", path):
        raise ValueError(
            "a remote shell reads this path, so it may contain only letters, digits and "
            "_./+~-; make a link to it whose path has no other characters"
        )
    return path


class SshOptions(HostsOptions):
    """Options of the ssh launcher.

    Attributes:
        config: ssh's configuration file (``ssh -F``) instead of the user's.
        python: the interpreter on the machines; this one's path by default.
    """

    config: str | None = None
    python: Annotated[str, AfterValidator(_check_path)] = Field(
        default=sys.executable, validate_default=True
    )


class Ssh(ForegroundLauncher):
    """Starts an agent on each host."""

    def render(self, job: Job, options: SshOptions, profile: LaunchProfile) -> Plan:
        """One job file in the shared run directory, and one ssh for each node.

        Raises:
            RunFileError: an option is wrong, or the hosts are not as many as the nodes.
        """
        hosts, coordinator = options.resolve(job)
        file = job_file(job)
        command = (
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
            *keep_alive(job),
            *(() if options.config is None else ("-F", options.config)),
        )
        common = ("--coordinator", coordinator, "--grace", f"{options.grace_s:g}")
        return Plan(
            files=(file,),
            processes=tuple(
                PlannedProcess(
                    node_rank=rank,
                    host=host,
                    argv=(
                        *command,
                        host,
                        f"exec {options.python} -m anygauge.launch.agent --stdin",
                    ),
                    arguments=("--job", file.path, "--node-rank", str(rank), *common),
                )
                for rank, host in enumerate(hosts)
            ),
            pass_environment=tuple(job.launch.pass_environment),
        )
